"""Module hooks: entry and exit of the selected modules, one shared function each.

A module that is only watched gets the short functions (``before``, ``_after``); one that is edited gets those that may
change what passes (``before_edit``, ``_after_edit``); ``leave`` comes last and tells the clock. Each hook is a partial
of one of these functions and of the module's ``Node``, which holds all that differs between modules.

Inside a backward pass the same hooks fire for calls that a checkpoint recomputes. These are no events: nobody looks
again. Edits act again, as they did in the first pass, and gradient hooks are set there if the first pass had no
autograd graph. Which call is repeated is told by the node's ``Replay``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from gaff.compat import autograd, checkpoints, distributed
from gaff.compat.autograd import backward_task, is_grad_enabled, is_outside_functions, transform_level
from gaff.compat.checkpoints import has_saved_hooks, may_repeat, saved_hooks
from gaff.engine.clock import Frame, Run
from gaff.engine.forwards import StandIn
from gaff.engine.node import Node
from gaff.engine.recomputation import Match, Passage, Replay
from gaff.engine.streams import ExitChange
from gaff.errors import PlanError

MISSING: Any = object()


class Hook(partial):  # type: ignore[type-arg]  # the one subclass of a concrete class: partial calls at C speed
    """A hook that stays behind when its module is copied or pickled: the copy gets one that does nothing.

    Calling it calls a function of this file with the node first. It is told from other people's hooks by its class.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: a pickle must not need gaff


def install(node: Node, handles: list[Any], make: Callable[..., Any] = Hook, *, always: bool = True) -> None:
    """Put the hooks of ``node`` on its module; ``handles`` takes what removes them, the last to be removed first.

    ``make(function, node)`` makes a hook of one of the functions of this file; compiled code has hooks of its own
    kind. ``always``: the last hook is called after exceptions, too. Where the order matters, hooks are moved
    within torch's table of the module: an edited parameter stands in before anybody's hook uses it, who only looks
    at what comes in comes last, and edits of outputs come first.
    """
    module = node.module
    for change in node.entry_changes:
        around = getattr(change, "around", None)
        if around is not None:
            handles.append(StandIn(module, around))
    if node.has_entry:
        entered: Callable[..., Any] = before_edit if node.entry_changes else before
        handles.append(module.register_forward_pre_hook(make(entered, node), with_kwargs=True))
        _order_entry(node.module)
    if len(node.exit_changes) == 1:
        node.direct = getattr(node.exit_changes[0], "direct", None)
    if node.exits or node.arms or node.exit_changes or node.mark is not None:
        after: Callable[..., Any] = _after_edit if node.exit_changes else _after
        handles.append(module.register_forward_hook(make(after, node), with_kwargs=True))
        if node.exit_changes:
            _order(module._forward_hooks, lambda hook: hook.func is _after_edit, is_last=False)
    if node.has_entry:
        handles.append(module.register_forward_hook(make(leave, node), with_kwargs=True, always_call=always))
    if node.scope is not None:
        node.scope.install(handles)
        # first of all: a function mode that somebody else's hook takes away must find itself on top
        _order(module._forward_hooks, lambda hook: type(hook.args[0]) is not Node, is_last=False)


def _order_entry(module: nn.Module) -> None:
    """Put the hooks at the entry of the module in order, where there are others."""
    if len(module._forward_pre_hooks) > 1:
        # an edited parameter stands in before hooks that use it, as those of weight_norm and pruning do
        _order(
            module._forward_pre_hooks,
            lambda hook: hook.func is before_edit and hook.args[0].has_swaps,
            is_last=False,
        )
        _order(module._forward_pre_hooks, lambda hook: hook.func is before, is_last=True)
        distributed.fsdp_first(module)
        # ops are looked at in a run, which the hooks of nodes begin
        _order(module._forward_pre_hooks, lambda hook: type(hook.args[0]) is not Node, is_last=True)


