"""Edits that compute: scale, add, fill, clamp, clip, noise, project, reverse, stop, quantize.

Each is a frozen value with ``change(tensor, event)``. Constants are brought to the device and dtype of what passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gaff.compat import memory, modes
from gaff.edits.event import Event, generator, like, remember
from gaff.errors import PlanError


@dataclass(frozen=True, eq=False)
class Scale:
    """``tensor * factor``."""

    factor: float | Tensor
    is_pure = True
    uses_event = False  # of which run or call
    _known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def keeps_zero(self) -> bool:
        return not isinstance(self.factor, Tensor) or self.factor.dim() == 0

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        return tensor * (like(self.factor, tensor, self._known) if isinstance(self.factor, Tensor) else self.factor)


@dataclass(frozen=True, eq=False)
class Add:
    """``tensor + strength * direction``."""

    direction: float | Tensor
    strength: float = 1.0
    is_pure = True
    uses_event = False
    _known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        if isinstance(self.direction, Tensor):
            return torch.add(tensor, like(self.direction, tensor, self._known), alpha=_whole(self.strength, tensor))
        return tensor + self.strength * self.direction


@dataclass(frozen=True, eq=False)
class Fill:
    """``value`` everywhere; no gradient flows to what was there."""

    value: float
    is_pure = True
    uses_event = False

    @property
    def keeps_zero(self) -> bool:
        return self.value == 0

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex() and not float(self.value).is_integer():
            raise PlanError(f"fill with {self.value!r} would lose its fraction in a tensor of {tensor.dtype}")
        return torch.full_like(tensor, self.value)


@dataclass(frozen=True, eq=False)
class Clamp:
    """Between ``low`` and ``high``; NaN stays NaN."""

    low: float | None
    high: float | None
    is_pure = True
    uses_event = False

    @property
    def keeps_zero(self) -> bool:
        return (self.low or 0) <= 0 <= (self.high or 0)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        return tensor.clamp(self.low, self.high)


@dataclass(frozen=True, eq=False)
class Clip:
    """Scaled down to an L2 norm of at most ``norm``, by the formula of ``torch.nn.utils.clip_grad_norm_``."""

    norm: float
    per: str = "tensor"
    dim: int = 0
    is_pure = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        total = torch.linalg.vector_norm(
            tensor, dim=self._dims(tensor), keepdim=self.per != "tensor", dtype=wide(tensor)
        )
        factor = (self.norm / (total + 1e-6)).clamp(max=1.0)
        return tensor * torch.where(total.isfinite(), factor, 1.0).to(tensor.dtype)

    def _dims(self, tensor: Tensor) -> tuple[int, ...] | None:
        if self.per == "tensor":
            return None
        dim = 0 if self.per == "row" else self.dim
        if not -tensor.dim() <= dim < tensor.dim():
            raise PlanError(f"clip per {self.per} needs dimension {dim}, got a tensor of shape {tuple(tensor.shape)}")
        kept = dim % tensor.dim()
        return tuple(other for other in range(tensor.dim()) if other != kept) if tensor.dim() > 1 else ()


@dataclass(frozen=True, eq=False)
class Noise:
    """Normal noise of standard deviation ``std``, drawn from a generator of its own for each event."""

    std: float
    seed: int = 0
    is_pure = True

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        draw = generator(event, self.seed, tensor.device)
        noise = torch.empty_like(tensor, requires_grad=False).normal_(0.0, self.std, generator=draw)
        return tensor + noise


@dataclass(frozen=True, eq=False)
class Project:
    """Without its part in the span of ``directions`` ``[k, width]``, or with that part alone (``keep``)."""

    directions: Tensor
    keep: bool = False
    dim: int = -1
    is_pure = True
    uses_event = False
    _known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        basis = self._basis(tensor)
        if not tensor.dim() or tensor.shape[self.dim] != basis.shape[1]:
            raise PlanError(
                f"directions of width {basis.shape[1]} given, dimension {self.dim} of {tuple(tensor.shape)} has another"
            )
        moved = tensor.movedim(self.dim, -1)
        with modes.without_autocast(tensor.device):  # in the precision of what passes
            inside = ((moved @ basis.T) @ basis).movedim(-1, self.dim)
        return inside if self.keep else tensor - inside

    def _basis(self, tensor: Tensor) -> Tensor:
        given = torch.atleast_2d(self.directions)
        if given.requires_grad:
            return like(orthonormal(given), tensor)
        key = (tensor.device, tensor.dtype, memory.version_of(self.directions))
        return remember(self._known, key, lambda: like(orthonormal(given), tensor))


@dataclass(frozen=True, eq=False)
class Reverse:
    """A gradient times ``-factor``. On a value: passes it as it is and reverses the gradient on its way back."""

    factor: float = 1.0
    is_pure = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        if event.is_gradient:
            return tensor * -self.factor
        reversed_: Tensor = _Backward.apply(tensor, -self.factor)  # type: ignore[no-untyped-call]
        return reversed_


@dataclass(frozen=True, eq=False)
class Stop:
    """No gradient: zeros in its place. On a value: passes it as it is, cut off from the graph."""

    is_pure = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        return torch.zeros_like(tensor) if event.is_gradient else tensor.detach()


@dataclass(frozen=True, eq=False)
class Quantize:
    """Rounded to another floating type and back; gradients pass as they are (straight through)."""

    dtype: str
    scaled: bool = False
    is_pure = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        rounded: Tensor = _Round.apply(tensor, getattr(torch, self.dtype), self.scaled)  # type: ignore[no-untyped-call]
        return rounded


class _Backward(torch.autograd.Function):
    """A copy of the value; its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype, scaled: bool) -> Tensor:
        if not scaled or not tensor.numel():
            return tensor.to(dtype).to(tensor.dtype, copy=True)
        scale = (tensor.abs().amax().float() / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
        return ((tensor.float() / scale).to(dtype).float() * scale).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def orthonormal(directions: Tensor) -> Tensor:
    """Rows that span what ``directions`` span, by singular values; dependent directions count once."""
    _, values, rows = torch.linalg.svd(directions.to(torch.float64), full_matrices=False)
    kept = values > values.max() * max(directions.shape) * torch.finfo(directions.dtype).eps
    basis: Tensor = rows[kept]
    return basis.to(directions.dtype) if directions.is_floating_point() else basis


def wide(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def _whole(strength: float, tensor: Tensor) -> float:
    return (
        int(strength)
        if not (tensor.is_floating_point() or tensor.is_complex()) and strength == int(strength)
        else strength
    )
