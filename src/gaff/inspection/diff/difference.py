"""What ``gaff.diff`` found: rows in the order in which things happened; as text, JSON and a page.

``gaff.inspection.diff.traces`` and ``runs`` make it. That order is what makes the first row that parted the place to
look at: what comes later is given other values already.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gaff.compat import extras
from gaff.compat.files import write_text
from gaff.inspection.writing import ending
from gaff.record.trace_rows import Fingerprint
from gaff.views.notebook import Shown, cell, colored, framed, safe, table_html
from gaff.views.run_text import number
from gaff.views.text import table

# Unit roundoff: half the distance from 1 to the next number (IEEE 754-2019; Micikevicius et al. 2022 for float8).
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
            "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}  # fmt: skip
STATES = ("same", "close", "parted")
_RIGHT = ("step", "difference", "tolerance")
_ROWS = 30  # of the text


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One site of both. ``site`` is its address in A, ``other`` in B.

    ``phase``: input, weights, forward, backward, parameter, batch, loss or evaluation, where weights are those that the
    forward was run with and parameter is what comes of it; ``step``: of a run, None of a trace.
    ``state``: ``same`` numbers to the last bit, ``close``: within ``tolerance``, ``parted``. ``delta``: the difference
    relative to the larger of both; of runs, of the logarithms of their rms. ``number``: what differs most, ``a`` and
    ``b`` its values; ``how``: what the sites were matched by.
    """

    site: str
    other: str
    phase: str
    state: str
    delta: float
    tolerance: float
    number: str = ""
    a: str = ""
    b: str = ""
    how: str = "address"
    step: int | None = None

    def told(self, size: float) -> str:
        """A difference, or a tolerance, of this row as people read it.

        ``10x`` for the rms of runs; for other numbers of runs percent of the larger rms, for losses and traces percent
        of the larger of both.
        """
        if math.isinf(size) or math.isnan(size):
            return f"{size}"
        if self.step is None or self.phase in ("loss", "batch"):
            return f"{100 * size:.3g} %"
        if self.number == "rms":
            if size > 100:
                return f"{size:.3g} of the logarithm"
            return f"{math.exp(size):.3g}x" if size > 0.005 else f"(1 + {size:.1g})x" if size else "1x"
        if self.number == "zeros":  # a share of the elements, compared as it is
            return f"{100 * size:.3g} % of the elements"
        return f"{100 * size:.3g} % of the rms"


