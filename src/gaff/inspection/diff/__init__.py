"""Where two runs, or two traces, first part.

``compare`` is the way in and reads both; ``pairs`` matches what they have in common, ``traces`` or ``runs`` compares
the pairs, and ``difference`` is what comes out.
"""
