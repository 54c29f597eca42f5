"""A step pre-hook of an optimizer that is called behind those of others, also behind those that are set after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from gaff.compat.compiler import never_traced


class LastPreHook:
    """Calls ``action(optimizer, args, kwargs)`` as a step begins, when the gradients are those that it will use.

    A hook that somebody has set later may change them still: where there is one, the last of these is called first, in
    its own place, and this one behind it. Among several of this class the order is that in which they were opened.
    """

    def __init__(self, optimizer: Optimizer, action: Callable[..., Any]) -> None:
        self._hooks: dict[int, Callable[..., Any]] = optimizer._optimizer_step_pre_hooks
        self._action = action
        self._replaced: tuple[int, Callable[..., Any], Callable[..., Any]] | None = None  # number, hook, what is there
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
        original = self._hooks[later[-1]]
        behind = never_traced(partial(self._behind, original))
        self._replaced = later[-1], original, behind
        self._hooks[later[-1]] = behind  # torch goes through the numbers, and looks up each hook when it comes there
        return None

    def _behind(self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._put_back()
        given = original(optimizer, args, kwargs)
        changed = self._action(optimizer, *(given if given is not None else (args, kwargs)))
        return given if changed is None else changed

    def _put_back(self) -> None:
        if self._replaced is not None:
            number, original, behind = self._replaced
            self._replaced = None
            if self._hooks.get(number) is behind:
                self._hooks[number] = original


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), LastPreHook)
