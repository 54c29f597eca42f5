"""Schedules of learning rates: whether somebody steps them, and whether they are stepped beyond their end.

torch tells nobody of a step of a scheduler. It is found among the objects that Python's garbage collector follows,
where the optimizer's own ``step`` says that there is one; from then on it says itself how far it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

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
        found = []
        for one in self._alone(step, optimizers):
            length = one.T_max if type(one) is CosineAnnealingLR else 0
            found.append({"schedule": type(one).__name__, "made": one.last_epoch, "length": int(length)})
        return tuple(found)

    def has_stepped(self, optimizers: Iterable[Any]) -> bool:
        """Whether the one schedule of an optimizer, of those that are known, has made a step."""
        return any(one.last_epoch > 0 for one in self._alone(0, optimizers))

    def unfinished(self, steps: int, optimizers: Iterable[Any]) -> tuple[str, int, int] | None:
        """Class, steps made and length of a schedule of ``optimizers`` that is as long as the run has had steps, to a
        twentieth, and has made a fifth of these or fewer; None where there is none. Searches if nobody has so far."""
        for one in self._alone(0 if self._known else steps, optimizers):
            length = one.T_max if type(one) is CosineAnnealingLR else one.total_steps if type(one) is OneCycleLR else 0
            if 0 < one.last_epoch <= length / 5 and abs(steps - length) <= length / 20:
                return type(one).__name__, one.last_epoch, int(length)
        return None

    def _alone(self, step: int, optimizers: Iterable[Any]) -> Iterator[Any]:
        """The one schedule of each of ``optimizers`` that has one, looked for where it is time after so many steps."""
        scheduled = [one for one in optimizers if getattr(one.step, "_wrapped_by_lr_sched", False)]
        if scheduled and step >= self._due:
            self._due = _TIMES * step
            self._known = list(map(weakref.ref, objects_of(LRScheduler)))
        there = [one for known in self._known if (one := known()) is not None]
        parts = {id(part) for one in there for part in getattr(one, "_schedulers", ())}
        for optimizer in scheduled:
            own = [one for one in there if getattr(one, "optimizer", None) is optimizer and id(one) not in parts]
            told = [one for one in own if isinstance(getattr(one, "last_epoch", None), int)]
            if len(told) == len(own) == 1:
                yield told[0]
