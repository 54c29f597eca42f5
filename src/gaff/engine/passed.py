"""What passed, in a few numbers, by which a call that comes again is told from others: up to rounding, in any order.

The values themselves are not kept: what recomputes is there to save their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import children
from gaff.compat import elements
from gaff.compat.modes import outside_modes

_MOST = 1 << 16  # elements of a tensor that are read
_DEEPEST = 16  # containers inside one another
_EXACT = 1e-4  # how far the sums of one tensor may lie apart, by its norm
_ROUNDED = 2e-2  # the same in half precision
_HALF = (torch.float16, torch.bfloat16)
_READ = (torch.float32, torch.float64, *_HALF, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8,
         torch.int16, torch.int32, torch.int64)  # fmt: skip


def traits_of(value: Any) -> tuple[Any, ...]:
    """Of each tensor in ``value`` the shape and three sums on its device, and each plain number or text as it is.

    The sums are of some 65,000 elements at most: the norm, and two with weights that depend on the place. None stands
    for the sums of a tensor that cannot be read. Copies no more than these elements; no synchronisation.
    """
    with outside_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tuple(_traits(one) for one in _leaves(value, 0))


def is_alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two values are the same up to rounding, as far as their traits tell. Waits for the device."""
    with outside_modes(), torch.no_grad():
        return len(one) == len(other) and all(map(_is_near, one, other))


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    inside = None if isinstance(value, Tensor) or depth > _DEEPEST else children(value)
    if inside is None:
        yield value
    else:
        for _, child in inside:
            yield from _leaves(child, depth + 1)


def _traits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)
    if leaf.is_nested:
        return Tensor
    sums = None
    is_known = leaf.dtype in _READ and not elements.is_opaque(leaf)
    if is_known and elements.is_readable(leaf) and elements.is_plain(leaf) and leaf.untyped_storage().nbytes():
        sums = _sums(leaf.detach())
    return leaf.shape, _ROUNDED if leaf.dtype in _HALF else _EXACT, sums


def _sums(tensor: Tensor) -> Tensor:
    while tensor.numel() > _MOST:  # a view: an expanded tensor takes no memory
        tensor = tensor[(slice(None),) * tensor.shape.index(max(tensor.shape)) + (slice(None, None, 2),)]
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    flat = flat.to(elements.wide_type(flat) if flat.is_floating_point() else torch.float32).nan_to_num()
    one, other = _weights(flat.numel(), flat.dtype, flat.device)
    return torch.stack([flat.norm(), flat @ one, flat @ other])


@lru_cache(maxsize=16)
def _weights(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two numbers between -1 and 1 for each place."""
    place = torch.arange(count, dtype=dtype, device=device)
    return (place * 0.7).cos(), (place * 1.3).sin()


def _is_near(one: Any, other: Any) -> bool:
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return bool(one == other)
    (shape, near, sums), (other_shape, other_near, other_sums) = one, other
    if shape != other_shape or sums is None or other_sums is None:
        return bool(shape == other_shape)
    away = (sums - other_sums).abs().max()
    return bool(away <= max(near, other_near) * sums[0])
