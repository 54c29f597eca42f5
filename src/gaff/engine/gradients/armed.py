"""Hooks that wait for the gradient of one call: what each kind of tensor needs for that.

An ordinary tensor, a view, of which torch may tell only a part (``ArmedView``), the view that a module was given to
find its share (``ArmedShare``), a leaf, which serves many runs (``ArmedLeaf``). They are set and found again by
``pending.Gradients``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gaff.compat import autograd, memory
from gaff.engine.clock import Run
from gaff.engine.streams import Stream


class Passes(Protocol):
    """What a hook asks about the backward passes of its session; ``Gradients`` answers."""

    is_open: bool

    def seen(self, run: Run) -> None:
        """Note that a gradient of ``run`` has come by in the current backward pass."""

    def heard(self, run: Run) -> None:
        """Note that ``run`` has had a gradient, which does not tell that the pass is its own."""

    def runs_of(self, task: int) -> list[Run]:
        """The runs whose gradients have come by in the backward pass ``task``."""

    def runs_that_met(self, armed: ArmedLeaf) -> list[Run]:
        """The runs with a living graph that met the leaf of ``armed``."""


class Armed:
    """One tensor hook that waits for the gradient of one call, on an ordinary tensor inside an autograd graph.

    Made by ``Gradients.arm`` in a forward, called by the hook in each backward pass that comes by, removed when the
    session closes or forgotten when the autograd graph is gone. ``fired``: the stream has heard something of it.
    ``is_plain``: what arrives is the gradient, without further questions.
    """

    __slots__ = ("call", "fired", "handle", "run", "stream")
    is_plain = True

    def __init__(self, stream: Stream, run: Run, call: int) -> None:
        self.stream = stream
        self.run = run
        self.call = call
        self.fired = False
        self.handle: Any = None

    def receive(self, gradients: Passes, gradient: Tensor) -> Any:
        """Take a gradient that has arrived, and return what ``deliver`` does; called for kinds that are not plain.

        Here is the place to find that it is not the gradient that was asked for, and to refuse it.
        """
        return self.deliver(gradient)

    def deliver(self, gradient: Tensor) -> Any:
        """Tell the stream; returns the gradient that an edit puts in its place, else None."""
        self.fired = True
        return self.stream.add(gradient, self.run, self.call)

    def refuse(self, reason: str) -> None:
        """Tell the stream that its gradient cannot be told exactly; an edit raises ExactnessError then."""
        self.fired = True
        self.stream.refuse(self.run, self.call, reason)

    def is_dead(self) -> bool:
        """Whether the autograd graph that the hook sits on is gone."""
        return self.handle is None or self.handle.hooks_dict_ref() is None

    def remove(self) -> None:
        """Take the hook from the tensor, if it is there."""
        if self.handle is not None:
            self.handle.remove()

    def why_refused(self) -> str:
        """Why a missing gradient is not None; empty where None is the truth."""
        return ""


class ArmedView(Armed):
    """On a view. Once it or its base has been changed in place, torch tells only a part of its gradient, or nothing.

    In-place writes give a view a new autograd node, while the hook stays on the old one. They are noticed by the
    version counter, of which a probe without memory is kept. ``follow_base`` helps where nothing else can see the
    base: its gradient, in the shape of the view, is the whole.
    """

    __slots__ = ("_base_handle", "_probe", "_shape", "_version")
    is_plain = False

    def __init__(self, stream: Stream, run: Run, call: int, tensor: Tensor) -> None:
        super().__init__(stream, run, call)
        self._probe = memory.version_probe(tensor)
        self._version = self._probe._version
        self._shape = tensor.shape
        self._base_handle: Any = None

    def receive(self, gradients: Passes, gradient: Tensor) -> Any:
        """Deliver the gradient if nobody wrote to the view since; else wait for the base's, or refuse."""
        if not self._is_stale():
            return self.deliver(gradient)
        if self._base_handle is None:
            self.refuse("it is a view that was changed in place later: torch tells a part of its gradient only")
        return None

    def follow_base(self, base: Tensor, gradients: Passes) -> None:
        """Take the gradient from the node of ``base`` where the view is stale; an edit changes it there.

        ``base``: all of it is this view, and whoever made it let nobody else see it.
        """

        def arrived(given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
            """Before the node of the base runs: its gradient, where the view's own hook did not see it."""
            if gradients.is_open and self._is_stale() and given[0] is not None:
                gradients.seen(self.run)
                changed = self.deliver(given[0].reshape(self._shape))
                if changed is not None:
                    return changed.reshape(given[0].shape), *given[1:]
            return None

        if base.grad_fn is not None:
            self._base_handle = base.grad_fn.register_prehook(arrived)

    def remove(self) -> None:
        """Take both hooks away, that of the view and that of its base."""
        super().remove()
        if self._base_handle is not None:
            self._base_handle.remove()

    def why_refused(self) -> str:
        """Why a missing gradient is not None: torch tells none of a view that was changed in place."""
        if self._base_handle is None and self._is_stale():
            return "no gradient arrived, and it is a view that was changed in place later: torch then tells none"
        return ""

    def _is_stale(self) -> bool:
        """Whether the memory of the view was written to in place since the hook was set."""
        return self._probe._version != self._version


class ArmedShare(ArmedView):
    """On the view of its input that a module was given, so that its own share can be edited.

    If the module wrote into that view, a hook on the autograd node before the input brings the share instead
    (``follow``).
    """

    __slots__ = ()

    def follow(self, handle: Any) -> None:
        """Keep the handle of the node's hook: the module wrote into its input, and its share arrives there."""
        self._base_handle = handle

    def receive_share(self, gradients: Passes, gradient: Tensor) -> Any:
        """Deliver a share that arrived at the node; returns what the edit puts in its place, else None."""
        gradients.seen(self.run)
        return self.deliver(gradient)


class ArmedLeaf(Armed):
    """On a leaf, which outlives the autograd graph: the gradient belongs to the run whose backward pass brings it.

    A leaf that one run met is that run's. Where several did, each has a hook of its own on it, and all of them fire;
    which run's pass it is, is known by then: a gradient of what the module made of the leaf has come by before
    (``Gradients.mark``). One pass over several runs sums their gradients before the leaf hears of them; that total is
    told to each of these runs.

    ``life`` lives as long as the autograd graph of what the module made of the leaf; None as long as nothing is known.
    """

    __slots__ = ("leaf", "life")
    is_plain = False

    def __init__(self, stream: Stream, run: Run, call: int, leaf: Tensor) -> None:
        super().__init__(stream, run, call)
        self.leaf = weakref.ref(leaf)
        self.life: weakref.ref[Any] | None = None

    def is_dead(self) -> bool:
        """Whether the autograd graph of its call is gone; the leaf's own accumulator is there to stay."""
        return self.life is not None and self.life() is None

    def receive(self, gradients: Passes, gradient: Tensor) -> Any:
        """Deliver the gradient if the pass is one of the run, or no other run may have brought it."""
        met = gradients.runs_that_met(self)
        marked = [run for run in gradients.runs_of(autograd.backward_task()) if run in met]
        if self.run in marked or met == [self.run]:
            gradients.heard(self.run)
            return self.deliver(gradient)
        if not marked:
            self.refuse(f"{len(met)} runs used this leaf, and nothing tells whose backward pass brought its gradient")
        return None
