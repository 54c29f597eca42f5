"""A saved run, read back: ``gaff.load``. Needs no torch; may be opened while the run goes on.

The folder of a run holds ``run.json`` (the head: version of the format, and what ``gaff watch`` knows of the run), and
for each process a log ``*.gaff`` and a ring ``*.ring`` of its last steps. The rank is part of the file's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gaff.address.grammar import nearest
from gaff.errors import RecordError
from gaff.record.absent import is_absent
from gaff.record.experiments import Experiments, compare, read_tried
from gaff.record.files import read_head, with_new
from gaff.record.finding import SEVERITIES, Finding
from gaff.record.flight import ENDING as RING
from gaff.record.flight import Flight, read_left, read_ring
from gaff.record.groups import error_of, failed_first, groups, helpers, left_before, only_group
from gaff.record.part import RankPart
from gaff.record.ranks import (
    divergence,
    holds_parts,
    lost,
    of_wholes,
    origins_first,
    same_batches,
    scalar_together,
    slow,
    together,
)
from gaff.record.statistics import DERIVED, value_of
from gaff.record.trainings import cases, evaluated
from gaff.record.verdict import STOPPED, Verdict, judge_all

_T = TypeVar("_T")
VERSION = 1
HEAD = "run.json"
ENDING = ".gaff"


@dataclass(frozen=True, slots=True)
class Series:
    """One number over time: ``steps[i]`` is the optimizer steps completed before ``values[i]`` was seen."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.steps, self.values, strict=True))

    def __repr__(self) -> str:
        if not self.steps:
            return "<gaff series, empty>"
        ends = [f"{self.values[at]:.4g} at step {self.steps[at]}" for at in (0, -1)]
        return f"<gaff series of {len(self)}: {' to '.join(ends)}>"


