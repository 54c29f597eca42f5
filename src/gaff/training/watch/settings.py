"""How to watch: the settings, declared once for ``gaff.watch``, for ``gaff watch`` and for the processes it starts.

A new setting is a field of ``Settings``: with ``help`` in its metadata it is an option of the command, too, and with a
line in ``WatchOptions`` a keyword of ``gaff.watch``. Needs no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from gaff.errors import PlanError, need_truth, whole_number
from gaff.views.text import printable

if TYPE_CHECKING:
    from typing_extensions import Self

PROCESSES = "GAFF_WATCH_PROCESSES"  # of the environment: the numbers of the processes that this one came from
VARIABLE = "GAFF_WATCH"  # of the environment: the settings of a watched command as JSON, which its children inherit


def to_stderr(text: str, *, is_first: bool = False) -> None:
    """Write a line to the standard error of this process, at once, as a terminal can show it.

    ``is_first``: to the one that it was started with, also where the program has put another in its place, as to read
    what it writes itself. Where there is no standard error, or it is closed or full, nobody is told.
    """
    stream = (sys.__stderr__ if is_first else None) or sys.stderr
    with suppress(AttributeError, OSError, ValueError):  # there is none, it takes nothing, or not these characters
        stream.write(f"{printable(text)}\n")
        stream.flush()


class WatchOptions(TypedDict, total=False):
    """The keywords of ``gaff.watch``, which tells what each means; those left out are as ``Settings`` has them."""

    out: str | os.PathLike[str] | None
    only: Iterable[str]
    skip: Iterable[str]
    every: int | None
    budget: float
    rules_off: Iterable[str]
    keep_batch: bool
    tell: Callable[[str], None] | None


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option of the command, too: ``more`` goes to argparse."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True)
class Settings:
    """How to watch one process; a frozen value, checked when it is made.

    Raises PlanError where a value cannot be meant. The fields are explained by ``gaff.watch`` and by the help of ``gaff
    watch``.
    """

    out: Path | None = field(default=None)
    only: tuple[str, ...] = _option(
        (), "look at what passes in these modules only, such as 'layer4.*'", metavar="PATTERN"
    )
    skip: tuple[str, ...] = _option((), "do not look at what passes in these modules", metavar="PATTERN")
    every: int | None = _option(None, "look at every Nth step, instead of as often as the budget allows", metavar="N")
    budget: float = _option(0.01, "share of the time that looking may take (default: 0.01)", metavar="SHARE")
    rules_off: tuple[str, ...] = _option((), "do not ask this health rule", metavar="RULE")
    keep_batch: bool = _option(False, "keep the batch in which something goes wrong, for gaff replay")
    interval_s: float = _option(10.0, "seconds between lines of progress (default: 10)", metavar="SECONDS")
    is_lazy: bool = False  # make the record when the first model is found
    rank: int = 0
    started_by: tuple[int, ...] = ()  # the numbers of the watched processes that this one came from
    tell: Callable[[str], None] | None = None  # alarms and progress, from another thread
    complain: Callable[[str], None] = to_stderr  # of a failure of gaff's own, where there is no ``tell``

    def __post_init__(self) -> None:
        for name in ("only", "skip", "rules_off"):
            value: Any = getattr(self, name)
            if isinstance(value, str):
                raise PlanError(f"{name}={value!r}: expected a list of patterns, such as [{value!r}]")
            value = [*value] if isinstance(value, Iterable) else [value]
            if not all(isinstance(one, str) for one in value):
                raise PlanError(f"{name}={value!r:.60}: expected a list of patterns as text, such as ['layer4.*']")
            object.__setattr__(self, name, tuple(value))
        if self.every is not None and whole_number(self.every, 1) is None:
            raise PlanError(f"every={self.every!r}: expected a number of steps, 1 or more")
        object.__setattr__(self, "every", whole_number(self.every))
        if not isinstance(self.budget, (int, float)) or not 0 < self.budget < 1:
            raise PlanError(f"budget={self.budget!r}: expected a share of the time between 0 and 1, such as 0.01")
        if not isinstance(self.interval_s, (int, float)) or self.interval_s <= 0:
            raise PlanError(f"interval_s={self.interval_s!r}: expected seconds between lines, above 0, such as 10")
        need_truth(self.keep_batch, "keep_batch")
        if self.tell is not None and not callable(self.tell):
            raise PlanError(
                f"tell={self.tell!r} cannot be called: expected a function of a line of text, such as print"
            )
        if self.out is not None:
            if not isinstance(self.out, (str, os.PathLike)) or not str(self.out):
                raise PlanError(f"out={self.out!r}: expected the name of a new folder, or None to keep no record")
            object.__setattr__(self, "out", Path(self.out))

    @classmethod
    def of(cls, *, rank: int = 0, **options: Any) -> Self:
        """The settings that ``gaff.watch`` is given: lists of patterns, and a folder as text or path.

        Raises TypeError for a keyword that ``gaff.watch`` does not have, PlanError for a value that cannot be meant.
        """
        unknown = [name for name in options if name not in WatchOptions.__annotations__]
        if unknown:
            known = ", ".join(WatchOptions.__annotations__)
            raise TypeError(f"watch got an unexpected keyword argument {unknown[0]!r}: expected {known}")
        return cls(rank=rank, **options)

    def to_json(self) -> dict[str, Any]:
        """What a process that is started is told: the options of the command, and where the record lies.

        Left out is what each process knows by itself, such as its rank, and functions, which no text can tell.
        """
        told = {one.name: getattr(self, one.name) for one in fields(self) if "help" in one.metadata}
        out = None if self.out is None else os.fsencode(self.out).decode(errors="surrogateescape")
        return {**told, "out": out}  # as text that is the same whatever locale the process has

    @classmethod
    def from_json(cls, told: Mapping[str, Any], **more: Any) -> Self:
        """The inverse of ``to_json``; ``more``: what no text can tell. Names that are not known are left out."""
        known = {one.name for one in fields(cls) if "help" in one.metadata} | {"out"}
        given = {name: value for name, value in told.items() if name in known}
        if given.get("out") is not None:
            given["out"] = Path(os.fsdecode(given["out"].encode(errors="surrogateescape")))
        return cls(**given, **more)
