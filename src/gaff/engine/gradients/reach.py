"""Questions to an autograd graph that need no hook: walks over its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gaff.compat import autograd

Edge = tuple[Node, int]  # the node of a tensor, and which of its outputs the tensor is
Feeding = list[tuple[Node, int]]  # nodes that hand a gradient to an edge, each with the position at which it does
NEVER = 1 << 62  # no node has such a number but the accumulator of a leaf


def used_leaves(outputs: Iterable[Tensor]) -> set[int] | None:
    """Identities of the leaf tensors that ``outputs`` depend on, such as the parameters that took part in a run.

    None where the autograd graph does not tell: nothing requires grad, or a reentrant checkpoint hides what it will
    recompute. Walks all of the graph; nothing is held afterwards.
    """
    roots = autograd.nodes_of(outputs)
    found: set[int] = set()
    for node in autograd.nodes_behind(roots):
        if node.name() == "CheckpointFunctionBackward":
            return None
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.add(id(variable))
    return found if roots else None


def find_feeding(
    roots: Iterable[Tensor], edge: Edge, since: int, stops: Set[Node] = frozenset(), made: Any = None
) -> tuple[Feeding, list[Node], range | None]:
    """The nodes made since ``since`` that hand a gradient to ``edge``, each with the position at which it does.

    ``roots`` are where the walk begins, ``edge`` is the node of the input and its output number, ``since`` the
    sequence number of the first node of the call. The walk stops at older nodes, so it costs what the call itself
    made. The older ones are told second: nodes from before the call, or of another thread, which numbers its own.
    ``stops`` are nodes of the call's arguments, at which it ends in any case. Into the set ``made``, if one is given,
    go all nodes of the call.

    The third is None where the walk met every node that this thread has made since; else the numbers of all of them:
    what was not met has been dropped, or somebody holds on to it.
    """
    numbers = range(since, autograd.next_sequence())
    waiting = [tensor.grad_fn for tensor in roots if autograd.takes_gradient(tensor) and tensor.grad_fn is not None]
    seen: set[Node] = set() if made is None else made
    known: dict[int, Node] = {}  # by number
    found, older = [], []
    while waiting:
        node = waiting.pop()
        if node in seen or node in stops:
            continue
        made_at = autograd.sequence_of(node)
        if made_at < since or numbers.stop <= made_at < NEVER:  # or of a thread that has made more
            older.append(node)
            continue
        seen.add(node)
        if made_at < NEVER and known.setdefault(made_at, node) is not node:  # one of the two is of another thread
            older += [node, known[made_at]]
            continue
        for position, (onward, number) in enumerate(node.next_functions):
            if onward is None:
                continue
            if onward is edge[0] and number == edge[1]:
                found.append((node, position))
            else:
                waiting.append(onward)
    return found, older, numbers if len(known) < len(numbers) else None


class PassGraph:
    """The graph of the backward pass in progress, walked once when it is first asked for, and let go with the pass.

    ``numbers``: the sequence numbers of its nodes, but for accumulators, once that was asked for.
    """

    def __init__(self) -> None:
        self._task = -1
        self.numbers: list[int] = []
        self._known: dict[tuple[Node | None, int], list[Node]] | None = None

    def handing_to(self, position: int) -> list[Node] | None:
        """The nodes of the pass that hand a gradient to the node that is being executed, as its input at ``position``.

        Where passes are in progress on several threads, nodes of the others may be among them. None where nothing tells
        with what the pass began: it was not called for through ``torch.autograd``.
        """
        task = autograd.backward_task()
        if task != self._task:
            self.numbers, roots = [], autograd.roots_of_passes()
            self._task, self._known = task, _by_edge(roots, self.numbers) if roots else None
            autograd.at_backward_end(self.let_go)
        return None if self._known is None else self._known.get((autograd.current_node(), position), [])

    def let_go(self) -> None:
        """Forget the nodes: they hold the graph."""
        self._task, self._known, self.numbers = -1, None, []


def _by_edge(roots: list[Node], numbers: list[int]) -> dict[tuple[Node | None, int], list[Node]]:
    """All nodes behind ``roots``, by what they hand a gradient to; their sequence numbers go into ``numbers``."""
    found: dict[tuple[Node | None, int], list[Node]] = {}
    for node in autograd.nodes_behind(roots):
        if (number := autograd.sequence_of(node)) < NEVER:
            numbers.append(number)
        for edge in node.next_functions:
            if edge[0] is not None:
                found.setdefault(edge, []).append(node)
    return found
