"""The one seam to private torch functions: each is named here once, and proven before it is trusted.

Everything else in gaff calls torch's public interface. What is missing or means something else in a torch
version switches to the safe alternative described beside it, never to a guess.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from gaff import spread

# Number of the backward pass that this thread is executing, or -1: in a forward hook it means "recomputation".
backward_task: Callable[[], int] = torch._C._current_graph_task_id

# Number that the next autograd node of this thread will get; a node's own is ``Node._sequence_nr()``.
next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The autograd node that this thread is executing, inside a backward pass.
current_node: Callable[[], Node | None] = torch._C._current_autograd_node

# Level of the innermost torch.func transform (grad, vmap ...) on this thread, or None.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

# Address of the memory behind a tensor: equal for all views of it, and (unlike ``data_ptr``) without making a
# copy-on-write copy real. Raises where there is no such memory (sparse, nested).
memory_of: Callable[[Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]

# Grad mode of this thread, without the cost of a context manager.
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def sequence_of(node: Node) -> int:
    """Creation number of an autograd node within its thread; leaves' accumulators have a huge one."""
    number: int = node._sequence_nr()
    return number


def storage_life(tensor: Tensor) -> Callable[[], bool]:
    """Tells whether the memory of ``tensor`` is still held by anybody, without holding it."""
    weak = StorageWeakRef(tensor.untyped_storage())
    return lambda: not weak.expired()


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor stands for many, inside a transform or a batched backward pass, and means nothing outside."""
    return transform_level() is not None or _is_batched(tensor)


_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to in place; -1 where torch does not count (inference mode)."""
    if spread.is_spread(tensor):  # both count: operations on the whole, and those on the local part alone
        return -1 if tensor.is_inference() else tensor._version + spread.local_of(tensor)._version
    return -1 if tensor.is_inference() else tensor._version


def version_probe(tensor: Tensor) -> Tensor:
    """An empty tensor that shares the version counter of ``tensor``, and so tells of writes without holding memory."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


class _Life:
    """Lives as long as the autograd nodes in whose metadata it lies."""


def graph_life(tensors: Iterable[Tensor]) -> weakref.ref[Any]:
    """A reference that lives as long as the graph behind any of ``tensors``, without holding it."""
    life = _Life()
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[_Life] = life  # type: ignore[index]
    return weakref.ref(life)


def enclosing_functions() -> list[Any]:
    """The autograd nodes of custom Functions (reentrant checkpoints, say) whose forward this thread runs, inner first.

    Only Functions in the classic style, with ``ctx`` as first argument of ``forward``, have a node by then. Those that
    torch makes of compiled code do not count.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.autograd.function.BackwardCFunction) and _is_forward_of(first, code):
                found.append(first)
        frame = frame.f_back
    return found


def _is_forward_of(node: Any, code: CodeType) -> bool:
    function = getattr(type(node), "_forward_cls", None)
    forward = inspect.unwrap(function.forward) if function is not None else None
    return not type(node).__name__.startswith("CompiledFunction") and getattr(forward, "__code__", None) is code


def recomputing_function() -> Any:
    """The node of the reentrant checkpoint (or other custom Function) inside whose backward this code runs, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.autograd.function.BackwardCFunction):
                return first
        frame = frame.f_back
    return None


def wrap_recomputation(region: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Let the checkpoint of ``region`` (its frame, or its node) recompute by ``wrap`` of what it would call.

    Returns whether there was something to wrap: a custom Function that is no checkpoint has nothing.
    """
    names = [name for name in ("recompute_fn", "run_function") if hasattr(region, name)]
    for name in names:
        setattr(region, name, wrap(getattr(region, name)))
    return bool(names)


def is_autograd_thread() -> bool:
    """Whether this thread is none of Python's, but one of those on which autograd runs the backward of a device."""
    here = threading.get_ident()
    return not any(one.ident == here and type(one).__name__ != "_DummyThread" for one in threading.enumerate())


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Operations on ``device`` keep the precision of what they are given."""
    is_on = torch.is_autocast_enabled(device.type) if torch.amp.is_autocast_available(device.type) else False
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def outside_modes() -> AbstractContextManager[Any]:
    """Runs what is inside unseen by dispatch modes, such as that of a selective checkpoint, which counts operations."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


