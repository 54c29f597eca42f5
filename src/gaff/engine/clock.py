"""Runs, calls and steps: when something happened, kept apart for every thread.

A run is the outermost call into the model's root, into a module that is watched, or into a module that contains one.
Backward passes and recomputations open no run; they belong to the run of their forward.

The hooks of ``modules`` tell the ``Clock`` of each entry and each exit; it opens a run at the first entry on a thread
and ends it when that same call leaves. The clock itself touches no hook of torch. Calls that a checkpoint makes again
are listed apart from those of runs (``Clock.replay_frames``), since they happen inside a backward pass.
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
from typing import Any, NamedTuple

from torch import Tensor

from gaff.address.nested import iter_deep
from gaff.compat import autograd, distributed, memory, modes
from gaff.engine.stop import StopForward
from gaff.errors import ExactnessError, PlanError

_NO_END = 1 << 62  # of the numbers of autograd nodes, while a run is open


class Frame:
    """One call in progress of a module that is hooked on entry; made when it is entered, dropped when it leaves.

    ``owner`` is the ``Node`` of the module or of the op. ``notes`` holds what a tap puts down at the entry and takes
    back at the exit, by the tap that did. ``at_leave`` are functions to call when the call is over, in order.
    ``ticket`` is that of the frame of compiled code that told of the call.
    """

    __slots__ = ("at_leave", "notes", "owner", "ticket")

    def __init__(self, owner: object, ticket: int = 0) -> None:
        self.owner = owner
        self.ticket = ticket
        self.notes: dict[object, Any] = {}
        self.at_leave: list[Callable[[], object]] = []


class Failure:
    """What was raised inside a model for the user, as ``text``, which must not get lost there; empty where nothing was.

    Made when a run begins: torch ends a run that fails while it handles what was raised, and in no other.
    """

    __slots__ = ("_handled", "text")

    def __init__(self) -> None:
        self._handled = id(sys.exc_info()[1])  # by the code around the run
        self.text = ""

    def is_swallowed(self) -> bool:
        """Whether something was raised and the run, which ends now, goes on without it."""
        return bool(self.text) and id(sys.exc_info()[1]) == self._handled


class Given(NamedTuple):
    """What a run did not make: addresses of the memory of the ``model``'s parameters and buffers, and of its arguments.

    An address may be given out again after its memory was freed, so each in ``memory`` comes with a function that tells
    whether that is still held. ``tensors`` are the identities of the arguments' tensors.
    """

    model: AbstractSet[int]
    memory: Mapping[int, Callable[[], object]] = {}
    tensors: AbstractSet[int] = frozenset()

    def holds(self, address: int) -> bool:
        """Whether the memory at an address belongs to the model or to an argument."""
        return address in self.model or (address in self.memory and self.memory[address]() is not None)


class Run:
    """One outermost call of a model, in one session and on one thread.

    ``index`` counts the runs of a session from 0, over all threads; -1 stands for a forward before the session.
    ``step`` is the number of optimizer steps that were completed when it began. ``entered`` and ``left`` count calls
    for each hooked module, by ``Node.index``: apart, since a module may be hooked on one side only, and may call
    itself.

    The object outlives the call: gradient hooks and recomputations refer to it, and what only a run in progress needs
    is let go of by ``Clock.end``.
    """

    __slots__ = ("again_since", "entered", "failure", "frames", "functions", "given", "has_backward", "index",
                 "is_waiting", "left", "made", "once", "outermost", "step", "thread")  # fmt: skip

    def __init__(self, index: int, step: int, size: int, given: Given) -> None:
        self.index = index
        self.step = step
        self.thread = get_ident()
        self.entered = [0] * size
        self.left = [0] * size
        self.given = given
        self.frames: list[Frame] = []
        self.outermost: FrameType | None = None
        self.once: set[object] = set()  # what has happened that happens once a run
        self.has_backward = False  # a gradient of this run has been seen
        self.made = range(0)  # sequence numbers of the autograd nodes that its thread made in it; open, of all since
        self.again_since = _NO_END  # that of the first node that a differentiable pass of it may have made
        self.functions: list[Any] | None = None  # custom Functions around it; None: with grad mode, or nobody asks
        self.is_waiting = False  # calls wait to be run again by a checkpoint, which alone tells their gradients
        self.failure = Failure()

    def __repr__(self) -> str:
        return f"Run({self.index})"

    def began_after(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which must require grad, was there before the run: a leaf, or made by what ran before.

        What it was given is, whatever the number of its node: another thread numbers its own, and a view of what was
        written to gets a new one when it is asked for.
        """
        node = tensor.grad_fn
        return node is None or autograd.sequence_of(node) < self.made.start or id(tensor) in self.given.tensors

    def fail(self, error: Exception) -> None:
        """Note what an edit, or a look, has raised inside the model: the first error of the run is kept, as text."""
        if not isinstance(error, StopForward):
            self.failure.text = self.failure.text or f"{type(error).__name__}: {error}"


