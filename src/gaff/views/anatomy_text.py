"""The anatomy of a backward pass as text: a table, words about the legacy hook, a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaff.views.text import table

if TYPE_CHECKING:
    from gaff.record.node_rows import Edge, Explained, NodeRow

_HEAD = ("", "node", "op", "line", "gradients that come", "gradients that it hands on")


def render_table(anatomy: Explained) -> str:
    """One line a node in the order of backward, whose gradients came out, and what the legacy hook makes of it."""
    rows = [
        (str(row.number), row.name, row.site, row.place, _short(row.incoming), _long(row.outgoing))
        for row in anatomy.nodes
    ]
    parts = [f"backward of {anatomy.module}, from a gradient of ones at {_names(anatomy.grad_output)}", ""]
    parts += [table(_HEAD, rows), ""]
    leaves = [*anatomy.grad_input, *anatomy.parameters]
    parts.append(
        table(("gradient of", "shape", "norm"), [(one.whose, one.shape or "None", _norm(one)) for one in leaves])
    )
    parts += ["", *explain_legacy(anatomy), *(f"note: {note}" for note in anatomy.notes)]
    return "\n".join(parts)


def render_tree(anatomy: Explained) -> str:
    """From the output down to the leaves; a node that several hand gradients to is told once."""
    seen: set[int] = set()
    fed = {edge.to for row in anatomy.nodes for edge in row.outgoing}
    lines: list[str] = []
    for row in anatomy.nodes:
        if row.number not in fed:
            lines += _branch(anatomy, row, 0, seen)
    return "\n".join(lines)


def explain_legacy(anatomy: Explained) -> list[str]:
    """What ``register_backward_hook`` shows, and why that is not the gradient of the module's inputs."""
    if not anatomy.legacy_input:
        return ["the legacy register_backward_hook would not be called: the first tensor that is returned has no graph"]
    last = next(row for row in anatomy.nodes if row.outgoing == anatomy.legacy_input)
    count = len([row for row in anatomy.nodes if row.name != "AccumulateGrad"])
    shown = "; ".join(
        f"{_shape(edge)} is the gradient of {edge.whose}, norm {_norm(edge)}" if edge.norm is not None else "None"
        for edge in anatomy.legacy_input
    )
    gradients = [f"{_shape(edge)} of {edge.whose}, norm {_norm(edge)}" for edge in anatomy.grad_input]
    truth = "; ".join(gradients) or "none: no input requires grad"
    lines = [
        f"the legacy register_backward_hook hangs on one node, the last of the forward: {last.name}"
        + (f", one of {count}" if count > 1 else ""),
        f"  as grad_input it shows what that node hands on: {shown}",
        f"  as grad_output: {', '.join(_shape(edge) for edge in anatomy.legacy_output)}",
        f"  the truth, as gaff's :grad_input tells it: {truth}",
    ]
    if any(edge.whose.partition(",")[0].endswith(":param") for edge in anatomy.legacy_input):
        lines.append(
            "  so its entries are the inputs of an autograd node (bias, input, weight), not those of the module"
        )
    elif not _differs(anatomy.legacy_input, anatomy.grad_input):
        lines.append("  here both agree")
    elif any(edge.whose.startswith(":input") for edge in anatomy.legacy_input):
        lines.append("  so it tells one share of the gradient of an input that is used in several places")
    else:
        lines.append(f"  so it tells of one node only, of {last.site}, and nothing of the module's inputs")
    return lines


def _differs(legacy: Sequence[Edge], truth: Sequence[Edge]) -> bool:
    shown, told = ([(edge.shape, _norm(edge)) for edge in edges if edge.norm is not None] for edges in (legacy, truth))
    return shown != told


def _branch(anatomy: Explained, row: NodeRow, depth: int, seen: set[int]) -> list[str]:
    place = f"  {row.place}" if row.place else ""
    line = f"{'  ' * depth}{row.name}  {row.site}{place}  {_short(row.incoming)}"
    if row.number in seen:
        return [f"{line}  (above)"]
    seen.add(row.number)
    lines = [line]
    for edge in row.outgoing:
        if edge.to is not None:
            lines += _branch(anatomy, anatomy.nodes[edge.to], depth + 1, seen)
    return lines


def _names(edges: Sequence[Edge]) -> str:
    return ", ".join(edge.whose for edge in edges)


def _short(edges: Sequence[Edge]) -> str:
    return ", ".join(f"{_shape(edge)} {_norm(edge)}".rstrip() for edge in edges)


def _long(edges: Sequence[Edge]) -> str:
    return "; ".join(f"{_shape(edge)} {_norm(edge)} to {edge.whose}" for edge in edges if edge.norm is not None)


def _shape(edge: Edge) -> str:
    return "None" if edge.norm is None else f"[{edge.shape.replace('x', ', ')}]" if edge.shape != "scalar" else "[]"


def _norm(edge: Edge) -> str:
    return "" if edge.norm is None else f"{edge.norm:.4g}"
