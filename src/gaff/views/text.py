"""Plain text tables and folded trees, for ``str`` of results and for the terminal. Needs no torch.

Every printed result of the package goes through these few functions, so that columns, units and cut names look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

_Row = TypeVar("_Row")
_NARROWEST = 16  # characters to which a text is cut at most
_FOLD_FROM = 3  # this many equal blocks in a row are told once


@dataclass
class Fitting:
    """How tables are printed while ``fitting`` is in force; ``heads`` are those of the tables so far."""

    width: int | None
    columns: tuple[str, ...] = ()
    heads: dict[str, None] = field(default_factory=dict)

    @property
    def complaint(self) -> str:
        """What is to be said of a column that was asked for, and that no table had; empty where all were there."""
        missing = [one for one in self.columns if one not in self.heads]
        if not missing:
            return ""
        there = f"expected some of {', '.join(self.heads)}" if self.heads else "no table was printed"
        return f"there is no column {missing[0]!r}: {there}"


_FITTING: ContextVar[Fitting | None] = ContextVar("gaff_fitting", default=None)


@contextmanager
def fitting(width: int | None, columns: Sequence[str] = ()) -> Iterator[Fitting]:
    """Every table that is made inside fits into ``width`` characters, and shows ``columns`` only, by their heads."""
    told = Fitting(width, tuple(columns))
    token = _FITTING.set(told)
    try:
        yield told
    finally:
        _FITTING.reset(token)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    first_to_go: Sequence[str] = (),
) -> str:
    """Aligned columns, two spaces apart, under a line of heads; columns without any text are left out.

    ``rows`` have one cell for each head. ``right``: heads of the columns that are set flush right. ``width``: what the
    table must fit into, else that of ``fitting``. To fit, long texts are cut, with ``~``, down to 16 characters; then
    columns are left out, those of ``first_to_go`` first, then from the right, and a last line names them. ``whole``:
    heads of columns that are neither cut nor left out, by default the first, for an address that is cut names nothing.
    """
    told = _FITTING.get()
    chosen = [number for number in range(len(head)) if any(row[number] for row in rows)] or [0]
    kept = [head.index(one) for one in whole if one in head] or [0]
    if told is not None:
        told.heads.update(dict.fromkeys(one.strip() for one in head if one.strip()))
        width = told.width if width is None else width
        wanted = [number for number, one in enumerate(head) if one.strip() in told.columns]
        chosen = sorted({*wanted, *(one for one in kept if one in chosen)}) if wanted else chosen
    cells = [[row[number].replace("\n", " ") for number in range(len(head))] for row in (head, *rows)]
    widths = {number: max(len(row[number]) for row in cells) for number in chosen}
    soft = {number for number in chosen if number not in kept and head[number] not in right}
    order = [head.index(one) for one in first_to_go if one in head]
    order += [number for number in reversed(chosen) if number not in order]
    left_out = _fit(widths, width, soft, [one for one in order if one not in kept]) if width is not None else []
    lines = []
    for row in cells:
        shown = []
        for number, wide in widths.items():
            text = row[number] if len(row[number]) <= wide else f"{row[number][: wide - 1]}~"
            shown.append(text.rjust(wide) if head[number] in right else text.ljust(wide))
        lines.append("  ".join(shown).rstrip())
    if left_out:
        lines.append(f"(not shown for want of room: {', '.join(head[one].strip() for one in sorted(left_out))})")
    return "\n".join(lines)


def fold(
    rows: Sequence[_Row],
    is_inside: Callable[[_Row, _Row], bool],
    likeness: Callable[[Sequence[_Row]], Hashable],
    line: Callable[[_Row, _Row | None, int], str],
) -> list[str]:
    """The lines of a tree in which blocks alike that follow each other are told once.

    ``rows`` come parents first. ``is_inside(row, head)``: whether a row belongs under a head; ``likeness(block)`` is
    equal for blocks to be folded; ``line(head, last, count)``: the text of a head, which stands for ``count`` blocks up
    to ``last`` (None, and 1, when it stands for itself). Three blocks in a row or more are folded, at every depth; of
    folded ones the first is shown with what is inside it.
    """
    lines: list[str] = []
    for head, last, count, inside in blocks(rows, is_inside, likeness):
        lines.append(line(head, last, count))
        lines += fold(inside, is_inside, likeness, line)
    return lines


def blocks(
    rows: Sequence[_Row],
    is_inside: Callable[[_Row, _Row], bool],
    likeness: Callable[[Sequence[_Row]], Hashable],
) -> Iterator[tuple[_Row, _Row | None, int, list[_Row]]]:
    """The outermost blocks of a tree, as ``fold`` tells them: head, last head, how many there are, and what is inside.

    Of blocks that are told together the inside is that of the first. The functions are those of ``fold``.
    """
    found: list[list[_Row]] = []
    for row in rows:
        if found and is_inside(row, found[-1][0]):
            found[-1].append(row)
        else:
            found.append([row])
    at = 0
    while at < len(found):
        same = at + 1
        while same < len(found) and likeness(found[same]) == likeness(found[at]):
            same += 1
        if same - at < _FOLD_FROM:
            same = at + 1
        last = found[same - 1][0] if same > at + 1 else None
        yield found[at][0], last, same - at, found[at][1:]
        at = same


def _fit(widths: dict[int, int], width: int, soft: set[int], order: Sequence[int]) -> list[int]:
    """Make columns fit into ``width`` together with their gaps, in ``widths``; returns those that were left out for it.

    ``soft``: columns whose texts may be cut, the widest first, ``order``: in which columns are left out.
    """
    waiting, gone = [one for one in order if one in widths], []
    while sum(widths.values()) + 2 * (len(widths) - 1) > width:
        cuttable = [number for number in widths if number in soft and widths[number] > _NARROWEST]
        if cuttable:
            widths[max(cuttable, key=lambda number: widths[number])] -= 1
        elif waiting:
            gone.append(waiting.pop(0))
            del widths[gone[-1]]
        else:
            break
    return gone


def count_text(number: float) -> str:
    """A count in three digits and a unit: ``1234567`` as ``1.23M``; exact below 10,000."""
    if abs(number) < 10_000:
        return f"{number:g}"
    for unit, size in (("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if abs(number) < size * 999.5:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def bytes_text(size: float) -> str:
    """A size in bytes with a decimal unit: ``2.5MB`` is 2.5 million bytes; exact below 10,000."""
    return count_text(size) + "B" if size < 10_000 else count_text(size).replace("K", "k") + "B"


def printable(text: str, keep: str = "\n\t") -> str:
    """The text without what could command a terminal, or what it cannot write: such characters as Python escapes them.

    Names and messages of a record come from other people's programs: an escape sequence in one could rewrite what is on
    the screen. Escaped is all that is not to be seen: control characters (those in ``keep`` stay), changes of direction
    and other formats, and lone surrogates, which UTF-8 cannot hold.
    """
    return "".join(one if one in keep or one.isprintable() else repr(one)[1:-1] for one in text)


def counted(count: int, what: str) -> str:
    """A count with its noun, in the plural where it must be: ``1 run``, ``2 runs``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
