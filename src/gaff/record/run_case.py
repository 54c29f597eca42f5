"""A run as causes see it: its findings, its curves, and what its looks have told. Needs no torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gaff.record.curve import Curve
from gaff.record.experiments import Experiments
from gaff.record.finding import Finding
from gaff.record.label_order import LabelOrder


class SingleSteps(NamedTuple):
    """What causes ask of single steps, which curves do not tell.

    ``norms``: steps with the L2 norm of all gradients, before they were clipped where that is known. Where a loss jumps
    (``loss_spike``): ``losses``, ten of it from that step on, and ``rates``, the learning rates of ten steps up to it.
    ``is_search``: models are made one after the other, and trained with other learning rates; ``is_raised``: a loss is,
    by an optimizer with ``maximize=True``. ``last_look``: the last step that was looked at, None where it is not known;
    ``large_at_first``: the finding that the first ones were large; ``began``: the first of all; ``is_followed``: the
    loss of a later training in the same run has fallen.
    """

    norms: tuple[tuple[int, float], ...] = ()
    losses: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    is_search: bool = False
    is_raised: bool = False
    last_look: int | None = None
    large_at_first: Finding | None = None
    began: int = 0
    is_followed: bool = False


class Unstepped(NamedTuple):
    """What was seen of a run in which no optimizer made a step.

    ``backwards``: backward passes; ``others``: steps made by optimizers that were not to be watched; ``has_modules``:
    whether the filters left a module to look at; ``broken``: the error of gaff's own that ended the watching.
    """

    backwards: int = 0
    others: int = 0
    has_modules: bool = True
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """What was heard of evaluations.

    ``losses``: by the names of torch's functions, each with its step; ``is_alike``: training and evaluations have a
    cross entropy over the same classes; ``in_eval_mode``: each loss followed a run of a model in evaluation mode.
    """

    losses: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    is_alike: bool = False
    in_eval_mode: bool = False


@dataclass(frozen=True, slots=True)
class RunCase:
    """A run as causes see it.

    ``findings``: those that hold and are no mere facts, worst first; ``steps``: optimizer steps made; ``looks``:
    how many of them were looked at; ``losses``, ``lr``: the curves over all steps, of the loss that was found first
    first; ``guess``: what guessing gives, by the name of a loss: of a mean cross entropy among its classes, of
    other losses the mean (or median) of the targets; ``optimizers``: how many train; ``experiments``: what came of
    running it again with one thing changed, where that was done; ``unstepped``: what is told where no optimizer
    made a step; ``single``: what is told of single steps; ``is_acting``: a quarter of the steps or more are those of an
    agent, whose loss follows what it meets (``gaff.record.sample.acts``); ``factors``: by its name what a loss was
    multiplied by before its backward pass, NaN where that changed; ``evaluated``: what was heard of evaluations;
    ``reach``: the usual least and largest target of a batch, of squared and absolute errors, None without any;
    ``order``: of labels, where the data comes in the order of them. Steps are counted from the beginning of the run.
    """

    findings: tuple[Finding, ...]
    steps: int
    looks: int
    losses: dict[str, Curve] = field(default_factory=dict)
    lr: Curve | None = None
    guess: dict[str, float] = field(default_factory=dict)
    optimizers: int = 1
    experiments: Experiments | None = None
    unstepped: Unstepped = field(default_factory=Unstepped)
    single: SingleSteps = field(default_factory=SingleSteps)
    is_acting: bool = False
    factors: dict[str, float] = field(default_factory=dict)
    evaluated: Evaluations = field(default_factory=Evaluations)
    reach: tuple[float, float] | None = None
    order: LabelOrder | None = None

    @property
    def began(self) -> int:
        """The first step of what this is about: 0, or that of a training that came after another in the same run."""
        return self.single.began

    def found(self, *rules: str) -> Finding | None:
        """The first finding of one of these rules, in the order of the rules; None where there is none."""
        return next((one for rule in rules for one in self.findings if one.rule == rule), None)

    @property
    def has_zero_rate_in_part(self) -> bool:
        """Whether one of several optimizers has a learning rate of zero at nearly every look, and the loss does not
        fall: the rates that are known of each step are those of another. What is frozen in this way is no fault."""
        zero = self.found("lr_zero")
        is_always = zero is not None and zero.share > 0.9 and not zero.is_over
        has_fallen = self.loss is not None and 0 < self.loss[1].last < 0.5 * self.loss[1].first
        return self.optimizers > 1 and is_always and not has_fallen

    def without(self, rule: str) -> RunCase:
        """The same run without the findings of one rule."""
        return replace(self, findings=tuple(one for one in self.findings if one.rule != rule))

    def is_rescaled(self, name: str) -> bool:
        """Whether a loss was multiplied by another number later on: its values cannot be compared over the run."""
        return math.isnan(self.factors.get(name, 1.0))

    @property
    def is_range_test(self) -> bool:
        """Whether the learning rate rises in every stretch, to a thousand times its first value or more.

        A search for a learning rate does that until the loss breaks (Smith, 2017); a linear warm-up that takes the
        whole run rises less, by about fifty times from the first stretch to the last.
        """
        values = self.lr.values if self.lr is not None else ()
        rises = all(one < other for one, other in itertools.pairwise(values))
        return len(values) >= 12 and rises and 0 < 1000 * values[0] <= values[-1]

    @property
    def begins_far_above(self) -> bool:
        """Whether the first loss of a regression is a hundred times what guessing gives, and its targets are near zero.

        A model that returns zeros would have at most a twenty-fifth of that loss, which is above 25: one that begins
        with numbers of about one is not too large for targets that are tiny. Of classes, whose scores count in the loss
        as they are, a thousand times.
        """
        if self.loss is None or self.is_acting:
            return False
        name, curve = self.loss
        if self.reach is None:
            return curve.start > 1000 * (self.guess.get(name) or math.inf)  # labels all alike: guessing is no scale
        farthest = max(map(abs, self.reach))
        return curve.start > max(100 * self.guess.get(name, math.inf), 25 * farthest, 25 * farthest**2, 25.0)

    @property
    def has_settled(self) -> bool:
        """Whether the learning rate went to a hundredth once the loss had fallen to half, and hardly fell any more.

        So does a schedule that waits for that. It has not fallen since, nor by a third in the half of the time before;
        a loss that cannot fall to half, as of labels that differ by chance, has fallen by far more than it varies, and
        in the half of the time before by less.
        """
        if self.lr is None or not self.lr.values or self.loss is None or self.lr.last >= 0.01 * max(self.lr.values):
            return False
        highest, curve = max(self.lr.values), self.loss[1]
        at = self.lr.values.index(highest)  # before it the rate may be warmed up
        later = zip(self.lr.steps[at:], self.lr.values[at:], strict=True)
        fell = next(step for step, value in later if value < 0.5 * highest)
        then = curve.at(fell)
        before, spread = curve.at((self.began + fell) // 2), curve.spread
        is_low = then < 0.5 * curve.start or (then < curve.start - 2 * spread and then > before - spread)
        return is_low and then > 2 / 3 * before and curve.last > then - max(2 * spread, 0.1 * then)

    @property
    def loss(self) -> tuple[str, Curve] | None:
        """The name and the curve of the loss that was found first, if it has any value."""
        return next(((name, curve) for name, curve in self.losses.items() if curve.values), None)

    @property
    def successors(self) -> list[Curve]:
        """The curves of losses from the same line as the first, of models that were trained after it, oldest first."""
        if self.loss is None:
            return []
        name, first = self.loss
        later = [one for other, one in self.losses.items() if one.values and other.rpartition("#")[0] == name]
        return sorted((one for one in later if one.steps[0] >= first.steps[-1]), key=lambda one: one.steps[0])

    @property
    def rise(self) -> tuple[str, int, float, float] | None:
        """Of the one loss of a run with one optimizer: its name, the step from which it rises, its lowest, its last.

        None where it does not rise, in runs with several losses or optimizers, where one may rise as another falls, in
        those of an agent, where it was rescaled, and where it is to rise; nor where it rises at once and stays below
        half of guessing, as one of pairs does whose wrong answers are random at first.
        """
        if (
            self.optimizers != 1
            or len(self.losses) != 1
            or self.loss is None
            or self.is_acting
            or self.single.is_raised
        ):
            return None
        name, curve = self.loss
        rise = None if self.is_rescaled(name) else curve.rise()
        is_easy = rise is not None and rise[0] <= self.began and max(curve.values) < 0.5 * self.guess.get(name, 0.0)
        if rise is None or is_easy:
            return None
        least = curve.lowest[1] if rise[0] > curve.steps[0] else min(curve.start, curve.lowest[1])
        return name, rise[0], least, curve.last

    @property
    def jump(self) -> tuple[int, float, float] | None:
        """Of the one loss of a run with one optimizer: the step and the height of its early peak, and its first value.

        None where that is not ten times the first value, or the first is not positive, or the peak is below half of
        what guessing gives. Of a cross entropy it is enough that it is twice the first value, and above twice of what
        guessing gives, plus 1, which only a model that is sure reaches; not where the first is ten times guessing. Nor
        where single values are about as high to the end, of a loss that differs from batch to batch by a third of it,
        and ends less than half as much higher than it began, or than single steps differ.
        """
        if self.optimizers != 1 or len(self.losses) != 1 or self.loss is None or self.is_acting:
            return None
        name, curve = self.loss
        if self.is_rescaled(name):
            return None
        step, peak = curve.early_peak
        is_noise = 0.5 * peak < curve.late_peak < 4 * peak and curve.spread > 0.3 * curve.first
        if is_noise and curve.last <= max(1.5 * curve.first, curve.first + curve.spread):
            return None
        guess = self.guess.get(name, math.inf)
        is_known = 0 < guess < math.inf  # far below guessing nothing is lost yet
        is_far = (0 < 10 * curve.start < peak and (not is_known or peak > 0.5 * guess)) or (
            is_known and peak > 2 * guess + 1 and peak > 2 * curve.start > 0 and curve.start < 10 * guess
        )
        return (step, peak, curve.start) if is_far else None
