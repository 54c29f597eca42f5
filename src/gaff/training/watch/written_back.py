"""Whether what a step has changed is still there when the next one begins: code may write old weights back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaff.training.watch.updates import Changed, Update


class WrittenBack:
    """Compares the weights that a step has left with those that the very next step of the optimizer begins with.

    Only where both are looked at. Holds some elements of each parameter from one step to the next, and waits for
    nothing.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, Changed]] = {}  # by optimizer: the number of its step, and what that changed

    def begins(self, optimizer: Any, number: int, update: Update) -> Tensor | None:
        """The share of the last change that is still there as step ``number`` begins: 1 where nobody wrote to weights.

        None where the last step that was looked at is not the one before, or has changed nothing that is still known.
        """
        at, last = self._last.pop(id(optimizer), (-1, []))
        if not last or at + 1 != number:
            return None
        now = {(one.model, one.path): one.before for one in update.owned}
        known = [(value[: len(change)], before, change) for key, before, change in last
                 if (value := now.get(key)) is not None and value.device == last[0][1].device]  # fmt: skip
        if not known or any(len(value) != len(before) for value, before, _ in known):
            return None
        value, before, change = (torch.cat(several).double() for several in zip(*known, strict=True))
        return torch.dot(value - before, change) / torch.dot(change, change)

    def ended(self, optimizer: Any, number: int, update: Update) -> None:
        """Step ``number`` has been made, and ``update`` has told what it has changed."""
        if update.changed:
            self._last[id(optimizer)] = number, update.changed

    def forget(self) -> None:
        """Hold nothing of the user's any more."""
        self._last.clear()
