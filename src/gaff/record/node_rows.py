"""The rows of an anatomy: one for each autograd node, as plain values without tensors.

``gaff.inspection.anatomy`` makes them; ``gaff.views.anatomy_text`` and ``anatomy_svg`` draw them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Edge:
    """One gradient at a node. ``whose``: the tensor it is the gradient of; ``to``: number of the node it goes to."""

    whose: str
    shape: str
    norm: float | None  # None where there is no gradient
    to: int | None = None


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One autograd node that ran, in the order of the backward pass. ``incoming`` gradients made ``outgoing`` ones."""

    number: int
    name: str
    site: str  # of the op whose forward made the node
    place: str
    code: str
    incoming: tuple[Edge, ...]
    outgoing: tuple[Edge, ...]


class Explained(Protocol):
    """What can be drawn of a backward pass: the fields of ``gaff.inspection.anatomy.Anatomy``, as views need them.

    A ``Protocol``, so that views can draw an anatomy without an import from a higher floor.
    """

    @property
    def module(self) -> str:
        """The class name of the module."""

    @property
    def nodes(self) -> tuple[NodeRow, ...]:
        """The autograd nodes in the order in which backward ran them; ``number`` of each is its place here."""

    @property
    def grad_input(self) -> tuple[Edge, ...]:
        """The gradients of the inputs that require grad, one for each tensor."""

    @property
    def grad_output(self) -> tuple[Edge, ...]:
        """The gradients that backward began with, ones, of every output that requires grad."""

    @property
    def parameters(self) -> tuple[Edge, ...]:
        """The gradients of the parameters that require grad, in and under the module."""

    @property
    def legacy_input(self) -> tuple[Edge, ...]:
        """What the legacy ``register_backward_hook`` calls ``grad_input``: what the output's node handed on."""

    @property
    def legacy_output(self) -> tuple[Edge, ...]:
        """What the legacy ``register_backward_hook`` calls ``grad_output``: what came to the output's node."""

    @property
    def legacy_node(self) -> int:
        """The number of the node on which that hook hangs; -1 where it did not run."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the numbers do not tell, or tell only in part."""
