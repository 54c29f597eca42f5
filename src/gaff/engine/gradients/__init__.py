"""How gradients come to be seen and changed: tensor hooks set from forward hooks.

``ports`` finds the tensors, ``pending`` holds the hooks that wait for a gradient, ``share`` tells a module's own part
of its input's gradient, ``edits`` changes gradients, ``leaves`` and ``sharded`` are about parameters.
"""
