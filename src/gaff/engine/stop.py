"""Ending a forward early, from inside a hook."""

from __future__ import annotations


class StopForward(Exception):  # an Exception, not a BaseException: torch cleans up only after these
    """Raised at the last wanted site, caught by gaff outside of the model.

    It takes one string argument, so that torch can pass it on.
    """
