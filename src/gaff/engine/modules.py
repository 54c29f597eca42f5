"""Module hooks: entry and exit of the selected modules, one shared function each."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from gaff import compat
from gaff.compat import backward_task, transform_level
from gaff.engine.clock import Clock, Frame, Run
from gaff.engine.stream import EntryArm, EntryTap, ExitArm, ExitTap
from gaff.errors import PlanError

MISSING: Any = object()


class Hook(partial):  # type: ignore[type-arg]  # the one subclass of a concrete class: partial calls at C speed
    """A hook that stays behind when its module is copied or pickled: the copy gets one that does nothing."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: a pickle must not need gaff


class Node:
    """One hooked module: what to call when it is entered and left.

    ``arms`` and ``entry_arms`` set gradient hooks; only they are called again when a reentrant checkpoint
    recomputes the module, since its first pass had no graph.
    """

    above: frozenset[Node] = frozenset()  # hooked modules that contain this one
    has_entry = False
    entries: tuple[EntryTap, ...] = ()
    exits: tuple[ExitTap, ...] = ()
    entry_arms: tuple[EntryArm, ...] = ()
    arms: tuple[ExitArm, ...] = ()
    replay: Replay  # of modules with gradient sites

    def __init__(self, module: nn.Module, clock: Clock, index: int) -> None:
        self.module = module
        self.clock = clock
        self.open = clock.open  # the runs in progress, by thread
        self.index = index

    def give_up(self, run: Run | None = None) -> None:
        """Tell the gradient streams of calls without grad mode that nothing recomputed them."""
        if not (self.arms or self.entry_arms) or not self.replay.is_waiting:
            return
        for place in self.replay.give_up(run):
            for entry_arm in self.entry_arms:
                entry_arm.give_up(*place)
            for arm in self.arms:
                arm.give_up(*place)

    def install(self, handles: list[Any]) -> None:
        """Put the hooks on the module; ``handles`` takes what removes them."""
        module = self.module
        if self.has_entry:
            handles.append(module.register_forward_pre_hook(Hook(_before, self), with_kwargs=True))
        if self.exits or self.arms:
            handles.append(module.register_forward_hook(Hook(_after, self), with_kwargs=True))
        if self.has_entry:
            handles.append(module.register_forward_hook(Hook(_leave, self), with_kwargs=True, always_call=True))


class Replay:
    """Which call of the first pass a recomputed call of this module stands for.

    A recomputation runs under the autograd node of its checkpoint, whose sequence number lies just before those of
    the calls inside it; so the calls to be matched are the ones with higher numbers, in their order.
    """

    __slots__ = ("_claimed", "_matched", "_waiting", "is_waiting")

    def __init__(self) -> None:
        self.is_waiting = False
        self._matched: set[tuple[Run, int]] = set()
        self._waiting: list[tuple[int, Run, int]] = []  # sequence number at the call, run, call
        self._claimed: dict[tuple[int, int], int] = {}  # (backward pass, node) -> position after the last match

    def wait(self, run: Run, call: int) -> None:
        run.is_waiting = self.is_waiting = True
        self._waiting.append((compat.next_sequence(), run, call))

    def match(self) -> tuple[Run, int] | None:
        """The run and call that the current recomputation of this module repeats, if it waits for one."""
        node = compat.current_node()
        if not self._waiting or node is None or not compat.is_python_node(node):  # others recompute for their own
            return None
        start = compat.sequence_of(node)
        place = (compat.backward_task(), start)
        position = self._claimed.get(place, 0)
        while position < len(self._waiting) and not self._may_be(self._waiting[position], start):
            position += 1
        if position == len(self._waiting):
            return None
        if len(self._claimed) > 1000:
            self._claimed.clear()
        self._claimed[place] = position + 1
        _, run, call = self._waiting[position]
        if torch.is_grad_enabled():
            self._matched.add((run, call))
        else:  # a checkpoint inside the recomputed one: its own recomputation comes after this number
            self._waiting.append((compat.next_sequence(), run, call))
        return run, call

    def _may_be(self, row: tuple[int, Run, int], start: int) -> bool:
        """Sequence numbers are counted for each thread; on a device, autograd's own threads recompute."""
        if row[0] <= start:
            return False
        thread = get_ident()
        return row[1].thread == thread or all(other.ident != thread for other in threading.enumerate())

    def give_up(self, run: Run | None = None) -> list[tuple[Run, int]]:
        """Stop waiting, for one run or for all; returns the calls that were never recomputed."""
        lost = [(row[1], row[2]) for row in self._waiting if run is None or row[1] is run]
        self._waiting = [row for row in self._waiting if run is not None and row[1] is not run]
        never = [place for place in dict.fromkeys(lost) if place not in self._matched]
        self._matched.difference_update(lost)
        return never


