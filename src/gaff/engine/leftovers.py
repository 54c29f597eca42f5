"""What outlives a session: the edits of checkpointed regions whose graphs are still alive."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from gaff.compat import checkpoints
from gaff.engine.force_eager import forced_eager
from gaff.engine.modules import Node
from gaff.errors import ExactnessError


class Release:
    """Whether the edits of some graphs were given up; their backward passes then raise instead of going unedited."""

    def __init__(self) -> None:
        self.is_done = False

    def guard(self, tensor: Tensor) -> None:
        """Hook what a run with edits under a checkpoint returned. The hook lives and dies with its graph."""
        tensor.register_hook(self._arrived)

    def _arrived(self, gradient: Tensor) -> None:
        if self.is_done:
            _refuse()


class Lingering:
    """Hooks that stay after a session, inert outside the recomputation of its graphs; gone with the last of these."""

    def __init__(self, hooks: list[tuple[Node, list[Any]]], *, is_forced: bool) -> None:
        self._hooks = dict(hooks)
        self._eager = ExitStack()
        if is_forced:  # compiled code would be recomputed without its hooks
            self._eager.enter_context(forced_eager)
        for node in self._hooks:
            for region in node.regions():
                weakref.finalize(region, self._look, node).atexit = False

    def __len__(self) -> int:
        return len(self._hooks)

    def nodes(self) -> set[Node]:
        """The modules that keep their hooks."""
        return set(self._hooks)

    def release(self) -> None:
        """Remove the hooks now."""
        for node in list(self._hooks):
            for region in node.regions():
                checkpoints.wrap_recomputation(region, lambda recompute: _refuse)
            self._remove(node)

    def _look(self, node: Node) -> None:
        if node in self._hooks and not node.repeats():
            self._remove(node)

    def _remove(self, node: Node) -> None:
        remove_all(self._hooks.pop(node))
        node.drop_changes()
        if not self._hooks:
            self._eager.close()


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise ExactnessError(
        "the edits of this graph were released, and a checkpoint in it would recompute without them: "
        "run the forward again, or call backward before .release()"
    )


def remove_all(handles: list[Any]) -> None:
    """Remove hooks, the last first."""
    for handle in reversed(handles):
        handle.remove()
