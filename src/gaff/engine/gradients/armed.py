"""Hooks that wait for the gradient of one call: what each kind of tensor needs for that.

An ordinary tensor, a view, of which torch may tell only a part (``ArmedView``), the view that a module was given to
find its share (``ArmedShare``); one that is older than the run, as a leaf, and may serve many (``Meetings``). They are
set and found again by ``pending.Gradients``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from torch import Tensor

from gaff.compat import autograd, checkpoints, memory
from gaff.compat.placements import ANY_PARTS, PARTS, Placement
from gaff.engine.clock import Run
from gaff.engine.gradients.reach import PassGraph
from gaff.engine.gradients.tensor_hooks import on_base
from gaff.engine.streams import Stream

_LAST = 16  # calls of older tensors that are over, and waited for all the same (chosen)
STALE = "it is a view that was changed in place later: torch tells a part of its gradient, or nothing"


class Passes(Protocol):
    """What a hook asks about the backward passes of its session; ``Gradients`` answers."""

    is_open: bool
    pass_graph: PassGraph

    def seen(self, run: Run) -> None:
        """Note that a gradient of ``run`` has come by in the current backward pass."""

    def why_untold(self, gradient: Tensor) -> str:
        """Why a gradient that has come cannot be told, whichever tensor it is of; empty if it can."""
        ...

    def heard(self, run: Run) -> None:
        """Note that ``run`` has had a gradient, which does not tell that the pass is its own."""

    def runs_of(self, task: int) -> Collection[Run]:
        """The runs whose gradients have come by in the backward pass ``task``."""

    def is_recent(self, run: Run) -> bool:
        """Whether few runs have set hooks since ``run`` began."""


class Armed:
    """One tensor hook that waits for the gradient of one call, on an ordinary tensor inside an autograd graph.

    Made by ``Gradients.arm`` in a forward, called by the hook in each backward pass that comes by, removed when the
    session closes or forgotten when the autograd graph is gone. ``fired``: the stream has heard something of it.
    ``is_plain``: what arrives is the gradient, without further questions. ``placement``: where the gradient lies, if
    the tensor is this process's part of one that is spread. ``met``: the calls that have met the tensor, if it is older
    than the run; ``life`` then lives as long as the autograd graph of what the call made of it, None as long as nothing
    is known of that. ``more``: the handles of hooks elsewhere that go with it.
    """

    __slots__ = ("call", "fired", "handle", "life", "met", "more", "placement", "run", "stream")
    is_plain = True

    def __init__(self, stream: Stream, run: Run, call: int) -> None:
        self.stream = stream
        self.run = run
        self.call = call
        self.fired = False
        self.handle: Any = None
        self.more: tuple[Any, ...] = ()
        self.placement: Placement | None = None
        self.met: Meetings | None = None
        self.life: Callable[[], Any] | None = None

    def lie_as(self, tensor: Tensor) -> None:
        """Note where the gradient lies: as ``tensor`` does, if that is known to be this process's part."""
        if ANY_PARTS and tensor in PARTS:
            self.placement = PARTS[tensor].of_gradient

    def receive(self, gradients: Passes, gradient: Tensor) -> Any:
        """Take a gradient that has arrived, if it is this run's, and return what ``deliver`` does; not called for those
        that are plain, and of one run for certain.

        Here is the place to find that it is not the gradient that was asked for, and to refuse it.
        """
        return self.deliver(gradient) if self.met is None or self.met.is_brought(self, gradients) else None

    def deliver(self, gradient: Tensor) -> Any:
        """Tell the stream; returns the gradient that an edit puts in its place, else None."""
        self.fired = True
        if self.placement is not None and type(gradient) is Tensor:
            PARTS[gradient] = self.placement
        return self.stream.add(gradient, self.run, self.call)

    def refuse(self, reason: str) -> None:
        """Tell the stream that its gradient cannot be told exactly; an edit raises ExactnessError then."""
        self.fired = True
        self.stream.refuse(self.run, self.call, reason)

    def is_dead(self) -> bool:
        """Whether the autograd graph that the hook sits on is gone."""
        return self.handle is None or self.handle.hooks_dict_ref() is None

    def is_over(self) -> bool:
        """Whether the autograd graph of its call is gone; the accumulator of a leaf is there to stay."""
        return self.is_dead() or (self.life is not None and self.life() is None)

    def let_go(self, *, is_shared: bool) -> None:
        """Listen no more; ``is_shared``: the hook is that of a chain of edits, which takes it away."""
        if not is_shared:
            self.remove()
        self.handle = None

    def remove(self) -> None:
        """Take the hook from the tensor, and those that go with it, as far as they are there."""
        for handle in (self.handle, *self.more):
            if handle is not None:
                handle.remove()

    def why_refused(self) -> str:
        """Why a missing gradient is not None; empty where None is the truth."""
        return ""


