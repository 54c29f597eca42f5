"""The graph of a backward pass as an SVG picture: layers from the output down to the leaves."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaff.record.node_rows import Edge, Explained

_WIDE, _HIGH, _GAP, _DROP = 230, 46, 24, 56  # a box, and what is between boxes


def render(anatomy: Explained) -> str:
    """Boxes are nodes: name, op, line. Arrows are gradients: shape and norm. Leaves are tinted."""
    layers = _layers(anatomy)
    columns = max(len(layer) for layer in layers)
    width = columns * (_WIDE + _GAP) + _GAP
    height = len(layers) * (_HIGH + _DROP) + _GAP
    places: dict[int, tuple[float, float]] = {}
    for depth, layer in enumerate(layers):
        left = (width - len(layer) * (_WIDE + _GAP) + _GAP) / 2
        for at, number in enumerate(layer):
            places[number] = left + at * (_WIDE + _GAP), _GAP + depth * (_HIGH + _DROP)
    parts = [_arrow(edge, places[row.number], places[edge.to], at, len(row.outgoing))
             for row in anatomy.nodes for at, edge in enumerate(row.outgoing) if edge.to is not None]  # fmt: skip
    parts += [_box(anatomy, number, place) for number, place in places.items()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11">'
        f'<title>backward of {escape(anatomy.module)}</title><defs><marker id="tip" viewBox="0 0 8 8" refX="7" '
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _layers(anatomy: Explained) -> list[list[int]]:
    """Numbers of nodes by their longest way from the output; backward runs a node after all that feed it."""
    depth = {row.number: 0 for row in anatomy.nodes}
    for row in anatomy.nodes:
        for edge in row.outgoing:
            if edge.to is not None:
                depth[edge.to] = max(depth[edge.to], depth[row.number] + 1)
    layers: list[list[int]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for number, at in depth.items():
        layers[at].append(number)
    return layers


def _box(anatomy: Explained, number: int, place: tuple[float, float]) -> str:
    row = anatomy.nodes[number]
    x, y = place
    is_leaf = not row.outgoing
    second = f"{row.site}  {row.place}".strip()
    return (
        f'<g><title>{escape(row.code or row.name)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_WIDE}" '
        f'height="{_HIGH}" rx="5" fill="{"#eaf3e6" if is_leaf else "#eef1f7"}" stroke="#8894a8"/>'
        f'<text x="{x + 8:.0f}" y="{y + 19:.0f}" font-weight="bold">{escape(_cut(row.name))}</text>'
        f'<text x="{x + 8:.0f}" y="{y + 35:.0f}" fill="#445">{escape(_cut(second))}</text></g>'
    )


def _arrow(edge: Edge, start: tuple[float, float], end: tuple[float, float], at: int, count: int) -> str:
    x1 = start[0] + _WIDE * (at + 1) / (count + 1)
    y1, x2, y2 = start[1] + _HIGH, end[0] + _WIDE / 2, end[1] - 2
    norm = "None" if edge.norm is None else f"{edge.shape} |{edge.norm:.3g}|"
    bend = (y2 - y1) / 2
    aside = _WIDE * 0.9 if y2 - y1 > _DROP else 0  # past the boxes of the layers between
    left = f"{x1 - aside:.0f} {y1 + bend:.0f}"
    right = f"{x2 - aside:.0f} {y2 - bend:.0f}"
    text_x, text_y = (x1 - 40, y1 + 14) if aside else ((x1 + x2) / 2 + 4, y1 + bend)
    return (
        f'<path d="M{x1:.0f} {y1:.0f} C{left} {right} {x2:.0f} {y2:.0f}" fill="none" stroke="#667" '
        f'marker-end="url(#tip)"/><text x="{text_x:.0f}" y="{text_y:.0f}" fill="#334" font-size="10" '
        f'paint-order="stroke" stroke="white" stroke-width="3">{escape(norm)}</text>'
    )


def _cut(text: str) -> str:
    return text if len(text) <= 36 else text[:35] + "~"
