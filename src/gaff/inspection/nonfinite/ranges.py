"""What is in a tensor, counted: cheaply at first, in full where something is wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaff.compat import distributed, libraries, modes
from gaff.inspection.call_log import shape_text
from gaff.inspection.nonfinite.report import Range


def can_hold(tensor: Tensor) -> bool:
    """Whether a tensor could hold a NaN or inf that can be read: a floating one, dense or sparse, with memory."""
    is_odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return (tensor.is_floating_point() or tensor.is_complex()) and not is_odd and tensor.numel() > 0


def has_nonfinite(tensor: Tensor) -> bool:
    """Whether an element is NaN or inf. Reads the tensor once, and again only on a hit. Waits for the device."""
    if not can_hold(tensor):
        return False
    with torch.no_grad(), modes.outside_modes(), modes.without_autocast(tensor.device):
        value = plain(tensor)
        if math.isfinite(probe(value).item()):
            return False
        return not bool(torch.isfinite(value).all())  # a sum of large finite numbers overflows


def probe(value: Tensor) -> Tensor:
    """A number on the device that is finite if all elements are, unless their sum overflows."""
    if not value.numel():
        return torch.zeros((), device=value.device)
    if value.dtype in (torch.float16, torch.bfloat16) or value.element_size() == 1:
        return value.sum(dtype=torch.float32)
    return value.sum()


def plain(tensor: Tensor) -> Tensor:
    """Without its graph, of real numbers."""
    value = libraries.dequantized(distributed.local_of(tensor.detach()))
    if libraries.is_small_float(value):
        value = value.float()
    if value.layout == torch.sparse_coo:
        value = value._values()
    elif value.layout != torch.strided:
        value = value.values()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def range_of(tensor: Tensor, name: str) -> Range:
    """Everything that a report tells of a tensor. Waits for the device."""
    if distributed.is_spread(tensor):
        name, tensor = f"{name}, this process's part of {shape_text(tensor)}", distributed.local_of(tensor)
    shape, dtype = shape_text(tensor), str(tensor.dtype).removeprefix("torch.")
    if not can_hold(tensor):
        return Range(name, shape, dtype, 0 if tensor.is_nested else tensor.numel(), None, None)
    with torch.no_grad(), modes.outside_modes(), modes.without_autocast(tensor.device):
        value = plain(tensor).to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        finite = torch.isfinite(value)
        good = value[finite]
        bad = ~finite
        first = tuple(int(at) for at in bad.nonzero()[0]) if bool(bad.any()) else None
        return Range(
            name,
            shape,
            dtype,
            tensor.numel(),
            good.min().item() if good.numel() else None,
            good.max().item() if good.numel() else None,
            int(value.isnan().sum()),
            int((value == math.inf).sum()),
            int((value == -math.inf).sum()),
            int((value == 0).sum()),
            first[: tensor.dim()] if first is not None and tensor.layout == torch.strided else None,
        )
