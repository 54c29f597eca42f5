"""Module hooks: entry and exit of the selected modules, one shared function each.

``entered`` is the hook at the entry, ``left`` the one at the exit; ``ended`` comes last and tells the clock. Each hook
is a partial of one of these functions and of the module's ``Node``, which holds all that differs between modules.

Inside a backward pass the same hooks fire for calls that a checkpoint recomputes. These are no events: nobody looks
again. What acts on a side does so again, as it did in the first pass (``Side.again``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gaff.address.nested import Arguments
from gaff.compat import distributed
from gaff.compat.autograd import backward_task, is_grad_enabled, is_outside_functions, transform_level
from gaff.compat.checkpoints import saved_hooks
from gaff.engine.clock import Frame, Run, end_call
from gaff.engine.forwards import StandIn, users_forward
from gaff.engine.node import Node
from gaff.errors import PlanError

MISSING: Any = object()


class Hook(partial):  # type: ignore[type-arg]  # the one subclass of a concrete class: partial calls at C speed
    """A hook that stays behind when its module is copied or pickled: the copy gets one that does nothing.

    Calling it calls a function with a ``Node``, or the scope of a module's ops, first. It is told from other people's
    hooks by its class.
    """

    __slots__ = ()

    @property
    def __name__(self) -> str:
        """None, as of any partial; the error is for ``torch.jit.script``, which compiles the hooks of a module."""
        raise AttributeError(
            "TorchScript cannot compile a module while a gaff session is open on it: expected it to be closed first"
        )

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: a pickle must not need gaff


def install(node: Node, handles: list[Any], make: Callable[..., Any] = Hook, *, always: bool = True) -> None:
    """Put the hooks of ``node`` on its module; ``handles`` takes what removes them, the last to be removed first.

    ``make(function, node)`` makes a hook of one of the functions of this file; compiled code has hooks of its own
    kind. ``always``: the last hook is called after exceptions, too. Where the order matters, hooks are moved
    within torch's table of the module: an edited parameter stands in before anybody's hook uses it, who only looks
    at what comes in comes last, and edits of outputs come first.
    """
    module, side = node.module, node.exit
    for act in node.entry.acts:
        around = getattr(act, "around", None)
        if around is not None:
            handles.append(StandIn(module, around))
    if node.has_entry:
        handles.append(module.register_forward_pre_hook(make(entered, node), with_kwargs=True))
        _order_entry(module)
    if len(side.acts) == 1:
        side.direct = getattr(side.acts[0], "direct", None)
    if side.taps or side.acts or node.mark is not None:
        handles.append(module.register_forward_hook(make(left, node), with_kwargs=True))
        if side.is_edited:
            # gradients are edited of what all edits of the output have made
            for is_first in (_is_edited, _makes_another):
                _order(module._forward_hooks, partial(_is_left_by, is_first), is_last=False)
            distributed.parallel_first(module)
    if node.has_entry:
        handles.append(module.register_forward_hook(make(ended, node), with_kwargs=True, always_call=always))
    if node.scope is not None:
        node.scope.install(handles)
        # first of all: a function mode that somebody else's hook takes away must find itself on top
        _order(module._forward_hooks, lambda hook: type(hook.args[0]) is not Node, is_last=False)


def is_untouched_linear(module: nn.Module) -> bool:
    """Whether a module returns what torch's own linear layer made: nobody has put another forward or hook there."""
    stands = users_forward(module.__dict__.get("forward"))
    is_own = type(module).forward is nn.Linear.forward and (stands is None or getattr(stands, "is_gaffs", False))
    hooks = [*module._forward_hooks.values(), *torch_module._global_forward_hooks.values()]
    return is_own and all(_is_ours(hook) for hook in hooks)


def _is_left_by(is_wanted: Callable[[Node], bool], hook: Hook) -> bool:
    return hook.func is left and is_wanted(hook.args[0])


def _is_edited(node: Node) -> bool:
    """Whether a session edits an output or its gradient, and not only the part from outside, where callers are."""
    return node.exit.is_edited and not all(act.gives_view for act in node.exit.acts)


def _makes_another(node: Node) -> bool:
    """Whether a session edits what the module returns."""
    return node.exit.is_edited and any(not act.needs_graph for act in node.exit.acts)


def _order_entry(module: nn.Module) -> None:
    """Put the hooks at the entry of the module in order, where there are others."""
    hooks = module._forward_pre_hooks
    if len(hooks) > 1:
        # an edited parameter stands in before hooks that use it, as those of weight_norm and pruning do
        _order(hooks, lambda hook: hook.func is entered and hook.args[0].has_swaps, is_last=False)
        _order(hooks, lambda hook: hook.func is entered and not hook.args[0].entry.is_edited, is_last=True)
        distributed.checkpoint_first(module)
        distributed.fsdp_first(module)
        # ops are looked at in a run, which the hooks of nodes begin
        _order(hooks, lambda hook: type(hook.args[0]) is not Node, is_last=True)


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, Hook) or getattr(hook, "is_gaffs", False)


def _order(hooks: Any, is_wanted: Callable[[Hook], bool], *, is_last: bool) -> None:
    """Move those of gaff's hooks that are wanted to one end of a module's table of hooks; their own order stays.

    Edits of outputs come before all other hooks, as if the module had done it; who looks at inputs comes last.
    """
    if len(hooks) < 2:
        return
    ours = [number for number, hook in hooks.items() if _is_ours(hook) and is_wanted(hook)]
    for number in sorted(ours, reverse=not is_last):
        hooks.move_to_end(number, last=is_last)


