"""Runs, calls and steps: when something happened, kept apart for every thread.

A run is the outermost call into the model's root, into a module that is watched, or into a module that contains
one. Backward passes and recomputations open no run; they belong to the run of their forward.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from gaff.address.nested import iter_deep
from gaff.compat import autograd, checkpoints, distributed, memory, modes
from gaff.errors import PlanError


class Frame:
    """One call in progress of a module that is hooked on entry. ``notes``: what taps remember until it returns."""

    __slots__ = ("at_leave", "notes", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.notes: dict[object, Any] = {}
        self.at_leave: list[Callable[[], object]] = []  # of a recomputed call


class Run:
    """One outermost call. ``entered`` and ``left`` count calls for each hooked module.

    ``arguments`` and ``model`` are addresses of memory that the run did not make: of what it was given, and of the
    parameters and buffers.
    """

    __slots__ = (
        "arguments",
        "entered",
        "first_node",
        "frames",
        "functions",
        "had_grad",
        "has_backward",
        "index",
        "is_waiting",
        "left",
        "life",
        "model",
        "once",
        "outermost",
        "step",
        "thread",
    )

    def __init__(
        self, index: int, step: int, size: int, arguments: dict[int, Callable[[], bool]], model: AbstractSet[int]
    ) -> None:
        self.index = index
        self.step = step
        self.thread = get_ident()
        self.entered = [0] * size
        self.left = [0] * size
        self.arguments = arguments
        self.model = model
        self.frames: list[Frame] = []
        self.outermost: FrameType | None = None
        self.once: set[object] = set()  # what has happened that happens once a run
        self.has_backward = False  # a gradient of this run has been seen
        self.first_node = 0  # sequence number of autograd nodes when it began
        self.life: ReferenceType[Any] | None = None  # of its graph, where somebody asks
        self.had_grad = True  # grad mode, when it began
        self.functions: list[Any] = []  # custom Functions in whose forward it runs without grad mode
        self.is_waiting = False  # calls without grad mode wait for a reentrant checkpoint to run them again

    def __repr__(self) -> str:
        return f"Run({self.index})"


class Clock:
    """Opens and closes the runs of one session. ``addresses``: of the model's parameters and buffers."""

    def __init__(self, addresses: AbstractSet[int], threads: str) -> None:
        self.open: dict[int, Run] = {}  # by thread
        self.closed = False
        self.step = 0
        self.latest = Run(
            -1, 0, 0, {}, addresses
        )  # the run begun last; number -1 stands for a forward before the session
        self.at_begin: list[Callable[[Run], None]] = []
        self.at_end: list[Callable[[Run, Any], None]] = []
        self._addresses = addresses
        self._size = 0
        self._owner = None if threads == "all" else get_ident()
        self._numbers = itertools.count()
        self._spans: deque[tuple[int, int, int]] = deque(maxlen=4096)  # thread, first and last node of a run's forward
        self._replays: dict[int, tuple[int, list[Frame]]] = {}  # by thread: backward pass, calls in progress

    def resize(self, size: int) -> None:
        """The number of hooked modules, once it is known."""
        self._size = size

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
        """A new run on this thread, or None where this session does not look."""
        if self.closed or not self.is_own_thread():
            return None
        if torch._C._get_tracing_state() or torch.compiler.is_exporting():
            raise PlanError("torch exports or traces the model while a gaff session is open on it: close it first")
        run = Run(next(self._numbers), self.step, self._size, _memory(args, kwargs), self._addresses)
        self.latest = run
        run.first_node = autograd.next_sequence()
        if not torch.is_grad_enabled():
            run.had_grad, run.functions = False, checkpoints.enclosing_functions()
        for callback in self.at_begin:
            callback(run)
        return run

    def end(self, run: Run, output: Any) -> None:
        """``output`` is what the outermost call returned; None also after an exception."""
        for callback in self.at_end:
            callback(run, output)
        self._spans.append((run.thread, run.first_node, autograd.next_sequence()))
        run.once.clear()
        run.functions = []
        run.arguments = {}

    def enter(self, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
        """A hooked module is entered in an ordinary forward: its run, opened if this call is the outermost."""
        thread = get_ident()
        run = self.open.get(thread)
        if run is not None and run.frames and run.frames[-1].owner not in owner.above and not is_running(run.outermost):
            run = None  # an exception such as Ctrl-C went past every hook: that run is over
        if run is None:
            run = self.begin(args, kwargs)
            if run is None:
                return None
            run.outermost = _calling_frame(sys._getframe(3))  # past our two hooks
            self.open[thread] = run
        run.frames.append(Frame(owner))
        return run

    def enter_compiled(self, owner: Any) -> None:
        """The same, told by compiled code that begins at ``owner``: of its frames nothing is to be seen."""
        run = self.open.get(get_ident())
        if run is not None and run.frames and run.frames[-1].owner not in owner.above:
            run = None  # what an exception in compiled code has left behind
        if run is None:
            run = self.begin((), {})
            if run is None:
                return
            run.had_grad, run.functions = True, []
            self.open[run.thread] = run
        run.frames.append(Frame(owner))

    def run_of_compiled(self, owner: Any) -> Run | None:
        """The run in progress, of which compiled code tells. None where this session does not look."""
        run = self.open.get(get_ident())
        if run is None and not self.closed and self.is_own_thread():
            raise PlanError(
                f"compiled code called {type(owner.module).__name__} without the model around it: expected a call of "
                "the model, or torch.compiler.set_stance('force_eager') around the session"
            )
        return run

    def leave(self, owner: object, output: Any) -> None:
        """A hooked module returned or raised."""
        run = self.open.get(get_ident())
        if run is None or not any(frame.owner is owner for frame in run.frames):
            return
        while run.frames.pop().owner is not owner:
            pass
        if not run.frames:
            del self.open[run.thread]
            run.outermost = None
            self.end(run, output)

    def count_step(self) -> None:
        """An optimizer has completed a step."""
        self.step += 1

    def replay_frames(self) -> list[Frame]:
        """Calls in progress of the recomputation on this thread."""
        task = autograd.backward_task()
        found = self._replays.get(get_ident())
        if found is None or found[0] != task:
            found = self._replays[get_ident()] = (task, [])
        return found[1]

    def made(self, node: Any) -> bool:
        """Whether an autograd node was made by the forward of one of this session's runs, as far as they are known."""
        number, thread = autograd.sequence_of(node), get_ident()
        is_any = autograd.is_autograd_thread()
        spans = [*self._spans, *((run.thread, run.first_node, number + 1) for run in self.open.values())]
        return any(first <= number < last and (is_any or owner == thread) for owner, first, last in spans)

    def is_own_thread(self) -> bool:
        return self._owner is None or self._owner == get_ident()

    def is_own_backward(self) -> bool:
        """Whether a backward pass on this thread may be this session's; devices have threads of autograd's own."""
        return self.is_own_thread() or autograd.is_autograd_thread()

    def is_foreign(self, tensor: Tensor, run: Run) -> bool:
        """Whether others hold the memory of ``tensor``: it belongs to a parameter, a buffer or an argument."""
        address = memory.memory_of(distributed.local_of(tensor))
        return address in run.model or (address in run.arguments and run.arguments[address]())

    def close(self) -> None:
        self.closed = True
        self.open.clear()
        self.at_begin.clear()
        self.at_end.clear()
        self._replays.clear()


def _calling_frame(frame: FrameType | None) -> FrameType | None:
    """The call that torch makes of a module, at ``frame`` or around it."""
    codes = modes.call_frames().codes
    found = frame
    while found is not None and found.f_code not in codes:
        found = found.f_back
    return found or frame


def is_running(frame: FrameType | None) -> bool:
    """Whether ``frame`` is one of the calls in progress on this thread."""
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False


def _memory(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Callable[[], bool]]:
    """Addresses of the memory of a call's tensors, also in attributes of objects; each with whether it still lives."""
    found: dict[int, Callable[[], bool]] = {}
    if autograd.transform_level() is None:
        alone = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
        for tensor in args if alone else iter_deep((args, kwargs)):
            with suppress(RuntimeError):  # sparse and the like have none
                local = distributed.local_of(tensor)
                found[memory.memory_of(local)] = memory.storage_life(local)
    return found
