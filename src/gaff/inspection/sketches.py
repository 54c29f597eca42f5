"""Small stand-ins for tensors, so that two traces can be compared without keeping what passed.

A digest is equal for equal bits. A sketch is a linear map to 32 numbers: element ``i`` is multiplied by a random
weight and added to the number ``i mod 32``. With weights of mean square 1 the squared norm of the difference of two
sketches has as its mean the squared norm of the difference of the tensors, and a relative deviation of about ``sqrt(2 /
32)`` (Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", 2002, with signs for weights; the
weights of every further 1,048,576 elements are the same ones, turned). The weights here have random signs, and sizes
that differ a little: with signs alone two elements of one number that are exchanged would not be seen.

Which elements are NaN and infinite has a digest of its own, since a sketch passes over them.

Weights and factors come from generators with fixed seeds, made on the CPU, so that marks made in another process or on
another device can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.record.picture import LENGTH

_PERIOD = 1 << 20
_LEAST = 0.7  # the smallest size of a weight; chosen, for how well two elements that are exchanged are told apart
_SIZE = math.sqrt((1 + _LEAST + _LEAST**2) / 3)  # the root of the mean square of numbers between that and 1
_PROJECTED = _PERIOD >> 2  # elements of a tensor that count in its projections
_SOME = 1 << 12  # elements of a parameter that stand for all
_DENSE = 1 << 24  # elements of a sparse tensor that is written out
_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # of 64 bits two
_SPREAD = 0x1E3779B97F4A7C15  # a large odd number without structure: its product carries low bits of a word up


class TensorMarks(NamedTuple):
    """What stands for some tensors, on their device. ``odd``: the digest of what is not finite, 0 where all is.

    ``whole``: the digest of those of whole numbers and truth values, by value, None without any; ``types``: the names
    of the types of all others.
    """

    digest: Tensor
    sketch: Tensor
    odd: Tensor
    whole: Tensor | None = None
    types: tuple[str, ...] = ()


def marks_of(tensors: Sequence[Tensor]) -> TensorMarks | None:
    """The marks of several tensors as one; None where none of them can be read element by element.

    All stay on the device, and nothing waits for it. The order counts: each further sketch is turned by its place, and
    digests are combined as a polynomial.
    """
    given = [(tensor.dtype, plain) for tensor in tensors if (plain := readable(tensor)) is not None]
    known = [plain for _, plain in given]
    if not known:
        return None
    types = tuple(sorted({str(one).removeprefix("torch.") for one, _ in given if _rounds(one)}))
    whole: Tensor | None = None
    for dtype, plain in given:
        if not _rounds(dtype):
            further = digest(plain.to(torch.int64))
            whole = further if whole is None else whole * 31 + further
    bits = digest(known[0])
    total, odd = sketch(known[0])
    for at, tensor in enumerate(known[1:], 1):
        bits = bits * 31 + digest(tensor)
        further, more = sketch(tensor)
        total, odd = total + further.roll(at), odd * 31 + more
    return TensorMarks(bits, total, odd, whole, types)


def _rounds(dtype: torch.dtype) -> bool:
    """Whether numbers of a type are rounded, as whole numbers and truth values are not."""
    return dtype.is_floating_point or dtype.is_complex


def readable(tensor: Tensor) -> Tensor | None:
    """The tensor with real elements side by side, the part of this process; None of what has none.

    A complex tensor becomes one of pairs, a sparse one is written out if it has at most 2**24 elements. May be a view.
    """
    is_sparse = tensor.layout not in (torch.strided, torch.jagged)
    if is_sparse and tensor.numel() > _DENSE:
        return None
    value = elements.elements(tensor.to_dense() if is_sparse and not tensor.is_meta else tensor)
    return value if value is not None and value.numel() else None


def sketch(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The sketch of one tensor, [32] float64, and the digest of what is not finite in it, a 0-dim int64 tensor.

    On the tensor's device, without synchronisation. Elements that are not finite count as zero in the sketch, since one
    of them would spoil the norm. Goes through the tensor in pieces of 2**20 elements, so that copies stay small.
    """
    tensor = tensor.cpu() if tensor.is_mps else tensor  # which has no float64
    flat = tensor.detach().reshape(-1)
    total = torch.zeros(LENGTH, dtype=torch.float64, device=tensor.device)
    odd = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights, factors = _weights(str(tensor.device)), _factors(str(tensor.device))
    for begin in range(0, flat.numel(), _PERIOD):
        part = flat[begin : begin + _PERIOD].to(torch.float32 if tensor.dtype in _NARROW else torch.float64)
        turned = (weights.roll(begin // _PERIOD * 7919) if begin else weights)[: part.numel()]
        added = _added(part * turned)
        if not (added.is_cpu and bool(added.isfinite().all())):  # to ask costs nothing on a CPU
            kinds = part.isnan() + 2 * (part == math.inf) + 3 * (part == -math.inf)
            odd = odd * 1000003 + (kinds * factors[: part.numel()]).sum()  # wraps, which is meant
            added = _added(part.nan_to_num(0.0, 0.0, 0.0) * turned)
        elif begin:
            odd = odd * 1000003
        total += added
    return total / _SIZE, odd


def _added(weighted: Tensor) -> Tensor:
    """The sums of every 32nd element, in float64."""
    padding = -weighted.numel() % LENGTH
    padded = torch.nn.functional.pad(weighted, (0, padding)) if padding else weighted
    return padded.view(-1, LENGTH).sum(0, dtype=torch.float64)


def digest(tensor: Tensor) -> Tensor:
    """A number of 64 bits (a 0-dim int64 tensor on the device), equal for equal bits. No synchronisation.

    The shape does not count. A sum of the words of the tensor, each of at most 32 bits and stirred, times an odd factor
    of its place, modulo 2**64: made to tell two runs apart, not to withstand somebody who wants to deceive. Words are
    stirred since the same change in many of them, such as of each sign, would count as the sum of their factors alone.
    """
    words = elements.words(tensor, _WORDS[tensor.element_size()])
    factors = _factors(str(tensor.device))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), _PERIOD):
        part = (words[begin : begin + _PERIOD].to(torch.int64) + 1) * _SPREAD  # wraps, here and below, which is meant
        total = total * 1000003 + ((part ^ (part >> 32)) * factors[: part.numel()]).sum()
    return total


