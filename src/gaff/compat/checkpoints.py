"""Activation checkpoints around the current call, of both kinds: torch tells of them nowhere, their frames do."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoint_module
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from gaff.compat.autograd import is_grad_enabled, is_outside_functions
from gaff.compat.modes import frames_from, outside_modes
from gaff.compat.replacements import Announced, Replacements

# Raised where a checkpoint's recomputation saves the last tensor that it is asked for: in whatever op that is.
StopRecomputation: type[Exception] = checkpoint_module._StopRecomputationError


def enclosing_functions() -> list[Any]:
    """The autograd nodes of custom Functions (reentrant checkpoints, say) whose forward this thread runs, inner first.

    Only Functions in the classic style, with ``ctx`` as first argument of ``forward``, have a node by then. Those that
    torch makes of compiled code do not count.
    """
    return [node for node, code in _functions_at(sys._getframe(1), "forward") if _is_forward_of(node, code)]


def note_functions(run: Any) -> None:
    """Note the custom Functions around a run that begins without grad mode, as its ``functions``."""
    run.functions = None if is_grad_enabled() else enclosing_functions()


def _is_forward_of(node: Any, code: CodeType) -> bool:
    """Whether ``code`` is the ``forward`` of the custom Function of ``node``, and none that torch made by compiling."""
    function = getattr(type(node), "_forward_cls", None)
    forward = inspect.unwrap(function.forward) if function is not None else None
    return not type(node).__name__.startswith("CompiledFunction") and getattr(forward, "__code__", None) is code


def repeats_in_order(function: Any) -> bool:
    """Whether a custom Function's node is torch's reentrant checkpoint, whose backward runs its forward once more.

    What others call in backward may be something else, in another order, as the solver of an adjoint equation does.
    """
    return getattr(type(function), "_forward_cls", None) is CheckpointFunction


def repeats_without_graph() -> bool:
    """Whether a reentrant checkpoint repeats the code that runs: its first pass made no autograd graph.

    A checkpoint of the other kind may lie inside one and repeat its own part of that, whose first pass made one.
    """
    for frame in frames_from(sys._getframe(1)):
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == checkpoint_module.__file__:
            return False
    return False


def is_spent(region: Any) -> bool:
    """Whether a region can recompute no more: torch's reentrant checkpoint, once a pass has freed what it saved.

    Its node lives on with the loss. Custom Functions of others may run again without what they saved, and do not count.
    """
    if not repeats_in_order(region):
        return False
    try:
        _ = region._raw_saved_tensors
    except RuntimeError:  # torch refuses a second pass in the same way
        return True
    return False


def recomputing_functions() -> Iterator[Any]:
    """The nodes of all custom Functions inside whose backward this code runs, the inner one first.

    Such as those of reentrant checkpoints.
    """
    return (node for node, _ in _functions_at(sys._getframe(1), "backward"))


def _functions_at(frame: FrameType, name: str) -> Iterator[tuple[Any, CodeType]]:
    """The nodes of custom Functions that are the first argument of the calls around ``frame``, and whose code runs.

    Of calls of this ``name``, or for "forward" whose first argument is named as a context is: to ask for a frame's
    variables is dear, and before Python 3.13 keeps them alive until the call ends.
    """
    for one in frames_from(frame):
        code = one.f_code
        first = code.co_varnames[0] if code.co_argcount else "self"
        if first != "self" and (name == code.co_name or (name == "forward" and first == "ctx")):
            node = one.f_locals.get(first)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                yield node, code


def wrap_recomputation(region: Any, wrap: Wrap) -> bool:
    """Let a checkpoint recompute by ``wrap(function)`` in the place of the function that it would call.

    ``region`` is the frame of a non-reentrant checkpoint or the node of a reentrant one, and is changed. Returns
    whether there was something to wrap: a custom Function that is no checkpoint has nothing.
    """
    names = [name for name in ("recompute_fn", "run_function") if hasattr(region, name)]
    for name in names:
        setattr(region, name, wrap(getattr(region, name)))
    return bool(names)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def follow_regions(wrap: Wrap, known: WeakSet[Any] | None = None) -> Callable[[], None]:
    """Let every checkpoint that begins on this thread recompute by ``wrap(function)``; returns what ends that.

    Of both kinds, whatever a region calls. Into ``known``, if it is given, go the regions, which are then those of all
    threads, and non-reentrant ones alone: what others save is what they recompute. While somebody follows, a method of
    each of torch's two classes is another.
    """
    thread = get_ident()

    def follow(region: Any) -> None:
        if known is None and thread == get_ident():
            wrap_recomputation(region, wrap)
        elif known is not None and isinstance(region, _FRAME):
            known.add(region)
            wrap_recomputation(region, wrap)

    return _regions.at_each(follow).close


_FRAME: Any = checkpoint_module._CheckpointFrame
_FUNCTION: Any = checkpoint_module.CheckpointFunction


def _beginning(told: Callable[[Any], None], plain: Callable[..., None]) -> Callable[..., None]:
    """The ``__init__`` of a non-reentrant checkpoint's frame while somebody follows."""

    @wraps(plain)
    def begin(frame: Any, *args: Any, **kwargs: Any) -> None:
        plain(frame, *args, **kwargs)
        _tell_once(told, frame)

    return begin


