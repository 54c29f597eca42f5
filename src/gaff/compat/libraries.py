"""What other libraries do to modules and tensors: accelerate keeps weights elsewhere, torchao and quanto quantise them.

Each private name of theirs is here once; none of them is imported.
"""

from __future__ import annotations

from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_HOOKS = frozenset(("pre_forward", "post_forward"))
_HOOKING = ("accelerate.", "diffusers.hooks")


def is_hook(frame: FrameType) -> bool:
    """Whether a call is a hook of accelerate or diffusers, which stands inside the module's forward."""
    return frame.f_code.co_name in _HOOKS and frame.f_globals.get("__name__", "").startswith(_HOOKING)


def offloaded(module: Any, name: str) -> Tensor | None:
    """The value of a parameter or buffer that accelerate keeps elsewhere between calls; None where it does not say."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        values = getattr(one, "weights_map", None)
        if values is not None:
            with suppress(KeyError):
                return values[name]  # type: ignore[no-any-return]
    return None


def dequantized(tensor: Tensor) -> Tensor:
    """The numbers that a quantised subclass (torchao, quanto) stands for; every other tensor as it is."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or not is_traceable_wrapper_subclass(tensor):
        return tensor
    own = getattr(kind, "dequantize", None)
    return tensor.dequantize() if own is not None and own is not Tensor.dequantize else tensor


def is_small_float(tensor: Tensor) -> bool:
    """Whether a tensor's type holds numbers and computes with none: float8 and smaller."""
    return tensor.is_floating_point() and tensor.element_size() == 1 and not tensor.is_quantized


def device_of(module: torch.nn.Module) -> torch.device:
    """The device on which a model computes: that of its first parameter that is not offloaded, else the CPU."""
    for one in module.modules():
        where = getattr(getattr(one, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
    return next((one.device for one in module.parameters() if not one.is_meta), torch.device("cpu"))
