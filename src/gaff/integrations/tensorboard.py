"""A record as event files that TensorBoard shows: scalars, histograms of magnitudes, findings. Needs no torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gaff.compat.extras import need
from gaff.errors import PlanError
from gaff.integrations.partners import STATS, Sender, as_text, tag
from gaff.integrations.rows import MAGNITUDES, LookTable, Row, looks, rows_of, steps
from gaff.record.run import Record
from gaff.record.statistics import BUCKETS, lower_edge

_LAST_EDGE = 128  # of float32
_EDGES = [*(lower_edge(bucket) for bucket in range(BUCKETS)), _LAST_EDGE]


class TensorBoard(Sender):
    """Writes what is new in a record with each ``send``, after a run or while it goes on. To be closed.

    Tags are ``loss/NAME``, ``run/lr``, ``site/stat`` and, of evaluation, ``site/eval_stat``; values are float32 (its
    server reads no other), with the times of the run. ``site/magnitudes`` is a histogram over powers of two: what lies
    between 0 and 1 is how many finite elements are from 1 to 2 in magnitude, within 3.3 %; zeros are in none. Findings
    are a text. With several ranks each has a folder of its own.
    """

    also = (MAGNITUDES,)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sites: Collection[str] = (),
        stats: Collection[str] = (*STATS, MAGNITUDES),
    ) -> None:
        """``folder``: without event files. Raises PlanError where it has some, or tensorboard is not installed."""
        self.folder = Path(folder)
        self._make = need("tensorboard.summary.writer.event_file_writer", "tensorboard").EventFileWriter
        self._protos = {
            name: need(f"tensorboard.compat.proto.{name}_pb2", "tensorboard")
            for name in ("event", "summary", "tensor", "tensor_shape", "types")
        }
        self._kinds = {
            name: need(f"tensorboard.plugins.{name}.metadata", "tensorboard").create_summary_metadata("", "")
            for name in ("histogram", "text")
        }
        if next(self.folder.rglob("*.tfevents.*"), None) is not None:
            raise PlanError(f"{str(self.folder)!r} holds event files already: expected a new folder, or remove them")
        super().__init__(sites, stats)
        self._writers: dict[int, Any] = {}
        self._latest = time.time()  # of what was sent; before that, now
        self._known: set[tuple[int, str]] = set()  # tags whose kind was told

    def _send(self, record: Record) -> int:
        """As ``send``, to the disk; histograms count as numbers."""
        count = 0
        for rows in steps(record, since=self._cursor):
            count += self._add_rows(record, rows)
        has_magnitudes = MAGNITUDES in self._stats
        for look in looks(record, sites=self._sites, since=self._cursor, with_magnitudes=has_magnitudes):
            count += self._add_rows(record, list(rows_of(look, self._stats)))
            count += self._add_histograms(record, look) if has_magnitudes else 0

        def write(found: list[list[str]]) -> None:
            tensor = self._tensor("DT_STRING", string_val=[as_text(found).encode()])
            value = self._value(min(record.ranks), "findings", "text", tensor)
            self._write(record, min(record.ranks), record.steps, self._latest, [value])

        self._findings.tell(record, write)
        for writer in self._writers.values():
            writer.flush()
        return count

    def _close(self) -> None:
        """Close the event files, and end their writers' threads; what was sent is complete on the disk without it."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add_rows(self, record: Record, rows: list[Row]) -> int:
        """Write the numbers of one step or look as one event; returns how many."""
        values = [self._protos["summary"].Summary.Value(tag=tag(row), simple_value=row.value) for row in rows]
        if rows:
            self._write(record, rows[0].rank, rows[0].step, rows[0].time, values)
        return len(values)

    def _add_histograms(self, record: Record, look: LookTable) -> int:
        """Write the histograms of one look, each a tensor of ``[buckets, 3]``; returns how many."""
        values = []
        for at, site in look.rows:
            bins = bins_of(look.table.shares(at), look.table.columns["count"][at])
            if bins:
                row = Row(look.rank, look.table.phase, look.step, look.time, site, MAGNITUDES, math.nan)
                flat = [number for one in bins for number in one]
                tensor = self._tensor("DT_DOUBLE", (len(bins), 3), double_val=flat)
                values.append(self._value(look.rank, tag(row), "histogram", tensor))
        if values:
            self._write(record, look.rank, look.step, look.time, values)
        return len(values)

    def _value(self, rank: int, name: str, kind: str, tensor: Any) -> Any:
        """A tensor under a tag, with the kind of plugin that shows it: that is told once a tag."""
        is_new = (rank, name) not in self._known
        self._known.add((rank, name))
        return self._protos["summary"].Summary.Value(
            tag=name, tensor=tensor, metadata=self._kinds[kind] if is_new else None
        )

    def _tensor(self, dtype: str, shape: tuple[int, ...] = (), **values: Any) -> Any:
        shapes = self._protos["tensor_shape"].TensorShapeProto
        dims = shapes(dim=[shapes.Dim(size=one) for one in shape])
        return self._protos["tensor"].TensorProto(
            dtype=self._protos["types"].DataType.Value(dtype), tensor_shape=dims, **values
        )

    def _write(self, record: Record, rank: int, step: int, when: float, values: list[Any]) -> None:
        """Add values to the event file of their rank, which is made when it is first needed."""
        if rank not in self._writers:
            folder = self.folder / f"rank{rank}" if len(record.ranks) > 1 else self.folder
            self._writers[rank] = self._make(str(folder))
        self._latest = when
        summary = self._protos["summary"].Summary(value=values)
        self._writers[rank].add_event(self._protos["event"].Event(wall_time=when, step=step, summary=summary))


def bins_of(shares: list[float], count: float) -> list[tuple[float, float, float]]:
    """The buckets of one histogram: left edge and right edge, both as powers of two, and how many elements lie between.

    They go from the first bucket that has any to the last; an empty list where none has. ``shares``: of all buckets, as
    a table holds them; ``count``: finite elements.
    """
    filled = [bucket for bucket, share in enumerate(shares) if share > 0]
    if not filled or count <= 0:
        return []
    return [
        (float(_EDGES[bucket]), float(_EDGES[bucket + 1]), shares[bucket] * count)
        for bucket in range(filled[0], filled[-1] + 1)
    ]
