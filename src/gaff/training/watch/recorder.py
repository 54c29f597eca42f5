"""From rows of one look to frames of the record; runs on the writer's thread.

A look comes as rows of 74 numbers, one for each tensor stream, and is stored as tables whose columns are statistics
(``gaff.record.statistics``). Which line of a table is which stream is written once, as a layout, and again only when a
stream turns up that has no line yet.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaff.record.finding import Finding
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogWriter
from gaff.record.matrix import Layout, pack, pack_series, to_bytes
from gaff.record.sample import Key, Sample, port_of
from gaff.record.statistics import (
    ACTIVATIONS,
    BY_NAME,
    COUNT,
    PARAMETERS,
    SAMPLED,
    WIDTH,
    Statistic,
    columns_of,
)

_GROUPS = dict.fromkeys(("param", "grad", "update"), PARAMETERS)  # by port
_OCTAVES = 24
_ABSENT = torch.full((1, WIDTH), float("nan"), dtype=torch.float64, device="cpu")


class Recorder:
    """Writes looks, series of steps and events to one log; lays a table out anew when its rows change.

    ``make`` returns the path of a new log, or None where no record is kept: then nothing is written. The log is made by
    ``open``; events from before wait for it. Called on one thread at a time, the writer's, but for the beginning (when
    the writer has nothing to do yet) and the end of a run. Raises OSError when the disk is full.
    """

    def __init__(self, make: Callable[[], Path | None]) -> None:
        self._make = make
        self._log: LogWriter | None = None
        self._waiting: list[tuple[str, int, dict[str, Any]]] = []
        self._is_closed = False
        self._layouts: dict[str, Layout] = {}  # the latest of each group
        self._made = 0

    def open(self) -> None:
        """Make the log, once. Raises OSError where that cannot be."""
        path = self._make() if self._log is None and not self._is_closed else None
        if path is not None:
            self._log = LogWriter(path)
            for kind, step, told in self._waiting:
                self.event(kind, step, **told)
        self._waiting = []

    def look(self, sample: Sample, keys: Sequence[Key], rows: Tensor) -> None:
        """Write one sampled step; ``rows``: [n, 74], float64, on the CPU, in the order of ``keys``.

        What belongs to a parameter is written under the step of its own optimizer, which may have made fewer than
        others. Writes nothing before there is a log.
        """
        if self._log is None:
            return
        groups: dict[tuple[str, int], dict[Key, int]] = {}
        for at, key in enumerate(keys):
            group = _GROUPS.get(port_of(key[1]), ACTIVATIONS)
            owner = sample.parameters.get((key[0], f"{key[1].rpartition(':')[0]}:param"))
            step = owner.step if owner is not None and group == PARAMETERS else sample.step
            groups.setdefault((group, step), {})[key] = at
        for (group, step), places in groups.items():
            layout = self._layout(group, places, sample.step)
            wanted = [places.get(key, -1) for key in layout.rows]
            table = torch.cat([rows, _ABSENT])[torch.tensor(wanted, device="cpu")]
            columns = [_column(BY_NAME[name], table, sample, layout.rows) for name, _ in columns_of(group)]
            self._log.write(MATRIX, pack(layout.number, sample.phase, [*columns, _magnitudes(table)]), step)

    def series(self, columns: dict[str, list[float]]) -> None:
        """Write numbers of consecutive steps: columns of equal length by name, ``step`` among them."""
        if self._log is not None and columns.get("step"):
            self._log.write(SERIES, pack_series(columns), int(columns["step"][0]))

    def event(self, kind: str, step: int = 0, **told: Any) -> None:
        """Write one event, with what is told of it as JSON; before there is a log it waits for it."""
        if self._log is not None:
            self._log.write_json(EVENT, {"kind": kind, **told}, step)
        elif not self._is_closed:
            self._waiting.append((kind, step, told))

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Write all findings as they are; readers take the latest."""
        self.event("findings", step, findings=[one.to_dict() for one in findings])

    def close(self) -> None:
        """Close the log; from here on nothing is written, and events are dropped."""
        self._is_closed = True
        if self._log is not None:
            self._log.close()
            self._log = None

    def _layout(self, group: str, keys: Iterable[Key], step: int) -> Layout:
        """The layout for a table of these rows: the group's last one if it has all of them, else a longer one.

        Rows are added and never taken away, so that layouts stay few; a row that a table has no numbers for is filled
        with NaN. A new layout is written here, before the table that refers to it.
        """
        known = self._layouts.get(group)
        if known is None or any(key not in known.index for key in keys):
            rows = tuple(dict.fromkeys((*(known.rows if known is not None else ()), *keys)))
            known = self._layouts[group] = Layout(self._made, group, rows, columns_of(group), has_magnitudes=True)
            self._made += 1
            assert self._log is not None
            self._log.write_json(LAYOUT, known.to_json(), step)
        return known


