"""The numbers of a tensor, declared once: what each is, how it follows from others, how parts of it add up. No torch.

The words, here and wherever these numbers go: a *row* is what one pass over a tensor gives, 74 numbers (below); a
*column* is one statistic of many sites, as it is stored; a *table* has the columns of one look, one line for each
site; a *layout* names its lines and columns; a *group* is what has the same columns (activations; parameters); a
*series* is one number over steps. ``Numbers`` reads a row by name.

A row holds, of all elements seen: how many are finite, their mean, the sum of their squared deviations from it, their
extremes, how many are zero, how many are NaN, +inf, -inf; then how many finite elements the powers of two were counted
on, and 64 counts, one for each bucket of magnitudes. Rows of parts merge exactly (Chan, Golub & LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BUCKETS = 64
COUNT, MEAN, M2, MIN, MAX, ZEROS, NAN, POSITIVE, NEGATIVE, SAMPLED = range(10)
WIDTH = 10 + BUCKETS
EMPTY = (0.0, 0.0, 0.0, math.inf, -math.inf, *([0.0] * (WIDTH - 5)))
ALL_COUNTED = 1 << 14  # above this many elements the powers of two are counted on a sample of an odd stride

ACTIVATIONS, PARAMETERS = "activations", "parameters"  # groups: what has the same columns


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number of a site. To add one, add it here, and to the kernels or the recorder that compute it.

    ``slot``, ``kind``: where it comes from in a row: the number itself ("value"; "moment" where there is none of an
    empty tensor), the root of its share of the finite elements ("deviation"), or that share ("share"). One without a
    slot is an ``extra`` of the groups named, which the recorder fills in, or follows from others: ``needs`` their
    columns, and ``rule`` is called with what has ``hypot`` and ``sqrt`` (``math``, ``numpy``) and these.
    ``merge``: how the parts of a tensor, or of a batch, add up: "sum", "least", "most", "pooled" (the moments, as the
    paper above), "weighted" by count; "" where they do not. ``ends``: which of several looks a page keeps where it has
    no room for each. ``is_of_finite``: whether a value that is not finite is told as infinite, and not as missing.
    """

    name: str
    unit: str
    means: str
    slot: int | None = None
    kind: str = ""
    code: str = "f"  # as it is stored: float32, or "d" for float64
    groups: tuple[str, ...] = (ACTIVATIONS, PARAMETERS)
    needs: tuple[str, ...] = ()
    rule: Callable[..., Any] | None = None
    merge: str = ""
    ends: tuple[str, ...] = ()
    is_of_finite: bool = False


def _extra(name: str, unit: str, means: str, group: str, *ends: str, is_of_finite: bool = False) -> Statistic:
    """A statistic without a slot in a row, of one group, which the recorder fills in."""
    return Statistic(name, unit, means, groups=(group,), ends=ends, is_of_finite=is_of_finite)


_BAD = ("nan", "positive_inf", "negative_inf")
STATISTICS = (
    Statistic("count", "elements", "how many are finite", COUNT, "value", "d", merge="sum"),
    Statistic("mean", "as the tensor", "of the finite elements", MEAN, "moment", merge="pooled", ends=("latest",),
              is_of_finite=True),
    Statistic("std", "as the tensor", "of the finite elements, of the population", M2, "deviation", merge="pooled",
              is_of_finite=True),
    Statistic("min", "as the tensor", "the least finite element", MIN, "moment", merge="least", ends=("lowest",),
              is_of_finite=True),
    Statistic("max", "as the tensor", "the largest finite element", MAX, "moment", merge="most", ends=("highest",),
              is_of_finite=True),
    Statistic("zeros", "share", "of the finite elements that are exactly zero", ZEROS, "share", merge="weighted",
              ends=("highest",)),
    Statistic("nan", "elements", "that are NaN", NAN, "value", merge="sum"),
    Statistic("positive_inf", "elements", "that are +inf", POSITIVE, "value", merge="sum"),
    Statistic("negative_inf", "elements", "that are -inf", NEGATIVE, "value", merge="sum"),
    _extra("saturated", "share", "of elements where the slope of tanh or sigmoid is below 6 %", ACTIVATIONS, "highest"),
    _extra("entropy", "share", "entropy of attention, of that of a uniform one", ACTIVATIONS, "lowest"),
    _extra("first_key", "share", "of attention that goes to the first key", ACTIVATIONS, "highest"),
    _extra("logit", "as the scores", "the largest score that attention takes a softmax of", ACTIVATIONS, "highest"),
    _extra("choice", "share", "entropy of a router's choice, of that of an even one", ACTIVATIONS, "lowest"),
    _extra("load", "ratio", "tokens of the expert with most, to those of a balanced router", ACTIVATIONS, "highest"),
    _extra("idle", "share", "of the experts that no token goes to", ACTIVATIONS, "highest"),
    _extra("dropped", "share", "of the tokens that no expert gets", ACTIVATIONS, "highest"),
    _extra("dead", "share", "of the units that were never above 1e-5 in magnitude", ACTIVATIONS, "highest"),
    _extra("outlier", "ratio", "the mean magnitude of the largest unit to the median one", ACTIVATIONS, "highest"),
    _extra("update_ratio", "ratio", "rms of the step's update to rms of the weight", PARAMETERS, "highest", "lowest",
           is_of_finite=True),
    _extra("adam_rms", "ratio", "root of the mean of g^2 / v (Wortsman et al., 2023, RMS_t)", PARAMETERS, "highest"),
    _extra("momentum", "as the gradient", "L2 norm of the first moment", PARAMETERS, "latest"),
    _extra("lr", "learning rate", "of the parameter's group", PARAMETERS, "latest"),
    Statistic("rms", "as the tensor", "root of the mean square of the finite elements", needs=("mean", "std"),
              rule=lambda m, mean, std: m.hypot(mean, std), merge="pooled", ends=("highest", "lowest"),
              is_of_finite=True),
    Statistic("norm", "as the tensor", "L2 norm of the finite elements", needs=("mean", "std", "count"),
              rule=lambda m, mean, std, count: m.hypot(mean, std) * m.sqrt(count), merge="pooled"),
    Statistic("nonfinite", "elements", "that are NaN or infinite", needs=_BAD,
              rule=lambda m, nan, positive, negative: nan + positive + negative, merge="sum", ends=("highest",)),
)  # fmt: skip
BY_NAME = {one.name: one for one in STATISTICS}
DERIVED = tuple(one.name for one in STATISTICS if one.rule is not None)  # not stored: they follow from what is
IN_EACH = (*(one.name for one in STATISTICS if one.slot is not None), *DERIVED)  # of every line of a table


