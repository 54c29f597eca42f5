"""Where the first NaN or inf of a step began: op, line, ranges, likely cause.

``examination`` runs a step with every op looked at, and marks what is not finite (``provenance``, ``attribution``);
``backward`` writes down the backward pass. ``causes`` and ``backward_causes`` say why, from what is in the tensors
(``ranges``), and ``report`` is what comes out. ``rerun`` runs a batch again that a guard or a watch has seen fail.
"""