class Record:
    """A run of ``gaff watch`` or ``gaff.watch``: its findings, its sites, and any number of any site over time.

    Made by ``gaff.load``; raises RecordError where there is no record. It is what the files held when it was opened or
    last refreshed; only ``refresh`` and ``flight`` read again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._parts: list[RankPart] = []
        self._named: tuple[int, dict[str, tuple[str, str]]] = (-1, {})  # by how many layouts there were
        self._open()
        if not self._parts:
            if (self.path / HEAD).exists():
                code = read_head(self.path / HEAD, VERSION).get("code")
                ended = ", so far" if code is None else f", and ended with exit code {code}"
                raise RecordError(f"{str(path)!r}: the command trained no torch model that was seen{ended}: no record")
            kind = "is no folder" if not self.path.is_dir() else f"holds no file *{ENDING}"
            raise RecordError(f"{str(path)!r} {kind}: expected a folder that gaff watch --out has written")
        self.head = read_head(self.path / HEAD, VERSION)
        self.refresh()

    def refresh(self) -> None:
        """Read what the run has written since, and what processes have that are new."""
        self._open()
        for part in self._parts:
            part.read()

    def _open(self) -> None:
        """Take in the logs that are not known yet."""
        found = self.path.glob(f"*{ENDING}") if self.path.is_dir() else ()
        self._parts = with_new(self._parts, found)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the processes whose logs are there, in ascending order."""
        return [part.rank for part in self._parts]

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of the processes that worked together, one list for each group that one command began.

        Where a process has started another one, and both train by themselves, that with fewer steps is a group of its
        own; such ones come first.
        """
        return [[part.rank for part in group] for group in groups(self._parts)]

    @property
    def findings(self) -> list[Finding]:
        """What was found in all processes, worst first; what was over when the run ended comes last.

        The comparison of the processes (other weights, a lost one, a slow one) is made here, anew each time.
        """
        found = _found_in_all(groups(self._parts), self.head)
        return sorted(found, key=lambda one: (one.is_over, SEVERITIES.index(one.severity)))

    @property
    def verdict(self) -> Verdict:
        """What the run comes to, as far as it has come: its state, the cause, what shows it, since when.

        Computed anew each time, by the findings of all processes and the losses of one; the worst of several trainings.
        """
        return _reading(self.path, lambda: judge_all(cases(self), _failure(self.head, self._parts)))

    @property
    def experiments(self) -> Experiments | None:
        """What ``gaff try`` has made of the command of this run, with one thing changed each time; None without any.

        The loss of this run that was found first is compared. Raises RecordError where the list of them is damaged.
        """
        tried = read_tried(self.path)
        name = next((one for one in self.scalars if one.startswith("loss:")), None)
        if tried is None or name is None:
            return None
        runs = [(run, *_tried(self.path, known, name)) for run, known in tried["runs"].items()]
        return compare(tried["steps"], name.removeprefix("loss:"), self.scalar(name).values, runs)

    @property
    def steps(self) -> int:
        """Optimizer steps completed: those of the logs, and of a process that was killed also the ones that its ring of
        last steps holds and its log does not yet. A ring that cannot be read counts none; ``flight`` says why. Those of
        a process that another one has started to train something else do not count."""
        most, aside = 0, helpers(self._parts)
        for part in (one for one in self._parts if one not in aside):
            looks = [step for step, one in part.events if one.get("kind") == "look" and one.get("phase") == "train"]
            most = max([most, *(step + 1 for step in looks)])
            for step, seconds in zip(part.series.get("step", ()), part.series.get("seconds", ()), strict=False):
                if not math.isnan(seconds):  # else it had begun only
                    most = max(most, int(step) + 1)
        return most

    @property
    def looks(self) -> list[int]:
        """The steps that were looked at, of the first process."""
        told = [
            step for step, one in self._parts[0].events if one.get("kind") == "look" and one.get("phase") == "train"
        ]
        return sorted(dict.fromkeys(told))

    @property
    def overhead(self) -> float | None:
        """The share of the run's time that watching took, as it measured itself; None where the record ends before."""
        told = [part.latest("end") or part.latest("progress") for part in self._parts]
        return max((float(one["overhead"]) for one in told if one and one.get("seconds") and "overhead" in one),
                   default=None)  # fmt: skip

    @property
    def is_complete(self) -> bool:
        """Whether every process has said that it ended."""
        return all(part.latest("end") is not None for part in self._parts)

    @property
    def sites(self) -> list[str]:
        """Every address with numbers; with the model's name before it where there are several models."""
        return list(self.names())

    @property
    def notes(self) -> list[str]:
        """What was not looked at or written, and why; damage of the files."""
        told = [str(one) for part in self._parts for _, event in part.events for one in event.get("notes", ())]
        left = [f"the record ends before the run: {one}" for one in map(_left, self._parts) if one]
        code = self.head.get("code")
        if not left and not self.is_complete and isinstance(code, int) and code >= 0:
            left = [f"the record has no end, though the command ended by itself (exit code {code}): it left at once, "
                    "as by os._exit, or the record could not be written any further"]  # fmt: skip
        told += left
        damaged = sum(part.reader.damaged for part in self._parts)
        if damaged:
            told.append(f"{damaged} places in the record are damaged and were passed over")
        return list(dict.fromkeys(told))

    def describe(self, kind: str, rank: int = 0) -> dict[str, Any]:
        """The latest event of one kind, such as ``model``, ``progress``, ``end``; empty where there is none."""
        return self.part(rank).latest(kind) or {}

    def events(self, kind: str, rank: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """All events of one kind, each with its step."""
        return [(step, one) for step, one in self.part(rank).events if one.get("kind") == kind]

    def evaluated(self, rank: int = 0) -> dict[str, tuple[tuple[int, float], ...]]:
        """The mean losses of evaluations, by the names of torch's functions, each with the steps made before it."""
        return _reading(self.path, lambda: evaluated(self.part(rank)))

    def saved(self, rank: int = 0) -> tuple[tuple[int, str], ...]:
        """The files that ``torch.save`` has written: how many steps were made before, and the file as it was named."""
        return tuple((step, str(one.get("file", ""))) for step, one in self.events("saved", rank))

    def flight(self, rank: int = 0) -> list[Flight]:
        """The last 64 steps, looked at or not, as they were when the process ended, however it ended; oldest first."""
        path = self.part(rank).reader.path.with_suffix(RING)
        return read_ring(path) if path.exists() else []

    def scalar(self, name: str = "loss", rank: int | str = 0) -> Series:
        """A number of each step: ``loss`` (the first that was found), ``loss:NAME`` or NAME, ``lr``, ``grad_norm`` ...

        Steps without one are left out; none is left where only other processes tell it. ``rank``: a process, or "all"
        for ``grad_norm`` of all parts of the parameters, of which one tells its share. Raises RecordError with the
        names that there are, and for others of all processes.
        """
        if isinstance(rank, str):
            return Series(*scalar_together(only_group(self._parts), name, rank))
        series = self.part(rank).series
        if name == "loss":
            name = next((one for one in series if one.startswith("loss:")), name)
        name = f"loss:{name}" if name not in series and f"loss:{name}" in series else name
        if not {name, f"loss:{name}"} & {*self.scalars}:
            raise RecordError(f"no scalar {name!r} in {self.path}: expected one of {', '.join(self.scalars) or 'none'}")
        pairs = [(int(step), value) for step, value in zip(series.get("step", ()), series.get(name, ()), strict=False)]
        is_missing = is_absent if name.startswith("loss") else math.isnan
        kept = [(step, value) for step, value in pairs if not is_missing(value)]
        return Series([step for step, _ in kept], [value for _, value in kept])

    @property
    def scalars(self) -> list[str]:
        """Names of the numbers that ``scalar`` knows, of all processes, in the order in which they were first seen."""
        return list(dict.fromkeys(name for part in self._parts for name in part.series if name != "step"))

    def series(self, site: str, stat: str, phase: str = "train", rank: int | str = 0) -> Series:
        """One number of one site over the sampled steps, such as ``record.series("fc1", "rms")``.

        ``site``: as in ``sites``; the model's name may be left out where only one model has it. ``stat``: a column
        (``mean``, ``std``, ``min``, ``max``, ``zeros``, ``nan``, ``count`` ...) or ``rms``, ``norm``, ``nonfinite``.
        ``rank``: a process, or "all" for their parts put together, at the steps that all have looked at (Chan, Golub &
        LeVeque 1979). Raises RecordError with near names, and for parts that do not add up.
        """
        key = _find(self.names(), site, self.path, phase)
        if rank == "all":
            return Series(*together(only_group(self._parts), key, stat, phase))
        steps, values = [], []
        stats: dict[str, None] = {}
        part = self.part(rank)
        for at, (step, _) in enumerate(part.tables):
            table = part.table(at)
            if table is None or table.phase != phase or key not in table.layout.index:
                continue
            stats.update(dict.fromkeys(table.columns))
            value = value_of(table.columns, table.layout.index[key], stat)
            if value is not None:
                steps.append(step)
                values.append(value)
        if not steps and stats and stat not in (*stats, *DERIVED):
            raise RecordError(f"{site!r} has no {stat!r}: expected one of {', '.join([*stats, *DERIVED])}")
        return Series(steps, values)

    def latest(self, site: str, phase: str = "train", rank: int = 0) -> dict[str, float]:
        """All numbers of one site at the last look that has it, with its step; empty where there is none."""
        key = _find(self.names(), site, self.path, phase)
        part = self.part(rank)
        for at in range(len(part.tables) - 1, -1, -1):
            table = part.table(at)
            row = table.layout.index.get(key) if table is not None and table.phase == phase else None
            if table is not None and row is not None and value_of(table.columns, row, "count") is not None:
                found = {name: values[row] for name, values in table.columns.items()}
                derived = {name: value_of(table.columns, row, name) or 0.0 for name in DERIVED}
                return {"step": float(part.tables[at][0]), **found, **derived}
        return {}

    def magnitudes(self, site: str, phase: str = "train", rank: int = 0) -> list[tuple[int, list[float]]]:
        """For each sampled step the shares of the finite elements in the 64 buckets of magnitude, within 3.3 %."""
        key = _find(self.names(), site, self.path, phase)
        part = self.part(rank)
        found = []
        for at, (step, _) in enumerate(part.tables):
            table = part.table(at, with_magnitudes=True)
            row = table.layout.index.get(key) if table is not None and table.phase == phase else None
            if table is not None and row is not None and value_of(table.columns, row, "count") is not None:
                found.append((step, table.shares(row)))
        return found

    def __repr__(self) -> str:
        return f"<gaff record {str(self.path)!r}: {self.steps} steps, {len(self.findings)} findings>"

    def part(self, rank: int | str = 0) -> RankPart:
        """What one process has written. Raises RecordError where there is none of this rank."""
        part = next((one for one in self._parts if one.rank == rank), None)
        if part is None:
            raise RecordError(f"no rank {rank} in {self.path}: expected one of {self.ranks}")
        return part

    def names(self) -> dict[str, tuple[str, str]]:
        """Model and address of every site, by its name."""
        laid = sum(len(part.layouts) for part in self._parts)
        if laid == self._named[0]:
            return self._named[1]
        keys = dict.fromkeys(row for part in self._parts for layout in part.layouts.values() for row in layout.rows)
        models = {model for model, _ in keys}
        names = {address if len(models) < 2 else _joined(model, address): (model, address) for model, address in keys}
        self._named = laid, names
        return names


def _found_in_all(several: list[list[RankPart]], head: Mapping[str, Any]) -> list[Finding]:
    """What was found in all groups of processes; ``head`` tells of the first process that was gone, of the first."""
    return [one for at, group in enumerate(several) for one in _found(group, {} if at else head)]


def _found(group: list[RankPart], head: Mapping[str, Any]) -> list[Finding]:
    """What was found in processes that work together, and by comparing them; ``head``: what is known of the run."""
    found = [*divergence(group), *lost(group, head), *slow(group), *same_batches(group)]
    for part in group:
        told = part.latest("findings") or {}
        found += [replace(Finding.from_dict(one), rank=part.rank) for one in told.get("findings", ())]
    return origins_first(of_wholes(found, group)) if len(group) > 1 else found


def _left(part: RankPart) -> str:
    """Why a process could not write its log to the end; empty where it could, or could tell nobody."""
    path = part.reader.path.with_suffix(RING)
    try:
        return read_left(path) if path.exists() else ""
    except RecordError:
        return ""


def _find(names: dict[str, tuple[str, str]], site: str, path: Path, phase: str) -> tuple[str, str]:
    """Model and address of a name; the model's may be left out. Raises RecordError with near names, and for a phase
    that is none."""
    if phase not in ("train", "eval"):
        raise RecordError(f"no phase {phase!r} in {path}: expected 'train' or 'eval'")
    if not isinstance(site, str):
        raise RecordError(f"{site!r} is no name of a site: expected a text, such as {next(iter(names), 'fc1')!r}")
    full = {_joined(*key): key for key in names.values()}
    for one in (site, site.removesuffix(":output")):  # which is meant where no port is said
        if one in names or one in full:
            return names[one] if one in names else full[one]
    alike = [key for key in names.values() if key[1] == site]
    if len(alike) == 1:
        return alike[0]
    if alike:
        places = ", ".join(_joined(*one) for one in alike)
        raise RecordError(f"{site!r} is in several models: expected one of {places}")
    near = ", ".join(nearest(site, list(names))) or "none"
    raise RecordError(f"no site {site!r} in {path} of {len(names)} sites; nearest: {near}")


def _reading(path: Path, read: Callable[[], _T]) -> _T:
    """What ``read`` returns, which reads events: one that is not as gaff writes it is a RecordError."""
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"record {str(path)!r} holds an event that cannot be read: {error!r:.100}") from error