def columns_of(group: str) -> tuple[tuple[str, str], ...]:
    """Name and type code of each stored column of a group, in the order in which they are stored."""
    return tuple((one.name, one.code) for one in STATISTICS if one.rule is None and group in one.groups)


def value_of(columns: Mapping[str, Sequence[float]], at: int, name: str) -> float | None:
    """One statistic of line ``at`` of a table, stored or derived; None where there is none."""
    if "count" in columns and math.isnan(columns["count"][at]):
        return None
    if name in columns:
        return columns[name][at]
    known = BY_NAME.get(name)
    if known is None or known.rule is None or not all(one in columns for one in known.needs):
        return None
    needed = [columns[one][at] for one in known.needs]
    if name == "norm":
        needed[2] = max(0.0, needed[2])  # of damaged files
    return float(known.rule(math, *needed))


def merged(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """One statistic of several parts together, from their stored columns; KeyError for one that does not add up."""
    how = BY_NAME[name].merge
    if how == "sum":
        return sum(value_of({key: (one,) for key, one in row.items()}, 0, name) or 0.0 for row in rows)
    filled = [row for row in rows if row["count"] > 0]  # a process may have no part of a small tensor
    if how in ("least", "most"):
        return (min if how == "least" else max)((row[name] for row in filled), default=math.nan)
    count = sum(row["count"] for row in filled)
    if not count:
        return math.nan
    if how == "weighted":
        return sum(row["count"] * row[name] for row in filled) / count
    if how != "pooled":
        raise KeyError(name)
    mean = sum(row["count"] * row["mean"] for row in filled) / count
    square = sum(row["count"] * (row["std"] ** 2 + row["mean"] ** 2) for row in filled)
    if name == "std":
        return math.sqrt(sum(row["count"] * (row["std"] ** 2 + (row["mean"] - mean) ** 2) for row in filled) / count)
    return {"mean": mean, "rms": math.sqrt(square / count), "norm": math.sqrt(square)}[name]


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
    where there are none, but for ``norm``, which is then 0; ``zeros`` is their fraction that is exactly zero. ``nan``
    and the infinities are counts.
    """

    __slots__ = ("_row", "count", "mean", "std")

    def __init__(self, row: Sequence[float]) -> None:
        self._row = row
        self.count = int(row[COUNT])
        self.mean = row[MEAN] if self.count else math.nan
        self.std = math.sqrt(max(row[M2], 0.0) / self.count) if self.count else math.nan

    @property
    def min(self) -> float:
        """The least finite element; NaN where there is none."""
        return self._row[MIN] if self.count else math.nan

    @property
    def max(self) -> float:
        """The largest finite element; NaN where there is none."""
        return self._row[MAX] if self.count else math.nan

    @property
    def zeros(self) -> float:
        """The share of the finite elements that is exactly zero; 0 where there is none."""
        return self._row[ZEROS] / self.count if self.count else 0.0

    @property
    def nan(self) -> int:
        """How many elements are NaN."""
        return int(self._row[NAN])

    @property
    def positive_inf(self) -> int:
        """How many elements are +inf."""
        return int(self._row[POSITIVE])

    @property
    def negative_inf(self) -> int:
        """How many elements are -inf."""
        return int(self._row[NEGATIVE])

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return int(self._row[NAN] + self._row[POSITIVE] + self._row[NEGATIVE])

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite elements; NaN where there is none."""
        return math.hypot(self.mean, self.std)

    @property
    def norm(self) -> float:
        """The L2 norm of the finite elements; 0 where there is none."""
        return self.rms * math.sqrt(self.count) if self.count else 0.0

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite element."""
        return max(abs(self._row[MIN]), abs(self._row[MAX])) if self.count else 0.0

    @property
    def median_magnitude(self) -> float:
        """The middle of the magnitudes of the finite elements, up to a factor of two: it lies in the next bucket's.

        That is the upper edge of the bucket of magnitudes in which half of what was counted is reached; 0 of nothing.
        """
        half = self._row[SAMPLED] / 2
        seen = self._row[SAMPLED] - sum(self._row[SAMPLED + 1 :])  # zeros are in no bucket
        if seen >= half:
            return 0.0
        for bucket, count in enumerate(self._row[SAMPLED + 1 :]):
            seen += count
            if seen >= half > 0:
                return float(2.0 ** lower_edge(min(bucket + 1, BUCKETS - 1)))
        return 0.0

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
    """The row of two parts together, whichever comes first; exact up to rounding (Chan, Golub & LeVeque, 1979)."""
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
