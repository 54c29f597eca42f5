"""Experiments: a training command run again with one thing changed from outside; what may be changed, what came of it.

``KINDS`` declares each experiment once: how it is written on the command line, and what it changes. ``gaff.training.
diagnosis`` makes the changes in the process of the command, ``gaff try`` runs them, and an ``Outcome`` is what one has
come to. Needs no torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gaff.errors import PlanError, RecordError

TRIED = "try.json"  # beside the record of the run as it is: which experiments were made, and where they lie
FOLDER = "try"
AGAIN = "again"  # the run as it is, a second time
_LEAST_WINDOW = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """What an experiment changes. ``value``: the one it has where none is written, None where it takes none.

    ``is_remedy``: if the loss is lower with it, that is what was wrong; others tell something else.
    """

    text: str
    value: float | None = None
    takes_factor: bool = False
    is_remedy: bool = True


KINDS: dict[str, Kind] = {
    "lr": Kind("learning rates, at every step: lr=0.1x (a factor) or lr=0.001", 0.1, takes_factor=True),
    "warmup": Kind("learning rates rise from 0 over the first steps: warmup=100", 100),
    "clip": Kind("gradients are clipped to this norm before each step: clip=1", 1),
    "decay": Kind("the optimizer's weight decay: decay=0", 0),
    "fp32": Kind("autocast is off"),
    "train-mode": Kind("the model is in training mode whenever gradients are computed"),
    "zero-grad": Kind("gradients are cleared after every step"),
    "unfreeze": Kind("every parameter requires grad, and belongs to the optimizer"),
    "one-batch": Kind("the first batch comes again and again: can the model learn it at all?", is_remedy=False),
    "scramble": Kind("rows of the input are permuted against the labels", is_remedy=False),
    "blind": Kind("inputs are replaced by zeros", is_remedy=False),
    "seed": Kind("random numbers are others", 1, is_remedy=False),
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """One change: its kind and its value, None for kinds without one; ``is_factor`` for one such as ``lr=0.1x``."""

    kind: str
    value: float | None = None
    is_factor: bool = False

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        value = "" if self.value is None else repr(self.value).removesuffix(".0")  # all digits: it is read back
        return f"{self.kind}={value}{'x' * self.is_factor}" if value else self.kind

    @classmethod
    def parse(cls, word: str) -> Experiment:
        """Read ``lr=0.1x``, ``clip`` or ``scramble``. Raises PlanError for what is none."""
        kind, equals, text = word.strip().partition("=")
        known = KINDS.get(kind)
        if known is None:
            raise PlanError(f"{word!r} is no experiment: expected one of {', '.join(KINDS)}")
        if known.value is None:
            if equals:
                raise PlanError(f"{word!r}: {kind} takes no value, expected {kind!r} alone")
            return cls(kind)
        if not equals:
            return cls(kind, known.value, known.takes_factor)
        is_factor = text.endswith("x") and known.takes_factor
        try:
            value = float(text.removesuffix("x") if is_factor else text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (kind == "clip" and not value):
            raise PlanError(f"{word!r}: expected a number, such as {cls(kind, known.value, known.takes_factor).name!r}")
        return cls(kind, value, is_factor)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the loss of one run came to. ``loss``: the median of its last tenth of steps, inf where it was not finite.

    ``scatter``: the standard error of that, from the distances of single steps; ``first``: the losses of the first
    three steps; ``steps``: how many were made; ``acted``: how often the change acted; ``why_not``: why it could not.
    None for ``loss`` where the run has none to be compared.
    """

    name: str
    loss: float | None
    scatter: float = 0.0
    first: tuple[float, ...] = ()
    steps: int = 0
    acted: int = 0
    why_not: str = ""

    @property
    def kind(self) -> str:
        """The kind of the experiment; of a run with nothing changed its name."""
        return self.name.partition("=")[0]

    @property
    def start(self) -> float:
        """The loss of the first step, inf where there is none."""
        return self.first[0] if self.first else math.inf


def outcome(
    name: str, losses: Sequence[float], window: int, *, steps: int = 0, acted: int = 0, why_not: str = ""
) -> Outcome:
    """The outcome of a run whose loss was ``losses``, step by step; its last ``window`` steps are looked at."""
    last = losses[-window:] if window else ()
    if not losses or why_not:
        return Outcome(name, None, first=tuple(losses[:3]), steps=steps, acted=acted,
                       why_not=why_not or "no loss was seen")  # fmt: skip
    if not all(map(math.isfinite, last)):
        return Outcome(name, math.inf, math.inf, tuple(losses[:3]), steps, acted)
    middle = statistics.median(last)
    scatter = 1.2533 * statistics.pstdev(last) / math.sqrt(len(last))  # of a median of normal values
    return Outcome(name, middle, scatter, tuple(losses[:3]), steps, acted)