class ArmedView(Armed):
    """On a view. Once it or its base has been changed in place, torch tells only a part of its gradient, or nothing.

    In-place writes give a view a new autograd node, while the hook stays on the old one. They are noticed by the
    version counter. Whatever goes from the view to what it was made of passes the node of its base (``follow_base``),
    where a gradient that was not told is noticed. Where nothing else can see the base (``is_whole``) its gradient, in
    the shape of the view, is the view's.
    """

    __slots__ = ("_base_handle", "_is_stale", "_passes", "_shape", "is_whole")
    is_plain = False

    def __init__(self, stream: Stream, run: Run, call: int, tensor: Tensor) -> None:
        super().__init__(stream, run, call)
        self._is_stale = memory.write_watch(tensor)
        self._shape = tensor.shape
        self._base_handle: Any = None
        self._passes: Passes | None = None
        self.is_whole = False

    def receive(self, gradients: Passes, gradient: Tensor) -> Any:
        """Deliver the gradient if nobody wrote to the view since; else wait for the base's, or refuse."""
        if not self._is_stale():
            return super().receive(gradients, gradient)
        if self._base_handle is None:
            self.refuse(STALE)
        return None

    def follow_base(self, tensor: Tensor, gradients: Passes) -> None:
        """Hear of what comes to the base of ``tensor``, the view, once that is stale: deliver it, or refuse."""

        def arrived(total: Tensor) -> Tensor | None:
            """The tensor hook of the base: its gradient, where the view's own hook did not see it."""
            if not gradients.is_open:
                return None
            if self.met is None:
                gradients.seen(self.run)
            elif not self.met.is_brought(self, gradients):
                return None
            if reason := gradients.why_untold(total) or ("" if self.is_whole else STALE):
                self.refuse(reason)
                return None
            changed = self.deliver(total.reshape(self._shape))
            return None if changed is None else changed.reshape(total.shape)

        self._base_handle, self._passes = on_base(tensor, self._is_stale, arrived), gradients
        self.more += (self._base_handle,)

    def is_dead(self) -> bool:
        """Whether the autograd graph is gone: a write takes the view's own node away, but not that of the base.

        A base may outlive the graphs of many views: of a view whose own node is gone some time ago no more is heard.
        """
        is_gone = super().is_dead()
        if self._base_handle is None or self._base_handle.hooks_dict_ref() is None or self._passes is None:
            return is_gone
        return is_gone and not self._passes.is_recent(self.run)

    def why_refused(self) -> str:
        """Why a missing gradient is not None: torch tells none of a view that was changed in place."""
        return STALE if self._base_handle is None and self._is_stale() else ""


