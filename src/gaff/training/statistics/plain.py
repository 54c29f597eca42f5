"""The statistics in plain torch: the same numbers as the kernel, on every device, slower. Never synchronises.

All of it is computed where the tensor is, and stays there: who wants the numbers reads rows of many tensors at once.
More than ten passes over the memory take the place of the kernel's one, a million elements at a time, so that what is
made on the way stays small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gaff.record.statistics import BUCKETS, COUNT, M2, MAX, MEAN, MIN, SAMPLED, WIDTH, bucket_of, stride_of

_AT_ONCE = 1 << 20  # elements; what is made on the way is eight bytes each


def observe_(x: Tensor, row: Tensor, histogram: bool) -> None:
    """Add the elements of ``x`` to ``row``: [74], float64, on the same device, written in place.

    ``x``: float16, bfloat16, float32 or float64, any shape and strides, not written to. ``histogram``: whether powers
    of two are counted too; above 16,384 elements on a sample of them, each counted as often as it stands for others.
    """
    flat = in_memory_order(x.detach())
    elements = flat.numel()
    for begin in range(0, elements, _AT_ONCE):
        _add(flat[begin : begin + _AT_ONCE], row)
    if histogram and elements:
        stride = stride_of(elements)
        _count_powers(flat[::stride], row, stride)


def observe_many_(tensors: Sequence[Tensor], rows: Tensor, histogram: bool) -> None:
    """Add the elements of each tensor to its own row: ``rows`` is [n, 74], float64, on the device of all of them."""
    for tensor, row in zip(tensors, rows.unbind(0), strict=True):
        observe_(tensor, row, histogram)


def observe_units_(x: Tensor, units: Tensor, inner: int) -> None:
    """Add to ``units`` what each unit of ``x`` did, as ``observe_`` reads it.

    ``units``, [3, n], float64, is written in place: the largest and smallest value and the sum of magnitudes of each
    unit so far; a NaN is neither largest nor smallest. The elements of a unit are ``inner`` neighbours in memory, those
    of all ``n`` units follow each other; ``x`` is dense.
    """
    table = in_memory_order(x.detach()).view(-1, units.shape[1], inner)
    if table.shape[0]:
        is_nan = table.isnan()
        torch.maximum(units[0], table.masked_fill(is_nan, -math.inf).amax((0, 2)).double(), out=units[0])
        torch.minimum(units[1], table.masked_fill(is_nan, math.inf).amin((0, 2)).double(), out=units[1])
        units[2] += table.abs().sum((0, 2), dtype=torch.float64)


def in_memory_order(x: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory: a view where ``x`` is dense, else a copy."""
    order = sorted((dim for dim in range(x.dim()) if x.shape[dim] != 1), key=x.stride, reverse=True)
    rest = [dim for dim in range(x.dim()) if x.shape[dim] == 1]
    return x.permute((*rest, *order)).reshape(-1)


def _add(x: Tensor, row: Tensor) -> None:
    """Merge the moments, extremes and counts of one stretch into a row: Chan, Golub & LeVeque, 1979.

    Everything is in float64. What is not finite is counted and left out of the rest; a stretch without anything finite
    leaves the mean as it was.
    """
    wide = x.double()
    is_finite = wide.isfinite()
    count = is_finite.sum().double()
    safe = torch.where(is_finite, wide, 0.0)
    mean = safe.sum() / count.clamp(min=1)
    deviation = torch.where(is_finite, wide - mean, 0.0)
    m2 = deviation.square().sum()
    total = row[COUNT] + count
    share = count / total.clamp(min=1)
    delta = mean - row[MEAN]
    added = torch.stack(
        [
            total,
            torch.where(count > 0, row[MEAN] + delta * share, row[MEAN]),
            row[M2] + m2 + delta.square() * row[COUNT] * share,
            torch.minimum(row[MIN], torch.where(is_finite, wide, float("inf")).amin()),
            torch.maximum(row[MAX], torch.where(is_finite, wide, float("-inf")).amax()),
            row[5] + (wide == 0).sum(),
            row[6] + wide.isnan().sum(),
            row[7] + (wide == float("inf")).sum(),
            row[8] + (wide == float("-inf")).sum(),
        ]
    )
    row[:SAMPLED] = added


def _count_powers(x: Tensor, row: Tensor, stride: int) -> None:
    """Count the exponents of elements by bucket; ``stride``: how many elements each of them stands for.

    Exponents are read from the bits, and not computed by a logarithm, whose rounding would put numbers just below a
    power of two into the next bucket. Those of float64 that float32 does not reach count at its ends.
    """
    if x.dtype == torch.float64:
        biased = ((x.contiguous().view(torch.int64) >> 52) & 0x7FF) - 1023 + 127
        biased = torch.where(biased == 0x7FF - 1023 + 127, 255, biased.clamp(0, 254))
    else:
        biased = (x.float().contiguous().view(torch.int32) >> 23).long() & 0xFF
    index = _places(x.device)[torch.where(x == 0, 256, biased)]
    counts = torch.zeros(BUCKETS + 2, dtype=torch.float64, device=x.device)
    counts.index_add_(0, index, torch.full_like(index, stride, dtype=torch.float64))
    row[SAMPLED] += counts[: BUCKETS + 1].sum()
    row[SAMPLED + 1 : WIDTH] += counts[:BUCKETS]


@lru_cache
def _places(device: torch.device) -> Tensor:
    """The bucket of every biased exponent of float32, as a table to look up; 256 stands for zeros, 255 for NaN and inf.

    Zeros go to place 64, which is not kept as a bucket, and NaN and inf to 65, which is not counted at all.
    """
    places = [0, *(bucket_of(biased - 127) for biased in range(1, 255)), BUCKETS + 1, BUCKETS]
    return torch.tensor(places, device=device)
