"""Plain text tables, for ``str`` of results and for the terminal. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, right: Sequence[str] = ()
) -> str:
    """Aligned columns, two spaces apart; empty columns are left out. ``right``: columns set flush right.

    ``width`` cuts the widest columns, with ``~``, until the table fits.
    """
    used = [number for number in range(len(head)) if any(row[number] for row in rows)] or [0]
    cells = [[head[number] for number in used], *([row[number] for number in used] for row in rows)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(used))]
    if width is not None:
        widths = _fit(widths, width)
    flush = [head[number] in right for number in used]
    return "\n".join(
        "  ".join(
            (_cut(cell, wide).rjust if is_right else _cut(cell, wide).ljust)(wide)
            for cell, wide, is_right in zip(row, widths, flush, strict=True)
        ).rstrip()
        for row in cells
    )


def _fit(widths: list[int], width: int) -> list[int]:
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 6:
        widths[widths.index(max(widths))] -= 1
    return widths


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "~"


def count_text(number: float) -> str:
    """``1234567`` as ``1.23M``; exact below 10,000."""
    if abs(number) < 10_000:
        return f"{number:g}"
    for unit, size in (("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if abs(number) < size * 1000:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def bytes_text(size: float) -> str:
    return count_text(size) + "B" if size < 10_000 else count_text(size).replace("K", "k") + "B"
