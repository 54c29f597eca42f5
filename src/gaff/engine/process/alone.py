"""A piece of work that one process does by itself, while the others go on with theirs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from gaff.compat import distributed
from gaff.compat.modes import plainly

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Unanswered(TorchDispatchMode):
    """Raises RuntimeError where an operation would talk to other processes, of which none answers."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            with self:
                return plainly(func, args, kwargs or {})
        if func.namespace in _SPACES:
            raise RuntimeError(f"it talks to other processes ({func.name()}), which are not at this place")
        return func(*args, **(kwargs or {}))


def alone() -> AbstractContextManager[Any]:
    """What runs inside, on this thread, talks to no other process: a collective of one alone would wait for ever.

    Raises RuntimeError at the first operation that would. Does nothing in a process that has no others.
    """
    return Unanswered() if distributed.has_others() else nullcontext()  # type: ignore[no-untyped-call]
