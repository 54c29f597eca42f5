"""A node: one module, or one op, that a session looks at or changes, and its two sides.

The wiring makes nodes and hangs on their sides what was asked for; backends let values pass these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from torch import nn

from gaff.compat.autograd import backward_task
from gaff.compat.checkpoints import is_spent
from gaff.engine.clock import Clock, Frame, Run
from gaff.engine.side import Side

_NOBODY: frozenset[Any] = frozenset()


class Node:
    """One hooked module in one session, with its ``entry`` and its ``exit``. An op is handled as such a node, too.

    The session makes it, hangs what was asked for on its sides while it prepares, and installs hooks for it once; from
    then on only these read it. ``index`` is its place in the counts of a run; an op has none of its own. It ends with
    the session, but for edits that a living autograd graph still needs (``leftovers``).
    """

    __slots__ = ("above", "clock", "entry", "exit", "has_entry", "has_swaps", "index", "mark", "module", "open",
                 "scope")  # fmt: skip

    def __init__(self, module: nn.Module, clock: Clock, index: int) -> None:
        self.module = module
        self.clock = clock
        self.open = clock.open  # the runs in progress, by thread
        self.index = index
        self.entry = Side(module, clock)
        self.exit = Side(module, clock)
        self.above: frozenset[Node] = _NOBODY  # hooked modules that contain this one
        self.has_entry = False
        self.has_swaps = False  # a parameter is edited, and this module may begin a run
        self.mark: Callable[[Run, Any], None] | None = None  # makes the run's backward passes known; begins no run
        self.scope: Any = None  # sees to the ops in the module's own forward

    def _sides(self) -> Iterator[Side]:
        """The sides of single ops in the module's own forward, as far as they have come, and its own."""
        for node in (*(() if self.scope is None else self.scope.nodes()), self):
            yield from (node.entry, node.exit)

    def note(self, key: object, value: Any) -> Frame:
        """Put a value down for the innermost call in progress, for its second half. There is one, unless another thread
        has closed the session meanwhile: then it is put down for nobody."""
        frame = self.frame() or Frame(self)
        frame.notes[key] = value
        return frame

    def frame(self) -> Frame | None:
        """The innermost call in progress on this thread, in a run or in a recomputation; None of what is not seen."""
        run = self.open.get(get_ident())
        frames = self.clock.replay_frames() if backward_task() != -1 else run.frames if run is not None else []
        return next((frame for frame in reversed(frames) if frame.owner is self), None)

    def give_up(self, *, is_final: bool) -> None:
        """Tell the gradient streams of calls without grad mode that nothing recomputed them; see ``Side.give_up``."""
        for side in self._sides():
            side.give_up(is_final=is_final)

    def repeats(self) -> bool:
        """Whether an autograd graph is alive whose recomputation needs the edits of this module."""
        return any(not is_spent(region) for region in self.regions())

    def regions(self) -> Iterator[Any]:
        """The checkpoints whose autograd graphs are alive, with calls of this module or its ops.

        Each is the frame of a non-reentrant checkpoint or the autograd node of a reentrant one; none is held here.
        """
        for side in self._sides():
            yield from side.regions()

    def drop(self) -> None:
        """Let go of what acts here: it knows its node, and the circle would wait for a collector."""
        for side in self._sides():
            side.drop()
