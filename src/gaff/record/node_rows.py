"""The rows of an anatomy: one for each autograd node, as plain values without tensors."""

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
    """What can be drawn of a backward pass: the fields of ``gaff.inspection.anatomy.Anatomy``, where each is told."""

    @property
    def module(self) -> str: ...
    @property
    def nodes(self) -> tuple[NodeRow, ...]: ...
    @property
    def grad_input(self) -> tuple[Edge, ...]: ...
    @property
    def grad_output(self) -> tuple[Edge, ...]: ...
    @property
    def parameters(self) -> tuple[Edge, ...]: ...
    @property
    def legacy_input(self) -> tuple[Edge, ...]: ...
    @property
    def legacy_output(self) -> tuple[Edge, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
