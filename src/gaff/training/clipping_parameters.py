"""The parameters whose gradients are limited: what each is called, and what in it is a unit of its own.

``clipping`` knows them by number, their place in the optimizer, and asks here what concerns single ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.resolve import iter_modules, join
from gaff.compat import distributed, elements, foreach
from gaff.compat.flat_shards import flat_shards
from gaff.errors import NonFiniteError, PlanError
from gaff.training.clipping_limits import Limits

_FLOOR = 1e-3  # of a weight's norm in adaptive clipping: Brock et al. 2021, section 4.1
TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm
Unit = tuple[tuple[int, ...], tuple[int, ...]]  # a shape of the parameter, and the dimensions its norm goes over


class LimitedParameters:
    """The parameters of an optimizer, in its order, as they were when ``look`` was last called.

    ``all`` holds them, ``names`` what they are called: a path in the model, the name that the optimizer was given, or a
    place in it; a new list where they have changed. ``numbers``: the place of each among all, by identity. ``model``:
    theirs, if it is known.
    """

    def __init__(self, optimizer: Any, limits: Limits, model: nn.Module | None) -> None:
        """Raises PlanError for limits of units where the model does not tell what a unit is, and of complex values.

        Also for a model that has none of the parameters.
        """
        self.all: list[Tensor] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}
        self._optimizer = optimizer
        self._limits = limits
        self.evaluations = 0  # within the step in progress
        self.model = model
        self.flat: dict[int, Any] = {}  # by identity: the processes that share a part of a flat parameter
        self._units: list[Unit] = []
        self._sets: list[int] = []  # for each the number of its layer or group, all of which have one limit
        self.look()
        if model is not None and self.all and not any(id(one) in self.numbers for one in model.parameters()):
            raise PlanError(
                f"model= is a {type(model).__name__} that has none of the optimizer's parameters: expected the one "
                "that they are of, or no model="
            )

    def look(self) -> None:
        """Read the optimizer's parameters again, for groups may have been added, and with them names and units."""
        new = [one for group in self._optimizer.param_groups for one in group["params"]]
        if len(self.all) == len(new) and all(a is b for a, b in zip(self.all, new, strict=True)):
            return
        if self._limits.value is not None and any(one.is_complex() for one in new):
            raise PlanError("value= clamps real numbers, and a parameter is complex: expected norm=")
        self.all = new
        self.numbers = {id(one): number for number, one in enumerate(new)}
        self.flat = flat_shards(new)
        self.names = _names(self._optimizer, self.model)
        if self._limits.adaptive is not None:
            owners = _owners(self.model)
            self._units = [_unit(one, owners.get(id(one)), name) for one, name in zip(new, self.names, strict=True)]
        if self._limits.per == "layer":
            owners = _owners(self.model)
            self._sets = [id(_owner(owners.get(id(one)), name)) for one, name in zip(new, self.names, strict=True)]
        elif self._limits.per == "group":
            groups = self._optimizer.param_groups
            self._sets = [number for number, group in enumerate(groups) for _ in group["params"]]

    def norms_together(self, numbers: list[int], norms: list[Tensor]) -> list[Tensor]:
        """For each gradient the norm of all that are limited with it: those of its layer, its group, or it alone.

        ``numbers``: places of the gradients among all parameters; ``norms``: of each.
        """
        if not self._sets:
            return norms
        parts: dict[int, list[Tensor]] = {}
        for number, norm in zip(numbers, norms, strict=True):
            known = parts.setdefault(self._sets[number], [])
            known.append(norm.to(known[0].device) if known else norm)
        totals = {at: torch.linalg.vector_norm(torch.stack(some), self._limits.norm_type) for at, some in parts.items()}
        return [totals[self._sets[number]].to(norm.device) for number, norm in zip(numbers, norms, strict=True)]

    def named(self, name: str) -> Tensor:
        """The parameter of this name. Raises PlanError with names that there are."""
        if name not in self.names:
            raise PlanError(
                f"views={name!r} is no parameter of the optimizer: expected one of {', '.join(self.names[:8])}"
                f"{'' if self.model is not None else '; with model= they have the names that they have there'}"
            )
        return self.all[self.names.index(name)]

    @property
    def stepped(self) -> str:
        """What has been stepped where it is refused now, in words."""
        if self.evaluations < 2:
            return "nothing was stepped"
        return f"at evaluation {self.evaluations} of this step, which may have changed weights after the earlier ones"

    def nonfinite(self, gradients: list[Tensor], numbers: list[int]) -> tuple[str, ...]:
        """The names of the parameters with NaN or inf in their gradients. Waits for the device.

        With ``nonfinite="raise"`` it raises NonFiniteError instead, with the first eight of them.
        """
        found = any_each([~distributed.local_of(one).isfinite() for one in gradients], gradients)
        bad = tuple(self.names[number] for number, one in zip(numbers, found, strict=True) if bool(one))
        if bad and self._limits.nonfinite == "raise":
            names = ", ".join(bad[:8]) + (" ..." if len(bad) > 8 else "")
            others = "or nonfinite='skip' or 'zero'" if self._limits.when == "step" else "or nonfinite='zero'"
            raise NonFiniteError(f"{names}: the gradient is NaN or inf; {self.stepped}: expected finite ones, {others}")
        return bad

    def clip_units(self, number: int, gradient: Tensor) -> Tensor:
        """Clip one gradient unit by unit, in place: Brock et al. 2021, equation 3. Returns whether anything changed.

        A unit's gradient norm may be ``adaptive`` times its weight norm at most, which counts as no less than 1e-3:
        weights that begin at zero could not move otherwise.
        """
        shape, dims = self._units[number]
        ratio = self._limits.adaptive or 0.0
        weight, change = self.all[number].detach().reshape(shape), gradient.reshape(shape)
        most = _unit_norm(weight, dims).clamp(min=_FLOOR) * ratio
        norm = _unit_norm(change, dims)
        factor = torch.where(norm > most, most / norm.clamp(min=TINY), 1.0)
        new = foreach.scaled(change, factor).reshape(gradient.shape)
        if distributed.is_spread(gradient):
            new = new.redistribute(placements=gradient.placements)  # type: ignore[attr-defined]
        gradient.copy_(new)
        is_any = (factor < 1).any()
        return is_any.full_tensor() if distributed.is_spread(is_any) else is_any  # type: ignore[attr-defined]


