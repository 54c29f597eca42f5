"""What needs a training loop: limits on gradients, guards against NaN, per-example norms, watching, health rules.

``clipping`` (with ``clipping_limits`` and ``clipping_audit``), ``guard`` and ``sample_norms`` (with
``layer_gradients``) are each one public function of ``gaff``; ``watch`` follows a whole run, ``rules`` judges it,
``statistics`` counts what is in a tensor.
"""
