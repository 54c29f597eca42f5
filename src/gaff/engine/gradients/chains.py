"""Edits of one tensor's gradient, by one session: they act one after the other, by the one hook that they have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gaff.compat import memory
from gaff.engine.gradients.armed import Armed


class EditChain:
    """Edits of one tensor: ``rows`` by call, the last first; those of a call in the order in which they came."""

    __slots__ = ("handle", "rows")

    def __init__(self) -> None:
        self.handle: Any = None  # of the one hook
        self.rows: list[tuple[object, list[Armed]]] = []


class Chains:
    """The chains of a session, by tensor; one that was written to in place has another gradient, and another chain.

    But for a leaf, which is written to without being made anew: its hooks hear what comes to it, as it is then.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[weakref.ref[Tensor], EditChain]] = {}  # by identity and version

    def on(self, tensor: Tensor) -> list[Armed]:
        """Those that act on a tensor, as it is now."""
        chain = self._chain_of(tensor)
        return [armed for _, group in chain.rows for armed in group] if chain is not None else []

    def join(self, tensor: Tensor, armed: Armed, set_hook: Callable[[EditChain], Any]) -> None:
        """Let ``armed`` act in its order; ``set_hook`` sets the hook of a new chain, and returns its handle."""
        chain = self._chain_of(tensor)
        if chain is None:
            if len(self._known) > 64:
                self._known = {at: row for at, row in self._known.items() if row[0]() is not None}
            chain = EditChain()
            self._known[_key_of(tensor)] = weakref.ref(tensor), chain
            chain.handle = set_hook(chain)
        place = (armed.run, getattr(armed.stream, "place", None), armed.call)
        armed.handle = chain.handle
        if chain.rows and chain.rows[0][0] == place:
            chain.rows[0][1].append(armed)
        else:
            chain.rows.insert(0, (place, [armed]))
        if len(chain.rows) > 8:  # on what outlives the graphs of many runs
            chain.rows[:] = [row for row in chain.rows if not all(one.is_dead() for one in row[1])]

    def _chain_of(self, tensor: Tensor) -> EditChain | None:
        known = self._known.get(_key_of(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def clear(self) -> None:
        """Take all hooks away, and forget the chains."""
        for _, chain in self._known.values():
            chain.handle.remove()
        self._known.clear()


def _key_of(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_leaf else memory.version_of(tensor)