# torch notes that a hook takes keywords after it has put the hook in place, and forgets it after it has taken the hook
# away: a call on another thread at that moment comes without keywords. It is outside the session, and ignored.


def _before(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    clock = node.clock
    if clock.closed or kwargs is None:
        return
    if backward_task() != -1:
        _before_again(node, args, kwargs)
        return
    if transform_level() is not None and clock.is_own_thread():
        _refuse_transform(module)
    run = clock.enter(node, args, kwargs)
    if run is None:
        return
    call = run.entered[node.index]
    run.entered[node.index] = call + 1
    for tap in node.entries:
        tap(args, kwargs, run, call)
    if node.entry_arms:
        if torch.is_grad_enabled():
            for arm in node.entry_arms:
                arm(args, kwargs, run, call)
        else:
            node.replay.wait(run, call)


def _after(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = MISSING) -> None:
    run = node.open.get(get_ident())
    if run is None or backward_task() != -1 or transform_level() is not None:
        _after_unusual(node, module, args, kwargs, output)
        return
    left = run.left
    call = left[node.index]
    left[node.index] = call + 1
    for tap in node.exits:
        tap(output, run, call)
    if node.arms:
        _arm_after(node, output, (args, kwargs), run, call)


def _after_unusual(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """A recomputation, a torch.func transform, or a run that is this one call."""
    if output is MISSING:
        return
    if backward_task() != -1:
        _after_again(node, output, (args, kwargs))
        return
    if node.clock.closed:
        return
    if transform_level() is not None and node.clock.is_own_thread():
        _refuse_transform(module)
    run = node.clock.begin(args, kwargs)
    if run is None:
        return
    run.left[node.index] = 1
    for tap in node.exits:
        tap(output, run, 0)
    if node.arms:
        _arm_after(node, output, (args, kwargs), run, 0)
    node.clock.end(run, output)


def _arm_after(node: Node, output: Any, given: tuple[Any, Any], run: Run, call: int) -> None:
    if torch.is_grad_enabled():
        for arm in node.arms:
            arm(output, given, run, call)
    elif not node.entry_arms:
        node.replay.wait(run, call)


def _leave(node: Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
    if backward_task() == -1:
        node.clock.leave(node, output)
        return
    frames = node.clock.replay_frames()
    if any(frame.owner is node for frame in frames):
        while frames.pop().owner is not node:
            pass


def _before_again(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    frame = Frame(node)
    node.clock.replay_frames().append(frame)
    if not node.entry_arms:
        return
    matched = node.replay.match()
    if matched is None:
        return
    frame.notes["matched"] = matched
    if not torch.is_grad_enabled():
        return
    for arm in node.entry_arms:
        arm(args, kwargs, *matched)


def _after_again(node: Node, output: Any, given: tuple[Any, Any]) -> None:
    if not node.arms:
        return
    matched: tuple[Run, int] | None
    if node.entry_arms:
        frames = node.clock.replay_frames()
        matched = frames[-1].notes.get("matched") if frames and frames[-1].owner is node else None
    else:
        matched = node.replay.match()
    if matched is not None and torch.is_grad_enabled():
        for arm in node.arms:
            arm(output, given, *matched)


def _refuse_transform(module: nn.Module) -> None:
    raise PlanError(
        f"{type(module).__name__} runs inside a torch.func transform (grad, vmap ...): its values are wrappers that "
        "mean nothing outside; open the session around code without the transform"
    )
