"""What around a model decides whether its sites can be seen: compiled, sharded, scripted, fused.

A session looks once, when it is made and before anything is installed, so that what cannot work is refused early.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gaff.compat import distributed
from gaff.compat.compiler import has_asked_to_compile, has_compiled, stance
from gaff.compat.memory import memory_of
from gaff.engine.force_eager import forced_eager
from gaff.engine.modules import Node
from gaff.errors import PlanError

_PECULIAR = (torch.jit.ScriptModule, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
_KINDS = {"OptimizedModule": "compiled", "FullyShardedDataParallel": "sharded", "DataParallel": "replicated"}
_OWN = "own"  # a class of the user's, which may keep tensors as plain attributes
SLOW_PATH = "nn.Transformer's fused fast path was not taken: it never calls the modules inside"


def runs_compiled(around: Surroundings) -> bool:
    """Whether compiled code may run when the model is called: not where the user has it run eagerly.

    A process that has compiled anything counts, since a compiled function around the model cannot be seen from the
    model.
    """
    if not (around.is_compiled or has_compiled() or has_asked_to_compile()):
        return False
    return forced_eager.is_held or stance() != "force_eager"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What ``look`` found.

    ``is_compiled``: the model, a module in it, or anything else in this process is compiled. ``fused``: layers that
    nn.Transformer runs as one fused call when it may. ``memory``: addresses of the memory of all parameters and
    buffers, and of tensors that modules keep as plain attributes.
    """

    is_compiled: bool
    fused: tuple[nn.Module, ...]
    memory: frozenset[int]


def look(model: nn.Module) -> Surroundings:
    """Refuse what gaff cannot see truly yet, and tell what else stands between a call and the hooks of ``model``.

    It counts as compiled with compiled modules in it, and as soon as this process has compiled anything at all: a
    compiled function may call the model, and torch ignores hooks that come after the first compilation without a word.
    Raises PlanError; installs nothing.
    """
    is_compiled = has_compiled()
    fused: list[nn.Module] = []
    tensors: list[Tensor | None] = []
    kinds: dict[Any, str] = {}  # by class
    waiting: list[nn.Module | None] = [model]
    for module in waiting:
        if module is None:
            continue
        inside = module.__dict__
        waiting += inside["_modules"].values()
        cls = type(module)
        kind = kinds.get(cls)
        if kind is None:
            kind = kinds[cls] = _kind(module)
        if kind == _OWN:
            tensors += [value for value in inside.values() if type(value) is Tensor]  # state without a name
        elif kind:
            is_compiled = is_compiled or kind == "compiled"
            if kind == "fused":
                fused.append(module)
            _refuse(model, module, kind)
        if "_compiled_call_impl" in inside:
            is_compiled = is_compiled or inside["_compiled_call_impl"] is not None
        for parameter in inside["_parameters"].values():
            if type(parameter) is not nn.Parameter and parameter is not None:
                _refuse(model, module, type(parameter).__name__)
            tensors.append(parameter)
        tensors += inside["_buffers"].values()
    return Surroundings(is_compiled, tuple(fused), frozenset(_iter_memory(tensors)))


def _iter_memory(tensors: Iterable[Tensor | None]) -> Iterator[int]:
    """Addresses of the memory behind tensors, of DTensors that of the local part."""
    for tensor in tensors:
        if tensor is not None:
            with suppress(RuntimeError, ValueError):  # sparse and the like have none
                yield memory_of(distributed.local_of(tensor))


def _kind(module: nn.Module) -> str:
    """What a module's class means for hooks; empty for the ordinary ones of torch itself.

    Wrappers are told by the name of their class, so that what is not used need not be imported. The class that
    ``fully_shard`` makes has FSDP before the name of the module's own.
    """
    if isinstance(module, _PECULIAR):
        return "script" if isinstance(module, torch.jit.ScriptModule) else "fused"
    cls = type(module)
    known = _KINDS.get(cls.__name__) or (_KINDS.get(cls.__name__[4:]) if cls.__name__.startswith("FSDP") else None)
    return known or ("" if cls.__module__.startswith("torch.nn.modules.") else _OWN)


def _refuse(model: nn.Module, module: nn.Module, kind: str) -> None:
    """Raises PlanError for a kind of module or parameter on which hooks would not show the truth, with the way out.

    ``kind`` is that of ``_kind``, or the name of the class of a parameter that is no plain ``nn.Parameter``.
    """
    path = next((path for path, inner in model.named_modules() if inner is module), "")
    at = f"{path or 'model'}: {type(module).__name__}"
    if kind == "script":
        raise PlanError(f"{at} is TorchScript, which takes no hooks: expected the model it was made from")
    if kind == "sharded":
        raise PlanError(f"{at} is sharded by the first FSDP: expected torch.distributed.fsdp.fully_shard (FSDP2)")
    if kind.startswith("Uninitialized"):
        raise PlanError(f"{at} is not initialised yet (lazy): run the model once first")
    if kind == "replicated" and len(getattr(module, "device_ids", ())) > 1:
        raise PlanError(f"{at} runs replicas on several devices: not supported yet; give the module inside it")


def takes_fast_path(blocks: Iterable[nn.Module]) -> bool:
    """Whether a bare run would now go through the fused path of one of ``blocks``.

    torch takes it in eval mode where no parameter needs a gradient, and not where hooks or a function mode stand in
    the way: a watched run then differs from a bare one by rounding, which is worth a warning.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    for block in blocks:
        needs_grad = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters())
        if not block.training and not needs_grad:
            return True
    return False


class SlowPath:
    """Notices runs that would have taken nn.Transformer's fused path, and takes them the slow way: told once.

    ``fused``: such blocks of the model; those count that hold a hooked module, or whose ops are asked for.
    """

    def __init__(self, fused: Iterable[nn.Module], nodes: Iterable[Node], notes: list[str]) -> None:
        hooked = list(nodes)
        ours = {node.module for node in hooked}
        asked = {inner for node in hooked if node.scope is not None for inner in node.module.modules()}
        self._notes = notes
        self._blocks = [
            block
            for block in fused
            if block in asked or not (isinstance(block, nn.MultiheadAttention) or ours.isdisjoint(block.modules()))
        ]

    def note(self, run: Any) -> None:
        """A run begins."""
        if SLOW_PATH not in self._notes and takes_fast_path(self._blocks):
            self._notes.append(SLOW_PATH)
            warn_once(SLOW_PATH)


def warn_once(message: str) -> None:
    """Warn that a run is not bitwise what it would be without the session; ``message`` says why.

    It does not know what was said before: a session asks once for each reason.
    """
    warnings.warn(f"gaff: not bitwise: {message}", stacklevel=6)
