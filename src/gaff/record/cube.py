"""All numbers of a run at once, as arrays: what pages and exports read. Needs numpy (``gaff[page]``), not torch.

The log holds one table a look. A ``Cube`` holds, for each number, one row a site and one column a look, or a bucket of
looks where there are more than are wanted: of those the lowest, the highest and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from gaff.errors import RecordError
from gaff.record.matrix import Layout, number_of, phase_of, raw
from gaff.record.part import RankPart
from gaff.record.sample import Key
from gaff.record.statistics import BUCKETS, BY_NAME, STATISTICS

_TYPES = {"f": "<f4", "d": "<f8"}
_DERIVED = tuple(one for one in STATISTICS if one.rule is not None and one.ends)  # those that a page keeps
WHEN = "step"  # beside them, by the name of a number: the step of the look
_NEEDED = ("count", *dict.fromkeys(name for one in _DERIVED for name in one.needs))


@dataclass
class Cube:
    """Numbers of one group of sites in one phase of one process.

    ``first``, ``last``: the first and the last step of each column. ``lowest``, ``highest``, ``latest``: by name,
    float32 [sites, columns], NaN where there is none; NaN and infinities of the values themselves are counted in
    columns of their own; by ``WHEN`` the step. ``marks``: the steps of the columns of ``magnitudes``, uint8 [sites, 64,
    marks]. Sites are in the order of ``keys``.
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


class Cache(dict[Any, Any]):
    """Columns that were made of the same tables before: a run that grows is read on, not anew.

    Owned by who reads the same run again and again (a live page), and given to ``read_cubes`` each time.
    """

    def keep(self, used: set[Any]) -> None:
        """Forget all but these keys: columns of other buckets, or of fewer sites, are not asked for again."""
        for key in self.keys() - used:
            del self[key]


def read_cubes(
    part: RankPart, *, columns: int, marks: int, begin: int = 0, end: int | None = None, cache: Cache | None = None
) -> list[Cube]:
    """The cubes of a process, of steps ``begin`` to ``end``: at most ``columns`` wide, magnitudes at ``marks`` looks.

    ``columns``, ``marks``: at least 1. Where there are more looks, a column is of 2, 4, 8 ... of them. Tables whose
    layout was lost are left out; raises RecordError for damaged ones.
    """
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for at, (step, payload) in enumerate(part.tables):
        layout = part.layouts.get(number_of(payload))
        if layout is not None and not {name for name, _ in layout.columns}.issuperset(_NEEDED):
            raise RecordError(f"a table has columns {[name for name, _ in layout.columns][:5]}: expected {_NEEDED}")
        if layout is not None and begin <= step and (end is None or step <= end):
            groups.setdefault((layout.group, phase_of(payload)), []).append((step, at))
    known: Cache = cache if cache is not None else Cache()
    used: set[Any] = set()
    ordered = sorted(groups.items(), key=lambda one: (one[0][1] != "train", one[0][0]))
    cubes = [_cube(part, name, sorted(places), (columns, marks), (known, used)) for name, places in ordered]
    known.keep(used)
    return cubes


def _cube(
    part: RankPart,
    name: tuple[str, str],
    places: list[tuple[int, int]],
    room: tuple[int, int],
    store: tuple[Cache, set[Any]],
) -> Cube:
    """One cube, of the tables at ``places`` (step, place in ``part.tables``), sorted by step.

    ``name``: group and phase; ``room``: the most columns and marks; ``store``: the cache, and the keys used of it so
    far. Later layouts may have more sites: the cube has those of all, in the order in which they turned up.
    """
    numbers = sorted({number_of(part.tables[at][1]) for _, at in places})
    layouts = [part.layouts[number] for number in numbers]
    cube = Cube(*name, list(dict.fromkeys(key for layout in layouts for key in layout.rows)))
    index = {key: at for at, key in enumerate(cube.keys)}
    rows = {layout.number: np.array([index[key] for key in layout.rows], int) for layout in layouts}
    names = (
        *dict.fromkeys(column for layout in layouts for column, _ in layout.columns),
        *(one.name for one in _DERIVED),
        WHEN,
    )
    steps: dict[int, list[int]] = {}
    for step, at in places:
        steps.setdefault(step, []).append(at)
    buckets = _dealt(list(steps), room[0])
    cube.first = np.array([bucket[0] for bucket in buckets])
    cube.last = np.array([bucket[-1] for bucket in buckets])
    joined: Any = np.empty((3, len(names), len(cube.keys), len(buckets)), np.float32)
    for column, bucket in enumerate(buckets):
        tables = tuple(at for step in bucket for at in steps[step])
        told = [(step, at) for step in bucket for at in steps[step]]
        make = partial(_column, part, told, rows, names, len(cube.keys))
        joined[..., column] = _known(store, (part.reader.path, name, tables, names, len(cube.keys)), make)
    for table, numbers_of in zip((cube.lowest, cube.highest, cube.latest), joined, strict=True):
        table.update(zip(names, numbers_of, strict=True))
    marked = [bucket[0] for bucket in _dealt(list(steps), room[1])]
    has_magnitudes = any(layout.has_magnitudes for layout in layouts)
    cube.marks = np.array(marked)
    cube.magnitudes = np.zeros((len(cube.keys), BUCKETS, len(marked) if has_magnitudes else 0), np.uint8)
    for column, step in enumerate(marked if has_magnitudes else ()):
        make = partial(_shares, part, steps[step], rows, len(cube.keys))
        key = part.reader.path, name, tuple(steps[step]), len(cube.keys)
        cube.magnitudes[..., column] = _known(store, key, make)
    return cube