def _order(hooks: Any, is_wanted: Callable[[Hook], bool], *, is_last: bool) -> None:
    """Move those of gaff's hooks that are wanted to one end of a module's table of hooks; their own order stays.

    Edits of outputs come before all other hooks, as if the module had done it; who looks at inputs comes last.
    """
    if len(hooks) < 2:
        return
    ours = [
        number
        for number, hook in hooks.items()
        if (isinstance(hook, Hook) or getattr(hook, "is_gaffs", False)) and is_wanted(hook)
    ]
    for number in sorted(ours, reverse=not is_last):
        hooks.move_to_end(number, last=is_last)


# torch notes that a hook takes keywords after it has put the hook in place, and forgets it after it has taken the hook
# away: a call on another thread at that moment comes without keywords. It is outside the session, and ignored.


def before(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """The entry hook of a module that is only watched: count the call, tell the taps, set gradient hooks.

    Changes nothing and returns None. In a recomputation only the gradient hooks are due.
    """
    if node.clock.closed or kwargs is None:
        return
    if backward_task() != -1:
        node.clock.replay_frames().append(Frame(node))
        arm_before_again(node, args, kwargs)
        return
    run = _enter(node, module, args, kwargs)
    if run is not None and node.entry_arms:
        arm_before(node, args, kwargs, run, run.entered[node.index] - 1)


def arm_before(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int) -> None:
    """Set the gradient hooks of what is entered, in an ordinary forward.

    Without grad mode there is nothing to hook yet. If the call is made inside the forward of a reentrant checkpoint,
    or of another custom Function, it waits for the recomputation; otherwise the streams are told that no gradient will
    come. With grad mode inside such a forward both may be: a checkpoint throws this graph away and makes it again,
    another Function may keep it.
    """
    if is_grad_enabled():
        if not is_outside_functions() and node.replay.wait(Passage(run, call), has_graph=True):
            for arm in node.entry_arms:
                arm.before_graph(args, kwargs, run, call)
        for arm in node.entry_arms:
            arm(args, kwargs, run, call)
    elif node.replay.wait(Passage(run, call)):
        for arm in node.entry_arms:
            arm.before_graph(args, kwargs, run, call)
    else:
        for arm in node.entry_arms:
            arm.give_up(run, call)


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
        for tap in node.entries:
            tap(args, kwargs, run, call)
    return run


def _after(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = MISSING) -> None:
    """The exit hook of a module that is only watched: count the call, tell the taps, set gradient hooks.

    Called with what the module and the hooks before it made of the output, and not after an exception.
    """
    run = node.open.get(get_ident())
    if run is None or backward_task() != -1 or transform_level() is not None:
        _after_unusual(node, module, args, kwargs, output)
        return
    left, index = run.left, node.index
    call = left[index]
    left[index] = call + 1
    for tap in node.exits:
        tap(output, run, call)
    if node.arms:
        arm_after(node, output, (args, kwargs), run, call)
    if node.mark is not None:
        node.mark(output, run)


def _after_unusual(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Look in a run that is this one call, or set gradient hooks in a recomputation; refuse a torch.func transform."""
    if output is MISSING:
        return
    if backward_task() != -1:
        arm_after_again(node, output, (args, kwargs))
        return
    run = _begin_at_exit(node, module, args, kwargs) if node.exits or node.arms else None
    if run is None:
        return
    for tap in node.exits:
        tap(output, run, 0)
    if node.arms:
        arm_after(node, output, (args, kwargs), run, 0)
    node.clock.end(run, output)


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


def arm_after(node: Node, output: Any, given: tuple[Any, Any], run: Run, call: int) -> None:
    """Set the gradient hooks of what returned, in an ordinary forward. ``given``: what the module was called with.

    As in ``arm_before``, a call without grad mode waits for a recomputation, or is given up at once.
    """
    if is_grad_enabled():
        if not is_outside_functions():
            node.exit_replay.wait(Passage(run, call), has_graph=True)
        for arm in node.arms:
            arm(output, given, run, call)
    elif not node.exit_replay.wait(Passage(run, call)):
        for arm in node.arms:
            arm.give_up(run, call)


def leave(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
    """The last hook, called after exceptions, too: the call is over, and with it perhaps the run.

    In a recomputation it drops the frame of the call, with those of calls inside it that raised, and calls what was to
    be done at its end.
    """
    if backward_task() == -1:
        node.clock.leave(node, output)
        return
    frames = node.clock.replay_frames()
    if any(frame.owner is node for frame in frames):
        is_found = False
        while not is_found:
            frame = frames.pop()
            is_found = frame.owner is node
            for callback in frame.at_leave:
                callback()
        for callback in node.clock.at_recomputed if not frames else ():
            callback()


def arm_before_again(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set the gradient hooks of what is entered in a recomputation, if the first pass had no autograd graph.

    Where it had one, hooks have been set on it, and a second set would tell each gradient twice.
    """
    found = node.replay.match() if node.entry_arms else None
    if found is not None and found.is_first_graph and is_grad_enabled():
        for arm in node.entry_arms:
            arm(args, kwargs, found.passage.run, found.passage.call)


def arm_after_again(node: Node, output: Any, given: tuple[Any, Any]) -> None:
    """Set the gradient hooks of what returned in a recomputation, if the first pass had no autograd graph."""
    if not node.arms or node.clock.closed:
        return
    found = node.exit_replay.match()
    if found is not None and found.is_first_graph and is_grad_enabled():
        for arm in node.arms:
            arm(output, given, found.passage.run, found.passage.call)


def before_edit(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """The entry hook of an edited module: as ``before``, and returns what the module is called with instead.

    In a recomputation it finds the call of the first pass and edits as that was edited. An ordinary call that may be
    recomputed is remembered for that. Where this session does not look it returns None, after an edit that would be
    met by the wrong thread has refused.
    """
    if kwargs is None:
        return None
    if backward_task() != -1:
        node.clock.replay_frames().append(Frame(node))
        found = find_match(node, module, node.replay)
        if found is None:
            return None
        return change_entry(node, args, kwargs, found.passage, found.is_first_graph, is_again=True)
    if node.clock.closed:
        return None
    run = _enter(node, module, args, kwargs)
    if run is None:
        for change in node.entry_changes:
            refuse = getattr(change, "refuse_other_thread", None)
            if refuse is not None:
                refuse()
        return None
    passage = Passage(run, run.entered[node.index] - 1)
    if may_repeat():
        node.replay.remember(passage)
    return change_entry(node, args, kwargs, passage, True, is_again=False)


def change_entry(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, has_graph: bool, *, is_again: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the edits at the entry of a call; what the module is called with.

    ``has_graph``: gradient hooks are due now, and not in a recomputation to come. ``is_again``: this is a
    recomputation. A gradient edit that cannot be set now waits if something may run the call again, else it is given
    up.
    """
    has_graph = has_graph and is_grad_enabled() and not node.clock.closed
    for change in node.entry_changes:
        if not change.is_gradient or has_graph:
            changed = change(args, kwargs, passage, is_again)
            if changed is not None:
                args, kwargs = changed
        elif not is_again and passage not in node.replay:
            change.give_up(passage.run, passage.call)
        elif not is_again and (before := getattr(change, "before_graph", None)) is not None:
            before(args, kwargs, passage.run, passage.call)
    return args, kwargs


def _after_edit(
    node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = MISSING
) -> Any:
    """The exit hook of an edited module: returns what its caller gets.

    The common case is one edit of the whole output, in a call that nothing can recompute: ``node.direct`` makes it
    without a passage, about as fast as a hook by hand. Everything else takes the long way, by ``change_exit``.
    """
    run = node.open.get(get_ident())
    if run is None or backward_task() != -1 or transform_level() is not None or output is MISSING:
        return _after_edit_unusual(node, module, args, kwargs, output)
    left, index = run.left, node.index
    call = left[index]
    left[index] = call + 1
    has_graph = is_grad_enabled()
    # nothing can recompute this call: in a graph only by saved hooks, without one only inside a custom Function
    is_graph = has_graph and is_outside_functions()
    is_once = saved_hooks(True) is None and (is_graph or (run.functions is not None and not run.functions))
    if is_once and node.direct is not None and type(output) is Tensor and node.mark is None:
        new = node.direct(output)
        if new is not None:
            return new
    passage = Passage(run, call)
    if not is_graph or has_saved_hooks():
        node.exit_replay.remember(passage)
    if not has_graph:
        return change_exit(node, output, (args, kwargs), passage, True, is_again=False)
    given = (args, kwargs)
    for change in node.exit_changes:
        output = change(output, given, passage, False)
    if node.mark is not None:
        node.mark(output, run)
    return output


def _after_edit_unusual(
    node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Edit in a recomputation, or in a run that is this one call; refuse a torch.func transform."""
    if output is MISSING:
        return None
    given = (args, kwargs)
    if backward_task() != -1:
        found = find_match(node, module, node.exit_replay)
        if found is None:
            return output
        return change_exit(node, output, given, found.passage, found.is_first_graph, is_again=True)
    run = _begin_at_exit(node, module, args, kwargs)
    if run is None:
        return output
    passage = Passage(run, 0)
    if may_repeat():
        node.exit_replay.remember(passage)
    output = change_exit(node, output, given, passage, True, is_again=False)
    node.clock.end(run, output)
    return output


def change_exit(
    node: Node,
    output: Any,
    given: tuple[Any, Any],
    passage: Passage,
    has_graph: bool,
    *,
    is_again: bool,
    changes: Iterable[ExitChange] | None = None,
) -> Any:
    """Make the edits at the exit of a call; what its caller gets.

    ``has_graph``: gradient hooks are due now, and not in a recomputation to come. ``is_again``: this is a
    recomputation. ``changes``: only these of the node's, for an op, whose values and gradients are edited at different
    moments.
    """
    has_graph = has_graph and is_grad_enabled() and not node.clock.closed
    for change in node.exit_changes if changes is None else changes:
        if not change.is_gradient or has_graph:
            output = change(output, given, passage, is_again)
        elif not is_again and passage not in node.exit_replay:
            change.give_up(passage.run, passage.call)
    return output


def find_match(node: Node, module: nn.Module, replay: Replay) -> Match | None:
    """The call that is recomputed here; None for one of a forward that was not edited.

    Raises PlanError where an open session's edited module is called inside a backward pass, and nothing tells to which
    forward that belongs: going on without the edit would make gradients of another function.
    """
    found = replay.match()
    if found is None and not node.clock.closed and node.clock.is_own_backward() and not _is_of_others(node):
        raise PlanError(
            f"{type(module).__name__} was called inside a backward pass, and its edits belong to a forward that cannot "
            "be told: expected torch.utils.checkpoint(use_reentrant=False), or no call of an edited module in backward"
        )
    return found


def _is_of_others(node: Node) -> bool:
    """Whether what recomputes here belongs to a forward that this session did not see.

    A non-reentrant checkpoint would have been remembered if it was seen; a custom Function's node was made elsewhere
    if none of this session's runs made it.
    """
    if any(found.is_again for found in checkpoints.enclosing()):
        return True
    current = autograd.current_node()
    return current is not None and autograd.is_python_node(current) and not node.clock.made(current)


def _refuse_transform(module: nn.Module) -> None:
    """Raises PlanError for a module inside grad, vmap and the like: its values are wrappers."""
    raise PlanError(
        f"{type(module).__name__} runs inside a torch.func transform (grad, vmap ...): its values are wrappers that "
        "mean nothing outside; open the session around code without the transform"
    )