class EndedRuns:
    """Runs that have ended: ``spans`` of the last 4096, thread and made nodes, and the last 64 themselves, ``recent``.

    A run counts the calls of each module, so few are held.
    """

    __slots__ = ("recent", "spans")

    def __init__(self) -> None:
        self.spans: deque[tuple[int, range]] = deque(maxlen=4096)
        self.recent: deque[Run] = deque(maxlen=64)

    def add(self, run: Run) -> None:
        """Note a run that has just ended."""
        self.spans.append((run.thread, run.made))
        self.recent.append(run)


class Clock:
    """Opens and ends the runs of one session: one at a time on each thread.

    ``addresses`` are those of the memory of the model's parameters and buffers. With ``threads="all"`` runs of every
    thread are seen, else those of the thread that makes the clock, which a session does when it opens. ``at_begin``
    holds functions of the run, ``at_end`` functions of the run and of what it returned; both are called on the thread
    of the run. ``at_recomputed`` are called when the outermost hooked module of a recomputation has left.

    Once ``closed`` the clock begins no run any more. Hooks that have to stay on a module after their session (see
    ``leftovers``) ask for that.
    """

    def __init__(self, addresses: AbstractSet[int], threads: str) -> None:
        self.open: dict[int, Run] = {}  # by thread
        self.at_begin: list[Callable[[Run], None]] = []
        self.at_end: list[Callable[[Run, Any], None]] = []
        self.at_recomputed: list[Callable[[], None]] = []
        self.size = 0  # hooked modules, once all are known: runs that begin later count the calls of so many
        self._owner = None if threads == "all" else get_ident()  # the thread whose runs are seen; None: of all
        self._ended = EndedRuns()
        self._replays: dict[int, tuple[int, list[Frame]]] = {}  # by thread: backward pass, calls in progress

        self.restart(addresses)

    def restart(self, addresses: AbstractSet[int]) -> None:
        """Count from nothing, for the thread that asks; ``addresses`` as when made. Nothing may be in progress."""
        self.closed = False
        self.has_others = False  # another thread has called modules of the model, which this session does not see
        self.step = 0
        self.before = Run(-1, 0, 0, Given(addresses))  # stands for a forward before the session, and for one unknown
        self._ended.recent.clear()
        self.latest = self.before  # the run begun last
        self._addresses = addresses
        self._owner = None if self._owner is None else get_ident()
        self._numbers = itertools.count()

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
        """Make a run that begins now on this thread, and tell ``at_begin``; None where this session does not look.

        The run is not put into ``open``: a module that is hooked only at its exit begins and ends its run there.
        Raises PlanError while ``torch.export``, ``torch.jit.trace`` or another tracer runs, since hooks would become
        part of what is made.
        """
        if self.closed or not self.is_own_thread():
            self.has_others = True
            return None
        if modes.is_traced():
            raise PlanError("torch exports or traces the model while a gaff session is open on it: close it first")
        run = Run(next(self._numbers), self.step, self.size, Given(self._addresses, *_memory(args, kwargs)))
        self.latest = run
        run.made = range(autograd.next_sequence(), _NO_END)
        for callback in self.at_begin:
            callback(run)
        return run

    def end(self, run: Run, output: Any) -> None:
        """End ``run``. ``output`` is what the outermost call returned; None also after an exception.

        What the run made in its forward stays known by the first and last sequence number of its autograd nodes, for
        ``made``. Raises ExactnessError where the model has caught what an edit or a look had raised in it: it would go
        on without them, and nobody would hear of it.
        """
        try:
            for callback in self.at_end:
                callback(run, output)
        finally:
            run.made = range(run.made.start, autograd.next_sequence())
            self._ended.add(run)
            run.once.clear()
            run.functions = run.functions and []
            run.given = Given(run.given.model)
        if run.failure.is_swallowed():
            raise ExactnessError(
                f"the model caught an error of the session open on it, and went on: {run.failure.text}"
            )

    def enter(self, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
        """Note that a hooked module is entered in an ordinary forward: its run, opened if this call is the outermost.

        ``owner`` is the module's ``Node``. None where this session does not look. An exception that no hook hears of
        (Ctrl-C) leaves its run open; such a run is told by its innermost call, which is none around ``owner``, and by
        torch's call that began it, which is no longer on the Python stack. It is dropped without ``at_end``.

        Only to be called by a function that a hook calls: torch's call of the module is looked for from the third
        frame up.
        """
        thread = get_ident()
        run = self.open.get(thread)
        if run is not None and run.frames and run.frames[-1].owner not in owner.above and not is_running(run.outermost):
            run = None  # an exception such as Ctrl-C went past every hook: that run is over
        if run is None:
            run = self.begin(args, kwargs)
            if run is None:
                return None
            here = sys._getframe(3)  # past our two hooks
            run.outermost = modes.nearest_call(here) or here
            self.open[thread] = run
        run.frames.append(Frame(owner))
        return run

    def enter_compiled(self, owner: Any, ticket: int) -> None:
        """Note that compiled code which begins at ``owner`` runs, and open a run if none is in progress around it.

        Of the frames of compiled code nothing is to be seen, so a run that began in it, and whose innermost call is
        none around ``owner``, is taken for the leftover of an exception; a module that calls itself is known by the
        ``ticket``, which is another in each frame. The run is given no arguments, and counts as begun with grad mode:
        compiled code itself runs without, also where it makes an autograd graph.
        """
        run = self.open.get(get_ident())
        if run is not None and run.frames and not is_running(run.outermost):
            inner = run.frames[-1]
            if inner.owner not in owner.above and not (inner.owner is owner and inner.ticket == ticket):
                run = None  # what an exception in compiled code has left behind
        if run is None:
            run = self.begin((), {})
            if run is None:
                return
            run.functions = None
            # the node of that code was made just before it ran
            run.made = range(run.made.start - (not autograd.is_outside_functions()), _NO_END)
            self.open[run.thread] = run
        run.frames.append(Frame(owner, ticket))

    def run_of_compiled(self, owner: Any) -> Run | None:
        """The run in progress on this thread, of which compiled code tells; None where this session does not look.

        Raises PlanError where there is none though the session looks: compiled code was called without the model
        around it.
        """
        run = self.open.get(get_ident())
        if run is None and not self.closed and self.is_own_thread():
            raise PlanError(
                f"compiled code called {type(owner.module).__name__} without the model around it: expected a call of "
                "the model, or torch.compiler.set_stance('force_eager') around the session"
            )
        return run

    def leave(self, owner: object, output: Any) -> None:
        """Note that a hooked module returned or raised, and end the run where this was its outermost call.

        Calls inside it that never left, because of an exception, are dropped with it. A module that is not in progress
        here (the run was never seen, or is over) is ignored.
        """
        run = self.open.get(get_ident())
        if run is not None and end_call(run.frames, owner) and not run.frames:
            is_open = self.open.pop(run.thread, None) is run  # not once another thread has closed the session
            run.outermost = None
            if is_open:
                self.end(run, output)

    def fail(self, error: Exception) -> None:
        """Note in the run in progress on this thread that something was raised in it which is for the user."""
        run = self.open.get(get_ident())
        if run is not None:
            run.fail(error)

    def count_step(self) -> None:
        """Count an optimizer step that was completed: runs that begin from now on belong to the next step."""
        self.step += 1

    def replay_frames(self) -> list[Frame]:
        """The calls in progress of the recomputation on this thread, outermost first; the caller adds and removes them.

        The list is empty at the first question in each backward pass, whatever an exception left behind in the one
        before.
        """
        task = autograd.backward_task()
        found = self._replays.get(get_ident())
        if found is None or found[0] != task:
            found = self._replays[get_ident()] = (task, [])
        return found[1]

    def made(self, node: Any) -> bool:
        """Whether an autograd node was made by the forward of one of this session's runs, as far as they are known.

        Known are the runs in progress and the last 4096 that ended. Sequence numbers count for each thread apart; on a
        thread of autograd's own it cannot be told which thread ran the forward, and the number alone decides.
        """
        number, thread = autograd.sequence_of(node), get_ident()
        is_any = autograd.is_autograd_thread()
        spans = (*self._ended.spans, *((run.thread, run.made) for run in self.open.values()))
        return any(number in made and (is_any or owner == thread) for owner, made in spans)

    def run_of(self, node: Any) -> Run | None:
        """The run whose forward made an autograd node, of those in progress and the last 64; as ``made`` tells it."""
        number, thread = autograd.sequence_of(node), get_ident()
        is_any = autograd.is_autograd_thread()
        runs = (*self._ended.recent, *self.open.values())
        return next((run for run in runs if number in run.made and (is_any or run.thread == thread)), None)

    def is_own_thread(self) -> bool:
        """Whether this session looks at what the current thread does."""
        return self._owner is None or self._owner == get_ident()

    def is_own_backward(self) -> bool:
        """Whether a backward pass on this thread may be this session's.

        A device has a thread of autograd's own for its backward, which does not tell who called ``backward()``: it may
        be.
        """
        return self.is_own_thread() or autograd.is_autograd_thread()

    def is_foreign(self, tensor: Tensor, run: Run) -> bool:
        """Whether others hold the memory of ``tensor``: it belongs to a parameter, a buffer or an argument of ``run``.

        Views count as the memory that they show, DTensors as their local part. Whoever keeps a value keeps such memory
        by reference, not by a copy-on-write copy.
        """
        return run.given.holds(memory.memory_of(distributed.local_of(tensor)))

    def is_of_model(self, tensor: Tensor, run: Run) -> bool:
        """Whether the memory of ``tensor`` belongs to a parameter or a buffer of the model."""
        return memory.memory_of(distributed.local_of(tensor)) in run.given.model

    def close(self) -> None:
        """Begin no run any more, and drop those in progress without calling ``at_end``."""
        self.closed = True
        for frame in [frame for run in list(self.open.values()) for frame in list(run.frames)]:
            for callback in frame.at_leave:
                callback()
        self.open.clear()
        self.at_begin.clear()
        self.at_end.clear()
        self.at_recomputed.clear()
        self._replays.clear()


def end_call(frames: list[Frame], owner: object) -> bool:
    """Drop the latest call of ``owner`` from those in progress, with what inside it never left; whether there was one.

    What was to be called when a call is over is called, from the inside out.
    """
    if not frames or (frames[-1].owner is not owner and not any(frame.owner is owner for frame in frames)):
        return False
    while True:
        frame = frames.pop()
        for callback in frame.at_leave:
            callback()
        if frame.owner is owner:
            return True


def is_running(frame: FrameType | None) -> bool:
    """Whether ``frame`` is one of the calls in progress on this thread. None is not."""
    return any(one is frame for one in modes.frames_from(sys._getframe(1)))


def _memory(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[int, Callable[[], object]], set[int]]:
    """Addresses of the memory of a call's tensors, also in attributes of objects; each with whether it still lives.

    Second their identities. Nothing inside a torch.func transform, where tensors are wrappers. The tensors are not
    held.
    """
    found: dict[int, Callable[[], object]] = {}
    given: set[int] = set()
    if autograd.transform_level() is None:
        alone = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
        for tensor in args if alone else iter_deep((args, kwargs)):
            given.add(id(tensor))
            with suppress(RuntimeError):  # sparse and the like have none
                local = distributed.local_of(tensor)
                found[memory.memory_of(local)] = memory.storage_life(local)
    return found, given
