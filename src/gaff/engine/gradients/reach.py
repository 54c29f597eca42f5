"""Questions to an autograd graph that need no hook."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node


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
