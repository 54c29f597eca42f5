"""One run, looked at: traces, sites, the anatomy of a backward pass, where runs differ, where a NaN began.

Each tool opens a session (``gaff.engine.session``) with taps of its own, runs the model once, and gives back plain
values that print and save without torch. ``tracer`` fills a ``trace``, with the notes of ``call_log``, the digests of
``sketches`` and the ``pictures``; ``op_log`` knows the ops of a run, for ``sites`` and ``anatomy``; ``untouched``
leaves the model as it was. ``diff`` compares two traces or two records, ``nonfinite`` looks for the first NaN or inf.
"""
