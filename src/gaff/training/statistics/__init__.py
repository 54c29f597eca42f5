"""All numbers of a tensor in one pass over its memory: compiled (``kernel``), or in plain torch (``plain``).

Both add to a row of 74 numbers, which ``gaff.record.statistics`` declares, and give the same results up to rounding.
The kernel is for CPU tensors, and may be missing; plain torch is for all other devices, and stands in for it.
"""