# torch notes that a hook takes keywords after it has put the hook in place, and forgets it after it has taken the hook
# away: a call on another thread at that moment comes without keywords. It is outside the session, and ignored.


def entered(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """The hook at the entry: a run may begin, the call is counted, and what comes in passes the node's ``entry``.

    Returns what the module is called with instead, None for the same. Where this session does not look it does nothing,
    after an edit that would be met by the wrong thread has refused.
    """
    if kwargs is None:
        return None
    side = node.entry
    if backward_task() != -1:
        if side.is_edited or not node.clock.closed:
            node.clock.replay_frames().append(Frame(node))
            return _passed(side.again, node.clock.replay_frames()[-1], args, kwargs) if side.acts else None
        return None
    if node.clock.closed:
        return None
    try:
        run = _enter(node, module, args, kwargs)
        if run is None:
            for act in side.acts:
                refuse = getattr(act, "refuse_other_thread", None)
                if refuse is not None:
                    refuse()
            return None
        if not side.acts:
            return None
        return _passed(side.cross, run.frames[-1], args, kwargs, run, run.entered[node.index] - 1)
    except Exception as error:
        node.clock.fail(error)
        raise


def _passed(cross: Callable[..., Any], frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> Any:
    """What a module is called with once its arguments have passed its entry by ``cross``; None for the same.

    What the module writes into containers that were made anew is brought to the caller's when ``frame`` is over.
    """
    given = Arguments(args, kwargs, frame.at_leave)
    new = cross(given, given, *rest)
    return None if new is given else (new.args, new.kwargs)


def _enter(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """Tell the clock and the taps that a module is entered in an ordinary forward.

    Its run; None where this session does not look. Raises PlanError inside a torch.func transform.
    """
    clock = node.clock
    if transform_level() is not None and clock.is_own_thread():
        _refuse_transform(module)
    run = clock.enter(node, args, kwargs)
    if run is not None:
        call = run.entered[node.index]
        run.entered[node.index] = call + 1
        if node.entry.taps:
            given = Arguments(args, kwargs)
            for tap in node.entry.taps:
                tap(given, run, call)
    return run


def left(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = MISSING) -> Any:
    """The hook at the exit: the call is counted, and what the module returns passes the node's ``exit``.

    Called with what the module and the hooks before it made of the output, and not after an exception. Returns what the
    caller of the module gets. One edit of the whole output, in a call that nothing can recompute, goes the short way
    (``direct``), about as fast as a hook by hand.
    """
    run = node.open.get(get_ident())
    if run is None or backward_task() != -1 or transform_level() is not None or output is MISSING:
        return None if output is MISSING else _left_unusual(node, module, args, kwargs, output)
    counts, index, side = run.left, node.index, node.exit
    call = counts[index]
    counts[index] = call + 1
    try:
        for tap in side.taps:
            tap(output, run, call)
        if side.acts:
            direct = side.direct  # read once: another thread may close the session
            if direct is not None and type(output) is Tensor and node.mark is None and _is_once(run):
                new = direct(output)
                if new is not None:
                    return new
            output = side.cross(output, Arguments(args, kwargs), run, call)
    except Exception as error:
        run.fail(error)
        raise
    if node.mark is not None:
        node.mark(run, output)
    return output


def _is_once(run: Run) -> bool:
    """Whether nothing can recompute this call: in an autograd graph only hooks for saved tensors do, without one only a
    custom Function around it."""
    if saved_hooks(True) is not None:
        return False
    return is_outside_functions() if is_grad_enabled() else run.functions is not None and not run.functions


def _left_unusual(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A module returns in a recomputation, or in a run that is this one call; a torch.func transform is refused."""
    side, given = node.exit, Arguments(args, kwargs)
    if backward_task() != -1:
        return side.again(output, given) if side.acts else output
    run = _begin_at_exit(node, module, args, kwargs) if side.taps or side.acts else None
    if run is None:
        return output
    for tap in side.taps:
        tap(output, run, 0)
    if side.acts:
        output = side.cross(output, given, run, 0)
    node.clock.end(run, output)
    return output


def _begin_at_exit(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """The run that is one call of a module hooked only at its exit; None where this session does not look.

    No module around it is in progress, or that would have begun the run: somebody calls this module by itself.
    """
    if node.clock.closed:
        return None
    if transform_level() is not None and node.clock.is_own_thread():
        _refuse_transform(module)
    run = node.clock.begin(args, kwargs)
    if run is not None:
        run.left[node.index] = 1
    return run


def ended(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
    """The last hook, called after exceptions, too: the call is over, and with it perhaps the run.

    In a recomputation it drops the frame of the call, with those of calls inside it that raised, and calls what was to
    be done at its end.
    """
    if backward_task() == -1:
        node.clock.leave(node, output)
        return
    frames = node.clock.replay_frames()
    if end_call(frames, node) and not frames:
        for callback in node.clock.at_recomputed:
            callback()


def _refuse_transform(module: nn.Module) -> None:
    """Raises PlanError for a module inside grad, vmap and the like: its values are wrappers."""
    raise PlanError(
        f"{type(module).__name__} runs inside a torch.func transform (grad, vmap ...): its values are wrappers that "
        "mean nothing outside; open the session around code without the transform"
    )