@dataclass(frozen=True, slots=True)
class Experiments:
    """All that were made of one command: the run as it is, ``bare``, and those with one thing changed, ``changed``.

    ``loss_name``: the loss that is compared; ``noise``: by how much it differs between two runs that mean the same,
    the larger of what another seed makes and of twice the scatter of steps; ``is_repeatable``: whether the run as it
    is had the same losses twice, bit by bit, None where that was not asked; ``goes_on``: whether it began, the second
    time, where the first one had ended: then the command reads a checkpoint that an earlier run has left, and its runs
    are not to be compared.
    """

    steps: int
    loss_name: str
    bare: Outcome
    changed: tuple[Outcome, ...]
    is_repeatable: bool | None
    noise: float
    goes_on: bool = False

    def get(self, kind: str) -> Outcome | None:
        """The outcome of the first experiment of this kind, or of this name, that could be made."""
        return next((one for one in self.changed if kind in (one.kind, one.name) and one.loss is not None), None)

    @property
    def range(self) -> float:
        """From the loss of the first step to the lowest that any run with the script's own data came to."""
        start = self.bare.start
        reached = [one.loss for one in (self.bare, *self.changed) if one.loss is not None and one.kind != "one-batch"]
        return start - min(reached) if reached and math.isfinite(start) else 0.0

    def gain(self, one: Outcome) -> float:
        """By how much the loss is lower than without the change, beyond the noise, as a share of ``range``; 0 else."""
        if one.loss is None or self.bare.loss is None or self.range <= 0 or self.goes_on:
            return 0.0
        if math.isinf(self.bare.loss):
            return max(0.0, (self.bare.start - one.loss) / self.range) if math.isfinite(one.loss) else 0.0
        gained = self.bare.loss - one.loss
        return gained / self.range if gained > 2 * self.noise else 0.0

    def is_well(self, one: Outcome) -> bool:
        """Whether an experiment that is no remedy says that nothing is wrong.

        The first batch can be learned: its loss falls to half or less. Other changes of the data make it worse.
        """
        if one.kind == "one-batch":
            return one.loss is not None and self.bare.start - one.loss > 0.5 * abs(self.bare.start)
        return self.effect(one) == "higher"

    def effect(self, one: Outcome) -> str:
        """What a change did to the loss: "lower", "higher", "same" within the noise, or "none" where it could not act.

        Lower and higher are beyond twice the noise, and a tenth of ``range`` or, of losses above 0, ten times.
        """
        if one.loss is None or self.bare.loss is None or self.goes_on:
            return "none"
        if math.isinf(one.loss) or math.isinf(self.bare.loss):
            same = math.isinf(one.loss) and math.isinf(self.bare.loss)
            return "same" if same else "higher" if math.isinf(one.loss) else "lower"
        difference = one.loss - self.bare.loss
        low, high = sorted((one.loss, self.bare.loss))
        is_far = abs(difference) > 0.1 * self.range or high > 10 * low > 0
        return "same" if abs(difference) <= 2 * self.noise or not is_far else "higher" if difference > 0 else "lower"

    def to_dict(self) -> dict[str, Any]:
        """What JSON tells of them: numbers, and the effect of each; infinite losses as None."""
        rows = [{**asdict(one), "effect": self.effect(one)} for one in self.changed]
        return {"steps": self.steps, "loss_name": self.loss_name, "noise": self.noise,
                "is_repeatable": self.is_repeatable, "goes_on": self.goes_on, "bare": asdict(self.bare),
                "changed": rows}  # fmt: skip


def compare(
    steps: int, name: str, bare: Sequence[float], runs: Iterable[tuple[str, Sequence[float], Mapping[str, Any]]]
) -> Experiments:
    """The experiments of a command whose loss ``name`` was ``bare`` in the run as it is, step by step.

    ``runs``: the name of each other run, its losses, and what else is known of its outcome, as ``outcome`` takes it.
    """
    runs = list(runs)
    window = max(_LEAST_WINDOW, len(bare) // 10)
    as_it_is = outcome("bare", bare, window, steps=len(bare))
    changed, noise, is_repeatable, goes_on = [], 2 * as_it_is.scatter, None, False
    for run, losses, known in runs:
        found = outcome(run, losses[: len(bare)], window, **known)
        if run == AGAIN:
            goes_on = _goes_on(as_it_is, found)
            is_repeatable = [*map(repr, losses)] == [*map(repr, bare)]
        elif len(losses) < len(bare) // 2 and found.loss is not None and math.isfinite(found.loss):
            changed.append(Outcome(run, None, steps=len(losses), why_not=f"it ended after {len(losses)} steps"))
        else:
            changed.append(found)
        if run == AGAIN or found.kind == "seed":
            both = found.loss, as_it_is.loss
            noise = max(noise, abs(both[0] - both[1])) if None not in both and all(map(math.isfinite, both)) else noise  # type: ignore[arg-type,operator]
    noise = noise if math.isfinite(noise) else 0.0
    return Experiments(steps, name, as_it_is, tuple(changed), is_repeatable, noise, goes_on)


def _goes_on(bare: Outcome, again: Outcome) -> bool:
    """Whether a run begins below half of what another one with nothing changed came to learn."""
    if bare.loss is None or not all(map(math.isfinite, (bare.start, bare.loss, again.start))):
        return False
    learned = bare.start - bare.loss
    return learned > 4 * bare.scatter and bare.start - statistics.fmean(again.first) > 0.5 * learned


def read_tried(path: Path) -> dict[str, Any] | None:
    """What ``gaff try`` has written beside a record, None without it. Raises RecordError where that is damaged."""
    file = path / TRIED
    if not file.is_file():
        return None
    try:
        told = json.loads(file.read_text())
        runs = {str(name): {**one, "folder": str(one["folder"])} for name, one in told["runs"].items()}
        return {"steps": int(told["steps"]), "runs": runs}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read: {error}") from None
