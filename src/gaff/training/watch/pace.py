"""How often a step is looked at, so that looking stays within its share of the time.

A look costs a multiple of a plain step or a small part of it, as the model is, so the distance between looks is
measured, not set. ``Pace`` does that; ``Alone`` measures something else of each step, for runs of several processes.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from time import perf_counter
from typing import NamedTuple

_SERIES: tuple[int, ...] = tuple(digit * power for power in (1, 10, 100, 1000, 10_000, 100_000) for digit in (1, 2, 5))
_DENSE = 25  # with time in hand, a run of n steps is looked at about n/25 steps apart
_SPARSE = 5  # the same once half of that time is spent
_SMOOTH = 0.3  # weight of the newest measurement
_REMEMBERED = 9  # looks whose costs tell what one costs
_LEARNING = 5  # looks until that is known
_PATIENCE = 5.0  # times the cost of a look that pass before the next one, while it is not, for each look until then
_WANTED = 3  # steps that are looked at where something happens
_SETTLED = 16  # steps after which what is new is another training
_AGAIN_S = 0.1  # seconds that looks may spend more for each of them, and how many there may be
_MOST_AGAIN = 10
_WARM_S = 5.0  # of a run, in which looks are dense: what comes after tells what watching costs in the long run
_SCATTER = 2_654_435_761  # Knuth's multiplicative hashing: 2**32 over the golden ratio
_OUTLIER = 4.0  # times what a look costs: more is an accident, such as another process, and held against no later look


class _Limits(NamedTuple):
    """What a ``Pace`` was made with."""

    budget: float
    every: int | None
    first_s: float  # that a run may spend on looks from its beginning
    allowance_s: float  # the same, with what trainings that began later in it were given


class Pace:
    """Decides whether to look at a step, and adds up what watching costs.

    ``every``: a fixed distance; None adapts it to ``budget``. Distances are then 1, 2, 5, 10, 20, 50 ... steps from one
    to the next on average (``_is_chosen``), so that all processes of a run look at the same ones. A run may first spend
    ``allowance_s`` seconds on looks, so that short ones are seen at all, and a tenth of a second more for each training
    that begins later in it (``begins_again``). After that ``budget`` of the time that passes is shared: what is done at
    every step, looked at or not, comes first, and looks get the rest, at least half of it.

    Times are measured by the caller; nothing here reads a clock. ``startup_s``: seconds until the first step was over
    that are no later step's, such as those of making the record and of the first look. It makes everything ready, and
    says nothing of what a look costs. After it, ``spent_s`` and ``total_s`` are the seconds that went into watching,
    and those that passed.
    """

    def __init__(self, budget: float, every: int | None = None, allowance_s: float = 0.5) -> None:
        self._limits = _Limits(budget, every, allowance_s, allowance_s)
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)  # of the last looks, beyond what every step costs
        self._cost_s = 0.0  # of one look: the median of these
        self._older_s = 0.0  # of the looks before these, as far as it counts against the budget
        self._charged_s = 0.0  # of all of them
        self._waited_s = 0.0  # time since the last look
        self._step_s = 0.0  # of a step without a look, watching left out
        self._latest = 1  # distance, when it was last asked for
        self._wanted = 0  # steps to come that are looked at in any case
        self._presence_s = 0.0  # what watching costs in such a step
        self._warm = 0.0, 0.0  # what was spent, and passed, when the first seconds were over
        self.startup_s = 0.0
        self.spent_s = 0.0
        self.total_s = 0.0

    @property
    def distance(self) -> int:
        """Steps from one look to the next, as things are: the least of the series at which looking keeps to the budget.

        It is the median cost of the last looks over what the budget leaves for them in one step; 1, as long as nothing
        was measured.
        """
        if self._limits.every is not None:
            return self._limits.every
        if not self._step_s or not self._cost_s:
            return 1
        wanted = self._cost_s / (self._step_s * self._share)
        return next((one for one in _SERIES if one >= wanted), _SERIES[-1])

    def is_due(self, step: int) -> bool:
        """Whether to look at step number ``step``.

        With a fixed distance that alone decides. Else, within the allowance looks may be nearer than the budget allows,
        and their distance grows with the run; once more has been spent than is allowed by now, no step is looked at
        until the time has made up for it, but for steps 20, 50, 100, 200 and so on, up to twice as much: a short run is
        else judged by its beginning alone. While few looks have told what one costs, the next one comes all the same
        when five times as long has passed, ten times after two, and so on: the first may have been slow by accident.
        """
        if self._limits.every is not None:
            return step % self._limits.every == 0
        if self._wanted:
            self._wanted -= 1
            return True
        if self._latest >= 10 and not _is_chosen(step, 10):  # nor by any larger distance
            return False
        distance = self._latest = self.distance
        charged = self._charged_s
        dense = _DENSE if charged < 0.5 * self._limits.allowance_s else _SPARSE
        growth = next(one for one in reversed(_SERIES) if one <= max(1, step // dense))
        if charged + self._cost_s <= self._limits.allowance_s:
            distance = self._latest = min(distance, growth)
        elif len(self._costs) < _LEARNING:
            patience_s = _PATIENCE * len(self._costs) * self._costs[-1] if self._costs else 0.0
            return self._waited_s >= patience_s and _is_chosen(step, growth)
        elif charged > self._limits.allowance_s + self._share * self.total_s:
            return step in _SERIES and self._is_cheap()  # a costly beginning is paid back
        return _is_chosen(step, distance) or (step in _SERIES and self._is_cheap())

    def want(self) -> None:
        """Something happens just now: look at the next three steps, whatever their number.

        As long as looks have not cost more than twice what they may, so that a loss which is always restless gets no
        more than others; never with a fixed distance.
        """
        if self._limits.every is None and self._is_cheap() and not self._wanted:
            self._wanted = _WANTED

    def hear(self, step: int, is_news: bool, begins_again: bool) -> None:
        """Step number ``step`` is over, in which a mode has changed (``is_news``), or another training has begun."""
        if is_news:
            self.want()
        if begins_again:
            self.begins_again(step)

    def begins_again(self, step: int) -> bool:
        """Another training has begun by step number ``step``, with a model or an optimizer of its own: its first steps
        tell the most. Look at the next three, and let looks spend a little more than they might, ten times in a run.

        Returns whether it comes to that: not in the first steps, in which the parts of one training come one by one;
        never with a fixed distance.
        """
        limits = self._limits
        is_left = limits.allowance_s < limits.first_s + _MOST_AGAIN * _AGAIN_S
        is_wanted = limits.every is None and step >= _SETTLED and is_left and not self._wanted
        if is_wanted:
            self._wanted, self._limits = _WANTED, limits._replace(allowance_s=limits.allowance_s + _AGAIN_S)
        return is_wanted

    def _is_cheap(self) -> bool:
        """Whether looks have not cost more than twice what they may."""
        return self._charged_s + self._cost_s <= 2 * (self._limits.allowance_s + self._share * self.total_s)

    def stepped(self, step: int, seconds: float, cost_s: float, is_look: bool) -> None:
        """Take in step number ``step``; of the first one only the cost, which is that of the preparations, too."""
        if step == 0:
            self.startup_s += cost_s
        elif is_look:
            self.looked(seconds, cost_s)
        else:
            self.passed(seconds, cost_s)

    def passed(self, seconds: float, cost_s: float = 0.0) -> None:
        """Take in a step without a look that took ``seconds``, of which ``cost_s`` went into watching."""
        self._add(seconds, cost_s)
        self._waited_s += seconds
        if self._presence_s and cost_s > _OUTLIER * self._presence_s:  # an evaluation was looked at
            extra_s = self._charge(cost_s - self._presence_s)
            self._older_s += extra_s
            self._charged_s += extra_s
        self._presence_s = _smoothed(self._presence_s, cost_s)
        self._step_s = _smoothed(self._step_s, max(seconds - cost_s, 1e-6))

    def looked(self, seconds: float, cost_s: float) -> None:
        """Take in a step that took ``seconds``, of which ``cost_s`` went into watching: it was looked at."""
        self._add(seconds, cost_s)
        self._waited_s = 0.0
        if len(self._costs) == _REMEMBERED:
            self._older_s += self._charge(self._costs[0])
        self._costs.append(max(cost_s - self._presence_s, 0.0))
        self._recount()
        self._step_s = _smoothed(self._step_s, max(seconds - cost_s, 1e-6))  # the first is slow, and soon forgotten

    def spend(self, looks_s: float, others_s: float = 0.0) -> None:
        """Count seconds off the training thread, which waits for the interpreter then: of looks, and of all else."""
        if not self.total_s:
            self.startup_s += looks_s + others_s
            return
        self.spent_s += looks_s + others_s
        if self._costs and looks_s:
            self._costs[-1] += looks_s  # it is what the last look has left to do
            self._recount()

    @property
    def overhead(self) -> float:
        """The share of the time since the first step that went into watching; 0 before there was any."""
        return self.spent_s / self.total_s if self.total_s else 0.0

    @property
    def steady(self) -> float | None:
        """The share of the time after the first five seconds that went into watching; None for a shorter run."""
        spent_s, total_s = self._warm
        return (self.spent_s - spent_s) / (self.total_s - total_s) if 0.0 < total_s < self.total_s else None

    @property
    def _share(self) -> float:
        """The share of the time that looks may take: what every step costs leaves half of the budget at least."""
        presence = self._presence_s / self._step_s if self._step_s else 0.0
        return max(self._limits.budget - presence, 0.5 * self._limits.budget)

    def _recount(self) -> None:
        """Work out anew what a look costs, and what looks have cost as far as that counts against the budget.

        Of one that took unusually long so much counts as four usual ones.
        """
        self._cost_s = median_low(self._costs)
        self._charged_s = self._older_s + sum(map(self._charge, self._costs))

    def _charge(self, cost_s: float) -> float:
        return min(cost_s, _OUTLIER * self._cost_s)

    def _add(self, seconds: float, cost_s: float) -> None:
        self.total_s += seconds
        self.spent_s += cost_s
        if not self._warm[1] and self.total_s > _WARM_S:
            self._warm = self.spent_s, self.total_s


def _is_chosen(step: int, distance: int) -> bool:
    """Whether a step is looked at with a distance of ``_SERIES``: one of the first few after each multiple of it.

    Which of them is as good as random, and the same for all distances from 5 on. Multiples themselves would always meet
    the same one of two models, heads or losses that take turns, and never the other.
    """
    few = min(distance, 2 if distance < 5 else 5)
    start = step - step % few
    mixed = start * _SCATTER % 2**32
    return start % distance == 0 and step - start == ((mixed ^ mixed >> 15) * _SCATTER % 2**32 >> 8) % few


def _smoothed(known: float, new: float) -> float:
    """An exponential mean, in which the newest has a weight of 0.3, and is taken for four times the mean at most."""
    return known + _SMOOTH * (min(new, _OUTLIER * known) - known) if known else new


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
