"""The trainings of a run, each as causes see it. Needs no torch.

A run may train one model after another: an autoencoder and then a classifier on top of it, a teacher and then its
student. Their losses are of other lines of the script, and the steps in which these are seen do not overlap. What
follows from what is asked of each by itself: a second model may be broken whose first one is fine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gaff.record.curve import Curve
from gaff.record.experiments import Experiments
from gaff.record.factors import at_first_scale, factor_of, guesses, short_groups
from gaff.record.finding import Finding, by_severity
from gaff.record.label_order import label_order
from gaff.record.part import RankPart
from gaff.record.run_case import Evaluations, RunCase, SingleSteps, Unstepped
from gaff.record.sample import acts

_AROUND = 10  # steps before and after a jump of a loss that causes are told of
_LEAST = 50  # steps of one that is judged by itself
_EVER = 1 << 62


class RunLog(Protocol):
    """What a ``Record`` is asked for here."""

    @property
    def scalars(self) -> list[str]:
        """The names of the numbers that are known at every step."""

    @property
    def ranks(self) -> list[int]:
        """The processes."""

    @property
    def findings(self) -> list[Finding]:
        """What was found in all of them."""

    @property
    def steps(self) -> int:
        """Steps made."""

    @property
    def looks(self) -> list[int]:
        """Those that were looked at."""

    @property
    def experiments(self) -> Experiments | None:
        """What came of running it again with one thing changed."""

    def part(self, rank: int | str = 0) -> RankPart:
        """What one process has written."""

    def scalar(self, name: str = "loss", rank: int | str = 0) -> Any:
        """One of the numbers over time, as pairs of step and value."""


@dataclass(slots=True)
class Training:
    """The part of a run in which some losses are seen: their names, and from which step to which, the last left out."""

    losses: list[str] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)

    def has(self, step: int) -> bool:
        """Whether a step of the run is one of this."""
        return any(first <= step < end for first, end in self.parts)

    def length(self, steps: int) -> int:
        """How many of the steps of a run are of this."""
        return sum(max(0, min(end, steps) - min(first, steps)) for first, end in self.parts)


def cases(record: RunLog) -> list[RunCase]:
    """The trainings of a run as causes see them, oldest first, by the first process that knows of a loss: in a pipeline
    that is the last stage. One at least, which is the whole run where there are no others."""
    names = [name for name in record.scalars if name.startswith("loss:")]
    part = record.part(teller_of(record, names[0] if names else ""))
    spans = {name.removeprefix("loss:"): (known.steps[0], known.steps[-1])
             for name in names if name in part.series and len(known := record.scalar(name, part.rank))}  # fmt: skip
    found = [_case(record, part, one, is_first=not at) for at, one in enumerate(trainings(_settled(spans)))]
    falls = [any(one.fell() and one.last < 0.9 * one.start for one in case.losses.values() if one.values)
             for case in found]  # fmt: skip
    return [
        replace(case, single=case.single._replace(is_followed=any(falls[at + 1 :]))) for at, case in enumerate(found)
    ]


def trainings(spans: Mapping[str, tuple[int, int]]) -> list[Training]:
    """The trainings that losses tell, by the first and the last step of each, oldest first.

    Those that overlap are of one training; one of the same lines as an earlier one, with other models, such as the next
    fold of a cross-validation, belongs to that. One of fewer than fifty steps belongs to the one before.
    """
    if not spans:
        return [Training([], [(0, _EVER)])]
    stretches: list[tuple[list[str], int, int]] = []  # names, first step, last step
    for name, (first, last) in sorted(spans.items(), key=lambda one: one[1]):
        if stretches and first <= stretches[-1][2]:
            names, began, until = stretches[-1]
            stretches[-1] = ([*names, name], began, max(until, last))
        else:
            stretches.append(([name], first, last))
    found = [Training()]
    ends = [*(first for _, first, _ in stretches[1:]), _EVER]
    for (names, first, last), end in zip(stretches, ends, strict=True):
        lines = {_line(name) for name in names}
        of = next((one for one in found if one.parts and lines <= set(map(_line, one.losses))), None)
        if of is None and last - first + 1 >= _LEAST and found[0].parts:
            of = Training()
            found.append(of)
        of = of or found[-1]
        of.losses += names
        of.parts.append((first if found[0].parts else 0, end))
    return found


def _settled(spans: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Losses without those of a step or two that go on by another name of the same line, and begin with them: at its
    very first step a loss may be told of a part of the model that it is told of later."""
    found = dict(spans)
    for name, (first, last) in sorted(spans.items(), key=lambda one: one[1]):
        after = [other for other, (begin, _) in found.items() if _line(other) == _line(name) and 0 < begin - last <= 2]
        if after and last - first < 2:
            del found[name]
            found[after[0]] = first, found[after[0]][1]
    return found


def _line(name: str) -> str:
    """The name of a loss without the number by which models at one line of the script are told apart."""
    base, mark, number = name.rpartition("#")
    return base if mark and number.isdigit() else name


