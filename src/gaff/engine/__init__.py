"""All that touches torch's hooks. Says when a site fires; knows nothing of what is done with the values.

A ``Session`` turns taps into hooks: ``clock`` tells runs and calls apart, ``modules`` has the hooks at entry and exit,
``recomputation`` finds the call that a checkpoint repeats, ``gradients``, ``parameters`` and ``ops`` see what module
hooks do not, ``compiled`` puts the hooks into compiled code, ``process`` is on no module at all.
"""
