"""What the engine needs of whoever looks or edits: one ``Stream`` for each site, and who calls it.

The engine says when something passes; what is done with it is on the other side of these protocols, so that the engine
knows of no capture and no edit. Two kinds of callables hang on each side of a node (``side``): a ``Look`` is told of
what passes in an ordinary forward, an ``Act`` changes it, or asks for its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from gaff.address.grammar import Key, Site
from gaff.address.nested import Arguments
from gaff.engine.clock import Run
from gaff.engine.crossing import Crossing


class Stream(Protocol):
    """Receives the events of one site; what a stream does not define does nothing.

    ``in_graph``, where a stream has that: the function of a tensor whose result compiled code may tell in its place.
    Called inside hooks, on the thread that runs the model or the backward pass: must not write into a value, must not
    read the device.
    """

    def add(self, value: Any, run: Run, call: int) -> Any:
        """A value passed, in the nth ``call`` of the module in ``run``; at a gradient's site it is a tensor.

        Raising stops the user's run. A tensor returned for a gradient takes its place in the backward pass; what is
        returned for any other value is ignored. A value may be anything that a module takes or returns;
        of attention it is ``ops.attention.Weights``, which makes the weights that are asked for.
        """

    def absent(self, run: Run, call: int, reason: str) -> None:
        """The site fired, and there is None to see, because of ``reason``."""
        return

    def refuse(self, run: Run, call: int, reason: str) -> None:
        """The site fired, but its value cannot be told exactly, because of ``reason``; reading it must raise."""
        return

    def skip(self, reason: str) -> None:
        """The site has something that it cannot show, because of ``reason``; it belongs to no run."""
        return

    def remark(self, text: str) -> None:
        """Tell something that whoever reads the value should know; it changes nothing."""
        return

    def at(self, key: Key) -> Stream:
        """The stream of one tensor inside this site's value; ``key`` leads to it from there."""
        return self

    def spawn(self, site: Site, known: Any) -> Any:
        """The stream of one op, asked for when that op is first met, where this one's site names several.

        ``site`` is the address of the single op. ``known`` is the stream that another pattern has already made for the
        same address, or None; returning it lets one stream serve both patterns.
        """
        return self


class EditStream(Stream, Protocol):
    """Changes what passes one site. ``add`` returns the gradient that backward goes on with, or None for no change.

    What cannot be changed truly must not go on unchanged: ``refuse`` raises. ``switch``, ``edit``, ``check_finite``
    and ``is_spread`` are read by ``compiled``, which makes the edit itself, in a compiled graph.
    """

    place: tuple[object, ...]  # equal for edits at one site: they act in the order given
    switch: Any
    edit: Any
    check_finite: bool

    @property
    def is_spread(self) -> bool:
        """Whether the model's tensors are spread over processes, and edits are of the whole."""

    def expect(self, tensor: Tensor) -> None:
        """The gradient of ``tensor`` is to come: called as the hook for it is set."""

    def change(self, value: Tensor, crossing: Crossing) -> Tensor:
        """The tensor that the model goes on with in the place of ``value``, which it must not write into.

        In the memo of ``crossing`` the stream keeps what it decided: a recomputation must get what the first pass got,
        or its gradients would be those of another function.
        """

    def direct(self, value: Tensor) -> Tensor | None:
        """The edited value without a crossing, of an edit that needs none, is fully on and has acted before; else None.

        After None, ``change`` is to be called. Asked only where nothing can run the call again.
        """

    def wants(self, run: Run, call: int) -> bool:
        """Whether the edit acts at this event; asked once for each ordinary call of a module that may be skipped."""

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_again: bool) -> Any:
        """The output of a module that is not run, made from what it was given; ``is_again``: in a recomputation."""


# Looks at what passes a side in a run, in the nth call: ``Arguments`` at the entry, the output at the exit. In ordinary
# forwards only, and not after an exception. What it returns is ignored; raising stops the user's run.
Look = Callable[[Any, Run, int], object]


class Act(ABC):
    """Acts on what passes a side: puts something else in its place, or sets the hooks by which a gradient is heard of.

    One that ``needs_graph`` is called once for each call, where an autograd graph is made that lasts. Any other is
    called in each ordinary call and again in each recomputation, where it must do what it did the first time. One that
    ``gives_view`` gives the caller of a module a view of what it returned: what others ask is about the output itself.
    """

    needs_graph = False
    gives_view = False

    @abstractmethod
    def __call__(self, value: Any, given: Arguments, crossing: Crossing) -> Any:
        """What passes on, or None for ``value`` itself, into which it must not write. ``given``: the call's arguments.

        Raising stops the user's run.
        """

    def before_graph(self, value: Any, crossing: Crossing) -> None:
        """The call has no autograd graph that lasts, but may be run again with one: asked of acts that need a graph."""
        return

    def without_graph(self, value: Any, given: Arguments, crossing: Crossing) -> None:
        """The call has no autograd graph, and nothing will run it again: asked of acts that need a graph."""
        self.give_up(crossing.run, crossing.call)

    def give_up(self, run: Run, call: int) -> None:
        """The call had no autograd graph, and none will come: nothing recomputed it."""
        return


class FirstHalf(Protocol):
    """An act at the entry that notes something, and acts on it at the exit."""

    needs_graph: bool  # as of an ``Act``, of both halves

    def leave(self, noted: Any, output: Any, given: Arguments, crossing: Crossing) -> Any:
        """The module returns ``output``, and ``noted`` was put down for this call; what passes on, or None."""


class SecondHalf(Act):
    """Acts at the exit on what its other half, at the entry, has noted; what never came is told by that half."""

    def __init__(self, node: Any, first: FirstHalf) -> None:
        self._node = node
        self._first = first
        self.needs_graph = first.needs_graph

    def __call__(self, value: Any, given: Arguments, crossing: Crossing) -> Any:
        frame = self._node.frame()
        noted = None if frame is None else frame.notes.pop(self._first, None)
        return None if noted is None else self._first.leave(noted, value, given, crossing)

    def without_graph(self, value: Any, given: Arguments, crossing: Crossing) -> None:
        """There may have been a graph at the entry: let the first half tell what becomes of what it has noted."""
        self(value, given, crossing)
