"""What a cell of a notebook shows, for ``_repr_html_``: tables, folding trees, curves and pictures, without script.

A cell is plain HTML, some kilobytes: it takes its colours from the notebook, light or dark, is shown by renderers that
run no script (GitHub, nbconvert, a saved notebook), and keeps its text where styles are stripped. Everything that comes
from a model or a record is escaped. The whole page, with script, is shown only where ``.page()`` is asked for.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from gaff.views.colors import RAMP, SIGNED
from gaff.views.text import blocks, printable

_Row = TypeVar("_Row")
_STYLE = (
    "<style>.gaff-cell{font-size:13px;line-height:1.45;overflow-x:auto}.gaff-cell table{border-collapse:collapse;"
    "font-variant-numeric:tabular-nums;margin:4px 0}.gaff-cell.gaff-cell th,.gaff-cell.gaff-cell td{text-align:left;"
    "padding:2px 10px 2px 0;border-bottom:1px solid #8884;background:none;vertical-align:middle}"
    ".gaff-cell.gaff-cell .r{text-align:right}"  # twice, to weigh more than a notebook's own rules for tables
    ".gaff-cell img{image-rendering:pixelated;border-radius:2px;display:block}.gaff-cell summary{cursor:pointer}"
    ".gaff-cell details{padding-left:14px}.gaff-cell .q{opacity:.7}.gaff-cell .error{color:#d64545}"
    ".gaff-cell .warning{color:#b97a00}.gaff-cell .fine{color:#1f9254}.gaff-cell .info{color:#3b82e0}"
    ".gaff-cell svg{vertical-align:middle}.gaff-cell code{font-size:12px}</style>"
)
_WIDE, _HIGH = 120, 22  # of a small curve, in pixels
_MOST_POINTS = 120
_BLUE = "#4f8ef7"


@dataclass(frozen=True, slots=True, repr=False)
class Shown:
    """HTML that is shown where it ends a cell of a notebook; ``str`` is the HTML itself."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def __str__(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"<HTML for a notebook, {len(self.html) / 1000:.0f} kB>"


Cell = str | Shown  # text, which is escaped, or HTML


def cell(*parts: Cell) -> str:
    """The HTML of a whole cell: its parts below each other, in colours that suit the notebook; texts are paragraphs."""
    inside = "".join(one.html if isinstance(one, Shown) else f"<p>{safe(one)}</p>" for one in parts if one)
    return f'<div class="gaff-cell">{_STYLE}{inside}</div>'


def colored(text: str, level: str) -> Shown:
    """A text in the colour of ``error``, ``warning``, ``info`` or ``fine``, or quiet (``q``)."""
    return Shown(f'<span class="{safe(level)}">{safe(text)}</span>')


