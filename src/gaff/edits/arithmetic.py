"""Edits that compute: scale, add, fill, clamp, clip, noise, project, reverse, stop, quantize.

Each is a frozen value with ``change(tensor, event)``. Constants are brought to the device and dtype of what passes, and
kept there (``_known``) until they are needed in another form or have other bits. ``is_pure``, ``uses_event`` and
``keeps_zero`` are explained at ``Edit``. A device is waited for only where a constant is brought to it, or the basis of
a projection made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements, modes
from gaff.edits.event import Event, Known, generator, like, number
from gaff.errors import PlanError


@dataclass(frozen=True, eq=False)
class Scale:
    """``tensor * factor``, with a number or a tensor that broadcasts to what passes."""

    factor: float | Tensor
    is_pure = True
    uses_event = False  # of which run or call
    _known: Known = field(default_factory=Known, init=False, repr=False)

    @property
    def keeps_zero(self) -> bool:
        """True but for a factor with dimensions: that broadcasts to the whole, not to the values of a sparse tensor."""
        return not isinstance(self.factor, Tensor) or self.factor.dim() == 0

    @property
    def acts_on_parts(self) -> bool:
        """True for a number: a tensor may broadcast to the whole."""
        return not isinstance(self.factor, Tensor)

    is_linear = acts_on_parts

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The product; gradients flow to both factors. Raises PlanError where the dtypes do not fit."""
        return tensor * (like(self.factor, tensor, self._known) if isinstance(self.factor, Tensor) else self.factor)