def digests_of_some(tensors: Sequence[Tensor]) -> list[str]:
    """For each tensor the digest of all its elements, or of every nth of a large one; empty of what cannot be read.

    Waits once for each device.
    """
    values = [readable(tensor.detach()) for tensor in tensors]
    flat = [None if value is None else value.reshape(-1) for value in values]
    found = [None if one is None else digest(one[:: (one.numel() // _SOME) | 1]) for one in flat]
    known: dict[torch.device, list[Tensor]] = {}
    for one in found:
        if one is not None:
            known.setdefault(one.device, []).append(one)
    read = {device: iter(torch.stack(ones).tolist()) for device, ones in known.items()}
    return ["" if one is None else f"{next(read[one.device]):x}" for one in found]


@torch.no_grad()
def projections(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """For each tensor four sums of its elements with random weights, [4] on its device; None of what cannot be read.

    Where two tensors differ, so do these, by about as much as the norm of the difference. Of a tensor with more than
    2**18 elements every nth is read. Costs two passes over these, and waits for nothing.
    """
    found: list[Tensor | None] = [None] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, Tensor]]] = {}
    for at, tensor in enumerate(tensors):
        value = readable(tensor.detach())
        if value is not None and not value.is_meta:
            flat = (value.cpu() if value.is_mps else value).reshape(-1)
            flat = flat[:: -(-flat.numel() // _PROJECTED)]
            alike.setdefault((flat.device, flat.dtype, flat.numel()), []).append((at, flat))
    for (device, dtype, size), several in alike.items():
        weights = _weights(str(device))[: 4 * size].view(4, size)
        together = _PROJECTED // size
        for begin in range(0, len(several), together):
            part = several[begin : begin + together]
            wide = torch.float32 if dtype in _NARROW else torch.float64
            rows = torch.stack([flat.to(wide) for _, flat in part])
            sums = (rows.unsqueeze(1) * weights).sum(2, dtype=torch.float64) / _SIZE
            for (at, _), row in zip(part, sums.unbind(), strict=True):
                found[at] = row
    return found


@lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """The weights of 2**20 elements, float32 on a device; the same ones everywhere. None is larger than 1.

    So no finite element overflows by its weight. Their mean square is ``_SIZE`` squared.
    """
    draw = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (_PERIOD,), generator=draw, dtype=torch.int8, device="cpu") * 2 - 1
    sizes = torch.rand(_PERIOD, generator=draw, dtype=torch.float32, device="cpu") * (1 - _LEAST) + _LEAST
    return (signs * sizes).to(device)


@lru_cache(maxsize=8)
def _factors(device: str) -> Tensor:
    """The factors of 2**20 places, int64 on a device; odd, so that none loses a bit of what it multiplies."""
    draw = torch.Generator().manual_seed(2)
    made = torch.randint(-(2**62), 2**62, (_PERIOD,), generator=draw, dtype=torch.int64, device="cpu")
    return (made | 1).to(device)
