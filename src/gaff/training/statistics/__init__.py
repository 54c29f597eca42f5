"""All numbers of a tensor in one pass over its memory: compiled (``kernel``), on a GPU (``fused``), or in plain torch.

All add to a row of 74 numbers, which ``gaff.record.statistics`` declares, and give the same results up to rounding.
The compiled kernel is for CPU tensors, Triton's are for GPUs, and both may be missing; ``plain`` stands in for them
there, and is for all other devices.
"""