class ArmedShare(ArmedView):
    """On the view of its input that a module was given, so that its own share can be edited.

    If the module wrote into that view, a hook on the autograd node before the input brings the share instead
    (``follow``). While ``is_inside``, the forward has not returned: what arrives is of a pass that it runs itself, as
    for forces, and no part of what comes back by its output.
    """

    __slots__ = ("is_inside",)

    def __init__(self, stream: Stream, run: Run, call: int, tensor: Tensor) -> None:
        super().__init__(stream, run, call, tensor)
        self.is_inside = True

    def deliver(self, gradient: Tensor) -> Any:
        """Tell the stream, unless the module's own forward differentiates by its input.

        Of such a pass in a region that a checkpoint will compute again, after the module has returned, it is told, too:
        an edit cannot be made there, and says so.
        """
        return None if self.is_inside and not checkpoints.is_first_pass() else super().deliver(gradient)

    def left(self) -> None:
        """The call of the module is over, by whatever way."""
        self.is_inside = False

    def follow(self, handle: Any) -> None:
        """Hear of the share at a node, whose hook ``handle`` is of: the module wrote into its input."""
        if self._base_handle is not None:
            self._base_handle.remove()
        self._base_handle = handle
        self.more += (handle,)


class Meetings:
    """The calls that have met one tensor which is older than their runs: a leaf, or what was made before them.

    What one run alone met is that run's. Where several did, each has a hook of its own on it, and all of them fire;
    which run's pass it is, is known by then: a gradient of what the call made of the tensor has come by before
    (``Gradients.mark``). A pass that has come by none of that is the run's which has made nodes of it, if one alone
    has. One pass over several runs sums their gradients before the tensor hears of them; that total is told to each of
    these.

    Of calls that are over the last ones are kept (``_LAST``); of runs of which none is left, the range of the numbers
    of their nodes, by thread (``_forgotten``).
    """

    def __init__(self, tensor: Tensor, ended: EndedGraphs) -> None:
        self.tensor = weakref.ref(tensor)
        self._ended = ended
        self._calls: list[Armed] = []
        self._runs: dict[Run, int] = {}  # how many of the calls are of each
        self._prune_at = 1
        self._kind = "leaf" if tensor.is_leaf else "tensor"
        self._position = tensor.output_nr
        self._forgotten: dict[int, range] = {}
        self._asked = (-1, -1)  # the pass that was asked about last, and the number of the node that has run
        self._told: tuple[list[int] | None, set[Run | None]] = None, set()

    def add(self, armed: Armed, *, is_shared: bool) -> None:
        """Note one more call, and now and then let go of those that are over; ``is_shared`` is for ``Armed.let_go``."""
        armed.met = self
        self._calls.append(armed)
        self._runs[armed.run] = self._runs.get(armed.run, 0) + 1
        if len(self._calls) < self._prune_at:
            return
        gone = {id(one): one for one in [one for one in self._calls[:-1] if self._is_over(one)][:-_LAST]}
        for one in gone.values():
            one.let_go(is_shared=is_shared)
            self._runs[one.run] -= 1
            if not self._runs[one.run]:
                made, known = one.run.made, self._forgotten.get(one.run.thread, one.run.made)
                self._forgotten[one.run.thread] = range(min(made.start, known.start), max(made.stop, known.stop))
                del self._runs[one.run]
        self._calls = [one for one in self._calls if id(one) not in gone]
        self._prune_at = len(self._calls) + max(1, len(self._calls) // 64)

    def _is_over(self, armed: Armed) -> bool:
        """Whether no more is to come to a call, as far as is known: its autograd graph is gone.

        It may still bring a gradient, by other uses in its run: one that has heard something is kept as long as
        anything is there that the run has returned; so it is where nothing is known of what the call made.
        """
        if armed.life is None and not armed.is_dead():
            return not armed.run.frames and self._ended.is_past(armed.run)
        return armed.is_over() and (not armed.fired or self._ended.is_past(armed.run))

    def is_brought(self, armed: Armed, gradients: Passes) -> bool:
        """Whether the pass is one of the run of ``armed``, or no other run may have brought it.

        Where nothing tells, the stream of ``armed`` is told so.
        """
        if armed.handle is None:
            return False
        is_any = getattr(self.tensor(), "is_of_any_run", False)
        seen = gradients.runs_of(autograd.backward_task())
        is_alone = len(self._runs) == 1 and not self._forgotten and not is_any
        is_its = armed.run in seen or is_alone or self._is_its(armed.run, gradients, seen, is_any=is_any)
        if is_its is None:
            count = "some" if is_any or len(self._runs) == 1 else len(self._runs)
            armed.refuse(f"{count} runs used this {self._kind}, and nothing tells whose pass it was")
        elif is_its:
            gradients.heard(armed.run)
        return bool(is_its)

    def _is_its(self, run: Run, gradients: Passes, seen: Collection[Run], *, is_any: bool) -> bool | None:
        """Whether the pass is one of the run, by its nodes; None where they do not tell, as where the run uses what
        another has made, and kept. ``seen``: the runs of what it has come by; ``is_any``: it is not known which runs
        met the tensor.

        A node that a differentiable pass of a run may have made, and no run in its forward, may be one of that run's.
        """
        due, touched = self._told_by(gradients)
        if due is None:
            return None
        if is_any:  # what none of the runs seen has made may be this run's, too
            is_told = bool(seen) and all(any(number in one.made for one in seen) for number in due)
            return False if is_told and not any(number in run.made for number in due) else None
        if any(number >= run.again_since and self._makers_of(number) <= {None} for number in due):
            return None
        if any(one in self._runs for one in seen):  # one of the others; what this run has made it may use, too
            return None if any(number in run.made for number in due) else False
        return None if len(touched) != 1 or None in touched else run in touched

    def _makers_of(self, number: int) -> set[Run | None]:
        """The runs that may have made the node of this number: each thread counts its own. None: one forgotten."""
        runs = {one for one in self._runs if number in one.made}
        others = (made for thread, made in self._forgotten.items() if {thread} != {one.thread for one in runs})
        return {*runs, *([None] if any(number in made for made in others) else ())}

    def _told_by(self, gradients: Passes) -> tuple[list[int] | None, set[Run | None]]:
        """The numbers of the nodes that hand the tensor its gradient in this pass, None where nothing tells them; and
        the runs that may have made any node of the pass."""
        node, graph = autograd.current_node(), gradients.pass_graph
        asked = autograd.backward_task(), -1 if node is None else autograd.sequence_of(node)
        if asked != self._asked:
            nodes = graph.handing_to(self._position)
            due = None if nodes is None else [autograd.sequence_of(one) for one in nodes if autograd.is_due(one)]
            self._asked, self._told = asked, (due, set().union(*map(self._makers_of, graph.numbers)))
        return self._told


class EndedGraphs:
    """Of runs that have ended whether the autograd graph of what they returned is still there."""

    def __init__(self) -> None:
        self._lives: dict[Run, Callable[[], object]] = {}
        self._prune_at = 64

    def add(self, run: Run, returned: Iterable[Tensor]) -> None:
        """Note what a run, which ends now, returns; its tensors that have a gradient."""
        self._lives[run] = autograd.graph_life(returned)
        if len(self._lives) >= self._prune_at:
            self._lives = {one: life for one, life in self._lives.items() if life() is not None}
            self._prune_at = 2 * len(self._lives) + 64

    def is_past(self, run: Run) -> bool:
        """Whether nothing is known of a run by which more gradients may come."""
        life = self._lives.get(run)
        return life is None or life() is None


class Met:
    """The meetings of each tensor that is older than the runs which have met it."""

    def __init__(self) -> None:
        self._known: dict[int, Meetings] = {}  # by identity of the tensor
        self.ended = EndedGraphs()

    def of(self, tensor: Tensor) -> Meetings:
        """Those of a tensor, made when they are first asked for."""
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            known = self._known[id(tensor)] = Meetings(tensor, self.ended)
        return known

    def knows(self, tensor: Tensor) -> bool:
        """Whether a call has met this very tensor, which was there before its run."""
        known = self._known.get(id(tensor))
        return known is not None and known.tensor() is tensor

    def prune(self) -> None:
        """Forget tensors that are gone."""
        self._known = {at: known for at, known in self._known.items() if known.tensor() is not None}

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        self.ended = EndedGraphs()
