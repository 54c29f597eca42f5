"""The anatomy of a module's backward pass as text: a table of autograd nodes, a tree, and words about the legacy hook.

What is drawn are the rows of ``gaff.record.node_rows``; ``gaff.anatomy(...)`` makes them and prints these texts. Norms
are L2; a gradient that does not exist is written ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaff.views.text import table

if TYPE_CHECKING:
    from gaff.record.node_rows import Edge, Explained, NodeRow

_HEAD = ("", "node", "op", "line", "gradients that come", "gradients that it hands on")


def render_table(anatomy: Explained) -> str:
    """The whole anatomy: a table of nodes, the gradients that came out, and what the legacy hook would have shown.

    Nodes are in the order in which backward ran them, each with the gradients that came in and those it handed on, and
    to which tensor. Notes come last.
    """
    rows = [
        (str(row.number), row.name, row.site, row.place, _short(row.incoming), _long(row.outgoing))
        for row in anatomy.nodes
    ]
    parts = [f"backward of {anatomy.module}, from a gradient of ones at {_names(anatomy.grad_output)}", ""]
    parts += [table(_HEAD, rows, whole=("node", "op")), ""]
    leaves = [*anatomy.grad_input, *anatomy.parameters]
    parts.append(
        table(("gradient of", "shape", "norm"), [(one.whose, one.shape or "None", _norm(one)) for one in leaves])
    )
    parts += ["", *explain_legacy(anatomy), *(f"note: {note}" for note in anatomy.notes)]
    return "\n".join(parts)


def render_tree(anatomy: Explained) -> str:
    """The autograd graph as an indented tree, from the output down to the leaves.

    A node that several others hand gradients to is drawn in full where it is met first; elsewhere one line,
    ``(above)``, points there.
    """
    seen: set[int] = set()
    fed = {edge.to for row in anatomy.nodes for edge in row.outgoing}
    lines: list[str] = []
    for row in anatomy.nodes:
        if row.number not in fed:
            lines += _branch(anatomy, row, 0, seen)
    return "\n".join(lines)


def explain_legacy(anatomy: Explained) -> list[str]:
    """Lines that tell what ``register_backward_hook`` would have shown beside the gradients of the module's inputs.

    The legacy hook hangs on one autograd node, the last that the forward made. Where the module made several, its
    ``grad_input`` is what that one node hands on: often bias, input and weight of a linear op, or one share of the
    gradient of an input that is used in several places. The lines say which of these holds here, or that both agree.
    """
    if not anatomy.legacy_input:
        return ["the legacy register_backward_hook would not be called: the first tensor that is returned has no graph"]
    last = anatomy.nodes[anatomy.legacy_node]
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
    """Whether the two tell other gradients, by shape and by norm to four digits; None among them does not count."""
    shown, told = ([(edge.shape, _norm(edge)) for edge in edges if edge.norm is not None] for edges in (legacy, truth))
    return shown != told


def _branch(anatomy: Explained, row: NodeRow, depth: int, seen: set[int]) -> list[str]:
    """The lines of one node and, indented, of all that it hands gradients to; ``seen`` holds the nodes drawn so far."""
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
    """The tensors whose gradients these are, separated by commas."""
    return ", ".join(edge.whose for edge in edges)


def _short(edges: Sequence[Edge]) -> str:
    """Shape and norm of each gradient, without the tensor it belongs to: for narrow columns."""
    return ", ".join(f"{_shape(edge)} {_norm(edge)}".rstrip() for edge in edges)


def _long(edges: Sequence[Edge]) -> str:
    """Shape, norm and tensor of each gradient that exists."""
    return "; ".join(f"{_shape(edge)} {_norm(edge)} to {edge.whose}" for edge in edges if edge.norm is not None)


def _shape(edge: Edge) -> str:
    """The shape as PyTorch prints it, ``[2, 3]``; ``[]`` of a scalar."""
    return "None" if edge.norm is None else f"[{edge.shape.replace('x', ', ')}]" if edge.shape != "scalar" else "[]"


def _norm(edge: Edge) -> str:
    return "" if edge.norm is None else f"{edge.norm:.4g}"
