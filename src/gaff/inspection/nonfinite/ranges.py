"""What is in a tensor, counted: cheaply at first, in full where something is wrong.

What ``has_nonfinite`` and ``range_of`` compute is no op of the model's: dispatch modes do not see it, autocast does
not change it, and autograd does not follow it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gaff.address.nested import shape_text
from gaff.compat import distributed, elements, modes
from gaff.inspection.nonfinite.report import Range

_USUAL = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def can_hold(tensor: Tensor) -> bool:
    """Whether a tensor could hold a NaN or inf that can be read: a floating one, dense or sparse, with memory."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    is_dense = is_real and not tensor.is_quantized and not is_lazy(tensor)
    return is_dense and elements.is_readable(tensor) and _has_any(tensor)


def numbers_of(tensor: Tensor) -> Tensor | None:
    """The elements of a tensor that could hold a NaN (``can_hold``), as ``plain`` gives them; None of any other.

    Asked about each output of each step: nearly all are tensors of the usual kind, told by one question.
    """
    is_usual = type(tensor) in _USUAL and tensor.dtype in _FLOATS and elements.is_plain(tensor)
    if is_usual and tensor.numel() and elements.is_readable(tensor):
        return tensor.detach()
    return plain(tensor) if can_hold(tensor) else None


def has_nonfinite(tensor: Tensor) -> bool:
    """Whether an element is NaN or inf. Reads the tensor once, and again only on a hit. Waits for the device."""
    if not can_hold(tensor):
        return False
    with torch.no_grad(), modes.outside_modes(), modes.without_autocast(tensor.device):
        value = plain(tensor)
        if math.isfinite(probe(value).item()):
            return False
        return not bool(torch.isfinite(value).all())  # a sum of large finite numbers overflows


def has_nan(tensor: Tensor) -> bool:
    """Whether an element is NaN. Waits for the device."""
    return bool(plain(tensor).isnan().any())


def nonfinite_elements(tensor: Tensor) -> Tensor:
    """Which elements are NaN or inf, as a bool tensor on its device; of a sparse one of the values that it stores."""
    with torch.no_grad(), modes.outside_modes():
        return ~torch.isfinite(plain(tensor))


def probe(value: Tensor) -> Tensor:
    """A 0-dim tensor on the device that is finite if all elements are, unless their sum overflows. No synchronisation.

    NaN and infinities survive a sum, which reads the memory once and writes nothing. Half precision is summed in
    float32, in which sums of finite numbers hardly overflow.
    """
    if not value.numel():
        return torch.zeros((), device=value.device)
    if value.dtype in (torch.float16, torch.bfloat16) or value.element_size() == 1:
        return value.sum(dtype=torch.float32)
    return value.sum()


def plain(tensor: Tensor) -> Tensor:
    """The elements as a tensor of real numbers without an autograd graph; a view where that is possible.

    See ``gaff.compat.elements``; empty where there are none to read.
    """
    value = elements.elements(tensor)
    return value if value is not None else torch.zeros(0, device="cpu")


def _has_any(tensor: Tensor) -> bool:
    """Whether there is an element at all; a nested tensor has no ``numel`` where its parts differ."""
    return tensor.is_nested or tensor.numel() > 0


def range_of(tensor: Tensor, name: str) -> Range:
    """Everything that a report tells of a tensor, under the name given. Waits for the device.

    Of a tensor that cannot hold a NaN only shape, type and size are told. ``first`` is an index into the tensor
    itself, and so not known of a sparse one.
    """
    if distributed.is_spread(tensor):
        name, tensor = f"{name}, this process's part of {shape_text(tensor)}", distributed.local_of(tensor)
    shape, dtype = shape_text(tensor), str(tensor.dtype).removeprefix("torch.")
    if not can_hold(tensor):
        return Range(name, shape, dtype, 0 if tensor.is_nested else tensor.numel(), None, None)
    with torch.no_grad(), modes.outside_modes(), modes.without_autocast(tensor.device):
        is_wide = tensor.dtype in (torch.float64, torch.complex128)
        value = plain(tensor).to(torch.float64 if is_wide else torch.float32)
        # an index into the numbers is one into the tensor: not of wrappers, nor of what is stored of a sparse one
        is_whole = not tensor.is_nested and value.shape[: tensor.dim()] == tensor.shape
        is_pairs = tensor.is_complex() and is_whole  # of a real and an imaginary part, counted once
        kinds = (value.isnan(), value == math.inf, value == -math.inf)
        nans, positive, negative = (int(found.any(-1).sum() if is_pairs else found.sum()) for found in kinds)
        finite = torch.isfinite(value)
        good = value[finite]
        bad = ~finite
        first = tuple(int(at) for at in bad.nonzero()[0]) if bool(bad.any()) else None
        return Range(
            name,
            shape,
            dtype,
            tensor.numel() if is_whole or tensor.layout != torch.strided else value.numel(),
            good.min().item() if good.numel() else None,
            good.max().item() if good.numel() else None,
            nans,
            positive,
            negative,
            int((value == 0).all(-1).sum() if is_pairs else (value == 0).sum()),
            first[: tensor.dim()] if first is not None and is_whole else None,
        )
