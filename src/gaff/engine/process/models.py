"""Models of a script that nobody names: whatever module is called first, from outside any other module.

``gaff nan SCRIPT`` uses it to guard the models of a script that knows nothing of gaff.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn


class RootWatch:
    """Calls ``found(module)`` before the first call of every outermost module, on the thread that opened it.

    Global hooks would come too late: torch looks up a module's own hooks before it calls them. So the one method
    through which all modules are called is wrapped while this is open. For the command line, which owns its process. A
    module inside one that was found is not found again, when it is called alone. Found modules are held as long as this
    lives, so that no other gets the identity by which they are known.
    """

    def __init__(self, found: Callable[[nn.Module], None]) -> None:
        self._found = found
        self._known: set[int] = set()
        self._held: list[nn.Module] = []  # their identities must not be used again
        self._depth = 0
        self._thread = threading.get_ident()
        self._original: Any = None

    def __enter__(self) -> None:
        original = self._original = nn.Module.__call__

        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            is_ours = type(module).__module__.startswith("gaff.")
            if not self._depth and id(module) not in self._known and not is_ours:
                self._note(module)
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def __exit__(self, *exc: object) -> None:
        nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _note(self, module: nn.Module) -> None:
        """Remember a module and all inside it, then tell of it; what ``found`` raises passes through to the caller."""
        self._held.append(module)
        self._known.update(id(inner) for inner in module.modules())
        self._found(module)
