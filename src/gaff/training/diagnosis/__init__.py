"""Experiments inside the process of a command: one thing is changed from outside, and the run is stopped in time.

``trial`` leads; ``changes`` has what can be changed about optimizers, modes and precision, ``data`` what can be changed
about batches, inputs and labels. What experiments there are, and what comes of them, is in ``gaff.record.experiments``.
"""
