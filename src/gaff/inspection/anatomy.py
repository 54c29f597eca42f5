"""What ``gaff.anatomy`` tells: a backward pass as plain values, which print, draw and save without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from gaff.compat.files import write_text
from gaff.errors import RecordError
from gaff.inspection.writing import ending, number_of, worded
from gaff.record.node_rows import Edge, NodeRow
from gaff.views import anatomy_svg, anatomy_text

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The backward pass of one call of a module.

    ``nodes``: in the order in which they ran. ``legacy_input`` and ``legacy_output``: what ``register_backward_hook``
    would have been given (shapes, and what they really are); ``grad_input``: the gradients of the module's inputs,
    ``grad_output`` those that came to its outputs; ``parameters``: those of its parameters; ``legacy_node``: the number
    of the node on which that hook hangs, -1 where it would not be called. Holds no tensor.
    """

    module: str
    nodes: tuple[NodeRow, ...]
    grad_input: tuple[Edge, ...]
    grad_output: tuple[Edge, ...]
    parameters: tuple[Edge, ...]
    legacy_input: tuple[Edge, ...]
    legacy_output: tuple[Edge, ...]
    notes: tuple[str, ...] = ()
    legacy_node: int = -1

    def __str__(self) -> str:
        return anatomy_text.render_table(self)

    __repr__ = __str__

    def tree(self) -> str:
        """The nodes as a tree, from the output to the leaves."""
        return anatomy_text.render_tree(self)

    def to_svg(self) -> str:
        """The autograd graph as a picture: nodes as boxes, gradients as arrows."""
        return anatomy_svg.render(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that JSON takes."""
        return asdict(self)

    def to_json(self) -> str:
        """Everything as JSON, with the number of the format. ``from_json`` reads it back."""
        return json.dumps(worded({"gaff_anatomy": _FORMAT, **self.to_dict()}), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Anatomy:
        """Inverse of ``to_json``. Raises RecordError when ``text`` is no anatomy."""
        try:
            told = json.loads(text, object_hook=number_of)
            if told.pop("gaff_anatomy") != _FORMAT:
                raise ValueError(f"another format, expected {_FORMAT}")
            told["nodes"] = tuple(_node(one) for one in told["nodes"])
            for name in ("grad_input", "grad_output", "parameters", "legacy_input", "legacy_output"):
                told[name] = _edges(told[name])
            told["module"], told["notes"] = str(told["module"]), tuple(str(one) for one in told["notes"])
            read = cls(**told)
            if read.legacy_input and not 0 <= read.legacy_node < len(read.nodes):
                raise ValueError(f"no node {read.legacy_node!r}, expected one of {len(read.nodes)}")
            return read
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RecordError(f"anatomy cannot be read: {error!r}; expected what Anatomy.to_json wrote") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write a picture where the name ends in ``.svg``, else JSON, which ``gaff.load`` reads.

        Raises PlanError for a name of another format, such as ``.png``, RecordError where the file cannot be written.
        """
        text = self.to_svg() if ending(path, ".json", ".svg") == ".svg" else self.to_json()
        write_text(path, text + "\n")


def _node(told: dict[str, Any]) -> NodeRow:
    """A row as it was saved. Raises KeyError, TypeError or ValueError for what is none."""
    edges = {name: _edges(told[name]) for name in ("incoming", "outgoing")}
    return NodeRow(**{**told, "number": int(told["number"]), **edges})


def _edges(told: list[dict[str, Any]]) -> tuple[Edge, ...]:
    """Gradients as they were saved; see ``_node``."""
    return tuple(
        Edge(str(one["whose"]), str(one["shape"]), None if one["norm"] is None else float(one["norm"]), one["to"])
        for one in told
    )
