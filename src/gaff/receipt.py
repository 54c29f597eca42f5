"""A receipt: what a session did, pattern by pattern, site by site. Printable, and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gaff.text import table


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """One site of one pattern. ``changed`` and ``delta`` are an edit's; a capture changes nothing."""

    pattern: str
    site: str
    fired: int = 0  # events, those with None included
    none: int = 0  # events whose value was None
    skipped: int = 0  # events that could not be shown
    reason: str = ""
    changed: int = 0  # elements that an edit changed
    delta: float = 0.0  # norm of the change relative to the norm of the value


@dataclass(frozen=True, slots=True)
class Receipt:
    """``rows`` in the order asked for. ``notes``: why the run was not, bit by bit, what a bare run would be."""

    rows: tuple[ReceiptRow, ...]
    runs: int = 0
    notes: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)

    @property
    def silent(self) -> tuple[str, ...]:
        """Patterns of which no site fired, apart from those marked ``gaff.maybe``."""
        fired = {row.pattern for row in self.rows if row.fired}
        asked = dict.fromkeys(row.pattern for row in self.rows)
        return tuple(name for name in asked if name not in fired and name not in self.optional)

    def __str__(self) -> str:
        rows = [
            (row.pattern, row.site, str(row.fired), _some(row.none), _some(row.skipped), row.reason)
            for row in self.rows
        ]
        lines = [f"{_counted(self.runs, 'run')}, {_counted(len(self.rows), 'site')}"]
        lines += [f"not bitwise: {note}" for note in self.notes]
        return "\n".join([*lines, table(("pattern", "site", "fired", "none", "skipped", "reason"), rows)])

    __repr__ = __str__


def merge_reasons(reasons: Sequence[tuple[str, int]]) -> str:
    """``a (3x); b``: what happened, most often first."""
    ordered = sorted(reasons, key=lambda pair: -pair[1])
    return "; ".join(text if count == 1 else f"{text} ({count}x)" for text, count in ordered)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _some(count: int) -> str:
    return str(count) if count else ""