def _joined(model: str, address: str) -> str:
    """The name of a site with its model's before it: ``model.fc1``, and ``model:output`` of the model itself."""
    return f"{model}{address}" if address.startswith((":", "[")) else f"{model}.{address}"


def norm_of_all(record: Record) -> Series:
    """The norm of all gradients of a run as a whole: of all parts where processes hold parts of the parameters.

    Empty where what processes tell cannot be put together.
    """
    is_share = len(record.ranks) > 1 and holds_parts(record._parts)
    try:
        return record.scalar("grad_norm", "all" if is_share else record.ranks[0])
    except RecordError:  # where each process has trained something of its own beside it
        return Series([], [])


def _failure(head: dict[str, Any], parts: list[RankPart]) -> str | None:
    """How the command ended, where it did not end well; None where it did, or goes on."""
    part = failed_first(parts, head)
    if part is not None:
        error = error_of(part)
        where = f", on rank {part.rank}" if len(parts) > 1 else ""
        early = left_before(part, parts)
        after = f", after rank {early.rank} had ended" if early is not None else ""
        return STOPPED if error == "KeyboardInterrupt" else f"the run ended with {error}{where}{after}"
    code = head.get("code")
    if not isinstance(code, int) or not code:
        return None
    return f"the command was ended by signal {-code}" if code < 0 else f"the command ended with exit code {code}"


def _tried(path: Path, known: dict[str, Any], name: str) -> tuple[list[float], dict[str, Any]]:
    """The loss of a run with one thing changed, step by step, and what else ``compare`` wants to know of it."""
    try:
        record = Record(path / str(known["folder"]))
    except RecordError as error:
        return [], {"why_not": str(error)}
    told = record.describe("experiment", record.ranks[0])
    losses = record.scalar(name, record.ranks[0]).values if name in record.scalars else []
    failed = f"it ended with exit code {known['code']}" if known.get("code") and not losses else ""
    return losses, {
        "steps": record.steps, "acted": int(told.get("acted", 0)), "why_not": told.get("why_not", "") or failed
    }  # fmt: skip