class Checkpoint(NamedTuple):
    """One non-reentrant checkpoint in progress on this thread. ``pass_`` is another object for each recomputation."""

    frame: Any  # weakly referable; dies with the graph of its region
    is_again: bool  # it recomputes
    pass_: Any


# The hooks for saved tensors on top on this thread, or None; its argument: also while something is traced.
saved_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_chains: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()  # pack hook -> what lies below and with it


def has_saved_hooks() -> bool:
    """Whether anything, such as a checkpoint, changes how tensors are saved for backward on this thread."""
    return saved_hooks(True) is not None


def checkpoints() -> list[Checkpoint]:
    """The non-reentrant checkpoints around the current call, innermost first; ``sees_checkpoints`` proves it.

    torch tells neither in forward nor in recomputation which checkpoint is at work, but both put their own hooks for
    saved tensors in place, and these hold the one frame object of that checkpoint.
    """
    top = saved_hooks(True)
    if top is None:
        return []
    chain = _chains.get(top[0])
    if chain is None:
        chain = tuple(found for pack in _all_pack_hooks() if (found := _checkpoint_of(pack)) is not None)
        if _checkpoint_of(top[0]) is not None:  # such a hook is put in place once; what lies below it stays
            _chains[top[0]] = chain
    return [Checkpoint(frame, is_again, pack) for reference, is_again, weak in chain
            if (frame := reference()) is not None and (pack := weak()) is not None]  # fmt: skip


def _all_pack_hooks() -> list[Any]:
    autograd: Any = torch._C._autograd
    taken = []
    found = []
    try:
        while (top := saved_hooks(True)) is not None:
            found.append(top[0])
            if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
                break  # torch would not let us put them back
            autograd._pop_saved_tensors_default_hooks()
            taken.append(top)
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def _checkpoint_of(pack: Any) -> tuple[weakref.ref[Any], bool, weakref.ref[Any]] | None:
    """The frame that a checkpoint's own pack hook closes over: itself in forward, weakly in a recomputation."""
    waiting = [pack]
    for depth, function in enumerate(waiting):
        for cell in getattr(function, "__closure__", None) or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if type(inside).__name__ == "_CheckpointFrame":
                return weakref.ref(inside), False, weakref.ref(pack)
            if isinstance(inside, weakref.ref) and type(inside()).__name__ == "_CheckpointFrame":
                return inside, True, weakref.ref(pack)
            if depth < 4 and hasattr(inside, "__closure__"):
                waiting.append(inside)
    return None


@cache
def sees_checkpoints() -> bool:
    """Whether ``checkpoints`` tells the truth in this version of torch: tried once, on a checkpoint of its own."""
    seen: list[list[Checkpoint]] = []

    def region(x: Tensor) -> Tensor:
        seen.append(checkpoints())
        return x.sin().sin()

    plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with plain, torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x = torch.zeros(1, device="cpu", requires_grad=True)
        checkpoint(region, x, use_reentrant=False, preserve_rng_state=False).backward()
    chains = [chain[0] for chain in seen if chain]
    seen.clear()  # or what is around this call would live until a collector comes
    return len(chains) == 2 and chains[0].frame is chains[1].frame and chains[1].is_again and not chains[0].is_again


