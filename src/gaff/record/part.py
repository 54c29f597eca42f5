"""What one process of a run has written, read as it grows. Needs no torch.

A log may be damaged, or come from somebody else: what is read is checked, and limited in size and depth, before it is
handed on, so that a reader gets a ``RecordError`` instead of a surprise later or a lack of memory.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaff.errors import RecordError
from gaff.record.absent import ABSENT
from gaff.record.finding import Finding
from gaff.record.flight import ENDING, read_ring
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogReader
from gaff.record.matrix import Layout, Table, number_of, unpack, unpack_series

_MOST_CELLS = 1 << 27  # of the series of one process
_MOST_DEPTH = 20  # of evidence


@dataclass
class RankPart:
    """What one process of the run has written so far.

    A ``Record`` makes and owns one for each log. ``rank``: its number in the record, ``own``: the rank in the name
    of its file, ``generation``: how many others with that rank came before it; ``began_at``, ``ended_at``: when it
    wrote its first frame, and that it ended, in seconds since 1970. ``read`` only ever adds. ``tables`` are step
    and payload of each MATRIX frame in the order of the file, still compressed: ``table`` unpacks one when it is
    asked for and keeps it in ``parsed``, by its place and by whether its magnitudes were wanted. ``layouts`` are by
    number. The columns of ``series`` are always of one length, and ``step`` is one of them; the last steps are
    those of the ring where a process left before its log had them. ``events`` are JSON objects whose parts were
    checked, each with its step.
    """

    rank: int
    reader: LogReader
    own: int = 0
    generation: int = 0
    began_at: float = math.inf
    ended_at: float = math.inf
    layouts: dict[int, Layout] = field(default_factory=dict)
    tables: list[tuple[int, bytes]] = field(default_factory=list)  # step, payload
    logged: dict[str, array[float]] = field(default_factory=dict)  # the series without what the ring has
    series: dict[str, array[float]] = field(default_factory=dict)
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    parsed: dict[tuple[int, bool], Table] = field(default_factory=dict)

    def read(self) -> None:
        """Take in every frame that was completed since the last call. Raises RecordError for what is none of gaff's."""
        for frame in self.reader.frames():
            if frame.kind == LAYOUT:
                layout = Layout.from_json(frame.json())
                self.layouts[layout.number] = layout
            elif frame.kind == MATRIX:
                self.tables.append((frame.step, frame.payload))
            elif frame.kind == SERIES:
                self._add_series(self.logged, unpack_series(frame.payload))
            elif frame.kind == EVENT:
                self.events.append((frame.step, _checked(frame.json())))
                self.ended_at = frame.time if self.events[-1][1].get("kind") == "end" else self.ended_at
            self.began_at = min(self.began_at, frame.time)
        self.series = self.logged
        if late := _late(self.reader.path.with_suffix(ENDING), max(self.logged.get("step", ()), default=-1.0)):
            self.series = {name: values[:] for name, values in self.logged.items()}
            self._add_series(self.series, late)

    def _add_series(self, known: dict[str, array[float]], columns: dict[str, array[float]]) -> None:
        """Append rows to series; where a column is missing, before or in these rows, it is filled with ``ABSENT``.

        Raises RecordError for steps that are not finite numbers from 0 on, and where the series of this process would
        hold more than 2**27 numbers.
        """
        if not all(math.isfinite(step) and step >= 0 for step in columns.get("step", [math.nan])):
            raise RecordError("a series has no steps, or steps that are no numbers")
        before, rows = len(known.get("step", ())), len(columns.get("step", ()))
        if (before + rows) * len({*known, *columns}) > _MOST_CELLS:
            raise RecordError(f"series of more than {_MOST_CELLS} numbers are none of gaff's")
        for name, values in columns.items():
            if name not in known:
                known[name] = array("d", [ABSENT]) * before
            known[name].extend(values)
        for name, values in known.items():
            if name not in columns:
                values.extend([ABSENT] * rows)

    def table(self, at: int, *, with_magnitudes: bool = False) -> Table | None:
        """The table at a place of ``tables``; None where its layout is not known: the frame that names it was damaged.

        ``with_magnitudes``: also the 64 columns of magnitudes; without them decompression stops before they come.
        Raises RecordError where the payload does not fit the layout.
        """
        known = self.parsed.get((at, with_magnitudes))
        if known is None:
            payload = self.tables[at][1]
            layout = self.layouts.get(number_of(payload))
            if layout is None:
                return None
            known = self.parsed[at, with_magnitudes] = unpack(layout, payload, with_magnitudes=with_magnitudes)
        return known

    @property
    def trains(self) -> bool:
        """Whether an optimizer has stepped in this process so far."""
        return "lr" in self.logged

    @property
    def length(self) -> int:
        """How many steps the log tells one by one."""
        return len(self.logged.get("step", ()))

    def was_started_by(self, other: RankPart) -> bool:
        """Whether this process was begun by another one of the command, or by one that had been; as both have told."""
        begun, theirs = self.latest("begin") or {}, (other.latest("begin") or {}).get("process")
        known = begun.get("started_by")
        return isinstance(theirs, int) and isinstance(known, list) and theirs in known

    def latest(self, kind: str) -> dict[str, Any] | None:
        """The latest event of one kind, such as ``model``, ``progress`` or ``end``; None where there is none."""
        return next((one for _, one in reversed(self.events) if one.get("kind") == kind), None)


def _late(ring: Path, last: float) -> dict[str, array[float]]:
    """The completed steps of a ring after step ``last``, as columns; empty where there are none, or no ring to read.

    A loss that the ring has as NaN may be one that nobody waited for: it is left out.
    """
    try:
        rows = [one for one in read_ring(ring) if one.step > last and one.seconds > 0] if ring.exists() else []
    except RecordError:  # ``Record.flight`` says why
        return {}
    names = dict.fromkeys(name for row in rows for name in row.losses)
    columns = {"step": [float(row.step) for row in rows], "seconds": [row.seconds for row in rows],
               "lr": [row.lr for row in rows]}  # fmt: skip
    for name in names:
        values = (row.losses.get(name, math.nan) for row in rows)
        columns[f"loss:{name}"] = [ABSENT if math.isnan(value) else value for value in values]
    return {name: array("d", values) for name, values in columns.items()} if rows else {}


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    """The event itself, once its parts have the types that readers rely on.

    Raises RecordError for an overhead that is no sensible number, for a finding that is none, and for evidence nested
    more than 20 deep.
    """
    kinds: dict[str, Any] = {"kind": str, "notes": list, "overhead": (int, float), "findings": list, "name": str}
    for name, kind in kinds.items():
        if name in event and not isinstance(event[name], kind):
            raise RecordError(f"an event has {name!r} {event[name]!r:.50}: expected {kind}")
    if not abs(event.get("overhead", 0.0)) < 1e9:
        raise RecordError(f"an event has an overhead of {event['overhead']!r:.50}: expected a share of the time")
    for finding in event.get("findings", ()):
        if not isinstance(finding, dict):
            raise RecordError(f"an event has a finding {finding!r:.50}: expected an object")
        Finding.from_dict(finding)
        if _is_deep(finding.get("evidence"), _MOST_DEPTH):
            raise RecordError(f"a finding has evidence nested more than {_MOST_DEPTH} deep")
    return event


def _is_deep(value: Any, left: int) -> bool:
    """Whether ``value`` nests non-empty dicts and lists more than ``left`` levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (left == 0 or any(_is_deep(one, left - 1) for one in inner))
