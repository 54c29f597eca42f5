"""What sessions are told before it happens, and may refuse: what torch has no hooks for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from gaff.compat import checkpoints, compiler
from gaff.compat.replacements import Held, Replacements


class Announced(Held):
    """Something that torch does anywhere in the process; ``place`` lets it call a function of ours first.

    What an asked function raises comes out of the program's own call, before anything is computed.
    """

    def __init__(self, place: Callable[[Callable[..., None]], AbstractContextManager[Any]]) -> None:
        super().__init__(lambda: place(self._ask))
        self._asked: dict[object, Callable[..., None]] = {}

    def before_each(self, ask: Callable[..., None]) -> ExitStack:
        """Until what this returns is closed ``ask`` is called each time."""
        key, asking = object(), ExitStack()
        asking.enter_context(self)
        self._asked[key] = ask
        asking.callback(self._asked.pop, key)
        return asking

    def _ask(self, *given: Any) -> None:
        for ask in list(self._asked.values()):
            ask(*given)


# A non-reentrant checkpoint is about to recompute: told with its frame.
recomputations = Announced(lambda ask: Replacements(checkpoints.before_recomputations(ask)))
# Compiled code is about to be called: told with the function, and its arguments.
compiled_calls = Announced(compiler.before_compiled_calls)
