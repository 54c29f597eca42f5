"""What the engine needs of whoever looks or edits: one ``Stream`` for each site, and who calls it.

The engine says when something passes; what is done with it is on the other side of these protocols, so that the engine
knows of no capture and no edit. Three kinds of callables hang on a hooked module (``modules.Node``), at its entry or
at its exit:

- A *tap* looks: ``EntryTap``, ``ExitTap``. It is called in ordinary forwards only.
- A *change* may put something else in the place of what passes: ``EntryChange``, ``ExitChange``. It is called in
  recomputations, too.
- An *arm* sets the hooks by which a gradient is heard of: ``EntryArm``, ``ExitArm``. It is called once a call, where
  an autograd graph is made.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from gaff.address.grammar import Key, Site
from gaff.engine.clock import Run
from gaff.engine.recomputation import Passage


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

    What cannot be changed truly must not go on unchanged: ``refuse`` raises. ``switch``, ``edit`` and ``check_finite``
    are read by ``compiled``, which makes the edit itself, in a compiled graph.
    """

    place: object  # equal for edits at one site: they act in the order given
    switch: Any
    edit: Any
    check_finite: bool

    def change(self, value: Tensor, passage: Passage, is_again: bool) -> Tensor:
        """The tensor that the model goes on with in the place of ``value``, which it must not write into.

        ``passage`` is the call; in its memo the stream keeps what it decided. ``is_again``: a recomputation, which
        must get what the first pass got, or its gradients would be those of another function.
        """

    def direct(self, value: Tensor) -> Tensor | None:
        """The edited value without a passage, for an edit that needs none, is fully on and has acted before; else None.

        After None, ``change`` is to be called. Asked only where nothing can run the call again.
        """

    def wants(self, run: Run, call: int) -> bool:
        """Whether the edit acts at this event; asked once for each ordinary call of a module that may be skipped."""

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_again: bool) -> Any:
        """The output of a module that is not run, made from what it was given; ``is_again``: in a recomputation."""


class EntryTap(Protocol):
    """Called when a module is entered in an ordinary forward, with the arguments that it is about to be run with.

    What it returns is ignored; raising stops the user's run.
    """

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int, /) -> None: ...


class ExitTap(Protocol):
    """Called when a module returns in an ordinary forward, with what its caller gets; not after an exception.

    What it returns is ignored; raising stops the user's run.
    """

    def __call__(self, output: Any, run: Run, call: int, /) -> None: ...


class EntryChange(Protocol):
    """Called when an edited module is entered; returns what it is called with instead, or None for the same.

    One that sets gradient hooks (``is_gradient``) is called only where an autograd graph is made for the first time,
    any other in each ordinary call and again in each recomputation. Three more methods are used where a change has
    them: ``around`` stands as the module's forward (see ``forwards``), ``before_graph`` is that of ``EntryArm``, and
    ``refuse_other_thread`` is called when the module is entered by a run that this session does not see.
    """

    is_gradient: bool  # sets gradient hooks: only where a graph is made

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool, /
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no autograd graph, and none will come: nothing recomputed it."""
        return


class ExitChange(Protocol):
    """Called when an edited module returns; returns what its caller gets. ``given``: positional and keyword arguments.

    ``is_gradient`` means the same as for an ``EntryChange``.
    """

    is_gradient: bool

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool, /) -> Any: ...

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no autograd graph, and none will come: nothing recomputed it."""
        return


class EntryArm(EntryTap, Protocol):
    """Sets gradient hooks at the entry of a module, on tensors among its arguments.

    Called in the first pass if grad mode is on there. A call without grad mode may be that of a reentrant checkpoint:
    then ``before_graph`` is called in the first pass and the arm itself in the recomputation, or ``give_up`` if none
    comes.
    """

    def before_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int, /) -> None:
        """The call has no autograd graph, but may be run again with one."""
        return

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no autograd graph, and none will come: nothing recomputed it."""
        return


class ExitArm(Protocol):
    """Sets gradient hooks at the exit of a module, on tensors of its output. ``given``: the arguments of the call.

    Called in the first pass if grad mode is on there, else in the recomputation by a reentrant checkpoint.
    """

    def __call__(self, output: Any, given: tuple[Any, Any], run: Run, call: int, /) -> None: ...

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no autograd graph, and none will come: nothing recomputed it."""
        return