def _column(statistic: Statistic, rows: Tensor, sample: Sample, keys: Sequence[Key]) -> bytes:
    """The bytes of one stored column: from a slot of ``rows``, [n, 74], or of what the sample knows besides.

    A mean, an extreme or a deviation of no element is NaN; counts and shares of none are 0.
    """
    if statistic.slot is None:
        return to_bytes(statistic.code, [_number(sample, statistic.name, key) for key in keys])
    count, values = rows[:, COUNT], rows[:, statistic.slot]
    if statistic.kind in ("share", "deviation"):
        values = values / count.clamp(min=1)
    if statistic.kind == "deviation":
        values = values.clamp(min=0).sqrt()
    if statistic.kind in ("moment", "deviation"):
        values = torch.where(count == 0, float("nan"), values)
    return bytes_of(values if statistic.code == "d" else values.float())


def _magnitudes(rows: Tensor) -> bytes:
    """The shares of the 64 buckets of magnitudes, a byte each, bucket by bucket.

    The scale is logarithmic: 255 is all, 1 is a share of 2**-24 or less, 0 is none.
    """
    shares = rows[:, SAMPLED + 1 :] / rows[:, SAMPLED : SAMPLED + 1].clamp(min=1)
    scaled = (255 + shares.log2() * (254 / _OCTAVES)).round().clamp(1, 255)
    return bytes_of(torch.where(shares > 0, scaled, 0.0).to(torch.uint8).t())


def bytes_of(values: Tensor, most: int = sys.maxsize) -> bytes:
    """A copy of a CPU tensor's elements as bytes, in the order of its indices, without a detour by NumPy.

    ``most`` bytes of it, where less than all is wanted.
    """
    values = values.contiguous()
    size = min(values.numel() * values.element_size(), most)
    return ctypes.string_at(values.data_ptr(), size) if size else b""


def memory_of(values: Tensor) -> Any:
    """The elements of a contiguous CPU tensor as something to copy from, as long as the tensor is held: no copy yet.

    To ask for memory of thousands of bytes between many small tensors takes long (glibc puts freed ones together then).
    """
    return (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())


def _number(sample: Sample, name: str, key: Key) -> float:
    """One statistic of a stream that is in no row, such as ``dead`` or ``update_ratio``; NaN where there is none."""
    nothing = float("nan")
    if name in ("saturated", "entropy", "first_key", "logit", "choice"):
        return sample.shares.get((name, key), nothing)
    if name in ("load", "idle", "dropped"):
        load = sample.loads.get(key)
        return nothing if load is None else load.number(name)
    if name in ("dead", "outlier"):
        units = sample.units.get(key)
        if units is None:
            return nothing
        return units.dead / units.count if name == "dead" else units.outlier
    if port_of(key[1]) != "param":
        return nothing
    known = sample.parameters.get(key)
    if name == "update_ratio":
        weight, update = sample.rows.get(key), sample.of(key, "update")
        return update.rms / weight.rms if weight and update and weight.count and weight.rms else nothing
    value = getattr(known, name, None) if known is not None else None
    return nothing if value is None else float(value)
