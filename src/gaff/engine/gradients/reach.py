"""Questions to an autograd graph that need no hook: walks over its nodes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

from gaff.compat import autograd


def used_leaves(outputs: Iterable[Tensor]) -> set[int] | None:
    """Identities of the leaf tensors that ``outputs`` depend on, such as the parameters that took part in a run.

    None where the autograd graph does not tell: nothing requires grad, or a reentrant checkpoint hides what it will
    recompute. Walks all of the graph; nothing is held afterwards.
    """
    waiting: list[Node] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    if not waiting:
        return None
    seen: set[Node] = set()
    found: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return None
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.add(id(variable))
        waiting.extend(onward for onward, _ in node.next_functions if onward is not None)
    return found


class PassGraph:
    """The graph of the backward pass in progress, walked once when it is first asked for, and let go with the pass."""

    def __init__(self) -> None:
        self._task = -1
        self._known: dict[tuple[Node | None, int], list[Node]] | None = None

    def handing_to(self, position: int) -> list[Node] | None:
        """The nodes of the pass that hand a gradient to the node that is being executed, as its input at ``position``.

        Where passes are in progress on several threads, nodes of the others may be among them. None where nothing tells
        with what the pass began: it was not called for through ``torch.autograd``.
        """
        task = autograd.backward_task()
        if task != self._task:
            roots = autograd.roots_of_passes()
            self._task, self._known = task, _by_edge(roots) if roots else None
            autograd.at_backward_end(self.let_go)
        return None if self._known is None else self._known.get((autograd.current_node(), position), [])

    def let_go(self) -> None:
        """Forget the nodes: they hold the graph."""
        self._task, self._known = -1, None


def _by_edge(roots: list[Node]) -> dict[tuple[Node | None, int], list[Node]]:
    """All nodes behind ``roots``, by what they hand a gradient to."""
    found: dict[tuple[Node | None, int], list[Node]] = {}
    seen: set[Node] = set()
    while roots:
        node = roots.pop()
        if node not in seen:
            seen.add(node)
            for edge in node.next_functions:
                if edge[0] is not None:
                    found.setdefault(edge, []).append(node)
                    roots.append(edge[0])
    return found
