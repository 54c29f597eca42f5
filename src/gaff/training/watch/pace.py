"""How often a step is looked at, so that looking stays within its share of the time.

A look costs a multiple of a plain step or a small part of it, as the model is, so the distance between looks is
measured, not set. ``Pace`` does that; ``Alone`` measures something else of each step, for runs of several processes.
"""

from __future__ import annotations

import math
from time import perf_counter

_SERIES: tuple[int, ...] = tuple(digit * power for power in (1, 10, 100, 1000, 10_000, 100_000) for digit in (1, 2, 5))
_DENSE = 25  # with time in hand, a run of n steps is looked at about n/25 steps apart
_SPARSE = 5  # the same once half of that time is spent
_SMOOTH = 0.3  # weight of the newest measurement


class Pace:
    """Decides whether to look at a step, and adds up what looking has cost.

    ``every``: a fixed distance; None adapts it to ``budget``. Distances are 1, 2, 5, 10, 20, 50 ... steps, so that all
    processes of a run look at the same ones. A run may first spend ``allowance_s`` seconds, so that short ones are seen
    at all; after that ``budget`` of the time that passes. Times are measured by the caller; nothing here reads a clock.
    ``spent_s`` and ``total_s`` are seconds since the beginning.
    """

    def __init__(self, budget: float, every: int | None = None, allowance_s: float = 0.5) -> None:
        self._budget = budget
        self._every = every
        self._allowance_s = allowance_s
        self._cost_s = 0.0  # of one look
        self._step_s = 0.0  # of a step without one
        self.spent_s = 0.0
        self.total_s = 0.0

    @property
    def distance(self) -> int:
        """Steps from one look to the next, as things are: the least of the series at which looking keeps to the budget.

        It is the mean cost of a look over what the budget allows for one step; 1, as long as nothing was measured.
        """
        if self._every is not None:
            return self._every
        if not self._step_s or not self._cost_s:
            return 1
        wanted = self._cost_s / (self._step_s * self._budget)
        return next((one for one in _SERIES if one >= wanted), _SERIES[-1])

    def is_due(self, step: int) -> bool:
        """Whether to look at step number ``step``.

        With a fixed distance that alone decides. Else, within the allowance looks may be nearer than the budget allows,
        and their distance grows with the run; once more has been spent than is allowed by now, no step is looked at
        until the time has made up for it.
        """
        if self._every is not None:
            return step % self._every == 0
        distance = self.distance
        if self.spent_s + self._cost_s <= self._allowance_s:
            dense = _DENSE if self.spent_s < 0.5 * self._allowance_s else _SPARSE
            growth = next(one for one in reversed(_SERIES) if one <= max(1, step // dense))
            distance = min(distance, growth)
        elif self.spent_s > self._allowance_s + self._budget * self.total_s:
            return False  # a costly beginning is paid back
        return step % distance == 0

    def passed(self, seconds: float) -> None:
        """Take in a step without a look, and how many seconds it took."""
        self.total_s += seconds
        self._measure(seconds)

    def looked(self, seconds: float, cost_s: float) -> None:
        """Take in a step that took ``seconds``, of which ``cost_s`` went into looking at it."""
        self.total_s += seconds
        self.spend(cost_s)
        self._cost_s = cost_s if not self._cost_s else self._cost_s + _SMOOTH * (cost_s - self._cost_s)
        self._measure(max(seconds - cost_s, 1e-6))  # the first step of a run is a slow one: it is soon forgotten

    def _measure(self, seconds: float) -> None:
        """Take in how long a step takes without a look: an exponential mean; the newest has a weight of 0.3."""
        self._step_s = seconds if not self._step_s else self._step_s + _SMOOTH * (seconds - self._step_s)

    def spend(self, seconds: float) -> None:
        """Count seconds that looking has cost, also off the training thread, which waits for the interpreter then."""
        self.spent_s += seconds

    @property
    def overhead(self) -> float:
        """The share of the run's time that went into looking; nothing spent yet: 0."""
        return self.spent_s / self.total_s if self.total_s else 0.0


class Alone:
    """When the first forward and the first backward pass of a step began: until then no process waits for another.

    Of processes that train together the slowest holds up all others in the first exchange of gradients, so that their
    steps take equally long. What each does before that is its own, and tells which one is slow.
    """

    def __init__(self) -> None:
        self._since = math.nan
        self._forward = self._backward = math.nan

    def forward_begins(self) -> None:
        """Note that a model runs in training mode; the first run of a step counts."""
        if math.isnan(self._forward):
            self._forward = perf_counter()

    def backward_begins(self) -> None:
        """Note that a backward pass begins; the first one of a step counts."""
        if math.isnan(self._backward):
            self._backward = perf_counter()

    def take(self, ended: float) -> tuple[float, float]:
        """Seconds from the end of the step before to the first forward and to the first backward pass of this one.

        NaN where none came, and in the first step. ``ended``: when this step did, by ``perf_counter``; the next one is
        measured from there.
        """
        taken = self._forward - self._since, self._backward - self._since
        self._since = ended
        self._forward = self._backward = math.nan
        return taken
