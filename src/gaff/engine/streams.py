"""What the engine needs of whoever looks: one ``Stream`` for each site."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from gaff.address.grammar import Key, Site
from gaff.engine.clock import Run
from gaff.engine.recomputation import Passage


class Stream(Protocol):
    """Receives the events of one site; what a stream does not define does nothing.

    ``in_graph``, where it has that: the function of a tensor that compiled code may tell in its place.
    Called inside hooks: must not write into a value, must not read the device."""

    def add(self, value: Any, run: Run, call: int) -> Any:
        """A value passed. Raising stops the user's run; a tensor returned for a gradient takes its place."""

    def absent(self, run: Run, call: int, reason: str) -> None:
        """The site fired, and there is None to see."""
        return

    def refuse(self, run: Run, call: int, reason: str) -> None:
        """The site fired, but its value cannot be told exactly; reading it must raise."""
        return

    def skip(self, reason: str) -> None:
        """An event that this site cannot show, of a pattern that asks for whatever there is."""
        return

    def remark(self, text: str) -> None:
        """Something that whoever reads the value should know."""
        return

    def at(self, key: Key) -> Stream:
        """The stream of one tensor inside this site's value."""
        return self

    def spawn(self, site: Site, known: Any) -> Any:
        """The stream of one op, where this one's site names several; ``known``: that of another pattern for it."""
        return self


class EditStream(Stream, Protocol):
    """Changes what passes one site. ``add`` returns the gradient that backward goes on with, or None for no change.

    What cannot be changed truly must not go on unchanged: ``refuse`` raises.
    """

    place: object  # equal for edits at one site: they act in the order given
    switch: Any
    edit: Any
    check_finite: bool

    def change(self, value: Tensor, passage: Passage, is_again: bool) -> Tensor:
        """The tensor that the model goes on with. ``is_again``: a recomputation, which must get what the first got."""

    def direct(self, value: Tensor) -> Tensor | None:
        """The same without questions, for an edit that needs none and has acted before; else None."""

    def wants(self, run: Run, call: int) -> bool:
        """Whether the edit acts at this event."""

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_again: bool) -> Any:
        """The output of a module that is not run."""


class EntryTap(Protocol):
    """Called when a module is entered."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int, /) -> None: ...


class ExitTap(Protocol):
    """Called when a module returns."""

    def __call__(self, output: Any, run: Run, call: int, /) -> None: ...


class EntryChange(Protocol):
    """Called when an edited module is entered; returns what it is called with instead, or None."""

    is_gradient: bool  # sets gradient hooks: only where a graph is made

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool, /
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no graph, and none will come."""
        return


class ExitChange(Protocol):
    """Called when an edited module returns; returns what its caller gets."""

    is_gradient: bool

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool, /) -> Any: ...

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no graph, and none will come."""
        return


class EntryArm(EntryTap, Protocol):
    """Sets gradient hooks at the entry of a module."""

    def before_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int, /) -> None:
        """The call has no graph, but may be run again with one."""
        return

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no graph, and none will come."""
        return


class ExitArm(Protocol):
    """Sets gradient hooks at the exit of a module. ``given``: the arguments of the call."""

    def __call__(self, output: Any, given: tuple[Any, Any], run: Run, call: int, /) -> None: ...

    def give_up(self, run: Run, call: int, /) -> None:
        """The call had no graph, and none will come."""
        return
