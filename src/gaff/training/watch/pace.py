"""How often a step is looked at, so that looking stays within its share of the time."""

from __future__ import annotations

import math
from time import perf_counter

_SERIES: tuple[int, ...] = tuple(digit * power for power in (1, 10, 100, 1000, 10_000, 100_000) for digit in (1, 2, 5))
_DENSE = 25  # with time in hand, a run of n steps is looked at about n/25 steps apart
_SPARSE = 5  # the same once half of that time is spent
_SMOOTH = 0.3  # weight of the newest measurement


class Pace:
    """Whether to look at a step, and what that has cost. ``every``: fixed distance; None adapts it to ``budget``.

    Distances are 1, 2, 5, 10, 20, 50 ... steps, so that all processes of a run look at the same ones. A run may first
    spend ``allowance_s`` seconds, so that short ones are seen at all; after that ``budget`` of the time that passes.
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
        """Steps from one look to the next, as things are."""
        if self._every is not None:
            return self._every
        if not self._step_s or not self._cost_s:
            return 1
        wanted = self._cost_s / (self._step_s * self._budget)
        return next((one for one in _SERIES if one >= wanted), _SERIES[-1])

    def is_due(self, step: int) -> bool:
        """Whether step number ``step`` is to be looked at, as far as time is left for it."""
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
        """A step without a look took so long."""
        self.total_s += seconds
        self._measure(seconds)

    def looked(self, seconds: float, cost_s: float) -> None:
        """A step took ``seconds``, of which ``cost_s`` went into looking at it."""
        self.total_s += seconds
        self.spend(cost_s)
        self._cost_s = cost_s if not self._cost_s else self._cost_s + _SMOOTH * (cost_s - self._cost_s)
        self._measure(max(seconds - cost_s, 1e-6))  # the first step of a run is a slow one: it is soon forgotten

    def _measure(self, seconds: float) -> None:
        self._step_s = seconds if not self._step_s else self._step_s + _SMOOTH * (seconds - self._step_s)

    def spend(self, seconds: float) -> None:
        """Also off the training thread, which has to wait for the interpreter meanwhile."""
        self.spent_s += seconds

    @property
    def overhead(self) -> float:
        """The share of the run's time that went into looking; nothing spent yet: 0."""
        return self.spent_s / self.total_s if self.total_s else 0.0


class Alone:
    """When the first forward and the first backward pass of a step began: until then no process waits for another."""

    def __init__(self) -> None:
        self._since = math.nan
        self._forward = self._backward = math.nan

    def forward_begins(self) -> None:
        """A model runs in training mode."""
        if math.isnan(self._forward):
            self._forward = perf_counter()

    def backward_begins(self) -> None:
        """A backward pass begins."""
        if math.isnan(self._backward):
            self._backward = perf_counter()

    def take(self, ended: float) -> tuple[float, float]:
        """Seconds from the end of the step before; ``ended``: when this one did, by ``perf_counter``."""
        taken = self._forward - self._since, self._backward - self._since
        self._since = ended
        self._forward = self._backward = math.nan
        return taken
