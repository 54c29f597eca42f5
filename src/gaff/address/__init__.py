"""Where a tensor is: the grammar of addresses, what they name in a model, and nested values by key.

``grammar`` reads and prints addresses and needs no torch; ``resolve`` looks them up in one model; ``nested`` walks what
modules take and return; ``exported`` and ``exported_calls`` make an exported graph look like the tree of modules that
it came from, so that ``resolve`` finds the original paths there. Nothing in this folder installs a hook.
"""
