"""What the senders to trackers have in common: the partner's package, names of metrics, points, findings as text.

A ``Sender`` reads a record with a ``Cursor``, so that each ``send`` continues where the last one stopped. What it reads
are points, each with the numbers of one rank and step, because trackers take all numbers of a step in one call.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from gaff.errors import PlanError
from gaff.integrations.rows import Cursor, Row, check, looks, parts_of, rows_of, site_filter, steps
from gaff.record.run import Record
from gaff.views.run_text import body_of

# What is sent where nobody chooses: all thirteen numbers of a thousand sites are more than a dashboard can show.
STATS = ("mean", "std", "rms", "zeros", "nonfinite", "update_ratio")
_SETTLED = 16  # tables after which a run has shown what there is to look at


_Sender = TypeVar("_Sender", bound="Sender")


class Point(NamedTuple):
    """Numbers of one rank that belong together, by their names."""

    rank: int
    step: int
    time: float
    values: dict[str, float]


def refuse_options(module: str, run: Any, options: Mapping[str, Any]) -> None:
    """Refuse ``options`` of a new run where one is active: they would have no effect. Raises PlanError then."""
    if run is not None and options:
        raise PlanError(
            f"{', '.join(f'{name}={value!r}' for name, value in options.items())}: a run of {module} is active and "
            "would be used; finish it first, or leave the options out"
        )


def points(record: Record, sites: Collection[str], stats: Collection[str], since: Cursor) -> Iterator[Point]:
    """What is new in a record: one point for each step, of its scalars, then one for each table."""
    for rows in steps(record, since=since):
        if rows:
            yield _point(rows)
    for look in looks(record, sites=sites, since=since):
        rows = list(rows_of(look, stats))
        if rows:
            yield _point(rows)


def tag(row: Row) -> str:
    """The name of a number in a tracker, without the rank.

    It is ``site/stat``, or ``site/eval_stat`` in evaluation; of a scalar of the run ``loss/NAME`` or ``run/lr``. What a
    module of the name ``loss`` or ``run`` returns has its port in it: ``loss:output/mean``.
    """
    if not row.site:
        return row.stat.replace(":", "/", 1) if row.stat.startswith("loss:") else f"run/{row.stat}"
    site = f"{row.site}:output" if row.site in ("loss", "run") else row.site
    return f"{site}/{'' if row.phase == 'train' else f'{row.phase}_'}{row.stat}"


def prefix(rank: int) -> str:
    """What stands before the names of a rank's numbers, in a tracker that has one place for all ranks.

    Rank 0 has plain names, so that those of a run of one process are the same.
    """
    return f"gaff/rank{rank}/" if rank else "gaff/"


class Sender(ABC):
    """Sends what is new in a record with each ``send``, after a run or while it goes on. To be closed.

    One sender is for one record, and keeps where in it the last ``send`` stopped; whoever follows a run calls
    ``record.refresh()`` before each ``send``. ``sites``: patterns, ``stats``: names of the numbers to be sent, as
    ``gaff.integrations.rows.numbers`` takes them. A context, which closes at its end.
    """

    also: Collection[str] = ()  # what may be chosen beside the numbers of sites

    def __init__(self, sites: Collection[str], stats: Collection[str]) -> None:
        """Raises PlanError for a text where several are expected."""
        if isinstance(stats, str):
            raise PlanError(f"stats={stats!r} is a text: expected a list of names, such as [{stats!r}]")
        site_filter(sites)
        self._sites, self._stats = sites, stats
        self._cursor = Cursor()
        self._findings = Findings()
        self._is_closed = False
        self._is_checked = False

    def send(self, record: Record) -> int:
        """Send what has come since the last time; returns how many numbers were new. Waits for whoever takes them.

        Raises RecordError, with near names, where ``sites`` or ``stats`` name nothing in the record, and PlanError for
        another record than the first time, and after ``close``. After an error, what was not sent is sent the next
        time.
        """
        if self._is_closed:
            raise PlanError(f"this {type(self).__name__} is closed: expected a new one")
        tables = sum(len(part.tables) for part in parts_of(record))
        if not self._is_checked and (record.is_complete or tables >= _SETTLED):
            check(record, self._sites, [one for one in self._stats if one not in (*STATS, *self.also)])
            self._is_checked = True
        return self._send(record)

    def close(self) -> None:
        """Finish what was made here; your own stays open. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    @abstractmethod
    def _send(self, record: Record) -> int:
        """As ``send``."""

    @abstractmethod
    def _close(self) -> None:
        """As ``close``, called once."""

    def _points(self, record: Record) -> Iterator[tuple[Point, dict[str, float]]]:
        """What is new, with the names that it has where all ranks are in one place."""
        for point in points(record, self._sites, self._stats, self._cursor):
            start = prefix(point.rank)
            yield point, {f"{start}{name}": value for name, value in point.values.items()}

    def __enter__(self: _Sender) -> _Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Findings:
    """Tells the findings of a record when they are others than the last time.

    Trackers keep every table or text that they are given, so the same findings are not sent twice.
    """

    def __init__(self) -> None:
        self._told = "[]"

    def tell(self, record: Record, send: Callable[[list[list[str]]], object]) -> None:
        """Call ``send`` with severity, rule, site, rank and text of each, worst first, unless nothing has changed.

        What it could not send, since it raised, is told again the next time.
        """
        found = record.findings
        told = json.dumps([one.to_dict() for one in found], default=str)
        if told != self._told:
            send([[one.severity, one.rule, one.address, str(one.rank), "\n".join(body_of(one))] for one in found])
            self._told = told


def as_text(findings: list[list[str]]) -> str:
    """Findings as Markdown in which nothing is markup but the title: every other line is indented as code."""
    blocks = []
    for severity, rule, site, rank, body in findings:
        lines = [f"at {site}, rank {rank}", *body.split("\n")]
        code = "\n".join(f"    {piece}" for line in lines for piece in line.splitlines() or [""])
        blocks.append(f"**{severity}: {rule if rule.isidentifier() else 'finding'}**\n\n{code}")
    return "\n\n".join(blocks) or "nothing found"


def _point(rows: list[Row]) -> Point:
    return Point(rows[0].rank, rows[0].step, rows[0].time, {tag(row): row.value for row in rows})
