"""Which part of a tensor this process holds, and how the whole is put together: the seam to placements of DTensor.

Under tensor parallelism an address means the logical tensor. A module may hand out a DTensor, which knows its
placement, or this process's part as a plain tensor, which does not. What is known of plain tensors stands in a table of
this process, which holds none of them: ``engine/placements`` writes it while a session is open.

Putting a whole together communicates: every process of the mesh must do it at the same place.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gaff.compat import distributed
from gaff.errors import PlanError


class Placement(NamedTuple):
    """Where a tensor lies: its mesh, a placement for each dimension of that, and the shape and strides of the whole.

    ``gradients``: where its gradient lies, if code has said so (``to_local(grad_placements=...)``).
    """

    mesh: Any
    places: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    gradients: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "a scalar"
        cut = [f"dimension {one.dim} over {self.mesh.size(at)}" for at, one in enumerate(self.places) if one.is_shard()]
        rest = [f"a sum over {self.mesh.size(at)}" for at, one in enumerate(self.places) if one.is_partial()]
        return f"{size}, {' and '.join(cut + rest) or 'the same'} in all processes"

    @property
    def is_whole(self) -> bool:
        """Whether each process has all of it."""
        return all(one.is_replicate() for one in self.places)

    @property
    def is_sum(self) -> bool:
        """Whether what the processes hold has still to be summed."""
        return any(one.is_partial() for one in self.places)

    @property
    def of_gradient(self) -> Placement:
        """That of the gradient of such a part: as code has said, or as torch takes it, of a sum all in each process."""
        return self._replace(places=self.gradients or self.summed, gradients=None)

    @property
    def summed(self) -> tuple[Any, ...]:
        """The placements where what is a sum has been summed: each process has all of it then."""
        from torch.distributed.tensor import Replicate

        return tuple(Replicate() if one.is_partial() else one for one in self.places)

    @property
    def has_summed_gradient(self) -> bool:
        """Whether the processes hold summands of the gradient, though not of the tensor."""
        return any(one.is_partial() for one in self.gradients or ())


UNKNOWN_PART = (
    "this process holds a part of the tensor here (tensor parallelism), and nothing tells which: expected the output "
    "of a parallel layer, or of an activation right behind it, or a DTensor; none of them inside compiled code"
)
UNKNOWN_GRADIENT = (
    "the processes hold summands of this tensor's gradient (to_local was given grad_placements), which an edit of the "
    "whole would not keep: expected an edit of single elements, or of the gradient"
)
BY_HAND: set[Any] = set()  # meshes of which code of models itself has taken local parts of parameters, or of sums
PARTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by plain tensor: its placement, where that is known
ANY_PARTS = PARTS.data  # the dictionary inside: asking whether it is empty costs nothing


def placement_of(tensor: Tensor) -> Placement | None:
    """The placement of a DTensor, or of a plain tensor of which it is known; else None."""
    if distributed.is_spread(tensor):
        spread: Any = tensor
        return Placement(spread.device_mesh, tuple(spread.placements), spread.shape, spread.stride())
    known: Placement | None = PARTS.get(tensor) if ANY_PARTS else None
    return known


def whole_of(tensor: Tensor, placement: Placement) -> Tensor:
    """All of the tensor, plain, in every process; gradients flow back to the parts. Communicates unless it is whole."""
    from torch.distributed.tensor import DTensor

    if not distributed.is_spread(tensor):
        if placement.is_whole:
            return tensor
        tensor = DTensor.from_local(tensor, placement.mesh, placement.places, run_check=False, shape=placement.shape,
                                    stride=placement.stride)  # fmt: skip
    spread: Any = tensor
    found: Tensor = spread.full_tensor()
    return distributed.arrived(found)


def together(tensor: Tensor, placement: Placement) -> Tensor:
    """As ``whole_of``. Raises PlanError where processes do not ask at the same time, or hold summands of a gradient."""
    if tensor.requires_grad and placement.has_summed_gradient:
        raise PlanError(UNKNOWN_GRADIENT)
    try:
        return whole_of(tensor, placement)
    except RuntimeError as error:
        raise PlanError(
            f"the parts of the tensor could not be put together ({str(error)[:160]}): every process has to make this "
            "edit, at the same event; one may have switched it off"
        ) from error


def part_again(whole: Tensor, like: Tensor, placement: Placement) -> Tensor:
    """This process's part of ``whole``, which every process has: a DTensor where ``like`` is one, else a plain tensor.

    Gradients flow back to the whole, put together from those of the parts.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if placement.is_whole and not distributed.is_spread(like):
        return whole
    everywhere = [Replicate()] * len(placement.places)
    spread = DTensor.from_local(whole.contiguous(), placement.mesh, everywhere, run_check=False)
    spread = spread.redistribute(placements=placement.summed)
    if placement.is_sum:
        sums = [at for at, one in enumerate(placement.places) if one.is_partial()]
        is_first = not any(placement.mesh.get_coordinate()[at] for at in sums)
        local: Tensor = _OfOne.apply(spread.to_local(), is_first)  # type: ignore[no-untyped-call]
        spread = DTensor.from_local(local, placement.mesh, placement.places, run_check=False, shape=placement.shape,
                                    stride=placement.stride)  # fmt: skip
    if distributed.is_spread(like):
        return spread
    return distributed.arrived(spread.to_local())


class _OfOne(torch.autograd.Function):
    """Of a sum over processes: all of it in the first of them, zeros in the others. Each has all of its gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, is_first: bool) -> Tensor:
        """``whole`` itself, or zeros."""
        return whole.view_as(whole) if is_first else torch.zeros_like(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient, in every process."""
        return gradient, None


def whole_on(mesh: Any, tensor: Tensor) -> Placement:
    """The placement of a plain tensor that each process of ``mesh`` has all of."""
    from torch.distributed.tensor import Replicate

    return Placement(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tensor.stride())


def is_equal_everywhere(tensor: Tensor, meshes: list[Any], *, is_state: bool = False) -> bool:
    """Whether all processes of ``meshes`` hold the same shape and bits. All must ask; waits for all and for the device.

    False for a tensor of one value: parts of zeros look alike and are none. But ``is_state``, a parameter or a buffer,
    is a DTensor where it is spread, unless models go on by hand. Equal in all processes that asked.
    """
    plain = tensor.detach()
    has_several = is_state and BY_HAND.isdisjoint(meshes)
    has_several = has_several or (bool(plain.numel()) and not bool((plain == plain.flatten()[0]).all()))
    told: Any = (has_several, tuple(plain.shape), str(plain.dtype), _digest(plain))
    for group in distributed.groups_along(meshes):
        told = (all(one == told and one[0] for one in distributed.told_by_all(told, group)), *told[1:])
    return bool(told[0])


def _digest(tensor: Tensor) -> bytes:
    """A hash (BLAKE2b, 128 bits) of a tensor's elements, in the order of its indices."""
    plain = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
    held = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    return hashlib.blake2b(held, digest_size=16).digest()
