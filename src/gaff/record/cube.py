"""All numbers of a run at once, as arrays: what pages and exports read. Needs numpy (``gaff[page]``), not torch.

The log holds one table a look. A ``Cube`` holds, for each number, one row a site and one column a look, or a bucket of
looks where there are more than are wanted: of those the lowest, the highest and the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gaff.errors import RecordError
from gaff.record.matrix import Layout, number_of, phase_of, raw
from gaff.record.run import Part
from gaff.record.sample import Key
from gaff.statistics.rows import BUCKETS

_TYPES = {"f": "<f4", "d": "<f8"}
_DERIVED = ("rms", "nonfinite")
_NEEDED = ("count", "mean", "std", "nan", "positive_inf", "negative_inf")


@dataclass
class Cube:
    """Numbers of one group of sites in one phase of one process.

    ``first``, ``last``: the steps that a column is of. ``lowest``, ``highest``, ``latest``: by name, float32
    [sites, columns], NaN where there is none; NaN and infinities of the values themselves are counted in columns of
    their own. ``marks``: the columns of ``magnitudes``, uint8 [sites, 64, marks].
    """

    group: str
    phase: str
    keys: list[Key] = field(default_factory=list)
    first: Any = None
    last: Any = None
    lowest: dict[str, Any] = field(default_factory=dict)
    highest: dict[str, Any] = field(default_factory=dict)
    latest: dict[str, Any] = field(default_factory=dict)
    marks: Any = None
    magnitudes: Any = None

    @property
    def is_bucketed(self) -> bool:
        """Whether some column is of several looks."""
        return bool((self.first != self.last).any())


def read_cubes(part: Part, *, columns: int, marks: int, begin: int = 0, end: int | None = None) -> list[Cube]:
    """The cubes of a process, of steps ``begin`` to ``end``: at most ``columns`` wide, magnitudes at ``marks`` looks.

    ``columns``, ``marks``: at least 1. Tables whose layout was lost are left out; raises RecordError for damaged ones.
    """
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for at, (step, payload) in enumerate(part.tables):
        layout = part.layouts.get(number_of(payload))
        if layout is not None and not {name for name, _ in layout.columns}.issuperset(_NEEDED):
            raise RecordError(f"a table has columns {[name for name, _ in layout.columns][:5]}: expected {_NEEDED}")
        if layout is not None and begin <= step and (end is None or step <= end):
            groups.setdefault((layout.group, phase_of(payload)), []).append((step, at))
    return [
        _cube(part, group, phase, sorted(places), columns, marks)
        for (group, phase), places in sorted(groups.items(), key=lambda one: (one[0][1] != "train", one[0][0]))
    ]


def _cube(part: Part, group: str, phase: str, places: Sequence[tuple[int, int]], columns: int, marks: int) -> Cube:
    layouts = {number_of(part.tables[at][1]) for _, at in places}
    known = [part.layouts[number] for number in sorted(layouts)]
    cube = Cube(group, phase, list(dict.fromkeys(key for layout in known for key in layout.rows)))
    steps = sorted({step for step, _ in places})
    width = min(columns, len(steps))
    bucket = {step: at * width // len(steps) for at, step in enumerate(steps)}
    edges = np.array([bucket[step] for step in steps])
    cube.first = np.array(steps)[np.searchsorted(edges, np.arange(width), "left")]
    cube.last = np.array(steps)[np.searchsorted(edges, np.arange(width), "right") - 1]
    wanted = {steps[at * len(steps) // min(marks, len(steps))] for at in range(min(marks, len(steps)))}
    cube.marks = np.array(sorted(wanted))
    has_magnitudes = any(layout.has_magnitudes for layout in known)
    cube.magnitudes = np.zeros((len(cube.keys), BUCKETS, len(wanted) if has_magnitudes else 0), np.uint8)
    _fill(cube, part, places, bucket)
    return cube


def _fill(cube: Cube, part: Part, places: Iterable[tuple[int, int]], bucket: dict[int, int]) -> None:
    """Column by column: what of a bucket is lowest, highest, last."""
    index = {key: at for at, key in enumerate(cube.keys)}
    names = dict.fromkeys(
        name
        for number in {number_of(part.tables[at][1]) for _, at in places}
        for name, _ in part.layouts[number].columns
    )
    shape = (len(cube.keys), len(cube.first))
    for table in (cube.lowest, cube.highest, cube.latest):
        table.update({name: np.full((shape[1], shape[0]), np.nan, np.float32) for name in (*names, *_DERIVED)})
    rows = {number: np.array([index[key] for key in layout.rows], int) for number, layout in part.layouts.items()
            if layout.group == cube.group and all(key in index for key in layout.rows)}  # fmt: skip
    mark_of = {int(step): at for at, step in enumerate(cube.marks)}
    for step, at in places:
        payload = part.tables[at][1]
        number = number_of(payload)
        layout = part.layouts[number]
        column = bucket[step]
        for name, values in _columns(cube, layout, payload, rows[number], mark_of.get(step)).items():
            here = rows[number]
            for table, join in ((cube.lowest, np.fmin), (cube.highest, np.fmax)):
                table[name][column, here] = join(table[name][column, here], values)
            is_known = ~np.isnan(values)
            cube.latest[name][column, here[is_known]] = values[is_known]
    for table in (cube.lowest, cube.highest, cube.latest):
        for name in table:
            table[name] = np.ascontiguousarray(table[name].T)


def _columns(cube: Cube, layout: Layout, payload: bytes, rows: Any, mark: int | None) -> dict[str, Any]:
    """The columns of a table; its magnitudes go into the cube where they are wanted."""
    has_magnitudes = layout.has_magnitudes and mark is not None
    _, data = raw(layout, payload, with_magnitudes=has_magnitudes)
    count = len(layout.rows)
    at = 0
    found: dict[str, Any] = {}
    for name, code in layout.columns:
        values = np.frombuffer(data, _TYPES[code], count, at)
        at += values.nbytes
        found[name] = values.astype(np.float32)
    found["rms"] = np.hypot(found["mean"], found["std"])
    found["nonfinite"] = found["nan"] + found["positive_inf"] + found["negative_inf"]
    absent = np.isnan(found["count"])
    for values in found.values():
        values[absent] = np.nan
    if has_magnitudes:
        shares = np.frombuffer(data, np.uint8, BUCKETS * count, at).reshape(BUCKETS, count)
        cube.magnitudes[rows[~absent], :, mark] = shares.T[~absent]  # another table of this step may have the others
    return found
