"""Whether what a step has changed is still there when the next one begins: code may write old weights back."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from gaff.training.watch.accumulator import readable
from gaff.training.watch.models import Models
from gaff.training.watch.slips import SelfLoads
from gaff.training.watch.updates import Changed, Update, parameters_of, some_of

_LATEST = 8  # steps that were looked at


class WrittenBack:
    """Compares the weights that a step has left with those that the very next step of the optimizer begins with.

    Of steps that are looked at. Holds some elements of each parameter of ``models`` from one step to the next, and
    waits for nothing. ``self_loads``: what was meant to write them back, and did not.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._last: dict[int, tuple[int, Changed]] = {}  # by optimizer: the number of its step, and what that changed
        self.self_loads = SelfLoads()
        self._told: dict[str, Any] = {}
        self._latest: deque[Tensor] = deque(maxlen=_LATEST)  # shares

    @property
    def is_awaiting(self) -> bool:
        """Whether it is to be told of steps that begin."""
        return bool(self._last)

    def begins(self, optimizer: Any, number: int) -> None:
        """Step ``number`` begins: note the share of the last change that is there yet, 1 where nobody wrote to weights.

        ``most`` is the largest of the latest such shares. Nothing where the last step that was looked at is not the one
        before, or has changed nothing that is still known.
        """
        at, last = self._last.pop(id(optimizer), (-1, [])) if self._last else (-1, [])
        if not last or at + 1 != number:
            return
        with torch.no_grad():
            held = {self._models.name_of(one): one for _, one in parameters_of(optimizer)}
            first = last[0][1].device  # numbers of one device alone are put together
            known = [(now, before, change) for key, before, change in last
                     if before.device == first and (now := _few_of(held.get(key), before)) is not None]  # fmt: skip
            if known:
                value, before, change = (torch.cat(several).double() for several in zip(*known, strict=True))
                share = torch.dot(value - before, change) / torch.dot(change, change)
                self._latest.append(share)
                latest = torch.stack([one.to(share.device) for one in self._latest])
                most = latest.nan_to_num(0.0).amax()  # a step that has changed nothing has no share
                self._told = {"kept": {"share": share, "most": most, "optimizer": type(optimizer).__name__}}

    def take(self) -> dict[str, Any]:
        """The fact that was noted last, once, for the rules; its share may be on a device."""
        told, self._told = self._told, {}
        return told

    def ended(self, optimizer: Any, number: int, update: Update) -> None:
        """Step ``number`` has been made, and ``update`` has told what it has changed."""
        if update.changed:
            self._last[id(optimizer)] = number, update.changed

    def forget(self) -> None:
        """Hold nothing of the user's any more."""
        self._last.clear()
        self._latest.clear()
        self._told = {}


def _few_of(parameter: Tensor | None, like: Tensor) -> Tensor | None:
    """The elements of a parameter that ``like`` has of it, as they are now; None where these are not there any more."""
    value = None if parameter is None else readable(parameter)
    if value is None or value.device != like.device or value.dtype != like.dtype:
        return None
    few = some_of(value)[: len(like)]
    return few if few.shape == like.shape else None
