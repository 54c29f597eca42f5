"""The house as a picture: ``docs/house.svg``, drawn from the folders and imports by ``make house``."""

from __future__ import annotations

import ast
from html import escape

import house

WIDE, HIGH, GAP, LEFT = 1000, 64, 26, 40
PICTURE = house.ROOT / "docs" / "house.svg"
STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#1c2733}.room{fill:#e6eef7;stroke:#3b5a7d}.file{fill:#f4efe4;stroke:#8a7440}"
    ".name{font-size:15px;font-weight:600}.says{font-size:12px}.inside{font-size:11px;fill:#56667a}"
    "path{fill:none;stroke:#7d8ea3;stroke-width:1.3;marker-end:url(#tip)}"
)


def rooms_of(floor: tuple[str, ...]) -> list[str]:
    """The rooms of a floor that there are, in the order in which they are listed."""
    known = {file.room for file in house.files()} - {"__main__"}  # which is the command line
    return [room for room in floor if room in known]


def says(room: str) -> str:
    """The first sentence that a room says of itself."""
    face = next(one for one in house.files() if one.name in (f"{room}/__init__.py", f"{room}.py"))
    return (ast.get_docstring(face.tree) or "").partition("\n")[0].replace("``", "")


def inside(room: str) -> str:
    """Folders and files in a room, by name."""
    names = dict.fromkeys(one.name.split("/")[1] for one in house.files() if one.name.startswith(f"{room}/"))
    folders = [f"{name}/" for name in names if not name.endswith(".py")]
    return ", ".join(
        [*folders, *(name.removesuffix(".py") for name in names if name.endswith(".py") and name[0] != "_")]
    )


def arrows() -> set[tuple[str, str]]:
    """Which room imports which, without what a longer way says already."""
    room = {file.name: file.room for file in house.files()}
    direct: dict[str, set[str]] = {}
    for name, others in house.imports().items():
        direct.setdefault(room[name], set()).update(room[other] for other in others if room[other] != room[name])

    def reached(start: str) -> set[str]:
        return set().union(*({one} | reached(one) for one in direct.get(start, ())))

    return {
        (one, other)
        for one, others in direct.items()
        for other in others
        if not any(other in reached(between) for between in others if between != other)
    }


def draw() -> str:
    """The picture as SVG: one row a floor, one box a room."""
    boxes: list[str] = []
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    top = 10
    for floor in house.FLOORS:
        rooms = rooms_of(floor)
        wide = (WIDE - 2 * LEFT - 16 * (len(rooms) - 1)) / max(1, len(rooms))
        for at, room in enumerate(rooms):
            left = LEFT + at * (wide + 16)
            places[room] = left, top, wide
            kind = "room" if inside(room) else "file"
            title = f"{room}/" if kind == "room" else f"{room}.py"
            most = int(wide / 5.9)
            lines = [("name", title), ("says", says(room)), ("inside", inside(room))]
            boxes.append(f'<rect class="{kind}" x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{HIGH}" rx="5"/>')
            boxes += [
                f'<text class="{cls}" x="{left + 10:.0f}" y="{top + 20 + 18 * row}">{escape(_cut(text, most))}</text>'
                for row, (cls, text) in enumerate(lines)
                if text
            ]
        top += HIGH + GAP
    ways = [_way(places[one], places[other]) for one, other in sorted(arrows()) if {one, other} <= places.keys()]
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    defs = f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" style="fill:#7d8ea3;stroke:none"/></marker></defs>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {top}" role="img"><title>The rooms of gaff</title>'
    return "\n".join([head, f"<style>{STYLE}</style>{defs}", *ways, *boxes, "</svg>", ""])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 2].rsplit(" ", 1)[0].rstrip(",:;") + " ..."


def _way(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    """From the bottom of one box to the top of another; past boxes between them along the side."""
    x, y = start[0] + start[2] / 2, start[1] + HIGH
    u, v = end[0] + end[2] / 2, end[1]
    if start[1] == end[1]:  # beside each other
        y = start[1] + HIGH / 2
        begin, stop = (start[0], end[0] + end[2]) if start[0] > end[0] else (start[0] + start[2], end[0])
        return f'<path d="M{begin:.0f} {y:.0f} L{stop:.0f} {y:.0f}"/>'
    if v - y <= GAP + 2:
        return f'<path d="M{x:.0f} {y} L{u:.0f} {v}"/>'
    side = WIDE - LEFT / 2 if x >= WIDE / 2 else LEFT / 2
    y, v = start[1] + HIGH / 2, end[1] + HIGH / 2
    begin, stop = (start[0] + start[2], end[0] + end[2]) if side > WIDE / 2 else (start[0], end[0])
    return f'<path d="M{begin:.0f} {y:.0f} C{side:.0f} {y:.0f} {side:.0f} {v:.0f} {stop:.0f} {v:.0f}"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"written: {PICTURE.relative_to(house.ROOT)}")