def table_html(head: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[str] = ()) -> str:
    """A ``<table>`` of heads and cells; ``right``: heads of columns that are set flush right.

    Columns in which nothing is are left out.
    """
    used = [at for at in range(len(head)) if not rows or any(_html(row[at]) for row in rows)]
    side = [' class="r"' if head[at] in right else "" for at in used]
    heading = "".join(f"<th{kind}>{safe(head[at])}</th>" for at, kind in zip(used, side, strict=True))
    cells = "".join(
        "<tr>" + "".join(f"<td{kind}>{_html(row[at])}</td>" for at, kind in zip(used, side, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{heading}</tr></thead><tbody>{cells}</tbody></table>"


def tree_html(
    rows: Sequence[_Row],
    is_inside: Callable[[_Row, _Row], bool],
    likeness: Callable[[Sequence[_Row]], Hashable],
    line: Callable[[_Row, _Row | None, int], str],
    *,
    depth: int,
) -> str:
    """A tree that folds, open down to ``depth`` levels; the functions are those of ``gaff.views.text.fold``."""
    parts = []
    for head, last, count, inside in blocks(rows, is_inside, likeness):
        text = safe(line(head, last, count).strip())
        if inside:
            is_open = " open" if depth > 0 else ""
            below = tree_html(inside, is_inside, likeness, line, depth=depth - 1)
            parts.append(f"<details{is_open}><summary>{text}</summary>{below}</details>")
        else:
            parts.append(f'<div style="padding-left:28px">{text}</div>')
    return "".join(parts)


def sparkline_image(values: Sequence[float], name: str = "") -> Shown:
    """A small curve as a picture, which notebooks show that are not trusted, too.

    It is logarithmic where all values are positive and lie more than a factor of 30 apart. What is not finite is a red
    dot at the lower edge. More than 120 values are joined, each stretch by its largest.
    """
    if not values:
        return Shown("")
    size = max(1, math.ceil(len(values) / _MOST_POINTS))
    points = [_largest(values[at : at + size]) for at in range(0, len(values), size)]
    known = [one for one in points if math.isfinite(one)]
    is_wide = bool(known) and min(known) > 0 and max(known) > 30 * min(known)
    scale = [math.log(one) if is_wide and math.isfinite(one) else one for one in points]
    finite = [one for one in scale if math.isfinite(one)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    x = [2 + at * (_WIDE - 4) / max(1, len(points) - 1) for at in range(len(points))]
    y = [_HIGH - 3 - (one - low) * (_HIGH - 6) / ((high - low) or 1.0) if math.isfinite(one) else None for one in scale]
    pieces: list[list[str]] = [[]]
    for left, top in zip(x, y, strict=True):
        if top is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{left:.1f},{top:.1f}")
    lines = "".join(f'<polyline points="{" ".join(one)}" fill="none" stroke="{_BLUE}" stroke-width="1.4"/>'
                    for one in pieces if len(one) > 1)  # fmt: skip
    dots = "".join(f'<circle cx="{one[0].split(",")[0]}" cy="{one[0].split(",")[1]}" r="1.6" fill="{_BLUE}"/>'
                   for one in pieces if len(one) == 1)  # fmt: skip
    bad = "".join(f'<circle cx="{left:.1f}" cy="{_HIGH - 3}" r="2" fill="#d64545"/>'
                  for left, top in zip(x, y, strict=True) if top is None)  # fmt: skip
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH}">{lines}{dots}{bad}</svg>'
    text = safe(name, quote=True)
    return Shown(
        f'<img width="{_WIDE}" height="{_HIGH}" alt="{text}" title="{text}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()}">'
    )


def picture(data: bytes, height: int, width: int, *, is_signed: bool, title: str, wide: int = 160) -> Shown:
    """A byte a cell, of [height, width], in colours, as a picture inside the HTML, about ``wide`` pixels wide.

    ``is_signed``: zero is in the middle, blue below and red above it; else dark is low and light is high.
    """
    colors = SIGNED if is_signed else RAMP
    rows = b"".join(
        b"\0" + b"".join(colors[one] for one in data[at * width : (at + 1) * width]) for at in range(height)
    )
    scale = max(1, min(wide // max(1, width), 48 // max(1, height)))
    return _image(rows, height, width, scale, title)


def photo(data: bytes, height: int, width: int, *, title: str) -> Shown:
    """Three bytes a pixel, of [height, width, 3], as a picture inside the HTML."""
    rows = b"".join(b"\0" + data[at * 3 * width : (at + 1) * 3 * width] for at in range(height))
    return _image(rows, height, width, max(1, 96 // max(height, width)), title)


def framed(page: str, height: int = 640) -> Shown:
    """A page in an ``<iframe>`` of its own, without rights to anything of the notebook's; ``height`` in pixels.

    ``page`` is a complete HTML document. The sandbox lets its script run, but gives it no origin: it can neither read
    the notebook's document nor its cookies.
    """
    return Shown(
        f'<iframe sandbox="allow-scripts" width="100%" height="{height}" style="border: 1px solid #8886" '
        f'srcdoc="{escape(page, quote=True)}"></iframe>'
        '<p style="opacity:.7;font-size:12px">Nothing above? Frames are shown in notebooks that are trusted; '
        "<code>.save('page.html')</code> writes the page.</p>"
    )


def _image(rows: bytes, height: int, width: int, scale: int, title: str) -> Shown:
    """A PNG (RFC 2083) of eight bits and three colours; ``rows``: each with its filter, which is none, before it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    text = safe(title, quote=True)
    return Shown(
        f'<img width="{width * scale}" height="{height * scale}" alt="{text}" title="{text}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    )


def safe(text: str, quote: bool = True) -> str:
    """A text as HTML takes it; what is not to be seen (a change of direction, ESC) is written as Python escapes it."""
    return escape(printable(text), quote=quote)


def _html(value: Cell) -> str:
    return value.html if isinstance(value, Shown) else safe(value)


def _largest(values: Sequence[float]) -> float:
    """The largest of a stretch; NaN where one is not finite."""
    return max(values) if all(math.isfinite(one) for one in values) else math.nan
