"""The numbers of a run on disk: written while it goes on, read at any time, without torch.

Every process of a watched run writes one log of its own (``log``, an append-only file of frames) and beside it a ring
of its last steps (``flight``). ``statistics`` declares the numbers of a site and how parts of them add up, ``matrix``
the form of a table in a frame, ``sample`` what one look has seen before it is written. For reading, ``part`` holds the
log of one process, ``run`` all of them as a ``Record``, ``ranks`` compares them, and ``cube`` gives everything as
arrays (numpy). ``finding``, ``trace_rows``, ``node_rows`` and ``picture`` are plain values that others make and views
draw.
"""
