"""What around a model decides whether its sites can be seen: compiled, sharded, scripted, fused."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from gaff.errors import PlanError

EAGER = "compiled code ran eagerly while the session was open (torch.compiler.set_stance('force_eager'))"
SLOW_PATH = "nn.Transformer's fused fast path was not taken: it never calls the modules inside"


def refuse_unsupported(model: nn.Module) -> None:
    """Raises PlanError for models whose sites gaff cannot see truly yet. Installs nothing."""
    for path, module in model.named_modules():
        name = type(module).__name__
        at = f"model {name}" if not path else f"{path}: module {name}"
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(f"{at} is TorchScript, which takes no hooks: expected the model it was made from")
        if name == "FullyShardedDataParallel" or name.startswith("FSDP"):
            raise PlanError(f"{at} is sharded (FSDP): not supported yet; capture before fully_shard is applied")
        if name == "DataParallel" and len(getattr(module, "device_ids", ())) > 1:
            raise PlanError(f"{at} runs replicas on several devices: not supported yet; give the module inside it")
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter.data).__name__ == "DTensor":
                raise PlanError(f"{at} holds DTensor parameters (tensor parallel or FSDP2): not supported yet")


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile stands between a call and the hooks of this model.

    True for compiled modules in it, and as soon as this process has compiled anything at all: a compiled function
    may call the model, and torch ignores hooks that come after the first trace without a word.
    """
    for module in model.modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            return True
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return bool(dynamo is not None and getattr(dynamo, "FRAME_COUNTER", 0))


class _Stance:
    """Process-wide ``force_eager``, held as long as any session needs it; sessions may close in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stance: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


forced_eager = _Stance()


def fused_blocks(model: nn.Module, hooked: Iterable[nn.Module]) -> list[nn.Module]:
    """The nn.Transformer layers whose fused fast path our hooks switch off."""
    if "torch.nn.modules.transformer" not in sys.modules:
        return []
    kinds = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    hooked = set(hooked)
    return [
        module for module in model.modules() if isinstance(module, kinds) and not hooked.isdisjoint(module.modules())
    ]


def takes_fast_path(blocks: Iterable[nn.Module]) -> bool:
    """Whether a bare run would now go through the fused path of one of ``blocks``."""
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    for block in blocks:
        needs_grad = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters())
        if not block.training and not needs_grad:
            return True
    return False


def warn_once(message: str) -> None:
    warnings.warn(f"gaff: not bitwise: {message}", stacklevel=6)