def _dealt(steps: list[int], most: int) -> list[list[int]]:
    """At most ``most`` buckets, of the same power of two of steps each, the last one perhaps less.

    While a run grows, full buckets stay as they are, and with them what a ``Cache`` holds, until all double at once.
    """
    each = 1
    while -(-len(steps) // each) > most:
        each *= 2
    return [steps[at : at + each] for at in range(0, len(steps), each)]


def _known(store: tuple[Cache, set[Any]], key: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, or has returned for ``key`` before; ``key`` is noted as used."""
    cache, used = store
    used.add(key)
    if key not in cache:
        cache[key] = make()
    return cache[key]


def _column(part: RankPart, tables: Sequence[tuple[int, int]], rows: Any, names: Sequence[str], count: int) -> Any:
    """Lowest, highest and last of several tables, each with its step: [3, names, sites]."""
    found: Any = np.full((3, len(names), count), np.nan, np.float32)
    lowest, highest, latest = found
    for step, at in tables:
        layout = part.layouts[number_of(part.tables[at][1])]
        known = _numbers(layout, part.tables[at][1])
        known[WHEN] = np.where(np.isnan(known["count"]), np.nan, np.float32(step))
        here = rows[layout.number]
        if len(known) < len(names) or len(here) < count or (here != np.arange(count)).any():
            values: Any = np.full((len(names), count), np.nan, np.float32)
            for name, column in known.items():
                values[names.index(name), here] = column
        else:  # the table has all rows, in their order
            values = np.stack([known[name] for name in names])
        np.fmin(lowest, values, out=lowest)
        np.fmax(highest, values, out=highest)
        np.copyto(latest, values, where=~np.isnan(values))
    return found


def _numbers(layout: Layout, payload: bytes) -> dict[str, Any]:
    """The columns of a table as float32, and what follows from them; NaN in all of a row that is not there."""
    _, data = raw(layout, payload, with_magnitudes=False)
    at = 0
    found: dict[str, Any] = {}
    for name, code in layout.columns:
        values = np.frombuffer(data, _TYPES[code], len(layout.rows), at)
        at += values.nbytes
        with np.errstate(over="ignore"):  # of damaged files
            found[name] = values.astype(np.float32)
    for one in _DERIVED:
        assert one.rule is not None
        found[one.name] = one.rule(np, *(found[name] for name in one.needs))
    absent = np.isnan(found["count"])
    is_odd = found["nonfinite"] > 0
    for name, values in found.items():
        if name in BY_NAME and BY_NAME[name].is_of_finite:
            odd = (is_odd | is_odd[_updates(layout)]) & _weights(layout) if name == "update_ratio" else is_odd
            values[odd & np.isnan(values)] = np.inf  # there, but not finite
        values[absent] = np.nan
    return found


@lru_cache(maxsize=16)
def _updates(layout: Layout) -> Any:
    """For each row of a layout the number of the row of the same parameter's update, its own where there is none."""
    number = {key: at for at, key in enumerate(layout.rows)}
    return np.array([number.get((model, f"{address.rpartition(':')[0]}:update"), at)
                     for at, (model, address) in enumerate(layout.rows)], np.int64)  # fmt: skip


@lru_cache(maxsize=16)
def _weights(layout: Layout) -> Any:
    """Which rows of a layout are parameters themselves."""
    return np.array([address.endswith(":param") for _, address in layout.rows], bool)


def _shares(part: RankPart, tables: Sequence[int], rows: Any, count: int) -> Any:
    """Magnitudes of one step: [sites, 64]. Several tables of it have different sites."""
    found: Any = np.zeros((count, BUCKETS), np.uint8)
    for at in tables:
        payload = part.tables[at][1]
        layout = part.layouts[number_of(payload)]
        if not layout.has_magnitudes:
            continue
        _, data = raw(layout, payload)
        size = len(layout.rows)
        is_there = ~np.isnan(_numbers(layout, payload)["count"])
        table = np.frombuffer(data, np.uint8, BUCKETS * size, len(data) - BUCKETS * size).reshape(BUCKETS, size)
        found[rows[layout.number][is_there]] = table.T[is_there]
    return found
