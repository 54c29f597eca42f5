"""A receipt: what a session did, pattern by pattern, site by site. Printable, and as data.

Of an edit the first sixteen events at a site are measured, later ones when their number is a power of two, so that a
long run pays nothing; ``hits`` counts all of them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gaff.views.notebook import Shown, cell, table_html
from gaff.views.text import counted, table

NOT_CALLED = "it was not called, or did not return"
NO_BACKWARD = "no backward pass reached it"
_RIGHT = ("hits", "changed", "rows", "delta")
CHANGING: weakref.WeakSet[Any] = weakref.WeakSet()  # limits on gradients, and sessions of edits, opened in this process
_QUOTED = re.compile(r"`(?:[^`]|``)*`")


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """One site of one pattern. From ``hits`` on the numbers are an edit's; a capture changes nothing.

    A pattern that matched nothing has one row with an empty ``site``. ``reason`` says why nothing came, or less than
    could.
    """

    pattern: str
    site: str
    fired: int = 0  # events, those with None included
    none: int = 0  # events whose value was None
    skipped: int = 0  # events that could not be shown
    reason: str = ""
    hits: int = 0  # events at which an edit acted; the numbers below are of the ``measured`` ones among them
    measured: int = 0
    seen: int = 0  # elements that came to the edit
    changed: int = 0  # elements that it changed
    rows_changed: int = 0  # rows (indices of dimension 0) with a changed element
    added_nonfinite: int = 0  # elements that it made NaN or inf
    delta: float = 0.0  # norm of the change relative to the norm of the value


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a session did: ``rows`` in the order asked for, ``runs`` how many runs it saw.

    ``notes``: why the run was not, bit by bit, what a bare run would be. ``optional``: patterns that may stay silent. A
    value of its own: it does not change while the session goes on.
    """

    rows: tuple[ReceiptRow, ...]
    runs: int = 0
    notes: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)
    is_edit: bool = False
    armed: int = 0  # modules that keep a hook for the recomputation of a graph that is still alive

    @property
    def silent(self) -> tuple[str, ...]:
        """Patterns of which no site fired, or at which no edit acted, apart from those marked ``gaff.maybe``."""
        fired = {row.pattern for row in self.rows if (row.hits if self.is_edit else row.fired)}
        asked = dict.fromkeys(row.pattern for row in self.rows)
        return tuple(name for name in asked if name not in fired and name not in self.optional)

    @property
    def size(self) -> str:
        """How many runs it saw and at how many sites, in words; one that several patterns name counts once."""
        sites = {row.site for row in self.rows if row.site}
        return f"{counted(self.runs, 'run')}, {counted(len(sites), 'site')}"

    def _repr_html_(self) -> str:
        head, rows = self._edit_cells() if self.is_edit else self._cells()
        return cell(self.size, *(f"not bitwise: {note}" for note in self.notes), Shown(table_html(head, rows, _RIGHT)))

    def __str__(self) -> str:
        lines = [self.size]
        lines += [f"not bitwise: {note}" for note in self.notes]
        if self.armed:
            what = f"{counted(self.armed, 'module')} armed for recomputation"
            lines.append(f"{what}, until the graph is freed (del the loss) or .release()")
        head, rows = self._edit_cells() if self.is_edit else self._cells()
        return "\n".join([*lines, table(head, rows, right=_RIGHT if self.is_edit else (), whole=("site",))])

    def _cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Heads and rows of a capture."""
        rows: list[tuple[str, ...]] = [
            (row.pattern, row.site, str(row.fired), _some(row.none), _some(row.skipped), row.reason)
            for row in self.rows
        ]
        return ("pattern", "site", "fired", "none", "skipped", "reason"), rows

    def _edit_cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Heads and rows of edits: with how much they changed, as far as it was measured."""
        rows: list[tuple[str, ...]] = [
            (row.pattern, row.site, str(row.hits), _some(row.none), _some(row.measured * (row.measured != row.hits)),
             f"{row.changed}/{row.seen}" if row.hits else "", _some(row.rows_changed),
             f"{row.delta:.3g}" if row.hits else "", row.reason)
            for row in self.rows
        ]  # fmt: skip
        head = ("pattern", "site", "hits", "none", "measured", "changed", "rows", "delta", "reason")
        return head, rows

    __repr__ = __str__


def merge_reasons(reasons: Sequence[tuple[str, int]]) -> str:
    """Reasons with their counts as one text, ``a (3x); b``: what happened most often first."""
    ordered = sorted(reasons, key=lambda pair: -pair[1])
    return "; ".join(text if count == 1 else f"{text} ({count}x)" for text, count in ordered)


def _has_op(pattern: str) -> bool:
    """Whether a pattern names ops; a slash in backticks is one of a module's name."""
    return "/" in _QUOTED.sub("", pattern)


def rows_of(rows: list[ReceiptRow], missing: Sequence[str]) -> tuple[ReceiptRow, ...]:
    """The rows of a receipt: tidy, and one for each pattern that matched nothing.

    A pattern such as ``**/softmax`` names all modules. Those that ran no such op are left out where others did; where
    nobody did, one row stands for all of the pattern.
    """
    acted = {row.pattern for row in rows if row.fired}
    silent: dict[str, list[ReceiptRow]] = {}
    for row in rows:
        if _has_op(row.pattern) and not row.fired and row.pattern not in acted:
            silent.setdefault(row.pattern, []).append(row)
    kept = []
    for row in rows:
        if row.fired or not _has_op(row.pattern) or (row.pattern in silent and len(silent[row.pattern]) == 1):
            kept.append(row)
        elif row.pattern in silent and row is silent[row.pattern][0]:
            count = len(silent[row.pattern])
            why = f"none of the {count} modules that it names ran such an op, see gaff.sites(model, x, ops=True)"
            if row.pattern.endswith(":weights"):
                why += "; attention that is written out has its weights as /softmax"
            kept.append(replace(row, site="", skipped=0, reason=why))
    return (*kept, *(ReceiptRow(pattern, "", reason="nothing in the model matches") for pattern in missing))


def _some(count: int) -> str:
    return str(count) if count else ""
