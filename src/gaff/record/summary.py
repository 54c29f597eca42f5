"""A run in a few facts: how long it was, where it ran, how it ended, what watching cost, and with what settings.

The head of a page and the end of a report tell them, and a page of several runs shows in which settings they differ.
Needs no torch.
"""

from __future__ import annotations

import math
import signal
import statistics
from dataclasses import dataclass
from typing import Any

from gaff.record.groups import error_of, failed_first
from gaff.record.run import Record


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching has cost: ``spent_s`` of the ``total_s`` seconds since the first step, ``startup_s`` before it.

    ``steady``: the share of the time after the first five seconds, in which looks are dense; None for a shorter run.
    """

    spent_s: float
    total_s: float
    startup_s: float
    steady: float | None

    @property
    def share(self) -> float | None:
        """The part of the time since the first step that went into watching, from 0 to 1; None where it is not told."""
        return self.spent_s / self.total_s if self.total_s else None

    def __str__(self) -> str:
        share = self.share
        if share is None:
            return "what watching took is not in the record"
        told = f"watching took {_duration(self.spent_s)} of processor time in {_duration(self.total_s)} ({share:.1%})"
        if self.steady is not None:
            return f"{told}, and {self.steady:.1%} after the first five seconds"
        return f"{told}; the first looks of a run may take half a second" if share > 0.015 else told


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run was; texts are empty, and numbers None, where the record does not tell.

    ``seconds``: since the first step; ``step_s``: the median step; ``ended``: how, in words; ``has_failed``: whether
    that was badly; ``settings``: what it was run with, by name, of the optimizers, the batch, the model, the command.
    """

    steps: int
    seconds: float | None
    step_s: float | None
    device: str
    ended: str
    has_failed: bool
    cost: Cost
    settings: dict[str, str]

    def __str__(self) -> str:
        each = f" (median {_duration(self.step_s)})" if self.step_s else ""
        lasted = f", those after the first in {_duration(self.seconds)}{each}" if self.seconds else ""
        where = f" on {self.device}" if self.device else ""
        return f"{self.steps} {'step' if self.steps == 1 else 'steps'}{lasted}{where}; {self.ended}"


def summary_of(record: Record, rank: int = 0) -> Summary:
    """The facts of a run, by one process of it; ``rank`` must be one of ``record.ranks``."""
    last = record.describe("end", rank) or record.describe("progress", rank)
    total = _number(last.get("seconds")) or 0.0
    at = record.events("progress", rank)[-1:] if not record.describe("end", rank) else []
    is_old = any(1.1 * (step + 1) < record.steps for step, _ in at)  # the last steps are those of the ring
    cost = Cost(
        total * (_number(last.get("overhead")) or 0.0), total, _number(last.get("startup")) or 0.0,
        _number(last.get("steady")),
    )  # fmt: skip
    taken = [one for one in record.scalar("seconds", rank).values if one > 0] if "seconds" in record.scalars else []
    ended, has_failed = _ended(record, rank)
    return Summary(
        record.steps, None if is_old else total or None, statistics.median(taken) if taken else None,
        _device(record, rank), ended, has_failed, cost, _settings(record, rank),
    )  # fmt: skip


def _ended(record: Record, rank: int) -> tuple[str, bool]:
    """How a run ended, in words, and whether that was badly."""
    code = record.head.get("code")
    first = failed_first(record._parts, record.head) if len(record.ranks) > 1 else None
    error = f"{error_of(first)} on rank {first.rank}" if first else record.describe("end", rank).get("error")
    if isinstance(code, int) and code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"killed by {known.get(-code, f'signal {-code}')}", True
    if error:
        return f"ended with {error}", True
    if isinstance(code, int):
        return f"exit code {code}", code != 0
    return ("ended", False) if record.is_complete else ("goes on, or was killed", False)


def _device(record: Record, rank: int) -> str:
    """Where the weights are; of a CPU with the number of torch's threads."""
    found = dict.fromkeys(str(one) for _, model in record.events("model", rank) for one in _list(model.get("devices")))
    threads = record.describe("begin", rank).get("threads")
    return ", ".join(f"{one} ({threads} threads)" if one == "cpu" and threads else one for one in found)


def _settings(record: Record, rank: int) -> dict[str, str]:
    """What the run was run with, by name."""
    begin = record.describe("begin", rank)
    look = next((one for _, one in record.events("look", rank) if one.get("phase") == "train"), {})
    found: dict[str, Any] = {}
    told = [one for _, look in record.events("look", rank) for one in _list(look.get("settings"))]
    optimizers = [one for one in told if isinstance(one, dict)]
    for at, one in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {at}"
        found[name] = one.get("class")
        groups = [group for group in _list(one.get("settings")) if isinstance(group, dict)]
        for number, group in enumerate(groups):
            first = groups[0] if number else {}
            where = f"{name}, group {number}" if number else name
            found.update({f"{where}, {key}": value for key, value in group.items() if first.get(key) != value})
        if len(groups) > 1:
            found[f"{name}, groups"] = len(groups)
    for _, model in record.events("model", rank):
        found[f"class of {model.get('name')}"] = model.get("class")
        shapes = [one[1] for one in _list(model.get("weights")) if isinstance(one, list) and len(one) == 4]
        found[f"parameters of {model.get('name')}"] = sum(_elements(shape) for shape in shapes)
    command = " ".join(map(str, _list(record.head.get("command"))))
    found |= {"batch": look.get("batch"), "precision": look.get("precision"), "device": _device(record, rank),
              "torch": begin.get("torch"), "command": command}  # fmt: skip
    return {name: _text(value) for name, value in found.items() if value not in (None, "")}


def _elements(shape: Any) -> int:
    product = 1
    for size in _list(shape):
        product *= size if isinstance(size, int) else 1
    return product


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _duration(seconds: float) -> str:
    """Seconds in the unit that people use for so many."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
