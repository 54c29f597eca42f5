"""The one seam to autograd: its private functions, and what its nodes, threads and backward passes tell.

None of it waits for a device.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gaff.compat.modes import frames_from

# Number of the backward pass that this thread is executing, or -1: in a forward hook it means "recomputation".
backward_task: Callable[[], int] = torch._C._current_graph_task_id
# Number that the next autograd node of this thread will get; a node's own is ``Node._sequence_nr()``.
next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
# The autograd node that this thread is executing, inside a backward pass.
current_node: Callable[[], Node | None] = torch._C._current_autograd_node
# Level of the innermost torch.func transform (grad, vmap ...) on this thread, or None.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
# Grad mode of this thread, without the cost of a context manager.
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether this thread is in the forward of no custom Function: torch runs those without forward-mode differentiation,
# and ``enable_grad`` inside does not change that.
is_outside_functions: Callable[[], bool] = torch._C._is_fwd_grad_enabled


def sequence_of(node: Node) -> int:
    """Creation number of an autograd node within its thread; leaves' accumulators have a huge one."""
    number: int = node._sequence_nr()
    return number


def is_saved_by_address() -> bool:
    """Whether saved tensors may be written to (``allow_mutation_on_saved_tensors``): torch knows them by address."""
    return bool(getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor stands for many, inside a transform or a batched backward pass, and means nothing outside.

    Such are the tensors of ``torch.func.vmap`` and of ``is_grads_batched``; inside a transform all count as such.
    """
    return transform_level() is not None or _is_batched(tensor)


_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_edge_of_compiled() -> bool:
    """Whether this thread brings a gradient to an output of compiled code that has other differentiable ones.

    Asked in a tensor hook outside of that code. Such an output may also be used inside, and what that brings is not in
    the gradient; of a single output nothing can come back but from outside. Where torch does not tell which outputs are
    differentiable all count.
    """
    node: Any = current_node()
    if node is None or type(node).__name__ != "CompiledFunctionBackward":
        return False
    known = getattr(getattr(type(node)._forward_cls, "metadata", None), "output_info", None)
    several = [one.requires_grad for one in known] if known is not None else node._input_metadata
    return sum(map(bool, several)) > 1


def metadata_of(node: Node) -> dict[Any, Any]:
    """What anybody has put down at an autograd node: it lives and dies with the node, whose Python object may not."""
    found: dict[Any, Any] = node.metadata  # type: ignore[assignment]  # torch declares a method
    return found


class _Life:
    """Lives as long as the autograd nodes in whose metadata it lies."""


def graph_life(tensors: Iterable[Tensor]) -> weakref.ref[Any]:
    """A reference that lives as long as the autograd graph behind any of ``tensors``, without holding it.

    It points to a token in the metadata of their nodes, which is freed with them. Leaves among them have none.
    """
    return node_life(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def node_life(nodes: Iterable[Node]) -> weakref.ref[Any]:
    """As ``graph_life``, of autograd nodes: it lives as long as any of them."""
    life = _Life()
    for node in nodes:
        metadata_of(node)[life] = None
    return weakref.ref(life)


def takes_gradient(tensor: Tensor) -> bool:
    """Whether backward can bring ``tensor`` a gradient; to be asked before its ``grad_fn``, which may raise.

    ``requires_grad`` is not enough. A view that was made without grad mode, of a tensor that requires grad, says that
    it requires one and gets none; once its memory is written to in place, torch raises whatever is asked of it.
    """
    try:
        return tensor.requires_grad and not is_view_without_grad(tensor)
    except RuntimeError:  # such a view, written to since
        return False


def maker_of(tensor: Tensor) -> Node | None:
    """The autograd node that made ``tensor``; None of a leaf, and of what torch raises for when its node is asked for.

    That is a view made without grad mode of what was written to since, as optimizers do with complex parameters.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_view_without_grad(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view that was made without grad mode of a tensor that requires grad."""
    try:
        return tensor._is_view() and tensor.grad_fn is None and tensor._base.requires_grad  # type: ignore[union-attr]
    except RuntimeError:  # written to since, with grad mode
        return True


def is_autograd_thread() -> bool:
    """Whether this thread is none of Python's, but one of those on which autograd runs the backward of a device."""
    here = threading.get_ident()
    return not any(one.ident == here and type(one).__name__ != "_DummyThread" for one in threading.enumerate())


def is_python_node(node: Node) -> bool:
    """Whether an autograd node is a custom Function's, such as that of a reentrant checkpoint."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def grad_edge_node(tensor: Tensor) -> tuple[Node, int]:
    """The autograd node that receives the gradient of ``tensor``, and the position in its inputs.

    ``tensor`` must require grad. Touches ``grad_fn`` first: torch 2.13 can crash on a stale view otherwise. Of
    a subclass torch's function would view it through ``__torch_function__``, and tell the node of that view, and
    modes of the program would see that view.
    """
    _ = tensor.grad_fn
    with torch._C.DisableTorchFunction():
        edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def is_due(node: Node) -> bool:
    """Whether the current backward pass computes what comes to ``node``; one for chosen inputs leaves others out."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf, whose gradient was asked for by name
        return True


def roots_of_passes() -> list[Node]:
    """The autograd nodes with which the backward passes in progress began, on whatever threads.

    Read from the frames of torch's own calls: a device has a thread of autograd's own, which does not show who called.
    """
    return [node for one in _passes() for node in nodes_of(one["t_outputs"])]


def chosen_inputs() -> list[set[int]]:
    """Of each backward pass in progress that is for chosen ``inputs`` only, the identities of these."""
    return [set(map(id, one["args"][3])) for one in _passes() if one["args"][3]]


def _passes() -> list[dict[str, Any]]:
    """The arguments of torch's own calls of its engine that are in progress."""
    frames = (inner for frame in sys._current_frames().values() for inner in frames_from(frame))
    return [frame.f_locals for frame in frames if frame.f_code is _RUN_BACKWARD]


def nodes_of(outputs: Iterable[Any]) -> list[Node]:
    """The autograd nodes of what a backward pass begins with, tensors or gradient edges; leaves have none."""
    nodes = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    return [node for node in nodes if node is not None]


def kept_by(node: Any, name: str) -> Tensor | None:
    """What a node keeps for its backward under a name of torch's, such as ``target``; None where it keeps none, or no
    more, where somebody has written to it since, and where hooks for saved tensors would notice: a checkpoint would
    compute its region once more, and what hands out each tensor once would hand it to nobody later."""
    try:
        if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
            return None
        found = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None
    return found if isinstance(found, Tensor) else None


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def nodes_behind(roots: Iterable[Node], stops: Iterable[Node] = ()) -> Iterator[Node]:
    """Every node of the autograd graphs behind ``roots``, these themselves included, each once."""
    seen, waiting = set(stops), list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [onward for onward, _ in node.next_functions if onward is not None]


def nearest_nodes(tensor: Tensor, most: int, *, stops: tuple[str, ...] = ()) -> Iterator[Node]:
    """The autograd nodes behind a tensor, the nearest first, each once, ``most`` of them at the most.

    What lies behind nodes whose names begin with one of ``stops`` is left out, as are these.
    """
    waiting: deque[Node] = deque(nodes_of([tensor]))
    seen: set[Node] = set()
    while waiting and len(seen) < most:
        node = waiting.popleft()
        if node not in seen and not (stops and node.name().startswith(stops)):
            seen.add(node)
            yield node
            waiting += [onward for onward, _ in node.next_functions if onward is not None]


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaves whose ``.grad`` a backward pass from ``tensor`` adds to, each once."""
    nodes: Iterable[Any] = nodes_behind(nodes_of([tensor]))
    return [node.variable for node in nodes if hasattr(node, "variable")]


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that this thread executes has finished.

    To be called inside a backward pass. torch drops the callback where the pass raises.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
