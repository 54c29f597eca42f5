"""What rounding explains of the difference between two traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gaff.inspection.diff.difference import ROUNDOFF, DiffRow
from gaff.record.trace_rows import CallRow, ParameterRow

LITTLE = 2.0**-60  # a difference too small to be told
_OFTEN = 8.0  # roundings that an op may add up to: chosen, as in backward error bounds that hold in the mean
_WHOLE = ("int", "uint", "bool")  # beginnings of the names of types


class Drift(NamedTuple):
    """How far two runs may have drifted apart by rounding: ``calls`` that differ, and the coarsest ``roundoff`` there.

    A value that has been bfloat16 is rounded as such, also where what comes of it is float32, as under autocast.
    """

    calls: int = 0
    roundoff: float = 0.0

    @property
    def steps(self) -> float:
        """Errors of rounding that are independent add up as a random walk (Higham & Mary, 2019)."""
        return math.sqrt(self.calls + 1)

    def after(self, rows: Sequence[DiffRow], *calls: CallRow) -> Drift:
        """How far, when a pair of calls has been compared, which ``rows`` tell of."""
        if all(row.state == "same" for row in rows):
            return self
        return Drift(self.calls + 1, max(self.roundoff, _coarsest(calls)))


def _coarsest(rows: Sequence[CallRow | ParameterRow]) -> float:
    """The unit roundoff of the coarsest type of some rows."""
    return max((ROUNDOFF.get(row.dtype, 2.0**-24) for row in rows), default=2.0**-24)


def allowance(tolerance: float | None, drift: Drift, *rows: CallRow | ParameterRow) -> float:
    """The relative difference that rounding explains; ``tolerance`` itself where it is given.

    Where all bits are the same so far there is one call's rounding to explain, however deep the model is. The unit
    roundoff is that of the coarsest type of the rows and of those before that differ; eight roundings a call are
    chosen. Whole numbers and truth values do not round.
    """
    if tolerance is not None:
        return tolerance
    if rows and all(row.dtype.startswith(_WHOLE) for row in rows):
        return 0.0 if len({row.dtype for row in rows}) == 1 else LITTLE
    return _OFTEN * max(drift.roundoff, _coarsest(rows)) * drift.steps
