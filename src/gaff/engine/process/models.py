"""Models of a script that nobody names: whatever module is called from outside any other module.

``gaff nan SCRIPT`` uses it to guard the models of a script that knows nothing of gaff, ``gaff try`` to change what they
are given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class RootCalls:
    """Calls ``around(module, call, args, kwargs)`` instead of each outermost call of a module, while it is open.

    ``around`` makes the call itself, with ``call(*args, **kwargs)``, and returns what is to be returned. On the thread
    that opened it only; modules of gaff's own are passed over. Global hooks would come too late: torch looks up a
    module's own hooks before it calls them. So the one method through which all modules are called is wrapped. For the
    command line, which owns its process.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._depth = 0
        self._thread = threading.get_ident()
        self._original: Any = None

    def __enter__(self) -> None:
        original = self._original = nn.Module.__call__

        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            is_outermost = not self._depth and not type(module).__module__.startswith("gaff.")
            self._depth += 1
            try:
                if is_outermost:
                    return self._around(module, original.__get__(module), args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def __exit__(self, *exc: object) -> None:
        nn.Module.__call__ = self._original  # type: ignore[method-assign]


def new_roots(found: Callable[[nn.Module], None]) -> RootCalls:
    """What calls ``found(module)`` before the first call of every outermost module, on the thread that opens it.

    A module inside one that was found is not found again, when it is called alone. What ``found`` raises passes through
    to the caller. A call that gives lazy parameters their shapes only passes: the module is found by the next one.
    """
    known = set[int]()
    held: list[nn.Module] = []  # their identities must not be used again

    def around(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) not in known and not any(map(is_lazy, module.parameters())):
            held.append(module)
            known.update(id(inner) for inner in module.modules())
            found(module)
        return call(*args, **kwargs)

    return RootCalls(around)
