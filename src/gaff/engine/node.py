"""A node: one module, or one op, that a session looks at or changes, and all that hangs there.

The wiring makes nodes and hangs things on them; the hooks of ``modules`` read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from gaff.engine.clock import Clock, Run
from gaff.engine.recomputation import Replay
from gaff.engine.streams import EntryArm, EntryChange, EntryTap, ExitArm, ExitChange, ExitTap


class Node:
    """One hooked module in one session: what to call when it is entered and left. An op is handled as such a node, too.

    The session makes it, hangs taps, arms and changes on it while it prepares, and calls ``install`` once; from then
    on only the hooks read it. What is hung on it acts in the order of the tuples.

    ``arms`` and ``entry_arms`` set gradient hooks; only they are called again when a reentrant checkpoint recomputes
    the module, since its first pass had no autograd graph. Changes are made again in every recomputation.

    ``index`` is its place in the counts of a run; an op has none of its own. It ends with the session, but for edits
    that a living autograd graph still needs (``leftovers``).
    """

    above: frozenset[Node] = frozenset()  # hooked modules that contain this one
    direct: Callable[[Tensor], Tensor | None] | None = None  # the only edit of the output, the short way
    has_entry = False
    has_swaps = False  # a parameter is edited, and this module may begin a run
    entries: tuple[EntryTap, ...] = ()
    exits: tuple[ExitTap, ...] = ()
    entry_arms: tuple[EntryArm, ...] = ()
    arms: tuple[ExitArm, ...] = ()
    entry_changes: tuple[EntryChange, ...] = ()
    exit_changes: tuple[ExitChange, ...] = ()
    mark: Callable[[Any, Run], None] | None = None  # makes the run's backward passes known; begins no run by itself
    scope: Any = None  # sees to the ops in the module's own forward

    def __init__(self, module: nn.Module, clock: Clock, index: int) -> None:
        self.module = module
        self.clock = clock
        self.open = clock.open  # the runs in progress, by thread
        self.index = index

    @cached_property
    def replay(self) -> Replay:
        """The calls that may be recomputed, as they are met at the entry of the module; made when first needed."""
        return Replay()

    @cached_property
    def exit_replay(self) -> Replay:
        """The calls that may be recomputed, as they are met at the exit of the module; made when first needed.

        Apart from those at the entry, since calls inside one another are entered and left in different orders.
        """
        return Replay()

    @property
    def ops(self) -> list[Node]:
        """What is asked of single ops in the module's own forward, as far as they have come."""
        return [] if self.scope is None else list(self.scope.nodes())

    def give_up(self, *, is_final: bool) -> None:
        """Tell the gradient streams of calls without grad mode that nothing recomputed them.

        Those are told whose checkpoint is gone; with ``is_final``, when the session closes, all that are left.
        """
        for op in self.ops:
            op.give_up(is_final=is_final)
        if not (self.entry_arms or self.arms or self.entry_changes or self.exit_changes):
            return
        entries, exits = (*self.entry_arms, *self.entry_changes), (*self.arms, *self.exit_changes)
        sides: tuple[tuple[Replay, tuple[Any, ...]], ...] = (self.replay, entries), (self.exit_replay, exits)
        for replay, asked in sides:
            for passage in replay.give_up(is_final=is_final):
                for one in asked if not passage.has_graph else ():
                    one.give_up(passage.run, passage.call)

    def repeats(self) -> bool:
        """Whether an autograd graph is alive whose recomputation needs the edits of this module."""
        return any(True for _ in self.regions())

    def regions(self) -> Iterator[Any]:
        """The checkpoints whose autograd graphs are alive, with calls of this module or its ops.

        Each is the frame of a non-reentrant checkpoint or the autograd node of a reentrant one; none is held here.
        """
        made = vars(self)
        for name in ("replay", "exit_replay"):
            if name in made:
                yield from made[name].regions()
        for op in self.ops:
            yield from op.regions()

    def drop_arms(self) -> None:
        """Let go of the gradient streams: they know their node, and the circle would wait for a collector."""
        self.arms = self.entry_arms = ()
        for op in self.ops:
            op.drop_arms()

    def drop_changes(self) -> None:
        """Let go of the edits, which know their node; nothing is repeated from then on."""
        self.entry_changes = self.exit_changes = ()
        for name in ("replay", "exit_replay"):
            if name in vars(self):
                vars(self)[name].forget()
        for op in self.ops:
            op.drop_changes()
