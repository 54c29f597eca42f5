"""What a record holds as plain rows, read once from front to end, or on from where one stopped. Needs no torch.

All exports and trackers read through here, so that the same numbers have the same names and times everywhere.
"""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gaff.address.grammar import nearest
from gaff.errors import PlanError, RecordError
from gaff.record.absent import is_absent
from gaff.record.log import MATRIX, SERIES, LogReader
from gaff.record.matrix import Table, number_of, unpack, unpack_series
from gaff.record.part import RankPart
from gaff.record.run import Record
from gaff.record.statistics import BY_NAME, DERIVED, IN_EACH, value_of

MAGNITUDES = "magnitudes"  # no number but a histogram
_Key = tuple[str, str]


class Row(NamedTuple):
    """One number. ``time``: when it was written, in seconds since 1970. A scalar of the run has an empty ``site``."""

    rank: int
    phase: str
    step: int  # optimizer steps completed before it was seen
    time: float
    site: str
    stat: str
    value: float


class LookTable(NamedTuple):
    """One table of a record. ``rows``: place in the table and name of each wanted site that has numbers there."""

    rank: int
    step: int
    time: float
    table: Table
    rows: list[tuple[int, str]]


@dataclass
class _Place:
    """How much of one part was passed, and when what it holds was written, which a second reader tells.

    ``early``: of steps that were passed before the log had them, from the ring of the run: what was told of each.
    """

    clock: LogReader
    tables: int = 0
    steps: int = 0
    early: dict[float, set[str]] = field(default_factory=dict)
    table_times: array[float] = field(default_factory=lambda: array("d"))
    step_times: array[float] = field(default_factory=lambda: array("d"))

    def read(self) -> None:
        """Note the times of the tables and steps that have been written since."""
        for frame in self.clock.frames():
            if frame.kind == MATRIX:
                self.table_times.append(frame.time)
            elif frame.kind == SERIES:
                self.step_times.extend(_times(frame.time, unpack_series(frame.payload)))


