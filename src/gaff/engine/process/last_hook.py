"""Step pre-hooks of an optimizer that are called behind those of others, also behind those that are set after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gaff.compat.compiler import never_traced


class Behind:
    """Stands in the place of one hook of a table until it is called: calls that hook, and ``then`` right behind it.

    torch goes through the numbers of the table, and looks up each hook when it comes there: nobody may make the table
    longer meanwhile, and any hook may take itself away.
    """

    def __init__(self, hooks: dict[int, Any], number: int, then: Callable[..., Any]) -> None:
        self._hooks = hooks
        self._number = number
        self._original = hooks[number]
        self._then = then
        never_traced(type(self).__call__)
        hooks[number] = self

    def put_back(self) -> None:
        """Leave the hook as it was, unless it has been taken away."""
        if self._hooks.get(self._number) is self:
            self._hooks[self._number] = self._original

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self.put_back()
        given = self._original(optimizer, args, kwargs)
        is_other = isinstance(given, tuple) and len(given) == 2  # torch refuses all else but None
        changed = self._then(optimizer, *(given if is_other else (args, kwargs)))
        return given if changed is None else changed


class LastPreHook:
    """Calls ``action(optimizer, args, kwargs)`` as a step begins, when the gradients are those that it will use.

    A hook that somebody has set later may change them still: where there is one, the last of these is called first, in
    its own place, and this one behind it. Among several of this class the order is that in which they were opened.
    """

    def __init__(self, optimizer: Optimizer, action: Callable[..., Any]) -> None:
        self._hooks: dict[int, Callable[..., Any]] = optimizer._optimizer_step_pre_hooks
        self._action = action
        self._behind: Behind | None = None
        self._handle = optimizer.register_step_pre_hook(never_traced(self._called))

    def remove(self) -> None:
        """Leave nothing on the optimizer."""
        self._put_back()
        self._handle.remove()

    def _called(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._put_back()  # of a step that ended before it came there
        later = [number for number, hook in self._hooks.items() if number > self._handle.id and not _is_ours(hook)]
        if not later:
            return self._action(optimizer, args, kwargs)
        self._behind = Behind(self._hooks, later[-1], self._action)
        return None

    def _put_back(self) -> None:
        if self._behind is not None:
            self._behind.put_back()
            self._behind = None


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), LastPreHook)
