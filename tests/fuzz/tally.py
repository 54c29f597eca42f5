"""What was asked of gaff and how it ended: failures, refusals by reason, numbers of what was equal."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz.truth import Event

Where = tuple[str, str, tuple[Any, ...]]  # path, port, key


@dataclass(frozen=True)
class Failure:
    """What gaff got wrong. ``kind`` and ``port`` are what two failures of one sort have in common."""

    kind: str
    port: str
    address: str
    expected: str
    got: str
    edit: str = ""  # of a failure under an edit: the expression that makes it

    @property
    def sort(self) -> tuple[str, str, str]:
        """The same for failures that are alike: an exception's first words are part of it."""
        words = re.sub(r"[\d'\[\]():.]+|\bm\d+\b", "", self.got)[:50] if self.kind == "crash" else ""
        return self.kind, self.port, words


COUNTS = (
    "programs", "values", "gradients", "exact_gradients", "edits", "taken", "ops", "watched", "numbers", "guarded", "several",
)  # fmt: skip


@dataclass
class Tally:
    """What was asked of one program or of many, and how it ended."""

    programs: int = 0
    values: int = 0
    gradients: int = 0
    exact_gradients: int = 0  # of those, bit by bit equal to the truth
    edits: int = 0
    taken: int = 0
    ops: int = 0  # of the values and gradients, those at ops
    watched: int = 0  # programs whose watched training was compared
    numbers: int = 0  # statistics that were told alike
    guarded: int = 0
    several: int = 0  # values and gradients that were told beside two sessions that edit
    rejected: Counter[str] = field(default_factory=Counter)  # programs that fail bare
    refused: Counter[str] = field(default_factory=Counter)  # reads and edits of what the truth can tell
    unclear: Counter[str] = field(default_factory=Counter)  # of what has no single truth
    unseen: Counter[str] = field(default_factory=Counter)  # statistics that one process has, and a setting has not
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("rejected", "refused", "unclear", "unseen"):
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures

    def fail(self, kind: str, port: str, address: str, expected: Any, got: Any) -> None:
        self.failures.append(Failure(kind, port, address, show(expected), show(got)))

    def refuse(self, what: str, error: BaseException | str, where: Where, event: Event | None = None) -> None:
        reason = re.sub(r"^.*?: ", "", str(error)) if not isinstance(error, str) else error
        reason = re.sub(r"\d+", "n", reason.split("\n")[0])[:100]
        if "was replaced" in reason:
            self.unclear["a module was replaced"] += 1
        elif event is not None and event.unclear:
            self.unclear[event.unclear] += 1
        else:
            self.refused[f"{what} {where[1]}: {reason}"] += 1


def address_of(where: Where, call: int | None = None) -> str:
    path, port, key = where
    at = "" if call is None or port in ("param", "buffer", "grad") else f"@{call}"
    return f"{path}{at}:{port}{''.join(f'[{one}]' for one in key)}"


def identical(one: Tensor, other: Tensor) -> bool:
    """Equal bit by bit, but for the sign of a zero."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def show(value: Any) -> str:
    """A value for a person: the first numbers of a tensor."""
    if isinstance(value, Tensor):
        numbers = ", ".join(f"{one:.5g}" for one in value.detach().flatten()[:4].tolist())
        return f"[{numbers}{', ...' if value.numel() > 4 else ''}]"
    if isinstance(value, (list, tuple)):
        return f"[{'; '.join(map(show, value))}]"
    return str(value)
