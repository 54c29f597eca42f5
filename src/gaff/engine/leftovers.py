"""What outlives a session: the edits of checkpointed regions whose autograd graphs are still alive.

A session may close between forward and backward. The recomputation then has to edit as the forward did, so the hooks
of those modules stay, and go with the last of the graphs. Whoever does not want to wait releases them, and a backward
pass of such a graph raises from then on.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gaff.compat import checkpoints
from gaff.engine.force_eager import forced_eager
from gaff.engine.gradients.tensor_hooks import on_gradient
from gaff.engine.node import Node
from gaff.errors import ExactnessError


class Release:
    """Whether the edits of some autograd graphs were given up: their backward passes then raise, not go on unedited.

    One belongs to each session. ``is_done`` is set by whoever releases. ``stripped``: the identities of modules whose
    hooks somebody else took away while the session was open.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.stripped: set[int] = set()

    def guard(self, tensor: Tensor) -> None:
        """Hook what a run with edits under a checkpoint returned. The hook lives and dies with its autograd graph.

        It holds this object and no session. Once ``is_done`` it raises ExactnessError in backward.
        """
        on_gradient(tensor, self._arrived)

    def _arrived(self, gradient: Tensor) -> None:
        if self.is_done:
            _refuse()


class Lingering:
    """Hooks that stay after a session, inert outside the recomputation of its graphs; gone with the last of these.

    ``hooks`` are nodes with the handles of their hooks. ``is_forced``: the session had compiled code run eagerly,
    which goes on as long, since compiled code would be recomputed without the hooks. A finalizer on each checkpoint
    looks whether its module's hooks are still needed; it may run on any thread, whichever frees the graph.
    """

    def __init__(self, hooks: list[tuple[Node, list[Any]]], *, is_forced: bool) -> None:
        self._hooks = dict(hooks)
        self._eager = ExitStack()
        if is_forced:  # compiled code would be recomputed without its hooks
            self._eager.enter_context(forced_eager)
        for node in self._hooks:
            for region in node.regions():
                weakref.finalize(region, self._look, node).atexit = False

    def __len__(self) -> int:
        """How many modules still have hooks."""
        return len(self._hooks)

    def nodes(self) -> set[Node]:
        """The nodes of the modules that keep their hooks, as a new set."""
        return set(self._hooks)

    def release(self) -> None:
        """Remove the hooks now. A checkpoint that would have needed them raises ExactnessError when it recomputes."""
        for node in list(self._hooks):
            for region in node.regions():
                checkpoints.wrap_recomputation(region, lambda recompute: _refuse)
            self._remove(node)

    def _look(self, node: Node) -> None:
        """Remove the hooks of one module if no autograd graph needs them any more."""
        if node in self._hooks and not node.repeats():
            self._remove(node)

    def _remove(self, node: Node) -> None:
        remove_all(self._hooks.pop(node))
        node.drop()
        if not self._hooks:
            self._eager.close()


def _refuse(*args: Any, **kwargs: Any) -> None:
    """Stands in the place of what a checkpoint would recompute without its edits: raises ExactnessError."""
    raise ExactnessError(
        "the edits of this graph were released, and a checkpoint in it would recompute without them: "
        "run the forward again, or call backward before .release()"
    )


STRIPPED = "hooks were taken from its module while the session was open: calls after that were not seen"


def remove_all(handles: list[Any]) -> bool:
    """Remove hooks by their handles, the last first: what was put on top of something goes before it.

    Returns whether all were there still: somebody may have cleared torch's tables of a module.
    """
    tables = [(one.hooks_dict_ref(), one.id) for one in handles if isinstance(one, RemovableHandle)]
    is_whole = all(table is not None and number in table for table, number in tables)
    for handle in reversed(handles):
        handle.remove()
    return is_whole


def take_off(
    hooks: list[tuple[Node, list[Any]]], kept: list[tuple[Node, list[Any]]], stripped: set[int], *, has_edits: bool
) -> None:
    """Remove the hooks of each node, the last first, and take it from ``hooks``, whatever is raised meanwhile.

    Those of edits that a living autograd graph would recompute stay, and go to ``kept``; ``stripped`` gets the
    identities of modules whose hooks were gone already. A Ctrl-C is raised when none is left.
    """
    try:
        while hooks:
            node, handles = hooks[-1]
            try:
                if has_edits and node.repeats():
                    kept += [] if kept and kept[-1][0] is node else [(node, handles)]
                elif not remove_all(handles):
                    stripped.add(id(node.module))
            except Exception:
                hooks.pop()  # it would fail again
                raise
            hooks.pop()
    finally:
        if hooks:
            take_off(hooks, kept, stripped, has_edits=has_edits)
