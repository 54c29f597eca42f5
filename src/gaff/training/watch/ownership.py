"""Which parameters belong to an optimizer that steps, and which get gradients and belong to none."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address.resolve import iter_modules, join
from gaff.compat.memory import version_of
from gaff.training.watch.accumulator import readable
from gaff.training.watch.held_parameter import HeldParameter
from gaff.training.watch.models import Model, Models
from gaff.training.watch.updates import Update, parameters_of

_LEAST, _NEAR = 64, 0.1  # elements of a weight that tell how it was made, and how near they have to be


class Stray(NamedTuple):
    """A module with parameters that the forward of ``model`` has called, and that is part of no model.

    ``is_drawn``: it was called with grad mode, and has weights of its own that look drawn at random.
    """

    module: weakref.ref[nn.Module]
    model: str
    kind: type[nn.Module]
    is_drawn: bool

    @property
    def is_made_anew(self) -> bool:
        """Whether it is gone already, with weights that were drawn at random: each forward makes one of its own."""
        return self.is_drawn and self.module() is None


def has_drawn(module: nn.Module, model: Model) -> bool:
    """Whether a module has trainable weights that are no constant, and no copy of the model's own. Waits for it."""
    own = [
        one
        for one in module._parameters.values()
        if isinstance(one, nn.Parameter) and one.requires_grad and readable(one) is not None
    ]
    root = model.root()
    theirs = list(root.parameters()) if root is not None else []
    return any(
        one.numel() > 1
        and bool((one != one.flatten()[0]).any())
        and not any(other.shape == one.shape and torch.equal(other, one) for other in theirs)
        for one in map(Tensor.detach, own)
    )


def owned_by(optimizers: Iterable[Any]) -> set[int]:
    """The identities of all parameters in these optimizers."""
    return {id(one) for optimizer in optimizers for _, one in parameters_of(optimizer)}


def is_all_owned(models: Models, optimizers: Iterable[Any]) -> bool:
    """Whether these optimizers have every parameter of the models that requires grad."""
    roots = [root for model in models.all if (root := model.root()) is not None]
    return {id(one) for root in roots for one in root.parameters() if one.requires_grad} <= owned_by(optimizers)


def facts(
    models: Models, updates: Iterable[Update], optimizers: Iterable[Any], strays: Mapping[int, Stray]
) -> dict[str, Any]:
    """What of a step that was looked at gets gradients and is in no optimizer that steps, where that tells a fault.

    ``adrift``: none of the parameters of any optimizer that made a step (``updates``) had a gradient, while those of
    models had: the optimizers' classes, and how many parameters of which model; ``strays``: modules that a model has
    called in its forward without having them as parts: by model, how many, and the class of the first; ``anew``: by
    model the class of one that is made in each forward; ``untrained``: models whose parameters all get gradients, of
    which no optimizer owns one, and whose weights lie as torch makes them, with how many parameters they have;
    ``twice``: beside these, the models that several optimizers hold; ``plain``: tensors that are attributes of modules
    and no parameters, by model and path. Models
    in evaluation mode are left out of the first and the last, and parameters that somebody writes to of all: they are
    stepped by hand, or copies of what an optimizer owns, as those of half precision are.

    Notes in ``models`` which parameters in no optimizer have got a gradient.
    """
    owned = owned_by(optimizers)
    made = list(updates)
    unowned = {model.name: _unowned(model, owned, models) for model in models.all if made}
    models.unowned.newly_fed = {id(one) for held in unowned.values() for one in held}
    unowned = {name: held for name, held in unowned.items() if held and _trains(models.named(name), held[0])}
    told: dict[str, Any] = {}
    if unowned and not any(one.is_fed for one in made):
        adrift = {model: len(held) for model, held in unowned.items()}
        told["adrift"] = {"optimizers": [type(one.optimizer).__name__ for one in made], "models": adrift}
    if made and (plain := list(_plain_tensors(models, owned))):
        told["plain"] = plain
    fresh = {model: len(held) for model, held in unowned.items() if _is_untrained(models.named(model), held)}
    if fresh:
        told["untrained"] = fresh
        held = [owned_by([optimizer]) for optimizer in optimizers]
        told["twice"] = [one.name for one in models.all if sum(one.parameters.keys() <= some for some in held) > 1]
    for one in strays.values():
        module = one.module()
        if module is not None and _is_stray(module, models, owned):
            known = told.setdefault("strays", {}).setdefault(one.model, {"count": 0, "class": type(module).__name__})
            known["count"] += 1
        elif one.is_made_anew:
            told.setdefault("anew", {}).setdefault(one.model, one.kind.__name__)
    return told


