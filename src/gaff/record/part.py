"""What one process of a run has written, read as it grows. Needs no torch."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

from gaff.errors import RecordError
from gaff.record.finding import Finding
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogReader
from gaff.record.matrix import Layout, Table, number_of, unpack, unpack_series

_MOST_CELLS = 1 << 27  # of the series of one process
_MOST_DEPTH = 20  # of evidence


@dataclass
class RankPart:
    """What one process of the run has written."""

    rank: int
    reader: LogReader
    layouts: dict[int, Layout] = field(default_factory=dict)
    tables: list[tuple[int, bytes]] = field(default_factory=list)  # step, payload
    series: dict[str, array[float]] = field(default_factory=dict)
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    parsed: dict[tuple[int, bool], Table] = field(default_factory=dict)

    def read(self) -> None:
        """What has come since the last time."""
        for frame in self.reader.frames():
            if frame.kind == LAYOUT:
                layout = Layout.from_json(frame.json())
                self.layouts[layout.number] = layout
            elif frame.kind == MATRIX:
                self.tables.append((frame.step, frame.payload))
            elif frame.kind == SERIES:
                self._add_series(unpack_series(frame.payload))
            elif frame.kind == EVENT:
                self.events.append((frame.step, _checked(frame.json())))

    def _add_series(self, columns: dict[str, array[float]]) -> None:
        if not all(math.isfinite(step) and step >= 0 for step in columns.get("step", [math.nan])):
            raise RecordError("a series has no steps, or steps that are no numbers")
        known = len(self.series.get("step", ()))
        rows = len(columns.get("step", ()))
        if (known + rows) * len({*self.series, *columns}) > _MOST_CELLS:
            raise RecordError(f"series of more than {_MOST_CELLS} numbers are none of gaff's")
        for name, values in columns.items():
            if name not in self.series:
                self.series[name] = array("d", [math.nan]) * known
            self.series[name].extend(values)
        for name, values in self.series.items():
            if name not in columns:
                values.extend([math.nan] * rows)

    def table(self, at: int, *, with_magnitudes: bool = False) -> Table | None:
        """None where its layout is not known: the frame that names it was damaged."""
        known = self.parsed.get((at, with_magnitudes))
        if known is None:
            payload = self.tables[at][1]
            layout = self.layouts.get(number_of(payload))
            if layout is None:
                return None
            known = self.parsed[at, with_magnitudes] = unpack(layout, payload, with_magnitudes=with_magnitudes)
        return known

    def latest(self, kind: str) -> dict[str, Any] | None:
        return next((one for _, one in reversed(self.events) if one.get("kind") == kind), None)


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    """Raises RecordError for an event whose parts are not what they must be."""
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
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (left == 0 or any(_is_deep(one, left - 1) for one in inner))