@dataclass(frozen=True, eq=False)
class Add:
    """``tensor + strength * direction``, with a number or a tensor that broadcasts to what passes."""

    direction: float | Tensor
    strength: float = 1.0
    is_pure = True
    uses_event = False
    _known: Known = field(default_factory=Known, init=False, repr=False)

    @property
    def acts_on_parts(self) -> bool:
        """True for a number: a tensor may broadcast to the whole."""
        return not isinstance(self.direction, Tensor)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The sum; a tensor is added in one operation, without a scaled copy of it. Gradients flow to both."""
        if isinstance(self.direction, Tensor):
            return torch.add(
                tensor, like(self.direction, tensor, self._known), alpha=number("a strength of", self.strength, tensor)
            )
        return tensor + (self.direction if self.strength == 1 else self.strength * self.direction)


@dataclass(frozen=True, eq=False)
class Fill:
    """``value`` everywhere, a number or a tensor that broadcasts; no gradient flows to what was there."""

    value: float | Tensor
    is_pure = True
    uses_event = False
    _known: Known = field(default_factory=Known, init=False, repr=False)

    @property
    def acts_on_parts(self) -> bool:
        """True for a number: a tensor may broadcast to the whole."""
        return not isinstance(self.value, Tensor)

    @property
    def keeps_zero(self) -> bool:
        """Only zeros leave the elements that a sparse tensor does not store as they are."""
        return not isinstance(self.value, Tensor) and self.value == 0

    is_linear = keeps_zero

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """A new constant tensor. Raises PlanError for a number that the type has not, as integers no fraction, and for
        a tensor that does not broadcast."""
        if not isinstance(self.value, Tensor):
            return torch.full_like(tensor, number("fill with", self.value, tensor))
        need_broadcast(self.value, tensor)
        return like(self.value, tensor, self._known).expand_as(tensor).clone(memory_format=torch.contiguous_format)


def need_broadcast(value: Tensor, tensor: Tensor) -> None:
    """Raise PlanError where a value does not broadcast to what passes."""
    sizes = zip(reversed(value.shape), reversed(tensor.shape), strict=False)
    if value.dim() > tensor.dim() or any(one not in (1, whole) for one, whole in sizes):
        raise PlanError(
            f"fill with shape {list(value.shape)} where {list(tensor.shape)} passes: expected what broadcasts to it"
        )


@dataclass(frozen=True, eq=False)
class Clamp:
    """Every element between ``low`` and ``high``; NaN stays NaN."""

    low: float | None
    high: float | None
    is_pure = True
    acts_on_parts = True
    uses_event = False

    @property
    def keeps_zero(self) -> bool:
        """Whether zero is within the bounds."""
        return (self.low or 0) <= 0 <= (self.high or 0)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """What ``tensor.clamp`` gives: no gradient flows to elements outside the bounds.

        Raises PlanError for a bound that the tensor's type has not.
        """
        bounds = [None if one is None else number("clamp at", one, tensor) for one in (self.low, self.high)]
        return tensor.clamp(*bounds)


@dataclass(frozen=True, eq=False)
class Clip:
    """Scaled down to an L2 norm of at most ``norm``, by the formula of ``torch.nn.utils.clip_grad_norm_``.

    ``per`` is "tensor", "row" (one norm for each index of dimension 0) or "unit" (one for each index of dimension
    ``dim``).
    """

    norm: float
    per: str = "tensor"
    dim: int = 0
    is_pure = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The tensor times min(1, norm / (total + 1e-6)).

        The norm is added up in float64, where no sum of squares of a narrower type overflows, and float16 and bfloat16
        are multiplied in float32, where a factor does not vanish. What has a NaN or an infinite norm passes as it is:
        scaling would make NaN of all its elements, and hide where it began.
        """
        return clipped(tensor, self.norm, self._dims(tensor), keeps=self.per != "tensor")

    def _dims(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The dimensions over which one norm is taken; None for all. Raises PlanError where ``dim`` does not exist.

        Of a tensor with one dimension, such as a bias, torch takes an empty tuple for all: it has one norm as a whole.
        """
        if self.per == "tensor":
            return None
        dim = 0 if self.per == "row" else self.dim
        if tensor.dim() == 1:
            return ()
        if not -tensor.dim() <= dim < tensor.dim():
            raise PlanError(f"clip per {self.per} needs dimension {dim}, got a tensor of shape {tuple(tensor.shape)}")
        kept = dim % tensor.dim()
        return tuple(other for other in range(tensor.dim()) if other != kept)


@dataclass(frozen=True, eq=False)
class Noise:
    """Normal noise of standard deviation ``std``, drawn from a generator of its own for each event.

    Equal events give equal noise, so that a recomputation gets what the first pass got: the edit is pure.
    """

    std: float
    seed: int = 0
    is_pure = True

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The tensor plus noise drawn on its own device, where another kind of device draws other numbers."""
        draw = None if tensor.is_meta else generator(event, self.seed, tensor.device)
        noise = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
        noise.normal_(0.0, self.std, generator=draw)
        return tensor + noise


@dataclass(frozen=True, eq=False)
class Project:
    """Without its part in the span of ``directions`` ``[k, width]``, or with that part alone (``keep``).

    ``dim`` is the dimension of the tensor that has size ``width``.
    """

    directions: Tensor
    keep: bool = False
    dim: int = -1
    is_pure = True
    uses_event = False
    _known: Known = field(default_factory=Known, init=False, repr=False)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The rest, or the part, by two products with an orthonormal basis, in the precision of what passes or better.

        Autocast is off for them: it would compute in a lower one. Raises PlanError where the widths differ, and for
        complex directions in a real tensor.
        """
        basis = self._basis(tensor)
        with modes.without_autocast(tensor.device):  # in the precision of what passes
            return outside(tensor, basis, self.dim, keep=self.keep)

    def _basis(self, tensor: Tensor) -> Tensor:
        """The orthonormal basis ``[rank, width]`` as the tensor needs it, in float32 or more; made again after a write.

        Directions that are trained are decomposed at every event, since their gradient flows through the decomposition;
        so is one direction, which only has to be scaled: whether several were written to a device is waited for.
        """
        given, work = torch.atleast_2d(self.directions), wide(tensor)
        if given.requires_grad or (len(given) == 1 and not given.is_cpu):
            return like(orthonormal(given), tensor, dtype=work)
        form = tensor.device, work
        return self._known.of(self.directions, form, lambda: like(orthonormal(given), tensor, dtype=work))


@dataclass(frozen=True, eq=False)
class Reverse:
    """A gradient times ``-factor``. On a value: passes it as it is and reverses the gradient on its way back."""

    factor: float = 1.0
    is_pure = True
    acts_on_parts = True
    is_linear = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The turned gradient, or a copy of the value with an autograd node that turns the gradient."""
        if event.is_gradient:
            return tensor * -self.factor
        reversed_: Tensor = _Backward.apply(tensor, -self.factor)  # type: ignore[no-untyped-call]
        return reversed_


@dataclass(frozen=True, eq=False)
class Stop:
    """No gradient: zeros in its place. On a value: passes a copy of it on, cut off from the autograd graph."""

    is_pure = True
    acts_on_parts = True
    is_linear = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """Zeros for a gradient; for a value a copy, since the model may write into what it is given."""
        return torch.zeros_like(tensor) if event.is_gradient else tensor.detach().clone()


@dataclass(frozen=True, eq=False)
class Quantize:
    """Rounded to another floating type and back; gradients pass as they are (straight through).

    ``dtype`` is a name of torch's, ``scaled`` whether the tensor's largest magnitude is first brought to the type's.
    """

    dtype: str
    scaled: bool = False
    is_pure = True
    keeps_zero = True
    uses_event = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The rounded tensor in its own dtype. What is out of range becomes what torch's conversion makes of it.

        Of complex numbers both parts are rounded. Raises PlanError for integers, of which it would make others.
        """
        if not tensor.is_floating_point() and not tensor.is_complex():
            raise PlanError(f"quantize rounds floating and complex numbers, got {tensor.dtype}")
        if tensor.is_complex():
            return torch.view_as_complex(self.change(torch.view_as_real(tensor.resolve_conj()), event))
        rounded: Tensor = _Round.apply(tensor, getattr(torch, self.dtype), self.scaled)  # type: ignore[no-untyped-call]
        return rounded


class _Backward(torch.autograd.Function):
    """A copy of the value; its gradient times a factor.

    A copy, since a view that a custom Function returns must not be written to in place, and the model may do that.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class _Round(torch.autograd.Function):
    """The rounding of ``Quantize``, as a Function: the derivative of rounding is zero, and the gradient is to pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype, scaled: bool) -> Tensor:
        """To ``dtype`` and back, in new memory.

        Scaled, it is divided before by largest finite magnitude / largest number of the type, in float32 or in the
        tensor's own type where that is wider, and multiplied again. The smallest normal number keeps the scale of an
        all-zero tensor from being zero. A type that reaches as far as the one computed in needs no scale.
        """
        wide = torch.promote_types(tensor.dtype, torch.float32)
        if not scaled or not tensor.numel() or torch.finfo(dtype).max >= torch.finfo(wide).max:
            return elements.cast(tensor, dtype).to(tensor.dtype, copy=True)
        exact = tensor.to(wide)
        is_finite = exact.isfinite()
        largest = torch.where(is_finite, exact, 0.0).abs().amax()
        scale = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(wide).tiny)
        rounded = ((exact / scale).to(dtype).to(wide) * scale).clamp(-largest, largest)  # not to inf, by rounding
        return torch.where(is_finite, rounded, exact).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def orthonormal(directions: Tensor) -> Tensor:
    """Rows that span what ``directions`` span, by singular values; dependent directions count once. One is only scaled.

    ``directions``: ``[k, width]``; returns ``[rank, width]`` in float64, or complex128. A singular value counts as zero
    where the rounding of the directions to their dtype may have made it, largest * sqrt(k) * eps / 2 (the perturbation
    is at most that by its Frobenius norm), or the decomposition, largest * max(k, width) * eps of float64.
    """
    exact = directions.to(torch.complex128 if directions.is_complex() else torch.float64)
    if len(exact) == 1:  # without a wait for its device; of zeros it stays zeros, which span nothing either
        tiny = torch.finfo(torch.float64).tiny
        scaled: Tensor = exact / exact.abs().max().clamp(min=tiny)
        return torch.nn.functional.normalize(scaled, dim=-1, eps=tiny)
    _, values, rows = torch.linalg.svd(exact, full_matrices=False)
    is_rounded = directions.is_floating_point() or directions.is_complex()
    rounding = math.sqrt(len(directions)) * torch.finfo(directions.dtype).eps / 2 if is_rounded else 0.0
    kept = values > values.max() * max(rounding, max(directions.shape) * torch.finfo(torch.float64).eps)
    basis: Tensor = rows[kept]
    return basis


def outside(tensor: Tensor, basis: Tensor, dim: int, *, keep: bool) -> Tensor:
    """What of ``tensor`` is orthogonal to the rows of ``basis`` along ``dim``, or (``keep``) lies in their span.

    Float16 and bfloat16 are computed with in float32, so that what is left is what rounding to them leaves. Raises
    PlanError where the widths differ.
    """
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != basis.shape[1]:
        raise PlanError(
            f"directions of width {basis.shape[1]} given, dimension {dim} of {tuple(tensor.shape)} has another"
        )
    work = wide(tensor)
    moved, span = tensor.to(work).movedim(dim, -1), basis.to(work)
    inside = ((moved @ span.mH) @ span).movedim(-1, dim)
    return (inside if keep else tensor.to(work) - inside).to(tensor.dtype)


def clipped(tensor: Tensor, norm: float | Tensor, dims: tuple[int, ...] | None, *, keeps: bool) -> Tensor:
    """What ``Clip`` gives: one norm over ``dims`` (None: all), which stay with size 1 where it ``keeps`` them."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise PlanError(f"clip divides by a norm, which needs floating or complex numbers, got {tensor.dtype}")
    work, exact = wide(tensor), torch.complex128 if tensor.is_complex() else torch.float64
    total = torch.linalg.vector_norm(tensor, dim=dims, keepdim=keeps, dtype=exact)
    factor = torch.where(total.isfinite(), (norm / (total + 1e-6)).clamp(max=1.0), 1.0)
    if work == tensor.dtype or (tensor.is_cpu and tensor.dim() and not factor.dim()):  # beside a tensor, a number
        return tensor * factor.to(work)
    return (tensor.to(work) * factor.to(work)).to(tensor.dtype)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is computed with where its own is too narrow: float32 for float16 and bfloat16."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
