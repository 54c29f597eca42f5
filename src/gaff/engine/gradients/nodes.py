"""Autograd nodes under watch: which ran, with what, in the order in which backward ran them.

For those who ask about a backward pass as a whole, as the search for the origin of a NaN and the anatomy of a layer
do; sites need none of this. Hooks on nodes see what tensor hooks cannot: steps whose results no Python code ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gaff.compat import autograd
from gaff.compat.compiler import uncompiled

Gradients = Sequence["Tensor | None"]


class Seen:
    """One autograd node under watch.

    ``owner`` is whatever the caller of ``follow`` said when the node was first met. ``onward`` tells who gets its
    gradients, in the order of its inputs: another node and which of its inputs that is, None where no gradient goes.
    """

    __slots__ = ("name", "node", "onward", "owner", "variable")

    def __init__(self, node: Node, owner: Any) -> None:
        self.node = node
        self.owner = owner
        self.name = node.name().rpartition("::")[2]
        self.variable: Tensor | None = getattr(node, "variable", None)  # of a leaf's accumulator
        self.onward: list[tuple[Seen, int] | None] = []


class NodeWatch:
    """Calls ``ran(seen, incoming, outgoing)`` after each watched node; its gradients are looked at, never changed.

    ``incoming`` are the gradients that arrived at the node, one for each output of its operation, ``outgoing`` those
    that it hands on; either may hold None. Called on the thread that runs the backward pass, each time that the node
    runs. Holds the nodes, and with them what they saved, until ``close``.
    """

    def __init__(self, ran: Callable[[Seen, Gradients, Gradients], None]) -> None:
        self._ran = ran
        self._seen: dict[Node, Seen] = {}
        self._handles: list[Any] = []
        self.is_open = True

    def __iter__(self) -> Any:
        return iter(self._seen.values())

    def __len__(self) -> int:
        return len(self._seen)

    def follow(self, tensors: Iterable[Tensor], owner: Any) -> None:
        """Watch every node behind ``tensors`` that is not watched yet, down to the leaves, as ``owner``'s.

        Callers ask after each piece of the forward: the nodes that are new then are those that this piece made.
        """
        waiting: list[Seen] = []
        for tensor in tensors:
            maker = autograd.maker_of(tensor) if autograd.takes_gradient(tensor) else None
            if maker is not None and maker not in self._seen:
                waiting.append(self._add(maker, owner))
        while waiting:
            seen = waiting.pop()
            for onward, position in seen.node.next_functions:
                known = self._seen.get(onward) if onward is not None else None
                if known is None and onward is not None:
                    known = self._add(onward, owner)
                    waiting.append(known)
                seen.onward.append(None if known is None else (known, position))

    def find(self, tensor: Tensor) -> Seen | None:
        """The node that made ``tensor``, if it is watched."""
        maker = autograd.maker_of(tensor)
        return self._seen.get(maker) if maker is not None else None

    def owners_behind(self, tensor: Tensor, passing: Iterable[str]) -> Iterator[tuple[Any, tuple[Node, int]]]:
        """Whose outputs went into what made ``tensor``: for each the owner, and the node with the number of its output.

        Asked is also behind nodes of the names in ``passing``, written without Backward, and behind one right behind
        these that is not watched, a custom Function's. Only watched nodes are told.
        """
        names = {f"{name}Backward" for name in passing}

        def is_passed(node: Node) -> bool:
            return node.name().rstrip("0123456789").rpartition("::")[2] in names

        waiting = [] if tensor.grad_fn is None else [tensor.grad_fn]
        known = set(waiting)
        while waiting:
            here = waiting.pop()
            for node, number in here.next_functions:
                if node is None:
                    continue
                if node in self._seen:
                    yield self._seen[node].owner, (node, number)
                if node not in known and (is_passed(node) or (is_passed(here) and node not in self._seen)):
                    known.add(node)
                    waiting.append(node)

    def close(self) -> None:
        """Remove the hooks, and let go of the nodes and of what they saved."""
        self.is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def _add(self, node: Node, owner: Any) -> Seen:
        seen = self._seen[node] = Seen(node, owner)
        self._handles.append(node.register_hook(uncompiled(partial(_after, self, seen))))
        return seen


def _after(watch: NodeWatch, seen: Seen, outgoing: Gradients, incoming: Gradients) -> None:
    """The hook of a node; torch names what a node hands on first and what arrived at it second."""
    if watch.is_open:
        watch._ran(seen, incoming, outgoing)
