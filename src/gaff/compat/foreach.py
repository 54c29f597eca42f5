"""Norms, scaling and clamping of many tensors at once, with the bits of ``torch.nn.utils``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gaff.compat import distributed


def norms_of(tensors: list[Tensor], kind: float) -> tuple[list[Tensor], Tensor]:
    """The norm of each tensor, on its device, and of all together, bit by bit as ``torch.nn.utils.get_total_norm``.

    ``kind`` is the p of the norm. Nothing is synchronised; of DTensors every process of their meshes must ask.
    """
    if any(distributed.is_spread(one) for one in tensors):
        return distributed.norms_of(tensors, kind)
    first = tensors[0]
    if all(one.dtype == first.dtype and one.device == first.device for one in tensors):
        norms = _norms_of_a_kind(tensors, kind)
        return norms, torch.linalg.vector_norm(torch.stack(norms), kind)
    places: list[int] = []  # in the order of torch's groups, which the bits of the sum depend on
    for _, found in _group_tensors_by_device_and_dtype([tensors], with_indices=True).values():  # type: ignore[list-item]
        places += found
    kinds = itertools.groupby(places, lambda at: (tensors[at].device, tensors[at].dtype))
    each = [norm for _, group in kinds for norm in _norms_of_a_kind([tensors[at] for at in group], kind)]
    total = torch.linalg.vector_norm(torch.stack([norm.to(first.device) for norm in each]), kind)
    known = dict(zip(places, each, strict=True))
    return [known[at] for at in range(len(tensors))], total


def _norms_of_a_kind(tensors: list[Tensor], kind: float) -> list[Tensor]:
    """The norm of each of some tensors of one device and dtype."""
    try:
        return list(torch._foreach_norm(tensors, kind))
    except RuntimeError:  # no such kernel for this device or type
        return [torch.linalg.vector_norm(one, kind) for one in tensors]


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all in place by one factor, as ``torch.nn.utils.clip_grads_with_norm_``.

    ``factor``: a tensor without dimensions, brought to the devices of the tensors; one on the CPU that is 1 changes
    nothing.
    """
    if factor.is_cpu and factor.item() == 1.0:
        return
    for group in _by_kind([distributed.local_of(one) for one in tensors]):
        torch._foreach_mul_(group, factor.to(group[0].device))


def scale_each(tensors: list[Tensor], factors: list[Tensor]) -> None:
    """Multiply each tensor in place by its own factor; of DTensors the local part. See ``scaled``."""
    for tensor, factor in zip(tensors, factors, strict=True):
        local = distributed.local_of(tensor)
        if _is_narrow(local):
            local.copy_(scaled(local, factor))
        else:
            local.mul_(factor.to(local.dtype))


def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a factor. Float16 and bfloat16 are multiplied in float32 where the factor is small.

    As a number of the tensor's own type a factor that is less than the smallest normal one loses its digits, or
    vanishes; any other is taken in that type, as torch does.
    """
    if not _is_narrow(tensor):
        return tensor * factor.to(tensor.dtype)
    exact = (tensor.float() * factor.float()).to(tensor.dtype)
    return torch.where(factor < torch.finfo(tensor.dtype).tiny, exact, tensor * factor.to(tensor.dtype))


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def clamp_all(tensors: list[Tensor], limit: float) -> None:
    """Clamp all in place to ``-limit`` ... ``limit``, as ``torch.nn.utils.clip_grad_value_``."""
    for group in _by_kind([distributed.local_of(one) for one in tensors]):
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups of one device and dtype, which torch's foreach functions handle by one kernel."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
