"""The tensor hooks of a session that wait for gradients: set in forwards, fired in backward passes, removed at its end.

A hook is set in a forward and fires in a backward pass, perhaps much later, more than once, or never. Until then it
must be known which run and call it belongs to (``armed``), and it must be found again to be removed when the session
closes (``Gradients``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.compat import autograd, modes
from gaff.compat.autograd import is_wrapper
from gaff.compat.compiler import has_compiled_autograd, uncompiled
from gaff.engine.clock import Run
from gaff.engine.gradients.armed import Armed, ArmedShare, ArmedView, Met
from gaff.engine.gradients.chains import Chains, EditChain
from gaff.engine.gradients.later import Later
from gaff.engine.gradients.reach import PassGraph
from gaff.engine.gradients.tensor_hooks import (
    EDGE,
    OUTER,
    be_first,
    is_at_edge,
    on_gradient,
    original,
    take_turn,
)
from gaff.engine.streams import Stream

NOT_REACHED = "backward ran, but no gradient reached this tensor"
_HIDDEN = (
    "compiled autograd was switched on while the session was open: such a pass does not tell the gradients of compiled "
    "code; switch it on before, and the session lets compiled code run eagerly"
)
BEHIND_VIEW = f"{NOT_REACHED}; a pass that ends at the view which :outer_grad gives a module's caller does not"
_NUMBERS = itertools.count()
_MOST_PASSES = 256  # in progress, one inside the other, or ended by an exception (chosen)
BATCHED = "this backward pass was batched (is_grads_batched, vectorize=True): its gradients are wrappers"


class RunsOfPasses:
    """Of backward passes in progress the runs whose gradients have come by; torch tells no end of one that raises."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Run, None]] = {}

    def of(self, task: int) -> Collection[Run]:
        """The runs that the pass ``task`` has come by, in order of their first gradient."""
        return self._known.get(task, {}).keys()

    def add(self, run: Run) -> None:
        """Note that the pass that this thread executes has come by a gradient of ``run``."""
        task = autograd.backward_task()
        if task not in self._known:
            if len(self._known) > _MOST_PASSES:
                del self._known[min(self._known)]  # the oldest, which has raised
            self._known[task] = {}
            if task != -1:
                autograd.at_backward_end(lambda: self._known.pop(task, {}).clear())
        self._known[task][run] = None


