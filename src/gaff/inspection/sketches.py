"""Small stand-ins for tensors, so that two traces can be compared without keeping what passed.

A digest is equal for equal bits. A sketch is a linear map to 32 numbers: element ``i`` is multiplied by a random sign
and added to the number ``i mod 32``. The squared norm of the difference of two sketches has as its mean the squared
norm of the difference of the tensors, and a relative deviation of at most ``sqrt(2 / 32)`` (Charikar, Chen &
Farach-Colton, "Finding frequent items in data streams", 2002; the signs of every further 1,048,576 elements are the
same ones, turned).

Signs and factors come from generators with fixed seeds, made on the CPU, so that marks made in another process or on
another device can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.record.picture import LENGTH

_PERIOD = 1 << 20
_DENSE = 1 << 24  # elements of a sparse tensor that is written out
_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def marks_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Digest and sketch of several tensors as one; None where none of them can be read element by element.

    Both stay on the device, and nothing waits for it. The order counts: each further sketch is turned by its place,
    and digests are combined as a polynomial.
    """
    known = [plain for tensor in tensors if (plain := readable(tensor)) is not None]
    if not known:
        return None
    total, bits = sketch(known[0]), digest(known[0])
    for at, tensor in enumerate(known[1:], 1):
        total = total + sketch(tensor).roll(at)
        bits = bits * 31 + digest(tensor)
    return bits, total


def readable(tensor: Tensor) -> Tensor | None:
    """The tensor with real elements side by side, the part of this process; None of what has none.

    A complex tensor becomes one of pairs, a sparse one is written out if it has at most 2**24 elements. May be a view.
    """
    is_sparse = tensor.layout not in (torch.strided, torch.jagged)
    if is_sparse and tensor.numel() > _DENSE:
        return None
    value = elements.elements(tensor.to_dense() if is_sparse and not tensor.is_meta else tensor)
    return value if value is not None and value.numel() else None


def sketch(tensor: Tensor) -> Tensor:
    """The sketch of one tensor: [32] float64 on the tensor's device. No synchronisation.

    Elements that are not finite count as zero, since one of them would spoil the norm; statistics count them. Goes
    through the tensor in pieces of 2**20 elements, so that copies in between stay small.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros(LENGTH, dtype=torch.float64, device=tensor.device)
    signs = _signs(str(tensor.device))
    for begin in range(0, flat.numel(), _PERIOD):
        part = flat[begin : begin + _PERIOD].to(torch.float32 if tensor.dtype in _NARROW else torch.float64)
        turned = signs.roll(begin // _PERIOD * 7919) if begin else signs
        part = part.nan_to_num(0.0, 0.0, 0.0) * turned[: part.numel()]
        padding = -part.numel() % LENGTH
        if padding:
            part = torch.nn.functional.pad(part, (0, padding))
        total += part.view(-1, LENGTH).sum(0, dtype=torch.float64)
    return total


def digest(tensor: Tensor) -> Tensor:
    """A number of 64 bits (a 0-dim int64 tensor on the device), equal for equal bits. No synchronisation.

    The shape does not count. A sum of the words of the tensor, each times an odd factor of its place, modulo 2**64:
    made to tell two runs apart, not to withstand somebody who wants to deceive.
    """
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
    """The signs of 2**20 elements, -1 and 1 as int8, on a device; the same ones everywhere."""
    made = torch.randint(0, 2, (_PERIOD,), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    return (made * 2 - 1).to(device)


@lru_cache(maxsize=8)
def _factors(device: str) -> Tensor:
    """The factors of 2**20 places, int64 on a device; odd, so that none loses a bit of what it multiplies."""
    made = torch.randint(-(2**62), 2**62, (_PERIOD,), generator=torch.Generator().manual_seed(2), dtype=torch.int64)
    return (made | 1).to(device)
