"""Edits of one tensor's gradient, by one session: they act one after the other, by the one hook that they have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gaff.compat import memory
from gaff.engine.gradients.armed import Armed

Chain = list[tuple[object, list[Armed]]]  # by call, the last first; those of a call in the order in which they came


class Chains:
    """The chains of a session, by tensor; one that was written to in place has another gradient, and another chain."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[weakref.ref[Tensor], Chain]] = {}  # by identity and version

    def on(self, tensor: Tensor) -> list[Armed]:
        """Those that act on a tensor, as it is now."""
        return [armed for _, group in self._chain_of(tensor) or () for armed in group]

    def join(self, tensor: Tensor, armed: Armed, set_hook: Callable[[Chain], Any]) -> None:
        """Let ``armed`` act in its order; ``set_hook`` sets the hook of a new chain, and returns its handle."""
        chain = self._chain_of(tensor)
        place = (armed.run, getattr(armed.stream, "place", None), armed.call)
        if chain is not None and chain[0][1][0].handle is not None:
            armed.handle = chain[0][1][0].handle
            if chain[0][0] == place:
                chain[0][1].append(armed)
            else:
                chain.insert(0, (place, [armed]))
            if len(chain) > 8:  # on a leaf, which outlives the graphs of many runs
                chain[:] = [row for row in chain if not all(one.is_dead() for one in row[1])]
            return
        if len(self._known) > 64:
            self._known = {at: row for at, row in self._known.items() if row[0]() is not None}
        chain = [(place, [armed])]
        self._known[id(tensor), memory.version_of(tensor)] = weakref.ref(tensor), chain
        armed.handle = set_hook(chain)

    def _chain_of(self, tensor: Tensor) -> Chain | None:
        known = self._known.get((id(tensor), memory.version_of(tensor)))
        return known[1] if known is not None and known[0]() is tensor else None

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