class Gradients:
    """All gradient hooks of one session; what they are waiting for, and their removal.

    The session makes it, arms set hooks through it, hooks call it from the threads of backward passes. It holds
    streams and hooks, no tensors of the user's. ``has_backward`` tells that there was a backward pass: without any, a
    gradient that is missing is no finding.
    ``has_edges``: compiled code runs beside eager code, at whose edges a part of a gradient may be all that is heard.
    """

    def __init__(self, *, has_edits: bool = False) -> None:
        self.is_open = True
        self.number = next(_NUMBERS)  # in the order in which sessions are opened
        self.asks_for_runs = has_edits  # somebody asks whose backward pass it is
        self.pass_graph = PassGraph()
        self.has_edges = False
        self._chains = Chains()
        self.has_edits = has_edits
        self.has_backward = False  # a backward pass of any run has been seen
        self._armed: list[Armed] = []
        self.met = Met()
        self._prune_at = 256
        self._is_hidden = False  # a pass was compiled as a whole, while compiled code was to tell gradients
        self._passes = RunsOfPasses()
        self.later = Later()
        self.at_pass: list[Callable[[], None]] = []  # called before each backward pass, outside of all others

    @property
    def only_looks(self) -> bool:
        """Whether its hooks change nothing: they then come after those of edits."""
        return not self.has_edits

    def meet_compiled(self) -> None:
        """Be ready for gradients from compiled code: hooks stay out of it, and at its edges they ask for more."""
        self.has_edges = True
        uncompiled(_arrived)

    def arm(self, tensor: Tensor, stream: Stream, run: Run, call: int, *, is_part: bool = False) -> Armed:
        """Tell ``stream`` every gradient that arrives at ``tensor``, which must require grad.

        Sets one hook, or with edits joins the chain of the tensor. A stand-in that says ``why_untold`` is refused.
        ``is_part``: the tensor is a view that shows a part of a gradient; else the total is told of what a view shows.
        """
        armed: Armed
        untold = getattr(tensor, "why_untold", "")  # of what stands for a tensor inside compiled code
        if untold:
            armed = ArmedView(stream, run, call, tensor)
            armed.refuse(untold)
            return armed
        if tensor._is_view() and not is_part:
            tensor = original(tensor)
        if tensor._is_view():
            armed = ArmedView(stream, run, call, tensor)
            armed.follow_base(tensor, self)
        else:
            armed = Armed(stream, run, call)
        before = self._of_other_runs(tensor, run)
        if before or run.began_after(tensor):
            self.asks_for_runs = True
            for one in (*before, armed):
                self.met.of(tensor).add(one, is_shared=self.has_edits)
        if self.has_edits and hasattr(stream, "expect"):
            stream.expect(tensor)
        armed.lie_as(tensor)
        self._hook(tensor, armed, is_part=is_part)
        return armed

    def _of_other_runs(self, tensor: Tensor, run: Run) -> list[Armed]:
        """The hooks of other runs on a tensor that were set as on one which their run had made: it cannot have been."""
        hooks = (tensor._backward_hooks or {}).values()
        ours = [hook.args[1] for hook in hooks if isinstance(hook, partial) and hook.args[:1] == (self,)]
        found = self._chains.on(tensor) if self.has_edits else ours
        return [one for one in found if isinstance(one, Armed) and one.run is not run and one.met is None]

    def arm_plain(self, tensor: Tensor, stream: Stream, run: Run, call: int) -> None:
        """As ``arm``, for a tensor inside an autograd graph that is no view, and where nothing is edited."""
        armed = Armed(stream, run, call)
        armed.lie_as(tensor)
        # no view: ``on_gradient`` asks for nothing
        armed.handle = modes.unseen(tensor.register_hook, partial(_arrived, self, armed))
        self.add(armed)

    def arm_share(self, alias: Tensor, share: ArmedShare) -> None:
        """Edit what arrives at ``alias``, the view that a module was given as its input.

        Not part of a chain: nobody else holds that view when its hook is set.
        """
        stream: Any = share.stream
        stream.expect(alias)
        share.lie_as(alias)
        share.handle = on_gradient(alias, partial(_arrived, self, share))
        share.follow_base(alias, self)
        self.add(share)

    def share_arrived(
        self, share: ArmedShare, position: int, handed: tuple[Tensor | None, ...], _given: Any
    ) -> tuple[Tensor | None, ...] | None:
        """The hook of a graph node that hands a share on, for modules that write into their input.

        ``handed`` is all that the node hands on, ``position`` the place of the share in it. Returns all of it with the
        edited share, or None for no change.
        """
        gradient = handed[position]
        if not self.is_open or gradient is None:
            return None
        if is_wrapper(gradient):
            share.refuse(BATCHED)
        self.seen(share.run)
        changed = share.deliver(gradient)
        return None if changed is None else (*handed[:position], changed, *handed[position + 1 :])

    def _hook(self, tensor: Tensor, armed: Armed, *, is_part: bool) -> None:
        """Set the hook of ``armed``; with edits one hook for each tensor, which calls a chain.

        Edits at one tensor act as backward meets their calls, the last call first; within a call in the order given.
        torch would call separate hooks in the order in which they were set, the first call's first. A tensor that was
        written to in place has another gradient, so the chain is found by the tensor and its version.
        """
        if self.has_edits:
            self._chains.join(tensor, armed, lambda chain: on_gradient(tensor, partial(_arrived_chain, self, chain)))
            if not is_part:
                take_turn(armed.handle, self.number)
        else:
            armed.handle = on_gradient(tensor, partial(_arrived, self, armed))
            if is_part:
                be_first(armed.handle)
        self.add(armed)  # with its handle: one without counts as gone

    def mark(self, tensor: Tensor, run: Run) -> None:
        """Take a backward pass for one of ``run`` when it comes by ``tensor``, which a call of the run has made."""
        mark = Armed(_UNHEARD, run, 0)
        is_passed_on = self.met.knows(tensor)  # it may be in the passes of other runs
        mark.handle = on_gradient(tensor, partial(_mark_arrived, self, mark, is_passed_on))
        self.add(mark)

    def add(self, armed: Armed) -> None:
        """Keep an armed hook until its autograd graph is gone, to remove it at closing."""
        self._armed.append(armed)
        if len(self._armed) > self._prune_at:
            self._prune()

    def runs_of(self, task: int) -> Collection[Run]:
        """The runs whose gradients have come by in the backward pass ``task``, in order of their first one."""
        return self._passes.of(task)

    def seen(self, run: Run) -> None:
        """Note that a gradient of ``run`` has come by in the current backward pass.

        Whose pass it is, is kept only where a leaf or an edit asks for it.
        """
        self.heard(run)
        if self.asks_for_runs:
            self._passes.add(run)

    def why_untold(self, gradient: Tensor) -> str:
        """Why a gradient that has come cannot be told, whichever tensor it is of; empty if it can.

        Wrappers of a batched backward pass mean nothing outside of it.
        """
        return BATCHED if is_wrapper(gradient) else EDGE if self.has_edges and is_at_edge() else ""

    def heard(self, run: Run) -> None:
        """Note that ``run`` has had a gradient. A leaf that it met may get one in a pass of another run."""
        run.has_backward = self.has_backward = True
        if autograd.is_grad_enabled():  # a differentiable pass, which makes nodes
            run.again_since = min(run.again_since, autograd.next_sequence())

    def is_recent(self, run: Run) -> bool:
        """Whether few runs (64, chosen) have set hooks since ``run`` began."""
        return not self._armed or self._armed[-1].run.index - run.index < 64

    def mark_returned(self, run: Run, output: Any) -> None:
        """Take a backward pass for one of ``run`` when it comes by what a call in it, or the run itself, has returned.

        That makes a pass known that reaches none of the hooks, so that None can be told apart from a backward that
        never ran. Nothing without grad mode.
        """
        if torch.is_grad_enabled():
            for _, tensor in iter_tensors(output):
                if autograd.takes_gradient(tensor) and not tensor.is_leaf:
                    self.mark(tensor, run)

    def run_ended(self, run: Run, output: Any) -> None:
        """``run`` has ended and returned ``output``: see ``Later.settle`` and ``mark_returned``."""
        self.settle_later()
        self.mark_returned(run, output)
        if self.asks_for_runs:
            self.met.ended.add(run, [one for _, one in iter_tensors(output) if autograd.takes_gradient(one)])

    def close(self) -> None:
        """Remove every hook; what a backward pass left out is told to the streams as None.

        Runs without any backward pass are not told of. No hook that still fires, on another thread, is listened to.
        """
        self.later.close(self.arm)
        self.is_open = False
        for armed in self._armed:
            armed.remove()
        self._settle(self._armed)
        self._armed.clear()
        self.met.clear()
        self._chains.clear()
        self.pass_graph.let_go()

    def settle_later(self) -> None:
        """Set the hooks of tensors that have come to require grad; tell the streams of those that no longer can."""
        self.later.settle(self.arm)

    def pass_begins(self, _outputs: Any, *, is_inside: bool) -> None:
        """A backward pass is about to begin; ``is_inside``: hooks are inside compiled code."""
        self._is_hidden = self._is_hidden or (is_inside and has_compiled_autograd())
        self.settle_later()
        for begins in self.at_pass:
            begins()

    def _prune(self) -> None:
        """Forget hooks whose autograd graph is gone, and tell their streams what never came.

        Called when their number has doubled since the last time, so that a long session costs the same for each hook.
        """
        dead = _past_hope(self._armed)
        gone = set(map(id, dead))
        for armed in dead:
            armed.remove()  # from what outlives the graph
        self._settle(dead)  # a call of which one hook has heard is told of, whichever of its hooks are gone
        self._armed = [armed for armed in self._armed if id(armed) not in gone]
        self._prune_at = 2 * len(self._armed) + 256
        self.met.prune()

    def _settle(self, waiting: list[Armed]) -> None:
        """Tell the streams of hooks that never fired why: no gradient came, or none that can be told.

        A run without a backward pass leaves nothing to tell. A call whose graph was made twice, first inside a
        reentrant checkpoint's forward and then in its recomputation, has hooks in both, and is told of once.
        """
        told = {(id(armed.stream), armed.run, armed.call) for armed in self._armed if armed.fired}
        for armed in waiting:
            at = id(armed.stream), armed.run, armed.call
            if armed.fired or at in told or not armed.run.has_backward:
                continue
            told.add(at)
            refused = armed.why_refused() or (_HIDDEN if self._is_hidden else "")
            if refused:
                armed.refuse(refused)
            else:
                armed.fired = True
                armed.stream.absent(armed.run, armed.call, BEHIND_VIEW if OUTER else NOT_REACHED)


