"""The sites of a run over its looks, as lines; which lines of two runs are the same. Needs numpy (``gaff[page]``).

Modules are the same by name. Where something was put into a list of modules, so that those behind it have other
numbers, parameters tell how far each has moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaff.address.grammar import parse_site
from gaff.inspection.diff.pairs import Pairing, is_in_lists, moves, renaming
from gaff.record.cube import Cube, read_cubes
from gaff.record.run import Record
from gaff.record.sample import port_of

NUMBERS = ("rms", "mean", "min", "max", "zeros", "nan", "positive_inf", "negative_inf")
_EVERY = 1 << 30  # columns: no bucket holds more than one look
_UPDATE = ":update"
_EVALUATED = " in "  # between a name and the phase of the run, where that is not the training


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One site of one run over its looks, in one phase of the run.

    ``elements``: how many were finite at the first look. ``steps``: the looks that have it, ascending; ``values``: by
    name of a number, float64, one for each of ``steps``. ``marks``: of a parameter before the first step of its
    optimizer sums of its elements with random weights, by which two are held against one another; empty where these
    were not noted.
    """

    name: str
    port: str
    phase: str
    elements: float
    steps: Any
    values: Mapping[str, Any]
    marks: tuple[float, ...] = ()

    @property
    def site(self) -> str:
        """Its name without the phase of the run."""
        return self.name.partition(_EVALUATED)[0]


def lines_of(record: Record) -> list[Line]:
    """The lines of all sites of a record's first process, from its cubes; those without a single look are left out."""
    named = {key: name for name, key in record.names().items()}
    marks = {
        (str(model), str(address)): tuple(map(float, row))
        for _, look in reversed(record.events("look", record.ranks[0]))
        for model, address, row in look.get("marks", ())
    }
    found = []
    for cube in read_cubes(record.part(record.ranks[0]), columns=_EVERY, marks=1):
        more = "" if cube.phase == "train" else f"{_EVALUATED}{cube.phase}"
        for at, key in enumerate(cube.keys):
            known = marks.get(key, ()) if cube.phase == "train" else ()
            found.append(_line(cube, at, f"{named.get(key, key[1])}{more}", port_of(key[1]), known))
    return [line for line in found if len(line.steps)]


def _line(cube: Cube, at: int, name: str, port: str, marks: tuple[float, ...]) -> Line:
    """One site of a cube as a line; looks at which it was not there are left out."""
    counts = cube.latest["count"][at]
    known = ~np.isnan(counts)
    values = {one: cube.latest[one][at][known].astype(np.float64) for one in NUMBERS}
    elements = float(counts[known][0]) if known.any() else 0.0
    return Line(name, port, cube.phase, elements, cube.last[known], values, marks)


def marked_apart(one: Line, other: Line) -> float:
    """How far two parameters were apart before the first step, by the norm of the difference relative to the larger.

    As their marks tell it, within a half or so; 0 where one has none, or has elements that are not finite.
    """
    size = max(math.hypot(*one.marks), math.hypot(*other.marks)) if one.marks and other.marks else 0.0
    return math.dist(one.marks, other.marks) / size if 0 < size < math.inf else 0.0


def pairing_of(
    a: list[Line], b: list[Line], classes: tuple[Mapping[str, str], Mapping[str, str]], by_hand: Mapping[str, str]
) -> Pairing[Line]:
    """The lines of two runs that are the same: by what was said ``by_hand``, by name, by order and size.

    ``classes``: of the modules of both, by path. Where some have other numbers in B, lines of modules of one class come
    before those of others. Raises PlanError for one ``by_hand`` that is no module.
    """
    pairing, paths = Pairing(a, b), (set(classes[0]), set(classes[1]))
    if by_hand:
        pairing.by_name(_name, _phased(renaming(by_hand, paths)), "pairs")
    moved = _moved(a, b, paths)
    if moved:
        pairing.by_name(_name, _phased(renaming(moved, paths)), "neighbours")
    pairing.by_name(_name, _phased(lambda site: None if is_in_lists(site, moved) else site) if moved else str)
    sizes = [[(line.phase, line.port, line.elements) for line in lines] for lines in (a, b)]
    if moved:
        kinds = ([known.get(_path(line)) for line in lines] for known, lines in zip(classes, (a, b), strict=True))
        keys = (list(zip(*both, strict=True)) for both in zip(sizes, kinds, strict=True))
        pairing.by_likeness("order, size and class", *keys)
    pairing.by_likeness("order and size", *sizes)
    return pairing


def _moved(a: list[Line], b: list[Line], paths: tuple[set[str], set[str]]) -> dict[str, str]:
    """What members of lists of modules are called in B, by their parameters.

    Nothing has moved where all of one have a namesake of their size in the other, unless one of these lies elsewhere
    in B by its values before the first step. By these values they are matched where any is alike, else by their sizes.
    """
    weights = [[line for line in lines if line.port == "param" and line.phase == "train"] for lines in (a, b)]
    sizes = [{line.name: line.elements for line in lines} for lines in weights]
    values = [{line.marks: line.name for line in lines if any(line.marks)} for lines in weights]
    is_alike = bool(values[0].keys() & values[1].keys())
    common = {name for name, size in sizes[0].items() if sizes[1].get(name) == size}
    is_elsewhere = any(values[1].get(marks, name) != name for marks, name in values[0].items())
    if len(common) == len(sizes[0]) == len(sizes[1]) or (len(common) == min(map(len, sizes)) and not is_elsewhere):
        return {}

    def key(line: Line) -> Hashable:
        return line.elements, line.site.rpartition(".")[2], line.marks if is_alike else None

    pairing = Pairing(*weights)
    pairing.by_likeness("weights", *(list(map(key, lines)) for lines in weights))
    found = ((weights[0][pair.a], weights[1][pair.b]) for pair in pairing.pairs)
    return moves(((_owner(one), _owner(other)) for one, other in found), paths)


def _owner(line: Line) -> str:
    """The path of the module that has a parameter."""
    return _path(line).rpartition(".")[0]


def _path(line: Line) -> str:
    return parse_site(line.site.removesuffix(_UPDATE)).path


def _name(line: Line) -> str:
    return line.name


def _phased(renamed: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """The same for names with a phase of the run behind them, and of updates, which records alone know."""

    def told(name: str) -> str | None:
        site, mark, phase = name.partition(_EVALUATED)
        address = site.removesuffix(_UPDATE)
        found = renamed(address)
        return None if found is None else f"{found}{site[len(address) :]}{mark}{phase}"

    return told