@dataclass(frozen=True, slots=True)
class Difference:
    """What two runs, or two traces, differ in; True where they part.

    ``a``, ``b``: names of both. ``rows``: in the order in which things happen; ``first``: the first that parted.
    ``only_a``, ``only_b``: sites that have no partner. ``allowed``: what differences below every tolerance are ascribed
    to. Holds texts and numbers alone.
    """

    a: str
    b: str
    rows: tuple[DiffRow, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    allowed: str = "rounding"

    def __bool__(self) -> bool:
        return self.first is not None

    @property
    def first(self) -> DiffRow | None:
        """The first row that parted; None where none did."""
        return next((row for row in self.rows if row.state == "parted"), None)

    @property
    def verdict(self) -> str:
        """What came out, in one sentence: whether they part, and where first, by how much."""
        first = self.first
        if first is None:
            if not self.rows:
                return "nothing could be compared: no site of one was found in the other, or none has numbers"
            worst = max(self.rows, key=lambda row: row.delta)
            if not worst.delta:
                return f"the same in all of {len(self.rows)} places"
            where = f"{worst.told(worst.delta)} at {worst.site}{_at(worst)}"
            return f"equal within {self.allowed} in {len(self.rows)} places; the largest difference is {where}"
        parted = f"{sum(row.state == 'parted' for row in self.rows)} of {len(self.rows)} places differ"
        if first.phase == "batch":
            return f"they were given different batches{_at(first)}, by the {first.number}; {parted}"
        if first.phase == "input":
            what = f"{first.number} {first.a} against {first.b}" if first.a else f"{first.told(first.delta)} apart"
            return f"they were given different inputs: {what}; {parted}"
        names = first.site if first.site == first.other else f"{first.site} ({first.other} in B)"
        values = f"{first.number} {first.a} against {first.b}"
        if first.a == first.b:
            values = "the elements differ" + (f", though {first.number} is {first.a} in both" if first.a else "")
        size = f"a difference of {first.told(first.delta)} where {first.told(first.tolerance)} is {self.allowed}"
        size = "which no rounding explains" if math.isinf(first.delta) else size
        return f"they differ first at {names}{_at(first)}, {first.phase}: {values}, {size}; {parted}"

    def __str__(self) -> str:
        parts = [f"A {self.a}", f"B {self.b}", self.verdict]
        shown = self._shown()
        if shown:
            parts.append(_table(shown))
        if len(self.rows) > len(shown):
            parts.append(f"... {len(self.rows)} places were compared; --json or --html has all")
        for name, sites in (("A", self.only_a), ("B", self.only_b)):
            if sites:
                more = f" and {len(sites) - 8} more" if len(sites) > 8 else ""
                parts.append(f"only in {name}: {', '.join(sites[:8])}{more}")
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _shown(self) -> list[DiffRow]:
        """The rows that the text shows: from just before the first that parted; if none did, those that differ most."""
        if self.first is None:
            return sorted(self.rows, key=lambda row: -row.delta)[: _ROWS // 3]
        at = self.rows.index(self.first)
        return list(self.rows[max(0, at - 3) : at - 3 + _ROWS if at > 3 else _ROWS])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; differences may be infinite, which JSON does not take: see ``to_json``."""
        return {
            "a": self.a,
            "b": self.b,
            "parted": bool(self),
            "verdict": self.verdict,
            "first": asdict(self.first) if self.first is not None else None,
            "rows": [
                {**asdict(row), "size": row.told(row.delta), "allowed": row.told(row.tolerance)} for row in self.rows
            ],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Everything as JSON, in which infinite and missing numbers are written as null."""
        return json.dumps(_finite(self.to_dict()), indent=1)

    def to_html(self) -> str:
        """A page that shows all rows. Raises PlanError without numpy."""
        extras.need("numpy", "page", for_="a page of a difference")
        from gaff.views.page.diff import document

        return document(self.to_dict()).to_html()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page where the name ends in ``.html``, else JSON. Raises RecordError where that cannot be.

        Raises PlanError for a name of another format, such as ``.csv``.
        """
        is_page = ending(path, ".json", ".html", ".htm") in (".html", ".htm")
        write_text(path, self.to_html() if is_page else self.to_json() + "\n")

    def _repr_html_(self) -> str:
        """For notebooks: the verdict and the rows that ``str`` shows; ``page()`` shows all."""
        head, rows = _cells(self._shown())
        level = "warning" if self else "fine"
        more = len(self.rows) - len(rows)
        return cell(
            Shown(f"<p>{colored(self.verdict, level)}</p>"),
            Shown(f'<p class="q">A is {safe(self.a)}, B is {safe(self.b)}</p>'),
            Shown(table_html(head, rows, right=_RIGHT)) if rows else "",
            Shown(f'<p class="q">{more} more places were compared: .page() shows all</p>') if more else "",
            *self.notes,
        )

    def page(self, height: int = 640) -> Shown:
        """The page inside a notebook, ``height`` pixels high: 130 kB, and the rows. Raises PlanError without numpy."""
        return framed(self.to_html(), height)


def _table(rows: Sequence[DiffRow]) -> str:
    """Rows as a text table."""
    head, cells = _cells(rows)
    whole = ("site of A", "site of B")
    return table(head, cells, right=_RIGHT, whole=whole, first_to_go=("tolerance", "number", "phase", "step"))


def _cells(rows: Sequence[DiffRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and cells of rows, without the columns in which nothing is."""
    head = ("phase", "step", "site of A", "site of B", "state", "difference", "tolerance", "number", "A", "B")
    cells = [
        (row.phase, "" if row.step is None else str(row.step), row.site, "" if row.other == row.site else row.other,
         row.state, row.told(row.delta), row.told(row.tolerance), row.number, row.a, row.b)
        for row in rows
    ]  # fmt: skip
    used = [at for at in range(len(head)) if any(row[at] for row in cells)]
    return tuple(head[at] for at in used), [tuple(row[at] for at in used) for row in cells]


def state_of(delta: float, tolerance: float) -> str:
    """``same`` for no difference at all, ``close`` within the tolerance, else ``parted``."""
    if delta == 0:
        return "same"
    return "close" if delta <= tolerance else "parted"


def shown(value: float | None) -> str:
    """A number as tables show it; empty for None."""
    return "" if value is None else number(value)


def _at(row: DiffRow) -> str:
    """Where in time a row is, to follow a site in a sentence; empty of a trace, which has no steps."""
    return "" if row.step is None else f" at step {row.step}"


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as None, at any depth: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value - value != 0 else value


def sketched(one: Fingerprint, other: Fingerprint, least: float = 0.0) -> float:
    """The norm of the difference of two tensors relative to the larger, as their sketches tell it: within a third.

    Infinite where not the same elements are NaN or infinite. ``least``: a norm below which neither counts as the larger
    one, see ``traces``.
    """
    if one.odd != other.odd or len(one.sketch) != len(other.sketch):
        return math.inf
    if not one.sketch:  # as of the inputs of an older format
        return 0.0 if one == other else math.inf
    difference = math.hypot(*(a - b for a, b in zip(one.sketch, other.sketch, strict=True)))
    size = max(least, math.hypot(*one.sketch), math.hypot(*other.sketch))
    return difference / size if size else float(difference > 0)


def elements_of(shapes: str) -> list[int] | str:
    """How many elements the tensors of an output have, by their shapes as text; the text itself where it has others."""
    try:
        return sorted(math.prod(int(size) for size in one.split("x") if size != "scalar") for one in shapes.split(", "))
    except ValueError:
        return shapes


def is_beginning(one: str, other: str) -> bool:
    """Whether one of two outputs, by their shapes as text, is the other with more tensors behind, as where attention
    returns its weights, too: moments are those of the first."""
    return f"{one}, ".startswith(f"{other}, ") or f"{other}, ".startswith(f"{one}, ")