def _past_hope(hooks: list[Armed]) -> list[Armed]:
    """Those of some hooks, the latest last, whose autograd graph is gone, and of whose run no more is to come.

    A run's backward pass may still come where other parts of its graph are there, or are being made: what the run
    itself has dropped is told of after that pass.
    """
    dead = [armed for armed in hooks if armed.is_dead()]
    gone = set(map(id, dead))
    awaited = {armed.run for armed in hooks if id(armed) not in gone} | {hooks[-1].run}
    return [armed for armed in dead if armed.run.has_backward or armed.run not in awaited]


class _Unheard(Stream):
    """A stream that keeps nothing: its hook is there to make a backward pass known."""

    place = ""

    def add(self, value: Any, run: Run, call: int) -> None:
        """The pass has been noted by the hook already."""


_UNHEARD = _Unheard()


def _arrived(gradients: Gradients, armed: Armed, gradient: Tensor | None) -> Any:
    """The tensor hook: a gradient for ``armed``; returns what an edit puts in its place, else None."""
    if not gradients.is_open or gradient is None:  # a custom Function hands None to what it does not need
        return None
    if armed.met is None:  # an older tensor does not tell by itself whose pass it is
        armed.run.has_backward = True
        if gradients.asks_for_runs:
            gradients.seen(armed.run)
    if is_wrapper(gradient) or gradients.has_edges:
        reason = gradients.why_untold(gradient)
        if reason:
            armed.refuse(reason)
            return None
    if armed.is_plain and armed.met is None:
        return armed.deliver(gradient)
    return armed.receive(gradients, gradient)


def _mark_arrived(gradients: Gradients, mark: Armed, is_passed_on: bool, gradient: Tensor | None) -> None:
    """The tensor hook of a mark: the pass is one of its run, or ``is_passed_on``, and it is heard of alone."""
    if gradients.is_open and gradient is not None:
        mark.fired = True
        (gradients.heard if is_passed_on else gradients.seen)(mark.run)


def _arrived_chain(gradients: Gradients, chain: EditChain, gradient: Tensor) -> Tensor | None:
    """The tensor hook where edits are: each gets what the one before it returned; None if nobody changed anything."""
    changed: Tensor | None = None
    for _, group in chain.rows:
        for armed in group:
            new = _arrived(gradients, armed, gradient if changed is None else changed)
            changed = changed if new is None else new
    return changed
