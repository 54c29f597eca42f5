"""Draws the autograd graph of a module's backward pass as an SVG picture.

Boxes are autograd nodes, in layers from the output at the top down to the leaves; arrows are the gradients that one
node hands to the next. The text is made from the rows of ``gaff.record.node_rows`` alone, without a layout library.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaff.record.node_rows import Edge, Explained

_WIDE, _HIGH, _GAP, _DROP = 230, 46, 24, 56  # a box, and what is between boxes


def render(anatomy: Explained) -> str:
    """The picture of an anatomy as one self-contained ``<svg>`` element.

    A box shows a node's name, and below it the op and the line of the user's code that made it; the code itself is the
    tooltip. Leaves (nodes that hand nothing on) are tinted. An arrow carries the gradient's shape and L2 norm. All
    texts are escaped: names and code come from the user's program.
    """
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
    """The numbers of all nodes, layer by layer: a node's layer is its longest way from the output.

    Backward runs a node after all that feed it, and ``anatomy.nodes`` are in that order, so one pass over the rows is
    enough: when a row is reached, its own depth is final.
    """
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
    """One node as SVG, with its upper left corner at ``place``, in pixels."""
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
    """One gradient as an SVG curve from the ``at``-th of ``count`` exits of the upper box to the top of the lower one.

    A gradient that skips layers is bent to the left, past the boxes between, and is labelled near its start: in the
    middle its label would lie on a box.
    """
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
    """At most 36 characters of ``text``, which is about what fits into a box."""
    return text if len(text) <= 36 else text[:35] + "~"