def _running(told: Callable[[Any], None], plain: Callable[..., Any]) -> Any:
    """The ``forward`` of a reentrant checkpoint while somebody follows."""

    @wraps(plain)
    def forward(node: Any, *args: Any) -> Any:
        outputs = plain(node, *args)
        _tell_once(told, node)
        return outputs

    return staticmethod(forward)


def _tell_once(told: Callable[[Any], None], region: Any) -> None:
    """Tell of a region that begins, where no patch of ours that lies below somebody else's has done so."""
    if not vars(region).get("is_followed"):
        region.is_followed = True
        told(region)


_regions = Announced(
    lambda told: Replacements(
        (_FRAME, "__init__", partial(_beginning, told)), (_FUNCTION, "forward", partial(_running, told))
    )
)


def _recomputing(ask: Callable[[Any], None], hook: Any) -> Any:
    """Where torch begins to recompute a non-reentrant checkpoint: ``ask`` is called first, with its frame."""

    @wraps(hook, updated=())
    def begin(region: weakref.ref[Any], group: Any) -> Any:
        ask(region())
        return hook(region, group)

    return begin


# A non-reentrant checkpoint is about to recompute: told with its frame.
recomputations = Announced(
    lambda ask: Replacements((checkpoint_module, "_recomputation_hook", partial(_recomputing, ask)))
)


class Checkpoint(NamedTuple):
    """One non-reentrant checkpoint in progress on this thread.

    ``frame`` is its one object in forward and recomputation, ``pass_`` another one for each of these.
    """

    frame: Any  # weakly referable; dies with the graph of its region
    is_again: bool  # it recomputes
    pass_: Any


# The hooks for saved tensors on top on this thread, or None; its argument: also while something is traced.
saved_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_chains: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()  # pack hook -> what lies below and with it


def has_saved_hooks() -> bool:
    """Whether anything, such as a checkpoint, changes how tensors are saved for backward on this thread."""
    return saved_hooks(True) is not None


def is_first_pass() -> bool:
    """Whether what runs now will run again, in a non-reentrant checkpoint around it, or may, by what saves tensors."""
    return has_saved_hooks() and not all(one.is_again for one in enclosing())


def may_repeat() -> bool:
    """Whether a backward pass may run again what runs now: a checkpoint, or a custom Function, is around it.

    A reentrant checkpoint runs its forward without grad mode, in a custom Function; code inside may turn it on.
    """
    return not is_grad_enabled() or saved_hooks(True) is not None or not is_outside_functions()


def enclosing() -> list[Checkpoint]:
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
    """The pack hooks of all saved-tensor hooks on this thread, innermost first.

    torch shows the top of that stack only, so they are taken off one by one and put back, whatever happens.
    """
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


def saved_plainly() -> AbstractContextManager[Any]:
    """What is saved for backward inside is kept as it is, unseen by a checkpoint around, which counts what it sees.

    Where such hooks are forbidden (``disable_saved_tensors_hooks``), no checkpoint can be around.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda held: held, lambda held: held)


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
    """Whether ``enclosing`` tells the truth in this version of torch: tried once, on a checkpoint of its own."""
    seen: list[list[Checkpoint]] = []

    def region(x: Tensor) -> Tensor:
        seen.append(enclosing())
        return x.sin().sin()

    with (
        outside_modes(),
        saved_plainly(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        x = torch.zeros(1, device="cpu", requires_grad=True)
        checkpoint(region, x, use_reentrant=False, preserve_rng_state=False).backward()
    chains = [chain[0] for chain in seen if chain]
    seen.clear()  # or what is around this call would live until a collector comes
    return len(chains) == 2 and chains[0].frame is chains[1].frame and chains[1].is_again and not chains[0].is_again
