"""A fuzzer: random programs, and a truth about each that gaff had no part in.

A *program* (``program``) is a tree of module classes and a driver that calls the root, makes losses and runs backward.
It is put together from *productions* (``grammar``), small functions with a name: layers, functions, writes in place,
views, structures, grad modes, checkpoints, threads, hooks of the user, gradient penalties. A new kind of program is a
new production.

The *truth* (``truth``) is the same source, run again with tensors that look after themselves: everything that is
written in place is a new value there, a view is computed from its base again, a checkpoint is a call. What a port means
is written down there a second time, and an edit is its formula, applied by hand. ``running`` runs programs: bare, under
gaff, as the truth. Whether the truth is right is asked first: what it leaves must be what the bare program leaves.

``check`` compares: every value that a module, an op or a parameter had (bit by bit), every gradient (within rounding,
since sums are in another order), the effect of random edits, what ``gaff.take`` returns, and that a watched run leaves
the bits, hooks and random state of a bare one. A refusal by name is counted by its reason; all else is a ``Failure``.
``shrink`` leaves out what it can of the program of a failure, and writes it as a script of its own.

``known`` names what gaff gets wrong today. ``corpus`` holds scripts of failures, found here, one a file; the tests ask
each again. ``python -m fuzz`` (in tests/) looks for new ones; ``make fuzz MINUTES=60``.
"""
