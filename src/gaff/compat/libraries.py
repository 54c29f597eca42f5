"""What other libraries do to modules and tensors: accelerate keeps weights elsewhere, torchao and quanto quantise them.

Each private name of theirs is here once; none of them is imported.
"""

from __future__ import annotations

from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor

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


def device_of(module: torch.nn.Module) -> torch.device:
    """The device on which a model computes: that of its first parameter that is not offloaded, else the CPU.

    The meta device where all of them are there, and nothing loads them.
    """
    for one in module.modules():
        where = getattr(getattr(one, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
    devices = dict.fromkeys(one.device for one in module.parameters())
    return next((one for one in devices if one.type != "meta"), next(iter(devices), torch.device("cpu")))


def class_name(module: torch.nn.Module, number: int) -> str:
    """A class of a model's output with its name, where a transformers configuration tells it, else its number."""
    known = getattr(getattr(module, "config", None), "id2label", None)
    name = known.get(number) if isinstance(known, dict) else None
    return f"{number} ({name})" if isinstance(name, str) and name != f"LABEL_{number}" else str(number)