def _case(record: RunLog, part: RankPart, training: Training, *, is_first: bool) -> RunCase:
    told = [(step, one) for step, one in part.events if one.get("kind") == "look" and one.get("phase") == "train"]
    is_search = "lr" in part.series and _is_search(part, list(record.scalar("lr", part.rank)))
    told = [(step, one) for step, one in told if training.has(step)]
    looks = [one for _, one in told]

    def series(name: str) -> list[tuple[int, float]]:
        return [pair for pair in record.scalar(name, part.rank) if training.has(pair[0])]

    short = _short_groups(record, part, training)
    of_groups = [(step, one) for step, one in told if step not in short]
    values = {name: [(step, value) for step, value in record.scalar(f"loss:{name}", part.rank) if step not in short]
              for name in training.losses}  # fmt: skip
    losses = {name: Curve.of(at_first_scale(name, pairs, of_groups)) for name, pairs in values.items()}
    findings = [one for one in record.findings if training.has(one.since)]
    is_elsewhere = any(one.rule == "lr_zero" and one.rank != part.rank for one in findings)  # not of these rates
    lr = Curve.of(series("lr")) if "lr" in part.series and not is_elsewhere else None
    norms = next((series(name) for name in ("unclipped_norm", "grad_norm") if name in part.series), [])
    optimizers = [one["optimizers"] for one in looks if isinstance(one.get("optimizers"), int)]
    tried = record.experiments if is_first else None  # experiments compare the first loss of a run
    is_raised, last = any(one.get("is_raised") for one in looks), told[-1][0] if told else None
    large = next((one for one in findings if one.rule == "first_steps_large"), None)
    around = _around_jump(record, part, findings)
    return RunCase(
        by_severity(findings), training.length(record.steps), sum(map(training.has, record.looks)), losses, lr,
        guesses(of_groups), max(optimizers, default=1), tried if tried is None or not tried.goes_on else None,
        _unstepped(part),
        SingleSteps(tuple(norms), *around, is_search, is_raised, last, large, training.parts[0][0]),
        4 * sum(map(acts, looks)) > len(looks),
        {name: factor_of(name, of_groups) for name in losses},
        Evaluations(evaluated(part, training), *_how_evaluated(part, looks, training)),
        _reach(looks),
        label_order(told),
    )  # fmt: skip


def _short_groups(record: RunLog, part: RankPart, training: Training) -> set[int]:
    """The steps over fewer batches than gradients are accumulated over around them."""
    counted = [name for one in training.losses if (name := f"passes:{one}") in part.series]
    return {step for name in counted for step in short_groups(record.scalar(name, part.rank))}


def _unstepped(part: RankPart) -> Unstepped:
    """What was seen of a run without any step of an optimizer."""
    made = part.latest("made") or {}
    seen = {} if made.get("steps", 1) else made
    broken = str((part.latest("failure") or {}).get("error", ""))
    return Unstepped(
        int(seen.get("backwards", 0)), int(seen.get("others", 0)), bool(made.get("has_modules", True)), broken
    )


def teller_of(record: RunLog, name: str) -> int:
    """The first process that has told of a scalar such as ``loss:loss``; the first of all where none has."""
    return next((rank for rank in record.ranks if name in record.part(rank).series), record.ranks[0])


def _reach(looks: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The usual least and largest target of a batch of a regression, by medians over the looks; None without one."""
    told = [one["reach"] for one in looks if isinstance(one.get("reach"), list)]
    return (statistics.median(low for low, _ in told), statistics.median(high for _, high in told)) if told else None


def _is_search(part: RankPart, rates: list[tuple[int, float]]) -> bool:
    """Whether models of one name were made one after the other, and the highest learning rates of them differ."""
    made = [(step, str(one.get("name", ""))) for step, one in part.events if one.get("kind") == "model"]
    names = {name for _, name in made}
    begun = sorted(step for step, name in made if name.partition("#")[0] in names)
    highest = [max((rate for step, rate in rates if first <= step < last), default=0.0)
               for first, last in itertools.pairwise([*begun, 1 << 62])]  # fmt: skip
    known = [one for one in highest if one > 0]
    return len(known) > 1 and max(known) > 1.5 * min(known)


def _around_jump(
    record: RunLog, part: RankPart, findings: Iterable[Finding]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Ten values of a loss from its jump on (``loss_spike``), and the learning rates of the ten steps up to it."""
    jump = next((one for one in findings if one.rule == "loss_spike"), None)
    names = [one for one in record.scalars if one.startswith("loss:") and one in part.series]
    name = next(
        (one for one in names if jump and f"the loss {one.removeprefix('loss:')!r} jumped" in jump.message), None
    )
    if jump is None or name is None:
        return (), ()
    losses = record.scalar(name, part.rank)
    rates = record.scalar("lr", part.rank) if "lr" in part.series else ()
    return (
        tuple(value for step, value in losses if jump.since <= step < jump.since + _AROUND),
        tuple(value for step, value in rates if jump.since - _AROUND <= step <= jump.since),
    )


def evaluated(part: RankPart, training: Training | None = None) -> dict[str, tuple[tuple[int, float], ...]]:
    """The losses of evaluations, by the names of torch's functions, each with its step; of one training or of all."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, one in _evaluations(part, training):
        for name, value in one["losses"].items():
            found.setdefault(str(name), []).append((step, float(value)))
    return {name: tuple(pairs) for name, pairs in found.items()}


def _how_evaluated(part: RankPart, looks: Iterable[Mapping[str, Any]], training: Training) -> tuple[bool, bool]:
    """Whether training and all evaluations have a cross entropy over the same classes, as far as their number tells;
    and whether models were in evaluation mode whenever a loss of an evaluation was heard."""
    trained = {int(one["among"]) for one in looks if "among" in one}
    told = [one for _, one in _evaluations(part, training)]
    is_alike = len(trained) == 1 and all(set(one.get("among", {}).values()) == trained for one in told)
    return is_alike, bool(told) and all(one.get("in_training_mode") == 0 for one in told)


def _evaluations(part: RankPart, training: Training | None) -> list[tuple[int, dict[str, Any]]]:
    return [(step, one) for step, one in part.events
            if one.get("kind") == "evaluated" and (training is None or training.has(step))]  # fmt: skip