def any_each(flags: list[Tensor], owners: list[Tensor]) -> list[Tensor]:
    """Whether any flag of each owner is set, in whatever process; communicates where owners are spread over several."""
    if not any(distributed.is_spread(one) for one in owners):
        return [flag.any() for flag in flags]
    return [one > 0 for one in distributed.over_parts([flag.any().float() for flag in flags], owners, "max")]


def _names(optimizer: Any, model: nn.Module | None) -> list[str]:
    """A name for each parameter: its path, the one the optimizer was given, or its place."""
    paths: dict[int, str] = {}
    for path, module, _ in iter_modules(model) if model is not None else ():
        for name, one in module._parameters.items():
            paths.setdefault(id(one), join(path, name))
    names: list[str] = []
    for at, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group {at}, parameter {place}" for place in range(len(group["params"]))]
        names += [paths.get(id(one), name) for one, name in zip(group["params"], given, strict=True)]
    return names


def _owners(model: nn.Module | None) -> dict[int, nn.Module]:
    """The module that holds each parameter, by the identity of that; raises PlanError where no model is known."""
    if model is None:
        raise PlanError("adaptive= and per='layer' need model=, whose modules tell what a unit or a layer is")
    return {id(one): module for _, module, _ in iter_modules(model) for one in module._parameters.values()}


def _owner(owner: nn.Module | None, name: str) -> nn.Module:
    """The module that holds a parameter. Raises PlanError for one that the model does not have."""
    if owner is None:
        raise PlanError(f"parameter {name!r} of the optimizer is not in the model: expected the model it is in")
    return owner


def _unit(parameter: Tensor, owner: nn.Module | None, name: str) -> Unit:
    """The shape in which a parameter is seen, and the dimensions over which the norm of one unit goes.

    A unit is what feeds one output: a row of a linear weight or of an embedding, a filter of a convolution; of a
    transposed one, and of GPT-2's Conv1D, outputs are dimension 1. Vectors (biases, gains) are one unit each.
    """
    owner = _owner(owner, name)
    shape = tuple(parameter.shape)
    if parameter.dim() < 2:
        return shape, tuple(range(parameter.dim()))
    if isinstance(owner, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        groups = owner.groups
        if groups > 1 and distributed.is_spread(parameter):
            raise PlanError(
                f"{name}: adaptive= clips unit by unit, and of a transposed convolution in groups that processes hold "
                "in parts units lie across its parts: expected norm=, or this weight whole in each process"
            )
        return (groups, shape[0] // groups, *shape[1:]), (1, *range(3, parameter.dim() + 1))
    if type(owner).__name__ == "Conv1D" and parameter.dim() == 2:
        return shape, (0,)
    return shape, tuple(range(1, parameter.dim()))


def _unit_norm(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The norm of each unit, with dimensions kept; in float64, whose squares do not overflow; of a scalar its size."""
    if not dims:
        return tensor.abs().to(elements.wide_type(tensor.abs()))
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True, dtype=elements.wide_type(tensor))
    return norm
