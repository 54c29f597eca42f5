"""What the 74 numbers of a row are, and what can be read from them. Needs no torch.

A row holds, of all elements seen: how many are finite, their mean, the sum of their squared deviations from it, their
extremes, how many are zero, how many are NaN, +inf, -inf; then how many finite elements the powers of two were counted
on, and 64 counts, one for each bucket of magnitudes. Rows of parts merge exactly (Chan, Golub & LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BUCKETS = 64
COUNT, MEAN, M2, MIN, MAX, ZEROS, NAN, POSITIVE, NEGATIVE, SAMPLED = range(10)
WIDTH = 10 + BUCKETS
EMPTY = (0.0, 0.0, 0.0, math.inf, -math.inf, *([0.0] * (WIDTH - 5)))
ALL_COUNTED = 1 << 14  # above this many elements the powers of two are counted on a sample of an odd stride

# The magnitude with which a number rounds to zero, or to infinity, in a format: as powers of two that are certain.
# Sources: IEEE 754-2019 for float16; Micikevicius et al., "FP8 formats for deep learning", 2022.
LIMITS = {"float16": (-25, 16), "bfloat16": (-126, 128), "float8_e4m3": (-10, 9), "float8_e5m2": (-17, 16)}


def bucket_of(exponent: int) -> int:
    """The bucket of magnitudes from ``2**exponent`` up to its double: of their own from -38 to 17, coarser outside."""
    if exponent < -126:
        return 0
    if exponent < -96:
        return 1
    if exponent < -64:
        return 2
    if exponent < -38:
        return 3
    if exponent < 18:
        return exponent + 42
    if exponent < 32:
        return 60
    if exponent < 48:
        return 61
    return 62 if exponent < 96 else 63


def lower_edge(bucket: int) -> int:
    """The exponent of two at which a bucket begins; of the first, which holds subnormal numbers, -149."""
    coarse = {0: -149, 1: -126, 2: -96, 3: -64, 60: 18, 61: 32, 62: 48, 63: 96}
    return coarse.get(bucket, bucket - 42)


def stride_of(elements: int) -> int:
    """The distance between elements on which powers of two are counted; odd, for even ones alias with channels."""
    return 1 if elements <= ALL_COUNTED else (elements // ALL_COUNTED) | 1


class Numbers:
    """The numbers of one tensor stream, read from its row. All but the shares of formats are exact up to rounding.

    ``mean``, ``std`` (of the population), ``min``, ``max``, ``rms``, ``norm`` (L2) are of the finite elements, NaN
    where there are none; ``zeros`` is their fraction that is exactly zero. ``nan`` and the infinities are counts.
    """

    __slots__ = ("_row", "count", "mean", "std")

    def __init__(self, row: Sequence[float]) -> None:
        self._row = row
        self.count = int(row[COUNT])
        self.mean = row[MEAN] if self.count else math.nan
        self.std = math.sqrt(max(row[M2], 0.0) / self.count) if self.count else math.nan

    @property
    def min(self) -> float:
        return self._row[MIN] if self.count else math.nan

    @property
    def max(self) -> float:
        return self._row[MAX] if self.count else math.nan

    @property
    def zeros(self) -> float:
        return self._row[ZEROS] / self.count if self.count else 0.0

    @property
    def nan(self) -> int:
        return int(self._row[NAN])

    @property
    def positive_inf(self) -> int:
        return int(self._row[POSITIVE])

    @property
    def negative_inf(self) -> int:
        return int(self._row[NEGATIVE])

    @property
    def nonfinite(self) -> int:
        return int(self._row[NAN] + self._row[POSITIVE] + self._row[NEGATIVE])

    @property
    def rms(self) -> float:
        return math.hypot(self.mean, self.std)

    @property
    def norm(self) -> float:
        return self.rms * math.sqrt(self.count) if self.count else 0.0

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite element."""
        return max(abs(self._row[MIN]), abs(self._row[MAX])) if self.count else 0.0

    def share(self, first: int, last: int = BUCKETS - 1) -> float:
        """The share of the finite elements whose magnitude is in one of these buckets; 0 where none were counted."""
        sampled = self._row[SAMPLED]
        return sum(self._row[SAMPLED + 1 + first : SAMPLED + 2 + last]) / sampled if sampled else 0.0

    def underflow(self, format_name: str) -> float:
        """The share of the finite elements that is not zero and rounds to zero in ``format_name`` (see ``LIMITS``).

        A lower bound: numbers in the last half power of two, some of which round to zero too, are not counted.
        bfloat16: the share of subnormal numbers, which most accelerators flush.
        """
        return self.share(0, bucket_of(LIMITS[format_name][0] - 1))

    def overflow(self, format_name: str) -> float:
        """The share that is beyond the largest number of ``format_name``, for certain; bfloat16 has float32's range."""
        limit = LIMITS[format_name][1]
        return self.share(bucket_of(limit)) if limit < 128 else 0.0


def merge(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """The row of both together; in any order."""
    count = left[COUNT] + right[COUNT]
    if not right[COUNT] or not left[COUNT]:
        moments = [(right if right[COUNT] else left)[at] for at in (COUNT, MEAN, M2)]
    else:
        delta = right[MEAN] - left[MEAN]
        share = right[COUNT] / count
        spread = left[M2] + right[M2] + delta * delta * left[COUNT] * share
        moments = [count, left[MEAN] + delta * share, spread]
    extremes = [min(left[MIN], right[MIN]), max(left[MAX], right[MAX])]
    return [*moments, *extremes, *(one + other for one, other in zip(left[ZEROS:], right[ZEROS:], strict=True))]
