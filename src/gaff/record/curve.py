"""What a number does over the steps of a run: where it began and ended, where it was lowest, whether it rose again.

Single steps are noisy, so all of this is told of medians of neighbouring steps. Needs no torch.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_EARLY = 50
_FEW = 8  # values that show no spread of their own
_POINTS = 24  # medians of a whole curve
_FAR = 100.0  # times what it was: no noise, whatever single steps do


@dataclass(frozen=True, slots=True)
class Curve:
    """A number at every step, as medians over up to 24 stretches of equal length, oldest first.

    The last one is up to half as long again, or shorter by up to a half. Where a quarter of the steps and more are not
    known at a stretch, as of a killed run, no median is over what was before and behind.

    What is not finite is left out. ``steps``: the first step of each stretch; ``values``: its median; ``spread``: the
    mean distance of a single step from the median of its stretch; ``start``: the very first value; ``nonfinite_since``:
    the first step that is not finite; ``early_peak``: the highest of the first fifty values, with its step;
    ``late_peak``: the highest of the second half; ``highs``: the highest value of each stretch; ``late_mean``: the mean
    of the last quarter, which a few high values move as they move a mean over all examples.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    spread: float
    start: float = math.inf
    nonfinite_since: int | None = None
    early_peak: tuple[int, float] = (0, -math.inf)
    late_peak: float = -math.inf
    highs: tuple[float, ...] = ()
    late_mean: float = math.inf

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Curve:
        """The curve of pairs of step and value, in the order of steps."""
        told = list(pairs)
        known = [(step, value) for step, value in told if math.isfinite(value)]
        bad = next((step for step, value in told if not math.isfinite(value)), None)
        size = max(1, math.ceil(len(known) / _POINTS))
        stretches = [one for part in _without_holes(known) for one in _cut(part, size)]
        middles = [statistics.median(value for _, value in one) for one in stretches]
        distances = [abs(value - middle) for one, middle in zip(stretches, middles, strict=True) for _, value in one]
        spread = statistics.fmean(distances) if distances else 0.0
        return cls(
            tuple(one[0][0] for one in stretches), tuple(middles), spread, known[0][1] if known else math.inf, bad,
            max(known[:_EARLY], key=lambda pair: pair[1], default=(0, -math.inf)),
            max((value for _, value in known[len(known) // 2 :]), default=-math.inf),
            tuple(max(value for _, value in one) for one in stretches),
            statistics.fmean(value for _, value in known[len(known) * 3 // 4 :]) if known else math.inf,
        )  # fmt: skip

    @property
    def first(self) -> float:
        """The median of the first stretch. There must be one."""
        return self.values[0]

    @property
    def began(self) -> float:
        """The median of the first stretch, or the very first value, where that is above it by more than noise: a curve
        may fall, and be done, before its first stretch ends."""
        return self.start if self.first + 4 * self.spread < self.start < math.inf else self.first

    @property
    def falls_ever_faster(self) -> bool:
        """Whether it falls by more than twice as much in its last third as in its first."""
        third = len(self.values) // 3
        return third > 0 and self.values[-1 - third] - self.last > 2 * abs(self.first - self.values[third])

    @property
    def told(self) -> str:
        """The highest value, as people are told it: ``0.3``, or ``up to 0.3`` of one that changes by half and more."""
        highest = max(self.highs)
        return f"{'up to ' if highest > 1.5 * min(self.values) else ''}{highest:.3g}"

    @property
    def is_rising_to_the_end(self) -> bool:
        """Whether it is highest in its last stretch, half as high again as it began, and higher than two thirds on."""
        later = self.values[-1 - len(self.values) // 3 :]
        return len(self.values) >= 4 and later[0] < self.last == max(self.values) and self.last > 1.5 * self.start

    @property
    def is_skewed(self) -> bool:
        """Whether its last quarter has a mean half as high again as its medians are: few steps make most of it."""
        return 0 < 1.5 * statistics.median(self.values[-1 - len(self.values) // 4 :]) < self.late_mean

    @property
    def is_falling(self) -> bool:
        """Whether its last quarter has lowered it by a quarter and more."""
        return self.last < 0.75 * self.values[-1 - len(self.values) // 4]

    def at(self, step: int) -> float:
        """The median of the stretch that a step lies in; the first one's before it."""
        return self.values[max(0, bisect_right(self.steps, step) - 1)]

    def highest_from(self, step: int) -> float:
        """The highest value in the stretch that a step lies in and in the next one."""
        at = max(0, bisect_right(self.steps, step) - 1)
        return max(self.highs[at : at + 2])

    @property
    def last(self) -> float:
        """The median of the last stretch. There must be one."""
        return self.values[-1]

    @property
    def lowest(self) -> tuple[int, float]:
        """The step at which the lowest stretch begins, and its median."""
        at = min(range(len(self.values)), key=self.values.__getitem__)
        return self.steps[at], self.values[at]

    def rise(self) -> tuple[int, float] | None:
        """Where the curve left its lowest values for good: the step of that, and how far it has risen since.

        That is the last stretch within a twentieth of the whole rise of the lowest one, and half as high again at most.
        None where it ends no higher than its first stretch, or within ten times its spread and a hundred times of where
        it was: then it has not come back up, or nothing tells that from noise. So it is of fewer than eight values that
        end below twice the lowest. A curve that jumped at once and stayed above one and a half times its very first
        value has risen from there.
        """
        if self.values and self.start > 0 and min(self.values) > 1.5 * self.start + 0.05:
            return self.steps[0], self.last - self.start
        if len(self.values) < 3:
            return None
        _, least = self.lowest
        grown = self.last - least
        is_noise = grown <= 10 * self.spread and self.last <= _FAR * max(abs(self.first), abs(least))
        if self.last <= self.first or is_noise or grown <= 0.05:
            return None
        if len(self.values) < _FEW and self.last < 2 * least:
            return None
        near = least + min(0.05 * grown, 0.5 * max(abs(least), 0.05))
        return max(step for step, value in zip(self.steps, self.values, strict=True) if value <= near), grown

    def fell(self) -> bool:
        """Whether the last stretch is below the first by more than twice the spread, and by a fiftieth at least."""
        return len(self.values) > 1 and self.first - self.last > max(2 * self.spread, 0.02 * abs(self.first))


def _without_holes(known: list[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The parts of a series between which a quarter of its steps and more are not known."""
    hole = max(8, (known[-1][0] - known[0][0]) / 4) if known else 0
    cuts = [at for at in range(1, len(known)) if known[at][0] - known[at - 1][0] > hole]
    return [known[one:other] for one, other in pairwise([0, *cuts, len(known)])]


def _cut(known: list[tuple[int, float]], size: int) -> list[list[tuple[int, float]]]:
    """Stretches of ``size`` values; one at the end that is less than half as long belongs to the one before."""
    found = [known[at : at + size] for at in range(0, len(known), size)]
    if len(found) > 1 and 2 * len(found[-1]) < size:  # too few for a median that stands for the end
        found[-2:] = [found[-2] + found[-1]]
    return found
