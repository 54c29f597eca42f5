"""What is private to torch and other libraries, or differs between their versions: each fact stands here once.

A private function is named in one file and proven before it is trusted, where that can be done; what is missing or
means something else in a version switches to the safe alternative that is described beside it, never to a guess. So
another version of torch is a matter of this folder. Nothing here knows of sites, runs or sessions.
"""
