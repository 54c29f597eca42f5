"""A crossing: one value passes one side of one node, once. What everything that hangs on a side is told about it."""

from __future__ import annotations

from typing import Any

from gaff.engine.clock import Run


class Crossing:
    """One value passing the entry or the exit of a node, in the ``call``-th call of it in ``run``.

    ``has_graph``: an autograd graph is made of what passes, so gradient hooks are due. ``is_again``: this is a
    recomputation, by a checkpoint, of that call. ``memo`` holds what edits decided in the first pass, each under itself
    as key, and is the same in each recomputation; None as long as nothing may repeat the call, so that ordinary calls
    keep nothing. ``waits``: something may run the call again and make the autograd graph that lasts. Holds no value,
    but a few numbers of it, ``passed``, where only these tell which call a recomputation repeats.
    """

    __slots__ = ("call", "has_graph", "is_again", "memo", "passed", "run", "waits")

    def __init__(self, run: Run, call: int, has_graph: bool = True, memo: Any = None, is_again: bool = False) -> None:
        self.run = run
        self.call = call
        self.has_graph = has_graph
        self.memo: dict[object, Any] | None = memo
        self.is_again = is_again
        self.waits = False
        self.passed: Any = None
