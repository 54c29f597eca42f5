"""A trace as a cell of a notebook: what the model comes to, its calls as a tree that folds, and pictures of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gaff.views.notebook import Cell, Shown, cell, photo, picture, safe, table_html, tree_html
from gaff.views.run_text import number
from gaff.views.trace_text import endings, is_inside, likeness, summary, tree_line

if TYPE_CHECKING:
    from gaff.record.picture import Picture
    from gaff.record.trace_rows import CallRow, Traced

_PICTURES = 8  # of a cell; the page has all
_CALLS = 1000  # calls of a cell; the page has all
_TILES = 8  # of one picture
_PHOTO, _TILE, _ROW = 80, 32, 192  # cells a side at most


def trace_cell(trace: Traced, depth: int = 2) -> str:
    """The HTML of a trace, open down to ``depth`` levels; at most eight pictures, the earliest of each kind first."""
    rows = _some(trace)
    parts: list[Cell] = [
        Shown(f"<p><b>{safe(summary(trace))}</b></p>"),
        Shown(f'<p class="q">input: {safe(" ".join(trace.tokens))}</p>') if trace.tokens else "",
        Shown(tree_html(rows, is_inside, likeness, tree_line, depth=depth)),
    ]
    if len(rows) < len(trace.rows):
        parts.append(Shown(f'<p class="q">{len(trace.rows) - len(rows)} calls further inside: .page() shows all</p>'))
    shown = _chosen(trace)
    if shown:
        lines: list[tuple[Cell, ...]] = [
            (one.site or "the model", _drawn(one), one.title, f"{number(one.low)} to {number(one.high)}")
            for one in shown
        ]
        more = len(trace.pictures) - len(shown)
        parts.append(Shown(table_html(("site", "", "what", "range"), lines)))
        parts.append(Shown(f'<p class="q">{more} more pictures: .page() shows all</p>') if more else "")
    parts += [Shown(f'<p class="q">{safe(line)}</p>') for line in endings(trace) if line]
    return cell(*parts)


def _some(trace: Traced) -> list[CallRow]:
    """The calls down to the level that leaves no more than a cell can hold."""
    kept = list(trace.rows)
    for level in range(max((row.depth for row in kept), default=0), 0, -1):
        if len(kept) <= _CALLS:
            break
        kept = [row for row in kept if row.depth < level]
    return kept


def _chosen(trace: Traced) -> list[Picture]:
    """The input, attention and class activation before feature maps, and those before plain values."""
    order = ("image", "attention", "class activation", "feature maps", "tokens x channels", "values")
    ranked = sorted(enumerate(trace.pictures), key=lambda pair: (order.index(pair[1].kind), pair[0]))
    kept = sorted(at for at, _ in ranked[:_PICTURES])
    return [trace.pictures[at] for at in kept]


def _drawn(one: Picture) -> Shown:
    """The first tiles of a picture, beside each other; of a large one every second cell, or third."""
    if one.kind == "image":
        tall, wide, _ = one.size
        step = -(-max(tall, wide) // _PHOTO)
        rows = [one.data[at * 3 * wide : (at + 1) * 3 * wide] for at in range(0, tall, step)]
        pixels = b"".join(row[3 * at : 3 * at + 3] for row in rows for at in range(0, wide, step))
        return photo(pixels, len(rows), -(-wide // step), title=one.title)
    tiles, tall, wide = one.size
    count = min(tiles, _TILES)
    step = -(-max(tall, wide) // (_ROW if min(tall, wide) < _TILE else _PHOTO if tiles == 1 else _TILE))
    starts = [(tile * tall + row) * wide for row in range(0, tall, step) for tile in range(count)]
    cells = b"".join(one.data[at : at + wide : step] for at in starts)
    across = count * -(-wide // step)
    return picture(cells, -(-tall // step), across, is_signed=one.limit > 0, title=one.title, wide=320)
