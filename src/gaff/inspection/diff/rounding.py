"""What rounding explains of the difference between two traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gaff.inspection.diff.difference import ROUNDOFF, DiffRow, elements_of
from gaff.record.trace_rows import CallRow, Fingerprint, ParameterRow

LITTLE = 2.0**-60  # a difference too small to be told
_MOST = 0.1  # of what passes, however many roundings there were; chosen
_OFTEN = 8.0  # roundings that an op may add up to: chosen, as in backward error bounds that hold in the mean
_SUMMED = 32.0  # the same of types whose sums are kept in themselves, not in a finer one: another order, another sum
_OF_WEIGHTS = 1e-3
_HALF = 2.0**-13  # between the unit roundoff of float16 and that of float32
_KINKED = ("relu", "maxpool", "max_pool", "hard", "clamp", "clip", "abs", "threshold")
_WHOLE = ("int", "uint", "bool")  # beginnings of the names of types


class Drift(NamedTuple):
    """How far two runs may have drifted apart by rounding: ``calls`` that differ, and the coarsest ``roundoff`` there.

    A value that has been bfloat16 is rounded as such, also where what comes of it is float32, as under autocast.
    ``has_kinks``: gradients come through functions with kinks, such as ReLU.
    """

    calls: int = 0
    roundoff: float = 0.0
    has_kinks: bool = False

    @property
    def steps(self) -> float:
        """Errors of rounding that are independent add up as a random walk (Higham & Mary, 2019)."""
        return math.sqrt(self.calls + 1)

    def after(self, rows: Sequence[DiffRow], *calls: CallRow) -> Drift:
        """How far, when a pair of calls has been compared, which ``rows`` tell of."""
        if all(row.state == "same" for row in rows):
            return self
        return self._replace(calls=self.calls + 1, roundoff=max(self.roundoff, _coarsest(calls)))


Numbers = CallRow | ParameterRow | Fingerprint  # what may be compared


def _types(row: Numbers) -> list[str]:
    """The names of the types in a row that are rounded, or of its only one; an older trace tells that of the first."""
    known = _mark(row)
    if known.types or isinstance(row, Fingerprint):
        return known.types.split(", ") if known.types else [_WHOLE[0]]
    return [row.dtype]


def _coarsest(rows: Sequence[Numbers]) -> float:
    """The unit roundoff of the coarsest type of some rows."""
    return max((ROUNDOFF.get(one, 2.0**-24) for row in rows for one in _types(row)), default=2.0**-24)


def _whole(rows: Sequence[Numbers]) -> set[str]:
    """What stands for the whole numbers and truth values in some rows, as far as it was written."""
    return {mark.whole for mark in map(_mark, rows) if mark.whole}


def _mark(row: Numbers) -> Fingerprint:
    """What stands for the elements of a row; an empty one for that of a parameter, which has none."""
    return row if isinstance(row, Fingerprint) else row.fingerprint if isinstance(row, CallRow) else Fingerprint()


def allowance(tolerance: float | None, drift: Drift, *rows: Numbers) -> float:
    """The relative difference that rounding explains; ``tolerance`` itself where it is given.

    Where all bits are the same so far there is one call's rounding to explain, however deep the model is. The unit
    roundoff is that of the coarsest type of the rows and of those before that differ; eight roundings a call are
    chosen, and four times as many of float32 and float64, in which sums of thousands are kept (of half precision they
    are kept in float32, and the result is rounded once). However deep a model is, that is a tenth at the most, or two
    roundings of a type that is coarser: ports of 48 blocks in bfloat16 are 3 % apart. Whole numbers and truth values do
    not round: where these differ, nothing is allowed for.

    Of half precision a gradient that came through kinks may be farther off: of numbers that rounding moves by a share e
    about as many lie that near to 0, where it opens or shuts a ReLU, and each of these is wrong as a whole. That is
    sqrt(e) of the norm; twice as much is chosen.
    """
    if tolerance is not None:
        return tolerance
    whole, types = _whole(rows), {one for row in rows for one in _types(row)}
    if len(whole) > 1:
        return 0.0
    if types and all(one.startswith(_WHOLE) for one in types):
        return 0.0 if len(types) == 1 and not whole else LITTLE
    roundoff = max(drift.roundoff, _coarsest(rows))
    flips = 2.0 * math.sqrt(roundoff * drift.steps) if drift.has_kinks and roundoff > _HALF else 0.0
    walked = (_OFTEN if roundoff > _HALF else _SUMMED) * roundoff * drift.steps
    return max(min(walked, max(_MOST, 2 * roundoff)), flips)


def in_sums(allowed: float, drift: Drift, shape: str, gradient: str, came: float, size: float) -> float:
    """The relative difference that rounding explains of a parameter's gradient of norm ``size``.

    ``came``: the norm of the gradient that came to its module. Shapes as texts, of the parameter and of what came. At
    each of the places that a module is applied at, n of them, m elements of a row of its weight are multiplied by
    inputs, and the products summed up over all places. An error that places share, as batch norm makes, adds up to
    sqrt(n m) of its norm at most (Cauchy and Schwarz); twice that is chosen, for inputs are larger than 1, too. Of
    weights no more than a thousandth: their sums do not cancel as that of a bias before a norm does. ``allowed`` as it
    is of half precision, whose own rounding is larger.
    """
    whole, rows, elements = (elements_of(text) for text in (shape, shape.partition("x")[0], gradient))
    if isinstance(whole, str) or isinstance(rows, str) or isinstance(elements, str):
        return allowed
    if drift.roundoff > _HALF or not rows[0] or not size:
        return allowed
    most = 2.0 * came * math.sqrt(max(1.0, sum(elements) / rows[0] * (whole[0] / rows[0])))
    wide = allowed * most / size
    return max(allowed, min(wide, _OF_WEIGHTS) if "x" in shape else wide)


def has_kinks(rows: Sequence[CallRow]) -> bool:
    """Whether a module or an op among the calls has kinks, by its name."""
    names = [f"{row.cls} {row.site.rpartition('/')[2]}".lower() for row in rows]
    return any(kink in name for name in names for kink in _KINKED)
