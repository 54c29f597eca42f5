"""How gradients come to be seen and changed: tensor hooks set from forward hooks.

``ports`` finds the tensors at outputs and inputs, ``outer`` those for the part from outside. ``pending`` holds hooks
that wait for a gradient, of the kinds in ``armed`` (set by ``tensor_hooks``); ``later`` waits for tensors that do
not require grad yet. ``share`` tells a module's own part of its input's gradient, by walking the graph (``reach``,
``nodes``), passes inside passes (``derivatives``) and what the module keeps (``kept``) left out; ``edits`` changes that
part. ``leaves`` and ``sharded`` are about parameters.
"""