def _has_new_grad(parameter: Tensor, left_over: MutableMapping[Tensor, int]) -> bool:
    """Whether a parameter has a gradient that was written to since this was last asked.

    That of an earlier training may lie there still. ``left_over``: by gradient its version at that time.
    """
    gradient = parameter.grad
    if gradient is None:
        return False
    version = version_of(gradient)
    is_new = left_over.get(gradient) != version
    left_over[gradient] = version
    return is_new


def _unowned(model: Model, owned: set[int], models: Models) -> list[Tensor]:
    """The parameters of a model that have got a gradient, are in no optimizer that steps, and stay as they are.

    Those that were replaced since the model was read are left out.
    """
    found: list[Tensor] = []
    for known, (called, name, _) in model.parameters.items():
        module = called() if known not in owned else None
        one = None if module is None else module._parameters.get(name)
        if one is not None and id(one) == known and one.requires_grad and _has_new_grad(one, models.unowned.left_over):
            before = models.unowned.held.get(known)
            if before is None or before.now() is not one or not before.is_other():
                found.append(one)
            models.unowned.held[known] = HeldParameter.of(called, name, one)
    return found


def _plain_tensors(models: Models, owned: set[int]) -> Iterator[tuple[str, str]]:
    """Attributes of modules that are tensors, no parameters, get gradients, are in no optimizer, and stay as they are.

    By model and path; from the second time on that they are met, for many are made anew in each step.
    """
    held = models.unowned.held
    for model in models.all:
        for path, module, _ in iter_modules(root) if (root := model.root()) is not None else ():
            for name, one in list(vars(module).items()):
                if not isinstance(one, Tensor) or not one.requires_grad or not one.is_leaf or id(one) in owned:
                    continue
                before = held.get(id(one))
                if one.grad is not None and before is not None and before.now() is one and not before.is_other():
                    yield model.name, join(path, name)
                held[id(one)] = HeldParameter.of(weakref.ref(module), name, one)


def _trains(model: Model, parameter: Tensor) -> bool:
    """Whether the module that has this parameter is in training mode: in evaluation mode a net may be meant to stay."""
    module = model.parameters[id(parameter)][0]()
    return module is not None and module.training


def _is_untrained(model: Model, unowned: list[Tensor]) -> bool:
    """Whether these are all parameters of the model, and the largest weight in it lies as torch initialises it.

    Not once that has changed, as that of a net into which another is copied. Waits for the device of that weight until
    it does not lie so.
    """
    if len(unowned) < len(model.parameters):
        return False
    if model.untrained != []:
        weight = max(unowned, key=lambda one: one.numel() if one.dim() > 1 else 0)
        values = weight.detach().flatten()[:_LEAST].tolist()
        is_as_made = model.untrained is None and _lies_as_made(model.parameters[id(weight)][0](), weight.detach())
        model.untrained = values if is_as_made or values == model.untrained else []
    return bool(model.untrained)


def _lies_as_made(module: nn.Module | None, weight: Tensor) -> bool:
    """Whether a weight lies as torch initialises that of this module, as far as its range and deviation tell.

    That is normally, with a deviation of one, of embeddings; else uniformly within one over the root of the inputs of a
    unit, or of the units of recurrent layers.
    """
    if weight.numel() < _LEAST or weight.dim() < 2:
        return False
    spread = float(weight.std())
    if isinstance(module, nn.Embedding):
        return abs(spread - 1) < _NEAR
    if isinstance(module, nn.RNNBase):
        bound = 1 / math.sqrt(module.hidden_size)
    elif isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        bound = 1 / math.sqrt(weight[0].numel())
    else:
        return False
    is_full = 1 - _NEAR < float(weight.abs().max()) / bound <= 1.0001
    return is_full and abs(spread * math.sqrt(3) / bound - 1) < _NEAR  # the deviation of a uniform distribution


def _is_stray(module: nn.Module, models: Models, owned: set[int]) -> bool:
    """Whether a parameter of ``module`` itself gets gradients, belongs to no optimizer, and to no model after all."""
    held = [one for one in module._parameters.values() if one is not None and one.grad is not None]
    return any(id(one) not in owned and models.name_of(one) is None for one in held)
