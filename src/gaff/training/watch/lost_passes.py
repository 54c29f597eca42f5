"""Backward passes whose gradients are cleared before any step has used them: they are for nothing.

So it is where gradients are meant to be accumulated and ``zero_grad`` stands in the inner loop, or where ``step``
stands outside of the loop over batches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gaff.compat import memory
from gaff.training.watch.accumulator import readable
from gaff.training.watch.updates import parameters_of

_PROBES = 64  # parameters of an optimizer that are asked for a gradient that a pass has changed
_Mark = tuple[int, int]  # which tensor, and how often it was written to


@dataclass(frozen=True, slots=True)
class _Left:
    """What a backward pass of the loss ``name`` has left at one parameter, whose ``version`` tells writes to it."""

    name: str
    parameter: weakref.ref[Tensor]
    version: int
    gradient: weakref.ref[Tensor]


class LostPasses:
    """Counts them from one step of an optimizer to the next, in a sampled step, by the name of the loss.

    One counts if what it left at a parameter is gone, or zero, when the next pass begins, while nobody has written to
    that parameter (a step by hand, a perturbation of the weights), and if the step then uses what the last pass of the
    same loss has left. Holds gradients weakly; waits for the device only where a gradient was written to.
    """

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []
        self._before: dict[int, dict[int, _Mark]] = {}  # by optimizer and parameter, as a pass begins
        self._left: dict[int, _Left] = {}  # by optimizer: by the last pass that has changed a gradient of it
        self._lost: Counter[tuple[int, str]] = Counter()

    def begins(self, optimizers: Iterable[Any]) -> None:
        """A backward pass is about to begin."""
        for optimizer in optimizers:
            left = self._left.pop(id(optimizer), None)
            if left is not None and _is_lost(left):
                self._lost[id(optimizer), left.name] += 1
            self._before[id(optimizer)] = {id(one): _mark(gradient) for one, gradient in _gradients(optimizer)}

    def ended(self, optimizers: Iterable[Any], name: str) -> None:
        """A backward pass from the loss ``name`` has ended; of one whose beginning was not told nothing is noted."""
        for optimizer in optimizers if self._before else ():
            before = self._before.pop(id(optimizer), {})
            changed = (
                (one, gradient) for one, gradient in _gradients(optimizer) if before.get(id(one)) != _mark(gradient)
            )
            found = next(changed, None)
            if found is not None:
                parameter, gradient = found
                self._left[id(optimizer)] = _Left(name, weakref.ref(parameter), memory.version_of(parameter),
                                                  weakref.ref(gradient))  # fmt: skip

    def used(self, optimizer: Any) -> None:
        """An optimizer is about to step: what was lost before is a fact, if it uses what the last pass has left."""
        left = self._left.pop(id(optimizer), None)
        parameter = left.parameter() if left is not None else None
        lost = self._lost.pop((id(optimizer), left.name), 0) if left is not None else 0
        if left is not None and lost and parameter is not None and parameter.grad is left.gradient():
            self.facts.append({"loss": left.name, "lost": lost, "optimizer": type(optimizer).__name__})


def _gradients(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The first parameters of an optimizer that have a gradient, with it."""
    found = ((one, one.grad) for _, one in islice(parameters_of(optimizer), _PROBES))
    return ((one, gradient) for one, gradient in found if gradient is not None)


def _mark(gradient: Tensor) -> _Mark:
    return id(gradient), memory.version_of(gradient)


def _is_lost(left: _Left) -> bool:
    """Whether what a pass has left is cleared by now, and nobody has written to the parameter. May wait."""
    parameter, known = left.parameter(), left.gradient()
    if parameter is None or memory.version_of(parameter) != left.version:
        return False
    gradient = parameter.grad
    if gradient is None:
        return True
    if gradient is not known:
        return False
    value = readable(gradient)
    with torch.no_grad():
        return value is not None and not bool(value.any())
