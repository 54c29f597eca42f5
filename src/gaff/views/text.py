"""Plain text tables and folded trees, for ``str`` of results and for the terminal. Needs no torch.

Every printed result of the package goes through these few functions, so that columns, units and cut names look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

_Row = TypeVar("_Row")
_NARROWEST = 6  # characters to which a column is cut at most
_FOLD_FROM = 3  # this many equal blocks in a row are told once


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    right: Sequence[str] = (),
    tail: Sequence[str] = (),
) -> str:
    """Aligned columns, two spaces apart, under a line of heads; columns without any text are left out.

    ``rows`` have one cell for each head. ``right``: heads of the columns that are set flush right. ``width``: cut the
    widest columns, with ``~``, until the table fits, but none below six characters, so a very narrow table may still be
    wider; of columns in ``tail`` the end is kept instead of the beginning, since the end of a path tells most.
    """
    used = [number for number in range(len(head)) if any(row[number] for row in rows)] or [0]
    cells = [[head[number] for number in used], *([row[number] for number in used] for row in rows)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(used))]
    if width is not None:
        widths = _fit(widths, width)
    flush = [(head[number] in right, head[number] in tail) for number in used]
    lines = []
    for row in cells:
        shown = []
        for cell, wide, (is_right, is_tail) in zip(row, widths, flush, strict=True):
            text = _cut(cell, wide, is_tail)
            shown.append(text.rjust(wide) if is_right else text.ljust(wide))
        lines.append("  ".join(shown).rstrip())
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


def _fit(widths: list[int], width: int) -> list[int]:
    """Column widths that fit into ``width`` together with their gaps: the widest column gives way first."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _cut(cell: str, width: int, is_tail: bool) -> str:
    """The cell in at most ``width`` characters, with ``~`` where its end, or for ``is_tail`` its beginning, was cut."""
    if len(cell) <= width:
        return cell
    return "~" + cell[len(cell) - width + 1 :] if is_tail else cell[: width - 1] + "~"


def count_text(number: float) -> str:
    """A count in three digits and a unit: ``1234567`` as ``1.23M``; exact below 10,000."""
    if abs(number) < 10_000:
        return f"{number:g}"
    for unit, size in (("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if abs(number) < size * 1000:
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
