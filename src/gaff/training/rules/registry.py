"""Health rules: each one small function over what one sampled step has seen.

``@rule`` makes a function a rule, with what it means and what to do about it. A rule of your own is the same:

    from gaff.training.rules.registry import Hit, rule

    @rule("too_sparse", severity="info", means="most of what a layer returns is zero",
          cause="a threshold that is too high", remedy="lower it")
    def too_sparse(sample, past):
        for key, row in sample.port("output").items():
            if row.zeros > 0.99:
                yield Hit(key, zeros=row.zeros)

A hit alone alarms nobody: it must come in at least ``least`` looks and in a ``share`` of all of them. Rules are asked
on the thread that writes the record, after the step that was looked at: they see numbers, and cannot disturb the
training.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gaff.address.grammar import nearest
from gaff.errors import PlanError
from gaff.record.finding import SEVERITIES
from gaff.record.sample import Key, Load, Sample


class Hit:
    """Says that a rule applies at one place; made by the rule's function, read by the judge.

    ``key``: the model's name and the address in it, ("", "") for the run as a whole; ``message``: a sentence with the
    values of this case, empty for the rule's ``means``; ``evidence``: the numbers that say so, by name, as JSON holds
    them.
    """

    __slots__ = ("evidence", "key", "message")

    def __init__(self, key: Key, message: str = "", **evidence: Any) -> None:
        self.key = key
        self.message = message
        self.evidence = evidence


@dataclass(slots=True)
class Activity:
    """Which units of a stream were active lately: in this period and in the one before it.

    Two periods, because a unit that dies must be noticed: what was active long ago is forgotten when a period ends, and
    still there are always enough inputs to tell a dead unit from one that is seldom needed.
    """

    now: int = 0
    before: int = 0
    inputs: int = 0  # values of each unit in this period
    inputs_before: int = 0
    looks: int = 0

    def add(self, active: int, inputs: int) -> None:
        """Take in one look: the units that it saw active, a bit each, on so many inputs.

        A new period begins when this one has six looks and 1,024 inputs.
        """
        if self.looks >= 6 and self.inputs >= 1024:
            self.before, self.inputs_before = self.now, self.inputs
            self.now = self.inputs = self.looks = 0
        self.now |= active
        self.inputs += inputs
        self.looks += 1

    @property
    def active(self) -> int:
        """The units that were active in either period, a bit each as of ``gaff.record.sample.Units.active``."""
        return self.now | self.before

    @property
    def seen(self) -> int:
        """The inputs on which no unit but those of ``active`` was active."""
        return self.inputs + self.inputs_before


@dataclass(slots=True)
class LossScales:
    """By what losses are multiplied before their backward passes, as looks tell it, by name.

    ``weights``: numbers below one, by which losses may be faded in; ``factors``: what is left, as divisions, at each
    look where it is known; ``varied``: losses that had another one at some look.
    """

    weights: dict[str, float] = field(default_factory=dict)
    factors: dict[str, list[float]] = field(default_factory=dict)
    varied: set[str] = field(default_factory=set)

    def has_changed(self, name: str) -> bool:
        """Whether a loss has mostly another factor lately than at first, so that its values are of no one scale."""
        told = self.factors.get(name, [1.0])
        ends = statistics.median_low(told[:5]), statistics.median_low(told[-10:])
        return not math.isclose(*ends, rel_tol=1e-3)

    def at_first(self, name: str, value: float, factor: dict[str, Any]) -> float:
        """The value of a loss with the weight of its first look; ``factor``: the fact of this look."""
        is_its = factor.get("loss") == name
        weight = factor.get("weight", 1.0) if is_its else 1.0
        scale = factor.get("scale") if is_its else None if factor else 1.0  # of one loss in a step it is told
        if scale is not None:
            self.factors.setdefault(name, []).append(scale)
            self.varied |= {name} if not math.isclose(scale, self.factors[name][0], rel_tol=1e-3) else set()
        weight = weight if 0 < weight < 1 else 1.0
        return value * self.weights.setdefault(name, weight) / weight


@dataclass(slots=True)
class Past:
    """What earlier looks at one training have seen, for rules that compare. Rules read it; only the judge writes."""

    looks: int = 0  # at training steps
    acting: int = 0  # of them, at steps of what acts (``Sample.is_acting``)
    train_outputs: dict[Key, list[tuple[int, float]]] = field(default_factory=dict)  # step, rms: the latest two looks
    active: dict[Key, Activity] = field(default_factory=dict)
    entropy: dict[Key, float] = field(default_factory=dict)  # the highest so far
    norms: dict[Key, deque[float]] = field(default_factory=dict)  # of gradients and updates, at the latest 32; of all
    # together by the model's name and the port; by no name the highest learning rate, as "lr", and the sum of what
    # outputs are multiplied with in a loss, as "constant", NaN where there is none
    loads: dict[Key, deque[Load]] = field(default_factory=dict)  # of routers, at the latest sixteen
    losses: dict[str, list[float]] = field(default_factory=dict)  # at the first looks
    recent: dict[str, deque[float]] = field(default_factory=dict)  # at the latest ones, both with the first's weight
    scales: LossScales = field(default_factory=LossScales)
    targets: set[float] = field(default_factory=set)  # of batches whose targets were all alike; inf: of one that mixed
    trained: set[str] = field(default_factory=set)  # models of which a parameter had a gradient at its step
    moved: set[Key] = field(default_factory=set)  # parameters whose smallest or largest element has been another
    leaked: set[str] = field(default_factory=set)  # "" or "_row": of such targets outputs told at the first step
    forbidden: dict[Key, int] = field(default_factory=dict)  # how many -inf a parameter held when it was first seen

    @property
    def is_acting(self) -> bool:
        """Whether a quarter of the looks or more were at steps of what acts: an agent takes random actions at first."""
        return 4 * self.acting > self.looks

    @property
    def is_warming_up(self) -> bool:
        """Whether the learning rate is higher than it was at all looks before."""
        rates = [*self.norms.get(("", "lr"), ())]
        return len(rates) > 1 and rates[-1] > max(rates[:-1])


LEAST_TARGETS = 8  # of a batch, before it says anything that they are all alike

Check = Callable[[Sample, Past], Iterable[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, frozen: what it asks, what it means, and when its hits become a finding. Made by ``@rule``.

    ``means``, ``cause``, ``remedy``: a line each, told with the finding; ``phase``: the looks that it is asked about;
    ``least``, ``share``: hits that are needed at one place, in number and of the looks since the first; ``rank``: its
    place in the order in which rules are asked; ``hides``: names of rules whose findings follow from one of this.
    Calling it calls ``check``.
    """

    name: str
    check: Check
    severity: str
    means: str
    cause: str
    remedy: str
    phase: str
    least: int
    share: float
    rank: int
    hides: tuple[str, ...]

    def __call__(self, sample: Sample, past: Past) -> Iterable[Hit]:
        return self.check(sample, past)