def is_python_node(node: Node) -> bool:
    """Whether an autograd node is a custom Function's, such as that of a reentrant checkpoint."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def grad_edge_node(tensor: Tensor) -> tuple[Node, int]:
    """The autograd node that receives the gradient of ``tensor``, and the position in its inputs.

    ``tensor`` must require grad. Touches ``grad_fn`` first: torch 2.13 can crash on a stale view otherwise.
    """
    _ = tensor.grad_fn
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass of this thread has finished; dropped by torch if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def norms_of(tensors: list[Tensor], kind: float) -> tuple[list[Tensor] | None, Tensor]:
    """The norm of each tensor and of all together, bit by bit as ``torch.nn.utils.get_total_norm``.

    Those of single tensors are None where they lie on several devices or in several types. Nothing is synchronised.
    """
    if any(spread.is_spread(one) for one in tensors):
        return spread.norms_of(tensors, kind)
    first = tensors[0]
    if any(one.dtype != first.dtype or one.device != first.device for one in tensors):
        return None, torch.nn.utils.get_total_norm(tensors, kind)
    try:
        norms = list(torch._foreach_norm(tensors, kind))
    except RuntimeError:  # no such kernel for this device or type
        norms = [torch.linalg.vector_norm(one, kind) for one in tensors]
    return norms, torch.linalg.vector_norm(torch.stack(norms), kind)


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all in place, as ``torch.nn.utils.clip_grads_with_norm_``; not where the factor is known to be 1."""
    if factor.is_cpu and factor.item() == 1.0:
        return
    for group in _by_kind([spread.local_of(one) for one in tensors]):
        torch._foreach_mul_(group, factor.to(group[0].device))


def scale_each(tensors: list[Tensor], factors: list[Tensor]) -> None:
    """Multiply each in place by its own factor."""
    for tensor, factor in zip(tensors, factors, strict=True):
        spread.local_of(tensor).mul_(factor.to(tensor.dtype))


def clamp_all(tensors: list[Tensor], limit: float) -> None:
    """Clamp all in place, as ``torch.nn.utils.clip_grad_value_``."""
    for group in _by_kind([spread.local_of(one) for one in tensors]):
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


@cache
def lazy_clone() -> Callable[[Tensor], Tensor] | None:
    """``torch._lazy_clone`` if it does what gaff needs, else None.

    It makes a copy-on-write copy: both tensors share memory until one of them is written to in place. Proven on
    first use, for a tensor, a view of it and its base; without it gaff falls back to references whose version
    counter is checked on reading.
    """
    found: Callable[[Tensor], Tensor] | None = getattr(torch, "_lazy_clone", None)
    return found if found is not None and _is_copy_on_write(found) else None


def _is_copy_on_write(function: Callable[[Tensor], Tensor]) -> bool:
    state: Any = torch.is_inference_mode_enabled()
    if state:  # version counters and views behave otherwise there; prove it in ordinary mode
        with torch.inference_mode(False):
            return _is_copy_on_write(function)
    with torch.no_grad():
        base = torch.arange(4, dtype=torch.float32, device="cpu") + 0
        view = base[1:3]
        kept_base, kept_view = function(base), function(view)
        is_shared = memory_of(kept_base) == memory_of(base) == memory_of(view)
        view.add_(10)
        base.add_(100)
        return (
            is_shared
            and kept_base.tolist() == [0, 1, 2, 3]
            and kept_view.tolist() == [1, 2]
            and base.tolist() == [100, 111, 112, 103]
            and view.tolist() == [111, 112]
        )


# The stack of function modes of this thread: the lowest pushed first.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack


def remove_mode(mode: Any) -> None:
    """Take ``mode`` from the stack wherever it is; what lies above it stays."""
    above = []
    while torch._C._len_torch_function_stack():
        top = pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push_mode(other)


def has_mode(mode: Any) -> bool:
    """Whether ``mode`` is somewhere on the stack."""
    return any(torch._C._get_function_stack_at(at) is mode for at in range(torch._C._len_torch_function_stack()))


class CallFrames(NamedTuple):
    """How a module's call looks on the Python stack.

    ``codes``: of torch's functions below a forward. ``position``: the instruction of the one with hooks at which it
    runs the forward, and not a hook; None where that cannot be told.
    """

    codes: frozenset[CodeType]
    position: int | None


@cache
def call_frames() -> CallFrames:
    """Read from the code of torch itself: calling a module to see it would call other people's global hooks."""
    outer = torch.nn.Module._call_impl.__code__
    inner = next((one for one in outer.co_consts if isinstance(one, CodeType) and one.co_name == "inner"), outer)
    is_next = False
    found = []
    for instruction in dis.get_instructions(inner):
        is_next = is_next or instruction.argval == "forward_call"
        if is_next and instruction.opname.startswith("CALL"):
            found.append(instruction.offset)
            is_next = False
    return CallFrames(frozenset((outer, inner)), found[0] if len(found) == 1 and inner is not outer else None)
