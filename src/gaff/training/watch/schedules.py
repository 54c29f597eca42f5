"""Schedules of learning rates: whether somebody steps them, and whether they are stepped beyond their end.

torch tells nobody of a step of a scheduler. It is found among the objects that Python's garbage collector follows,
where the optimizer's own ``step`` says that there is one; from then on it says itself how far it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from gaff.training.watch.idle_optimizers import objects_of

_FIRST, _TIMES = 64, 8  # looked for after so many steps, and again after so many times as many


class Schedules:
    """Knows the schedulers of the optimizers that train. Used on the thread that trains.

    A search goes through all of Python's objects, tens of milliseconds where there is a million of them.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []
        self._due = _FIRST

    def facts(self, step: int, optimizers: Iterable[Any]) -> tuple[dict[str, Any], ...]:
        """After so many steps: class, steps made and length (0 where it has none) of each schedule of ``optimizers``.

        Those that are parts of another, and those of an optimizer of which another schedule has made steps, are left
        out: they wait for their turn.
        """
        scheduled = [one for one in optimizers if getattr(one.step, "_wrapped_by_lr_sched", False)]
        if scheduled and step >= self._due:
            self._due = _TIMES * step
            self._known = list(map(weakref.ref, objects_of(LRScheduler)))
        there = [one for known in self._known if (one := known()) is not None]
        parts = {id(part) for one in there for part in getattr(one, "_schedulers", ())}
        found = []
        for optimizer in scheduled:
            own = [one for one in there if getattr(one, "optimizer", None) is optimizer and id(one) not in parts]
            told = [one for one in own if isinstance(getattr(one, "last_epoch", None), int)]
            if len(told) == len(own) == 1:
                length = told[0].T_max if type(told[0]) is CosineAnnealingLR else 0
                found.append({"schedule": type(told[0]).__name__, "made": told[0].last_epoch, "length": int(length)})
        return tuple(found)