RULES: dict[str, Rule] = {}


def rule(  # noqa: PLR0913  # one keyword for each line of a finding
    name: str,
    *,
    severity: str,
    means: str,
    cause: str,
    remedy: str,
    phase: str = "train",
    least: int = 5,
    share: float = 0.1,
    hides: tuple[str, ...] = (),
) -> Callable[[Check], Rule]:
    """Register a check; a later one of the same name takes its place. Returns the rule, to be given to ``gaff.watch``.

    ``check(sample, past)`` yields a ``Hit`` for each place where the symptom is; it must write into neither.

    Args:
        name: as a finding shows it, and ``rules_off`` names it.
        severity: ``error``, ``warning``, or ``info``, which is reported and never alarms.
        means, cause, remedy: what is the matter, where that usually comes from, what to do.
        phase: ``train`` or ``eval``, the looks that it is asked about.
        least: hits at one place before it is a finding.
        share: and in which part of the looks since the first hit; 0 for what is certain when it was seen once.
        hides: rules whose findings follow from this one, and are not told beside it.

    Raises PlanError for a severity, phase, least or share that cannot be.
    """
    if severity not in SEVERITIES:
        raise PlanError(f"severity={severity!r}: expected one of {', '.join(SEVERITIES)}")
    if phase not in ("train", "eval") or least < 1 or not 0 <= share <= 1:
        given = f"phase={phase!r}, least={least}, share={share}"
        raise PlanError(f"rule {name!r}: {given}: expected train or eval, 1 or more, 0 to 1")

    def register(check: Check) -> Rule:
        rank = RULES[name].rank if name in RULES else len(RULES)
        made = RULES[name] = Rule(name, check, severity, means, cause, remedy, phase, least, share, rank, hides)
        return made

    return register


def select(off: Iterable[str]) -> list[Rule]:
    """All registered rules but those named, in the order in which they were registered.

    Raises PlanError for a name that is none, with those that there are.
    """
    left_out = set(off)
    unknown = left_out - set(RULES)
    if unknown:
        near = ", ".join(nearest(sorted(unknown)[0], list(RULES))) or "none"
        raise PlanError(f"no rule {sorted(unknown)[0]!r}: expected one of {', '.join(RULES)}; nearest: {near}")
    return [one for name, one in RULES.items() if name not in left_out]
