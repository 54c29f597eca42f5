"""Optimizers that hold parameters of a watched model and never make a step: ``optimizer.step()`` is missing.

An optimizer is known to a watcher by its steps. One that makes none has to be looked for, and nothing is told when one
is made: it is found among the objects that Python's garbage collector follows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaff.training.watch.held_parameter import HeldParameter
from gaff.training.watch.models import Model, Models
from gaff.training.watch.optimizers import Optimizers
from gaff.training.watch.ownership import owned_by
from gaff.training.watch.updates import parameters_of

_FIRST, _TIMES = 16, 4  # looked for after so many steps or backward passes, and again after so many times as many
_COMPARED = 8  # parameters of an optimizer that are compared with what they were


@dataclass(frozen=True, slots=True)
class Idle:
    """An optimizer without a step, as far as one model is concerned.

    ``optimizer``: its class; ``parts``: which of the model's ``parameters`` it holds, the largest first.
    """

    optimizer: str
    model: str
    parameters: int
    parts: tuple[HeldParameter, ...]


class IdleOptimizers:
    """Looks for optimizers of which no step was seen, and forgets those that make one after all.

    Asked on the thread that trains. A search goes through all of Python's objects, tens of milliseconds where there is
    a million of them; it is made only where a parameter needs an optimizer and has none that steps, and at distances
    that grow. Code that changes parameters by hand needs no step: the largest of what was found are compared with what
    they were.
    """

    def __init__(self, models: Models, optimizers: Optimizers) -> None:
        self._models = models
        self._optimizers = optimizers
        self._found: list[Idle] = []
        self._due = _FIRST
        self.was_wrong = False  # all that was found has made a step since

    def is_due(self, count: int) -> bool:
        """Whether ``passed`` would do anything after so many steps."""
        return count >= self._due or bool(self._found)

    def passed(self, count: int) -> None:
        """So many steps were made, or backward passes where there was no step yet: search, where it is time.

        Where others step, parameters count that have a gradient at this moment: right after a backward pass.
        """
        self._forget_changed()
        if count >= self._due:
            self._due = _TIMES * count
            needy = self._needy(has_gradient=bool(self._optimizers.counts))
            self._found = list(self._search(needy)) if needy else []

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step, or a GradScaler one in its place: what it holds is in good hands."""
        if self._found:
            held = {id(parameter) for _, parameter in parameters_of(optimizer)}
            self._found = [one for one in self._found if not any(id(part.now()) in held for part in one.parts)]
            self.was_wrong = not self._found

    def facts(self) -> list[dict[str, Any]]:
        """What was found and holds still, as rules read it."""
        self._forget_changed()
        return [{"optimizer": one.optimizer, "model": one.model, "held": len(one.parts), "parameters": one.parameters}
                for one in self._found]  # fmt: skip

    def _forget_changed(self) -> None:
        """Forget what code by hand has changed since it was found."""
        if self._found:
            self._found = [one for one in self._found if not any(part.has_changed() for part in one.parts)]

    def _needy(self, *, has_gradient: bool) -> dict[int, tuple[Model, Tensor]]:
        """Parameters of modules in training mode that are in no optimizer that steps, by identity, with their model.

        One of several models counts for the first.
        """
        owned = owned_by(self._optimizers.counts)
        found: dict[int, tuple[Model, Tensor]] = {}
        for model in self._models.all:
            for called, name, _ in model.parameters.values():
                module = called()
                one = module._parameters.get(name) if module is not None and module.training else None
                if one is None or not one.requires_grad or id(one) in owned:
                    continue
                if one.grad is not None or not has_gradient:
                    found.setdefault(id(one), (model, one))
        return found

    def _search(self, needy: dict[int, tuple[Model, Tensor]]) -> Iterator[Idle]:
        """What each optimizer without a step holds of these parameters, by model."""
        for optimizer in filter(self._may_step, objects_of(torch.optim.Optimizer)):
            held: dict[str, list[Tensor]] = {}
            for _, one in parameters_of(optimizer):
                if id(one) in needy:
                    held.setdefault(needy[id(one)][0].name, []).append(one)
            for name, parameters in held.items():
                model = self._models.named(name)
                parts = tuple(_parts(model, sorted(parameters, key=Tensor.numel, reverse=True)))
                if parts:
                    yield Idle(type(optimizer).__name__, name, len(model.parameters), parts)

    def _may_step(self, optimizer: Any) -> bool:
        """Whether a step of this one would have been seen, would count, and there has been none, as far as is known.

        torch puts what tells of steps around ``step`` of a class when the first one is made by ``Optimizer.__init__``;
        wrappers around other optimizers pass that over.
        """
        if not getattr(type(optimizer).step, "hooked", False) or not hasattr(optimizer, "param_groups"):
            return False
        return not optimizer.state and optimizer not in self._optimizers.counts and self._optimizers.has(optimizer)


def _parts(model: Model, parameters: list[Tensor]) -> Iterator[HeldParameter]:
    """Where the parameters are in the model; what the first eight are now is noted."""
    for count, one in enumerate(parameters):
        known = model.parameters.get(id(one))
        if known is not None:
            yield HeldParameter.of(known[0], known[1], one if count < _COMPARED else None)


def objects_of(base: type) -> list[Any]:
    """Every object of a class, or of one made of it, that the garbage collector follows, whoever holds it.

    Types are compared, not instances: an object that stands in for others answers for its class with code of its own.
    """
    kinds: set[type] = set()
    found: list[type] = [base]
    while found:
        kind = found.pop()
        if kind not in kinds:
            kinds.add(kind)
            found += type.__subclasses__(kind)
    return [one for one in gc.get_objects() if type(one) in kinds]
