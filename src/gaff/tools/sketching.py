"""Small stand-ins for tensors, so that two traces can be compared without keeping what passed.

A digest is equal for equal bits. A sketch is a linear map to 32 numbers: element ``i`` is multiplied by a random sign
and added to the number ``i mod 32``. The squared norm of the difference of two sketches has as its mean the squared
norm of the difference of the tensors, and a relative deviation of at most ``sqrt(2 / 32)`` (Charikar, Chen &
Farach-Colton, "Finding frequent items in data streams", 2002; the signs repeat after 1,048,576 elements).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gaff.record.picture import LENGTH

_PERIOD = 1 << 20
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sketch(tensor: Tensor) -> Tensor:
    """[32] float64 on the tensor's device; elements that are not finite count as zero. No synchronisation."""
    flat = tensor.detach().reshape(-1)
    total = torch.zeros(LENGTH, dtype=torch.float64, device=tensor.device)
    signs = _signs(str(tensor.device))
    for begin in range(0, flat.numel(), _PERIOD):
        part = flat[begin : begin + _PERIOD].to(torch.float32 if tensor.dtype != torch.float64 else tensor.dtype)
        part = part.nan_to_num(0.0, 0.0, 0.0) * signs[: part.numel()]
        padding = -part.numel() % LENGTH
        if padding:
            part = torch.nn.functional.pad(part, (0, padding))
        total += part.view(-1, LENGTH).sum(0, dtype=torch.float64)
    return total


def digest(tensor: Tensor) -> Tensor:
    """A number of 64 bits, equal for equal bits and shapes alike. No synchronisation."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    factors = _factors(str(tensor.device))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), _PERIOD):
        part = words[begin : begin + _PERIOD].to(torch.int64)
        total = total * 1000003 + ((part + 1) * factors[: part.numel()]).sum()  # wraps, which is meant
    return total


@lru_cache(maxsize=8)
def _signs(device: str) -> Tensor:
    made = torch.randint(0, 2, (_PERIOD,), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    return (made * 2 - 1).to(device)


@lru_cache(maxsize=8)
def _factors(device: str) -> Tensor:
    made = torch.randint(-(2**62), 2**62, (_PERIOD,), generator=torch.Generator().manual_seed(2), dtype=torch.int64)
    return (made | 1).to(device)