class Cursor:
    """How far a record has been read: given again after ``record.refresh()``, only what is new follows.

    Moves on by a whole table or step, when the row after it is asked for: after an error nothing is missing. What the
    last steps of a run in progress have in its ring follows at once, the rest of their numbers when the log has them. A
    site keeps its first name, also where a second model is found later. Of one record only.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._places: dict[int, _Place] = {}
        self._names: dict[_Key, str] = {}

    def catch_up(self, record: Record) -> dict[_Key, str]:
        """Take in the names and times of what the record has by now; returns the name of each (model, address).

        Raises PlanError for another record than the first time.
        """
        if self._path not in (None, record.path):
            raise PlanError(f"{str(record.path)!r} is another record than {str(self._path)!r}: expected that one again")
        self._path = record.path
        taken = set(self._names.values())
        for name, key in record.names().items():
            if key not in self._names:
                own = sound(name)
                free = (f"{own}#{number}" for number in itertools.count(2))
                self._names[key] = own if own not in taken else next(one for one in free if one not in taken)
                taken.add(self._names[key])
        for part in parts_of(record):
            if part.rank not in self._places:
                self._places[part.rank] = _Place(LogReader(part.reader.path))
            self._places[part.rank].read()
        return self._names

    def place(self, part: RankPart) -> _Place:
        """The place in one part of a record that was caught up with."""
        return self._places[part.rank]


def looks(
    record: Record, *, sites: Collection[str] = (), since: Cursor | None = None, with_magnitudes: bool = False
) -> Iterator[LookTable]:
    """Every table of a record, rank by rank; each is unpacked once and not kept.

    ``sites``: patterns as of ``site_filter``; none: all of them. ``since``: a cursor, which moves on; without one
    reading begins at the front. Raises RecordError for a table that is damaged.
    """
    cursor = since if since is not None else Cursor()
    names = cursor.catch_up(record)
    is_wanted = site_filter(sites)
    for part in parts_of(record):
        place = cursor.place(part)
        wanted: dict[int, list[tuple[int, str]]] = {}  # by number of the layout
        while place.tables < len(part.tables):
            step, payload = part.tables[place.tables]
            layout = part.layouts.get(number_of(payload))
            if layout is not None:  # else the frame that names it was damaged
                if layout.number not in wanted:
                    named = ((at, names.get(key, "")) for at, key in enumerate(layout.rows))
                    wanted[layout.number] = [(at, name) for at, name in named if name and is_wanted(name)]
                table = unpack(layout, payload, with_magnitudes=with_magnitudes)
                count = table.columns["count"]
                there = [one for one in wanted[layout.number] if not math.isnan(count[one[0]])]
                yield LookTable(part.rank, step, place.table_times[place.tables], table, there)
            place.tables += 1


def numbers(
    record: Record, *, sites: Collection[str] = (), stats: Collection[str] = (), since: Cursor | None = None
) -> Iterator[Row]:
    """Every number of every site: the stored columns and ``DERIVED``, with the values of ``record.series``.

    ``sites``: patterns (``site_filter``), ``stats``: names; none: all. A number that only some looks have, such as
    ``saturated`` or ``adam_rms``, gives a row only where it is one.
    """
    for look in looks(record, sites=sites, since=since):
        yield from rows_of(look, stats)


def rows_of(look: LookTable, stats: Collection[str] = ()) -> Iterator[Row]:
    """The numbers of one look, stored and derived, site by site; ``stats``: their names, none for all."""
    columns = [
        (sound(name), values, name in IN_EACH)
        for name, values in _columns(look.table).items()
        if not stats or name in stats
    ]
    for at, site in look.rows:
        for stat, values, is_always in columns:
            value = values[at]
            if is_always or not math.isnan(value):
                yield Row(look.rank, look.table.phase, look.step, look.time, site, stat, value)


def scalars(record: Record, *, since: Cursor | None = None) -> Iterator[Row]:
    """The numbers of each step, such as ``loss:NAME`` or ``lr``; NaN only of losses, as ``record.scalar`` tells them.

    Their time is that of the frame they were written in, less the seconds of the steps that follow in it.
    """
    for rows in steps(record, since=since):
        yield from rows


def steps(record: Record, *, since: Cursor | None = None) -> Iterator[list[Row]]:
    """The scalars of each step together, rank by rank: an empty list for a step that has none.

    With ``since`` the seconds of a step are those of the log: the ring's are of another clock.
    """
    cursor = since if since is not None else Cursor()
    cursor.catch_up(record)
    for part in parts_of(record):
        place = cursor.place(part)
        columns = [(sound(name), name.startswith("loss"), values) for name, values in part.series.items()]
        numbered = part.series.get("step", array("d"))
        logged = len(part.logged.get("step", ()))
        for at in range(place.steps, len(numbered)):
            start = (part.rank, "train", int(numbered[at]), _ended(place, part, at), "")
            told = place.early.get(numbered[at], set())
            left_out = {"step", *told, *(("seconds",) if at >= logged and since is not None else ())}
            rows = [
                Row(*start, name, values[at])
                for name, is_loss, values in columns
                if name not in left_out and not (is_absent(values[at]) if is_loss else math.isnan(values[at]))
            ]
            yield rows
            if at < logged:
                place.early.pop(numbered[at], None)
                place.steps += 1
            else:
                place.early[numbered[at]] = told | {row.stat for row in rows}


def _ended(place: _Place, part: RankPart, at: int) -> float:
    """When the step in that place ended; of those that only the ring of a run in progress, or killed, has by now, that
    is reckoned from the last one that was written."""
    known = place.step_times
    if at < len(known):
        return known[at]
    written = part.began_at if math.isfinite(part.began_at) else place.clock.path.stat().st_mtime
    latest = known[-1] if known else (place.table_times[-1] if place.table_times else written)
    return latest + sum(one for one in part.series["seconds"][len(known) : at + 1] if one > 0)


def check(record: Record, sites: Iterable[str], stats: Iterable[str]) -> None:
    """Look the patterns and stats up before anything is written, in a record that has any sites.

    Raises RecordError, with near names, for one that names nothing in the record.
    """
    names = [sound(name) for name in record.sites]
    if not names:
        return
    for pattern in sites:
        if not any(map(site_filter([pattern]), names)):
            near = ", ".join(nearest(pattern, names)) or "none"
            raise RecordError(f"no site {pattern!r} in {record.path} of {len(names)} sites; nearest: {near}")
    columns = {name for part in parts_of(record) for one in part.layouts.values() for name, _ in one.columns}
    known = [*sorted(columns), *DERIVED]
    for stat in stats:
        if stat not in known:
            raise RecordError(f"no stat {stat!r} in {record.path}: expected one of {', '.join(known)}")


def site_filter(patterns: Collection[str]) -> Callable[[str], bool]:
    """Whether a site has one of these names; in them ``*`` stands for part of a name, ``**`` for anything.

    ``fc*`` means outputs, ``**:grad`` gradients of parameters, ``layer4**`` all in and of layer4.
    """
    if isinstance(patterns, str):
        raise PlanError(f"sites={patterns!r} is a text: expected a list of patterns, such as [{patterns!r}]")
    signs = {"**": ".*", "*": "[^.:]*"}
    texts = ["".join(signs.get(one) or re.escape(one) for one in re.split(r"(\*\*|\*)", text)) for text in patterns]
    expression = re.compile("|".join(texts), re.DOTALL)
    return lambda name: not texts or expression.fullmatch(name) is not None


def parts_of(record: Record) -> list[RankPart]:
    """What each process of the run has written, in the order of ``record.ranks``."""
    return [record.part(rank) for rank in record.ranks]


def sound(name: str) -> str:
    """The name without lone surrogates, which JSON can hold and UTF-8 cannot: each becomes ``?``."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _columns(table: Table) -> dict[str, Sequence[float]]:
    """The stored columns of a table by name, and those that follow from them, where all that they need is there."""
    found: dict[str, Sequence[float]] = dict(table.columns)
    lines = range(len(table.layout.rows))
    for name in DERIVED:
        if all(one in table.columns for one in BY_NAME[name].needs):
            values = (value_of(table.columns, at, name) for at in lines)
            found[name] = array("d", [math.nan if value is None else value for value in values])
    return found


def _times(end: float, columns: dict[str, array[float]]) -> list[float]:
    """When each step of a series ended, if the last one did at ``end``."""
    found = []
    for seconds in reversed(columns.get("seconds", array("d", [0.0]) * len(columns["step"]))):
        found.append(end)
        end -= 0.0 if math.isnan(seconds) else seconds
    return found[::-1]
