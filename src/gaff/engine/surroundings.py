"""What around a model decides whether its sites can be seen: compiled, sharded, scripted, fused.

A session looks once, when it is made and before anything is installed, so that what cannot work is refused early.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gaff.compat import distributed
from gaff.compat.compiler import has_asked_to_compile, has_compiled, stance
from gaff.compat.flat_shards import FLAT
from gaff.compat.memory import memory_of
from gaff.engine.force_eager import forced_eager
from gaff.engine.node import Node
from gaff.errors import PlanError

_PLAIN = (nn.Parameter, type(None))
_PECULIAR = (torch.jit.ScriptModule, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
_KINDS = {
    "OptimizedModule": "compiled",
    "FullyShardedDataParallel": "sharded",
    "DataParallel": "replicated",
    "DeepSpeedEngine": "deepspeed",
}
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

    ``tables`` are all modules' own tables of children, ``inside`` what was in them; ``held`` the tables of parameters
    and buffers, ``own`` the modules that may keep tensors as attributes: by these ``renewed`` is a short look.
    """

    is_compiled: bool
    fused: tuple[nn.Module, ...]
    memory: frozenset[int]
    tables: tuple[dict[str, Any], ...]
    inside: tuple[tuple[Any, ...], ...]
    held: tuple[dict[str, Any], ...]
    own: tuple[nn.Module, ...]
    has_flat: bool = False  # parameters lie end to end: the first FSDP
    has_script: bool = False  # parts are TorchScript: they take no hooks, and are left out

    def renewed(self, model: nn.Module) -> Surroundings:
        """What ``look`` would find now: the addresses are read anew, the modules only where some were replaced.

        Raises like ``look``.
        """
        kinds = set(map(type, chain.from_iterable(map(dict.values, self.held))))
        is_same = tuple(map(tuple, map(dict.values, self.tables))) == self.inside
        if not is_same or kinds - {nn.Parameter, Tensor, type(None)}:
            return look(model, allows_flat=self.has_flat)
        memory = _memory_of(self.held, self.own)
        return replace(self, is_compiled=self.is_compiled or has_compiled(), memory=memory)


_PARTED = "ZeROOrderedDict"  # the class of the tables of parameters that ZeRO 3 gathers when somebody asks for one
_DEEPSPEED = (
    "DeepSpeed reduces gradients in buffers of its own, and ZeRO 3 keeps parameters in parts: what passes there was "
    "never held against one process, so nothing is told of it. Expected torch's fully_shard or "
    "DistributedDataParallel, or, for values with ZeRO 1 and 2, the model inside the engine (engine.module)"
)


def look(model: nn.Module, *, allows_flat: bool = False) -> Surroundings:
    """Refuse what gaff cannot see truly yet, and tell what else stands between a call and the hooks of ``model``.

    It counts as compiled with compiled modules in it, and as soon as this process has compiled anything at all: a
    compiled function may call the model, and torch ignores hooks that come after the first compilation without a word.
    Raises PlanError; installs nothing. ``allows_flat``: whoever asks knows what to do with the first FSDP's parameters.
    """
    is_compiled, has_flat, has_script = has_compiled(), False, False
    fused: list[nn.Module] = []
    own: list[nn.Module] = []
    tables: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    kinds: dict[Any, str] = {}  # by class
    waiting: list[nn.Module | None] = [model]
    for module in waiting:
        if module is None:
            continue
        cls = type(module)
        kind = kinds.get(cls)
        if kind is None:
            kind = kinds[cls] = _kind(module)
        if kind == "script" and module is not model:
            has_script = True
            continue  # nobody can ask about it, or about what is inside
        inside = module.__dict__
        children = inside["_modules"]
        tables.append(children)
        waiting += children.values()
        if kind == _OWN:
            own.append(module)
        elif kind:
            is_compiled = is_compiled or kind == "compiled"
            if kind == "fused":
                fused.append(module)
            has_flat = has_flat or kind == "sharded"
            if not (allows_flat and kind == "sharded"):
                _refuse(model, module, kind)
        is_compiled = is_compiled or inside.get("_compiled_call_impl") is not None
        parameters = inside["_parameters"]
        odd = next((one for one in parameters.values() if type(one) not in _PLAIN), None) if parameters else None
        if odd is not None:
            _refuse(model, module, type(odd).__name__)
        held += [parameters, inside["_buffers"]]
    distributed.refuse_localized(model.parameters())
    insides = tuple(map(tuple, map(dict.values, tables)))
    memory = _memory_of(held, own)
    return Surroundings(
        is_compiled, tuple(fused), memory, tuple(tables), insides, tuple(held), tuple(own), has_flat, has_script
    )


def _memory_of(held: Iterable[dict[str, Any]], own: Iterable[nn.Module]) -> frozenset[int]:
    """Addresses of the memory behind tables of parameters and buffers, and of what modules keep without a name.

    Of DTensors that of the local part; sparse tensors and the like have none.
    """
    tensors = [tensor for table in held if table for tensor in table.values() if tensor is not None]
    kept = [values for module in own if Tensor in map(type, values := module.__dict__.values())]
    tensors += [value for values in kept for value in values if type(value) is Tensor]
    with suppress(RuntimeError, ValueError):
        if set(map(type, tensors)) <= {nn.Parameter, Tensor}:
            return frozenset(map(memory_of, tensors))
    found = set()
    for tensor in tensors:
        with suppress(RuntimeError, ValueError):
            found.add(memory_of(distributed.local_of(tensor)))
    return frozenset(found)


def _kind(module: nn.Module) -> str:
    """What a module's class means for hooks; empty for the ordinary ones of torch itself.

    Wrappers are told by the name of their class or of one above it, so that what is not used need not be imported.
    """
    if type(module._parameters).__name__ == _PARTED:
        return "deepspeed"
    if isinstance(module, _PECULIAR):
        return "script" if isinstance(module, torch.jit.ScriptModule) else "fused"
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules."):
        return ""
    return next((kind for base in cls.__mro__ if (kind := _KINDS.get(base.__name__))), _OWN)


def _refuse(model: nn.Module, module: nn.Module, kind: str) -> None:
    """Raises PlanError for a kind of module or parameter on which hooks would not show the truth, with the way out.

    ``kind`` is that of ``_kind``, or the name of the class of a parameter that is no plain ``nn.Parameter``.
    """
    path = next((path for path, inner in model.named_modules() if inner is module), "")
    at = f"{path or 'model'}: {type(module).__name__}"
    if kind == "script":
        raise PlanError(f"{at} is TorchScript, which takes no hooks: expected the model it was made from")
    if kind == "sharded":
        raise PlanError(f"{at}: {FLAT}")
    if kind == "deepspeed":
        raise PlanError(f"{at}: {_DEEPSPEED}")
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
    for block in filter(_may_be_fused, blocks):
        needs_grad = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters())
        if not block.training and not needs_grad:
            return True
    return False


def _may_be_fused(block: nn.Module) -> bool:
    """Whether torch has a fused path for a block made as this one is: with the batch first, biases, an even number of
    heads, and ReLU or GELU between its linear layers."""
    if isinstance(block, nn.TransformerEncoder):
        return any(map(_may_be_fused, block.layers))
    attention = getattr(block, "self_attn", block)
    if isinstance(attention, nn.MultiheadAttention) and (
        not (attention.batch_first and attention._qkv_same_embed_dim)
        or attention.in_proj_bias is None
        or attention.num_heads % 2
    ):
        return False
    if not isinstance(block, nn.TransformerEncoderLayer):
        return True
    norms: list[Any] = [block.norm1, block.norm2]
    return bool(block.activation_relu_or_gelu) and len({one.eps for one in norms}) == 1


def _fusing(block: nn.Module) -> Iterator[nn.Module]:
    """The modules on which a hook keeps a block from its fused path: itself and those inside.

    A hook on attention does not, nor one on a whole encoder, whose layers are fused each by itself.
    """
    if isinstance(block, nn.MultiheadAttention):
        return iter(())
    return (one for one in block.modules() if one is not block or not isinstance(block, nn.TransformerEncoder))


def slow_path(fused: Iterable[nn.Module], nodes: Iterable[Node], notes: list[str]) -> Callable[[Any], None]:
    """What notices, as a run begins, that it would have taken nn.Transformer's fused path, and takes the slow way.

    That is told once. ``fused``: such blocks of the model; those count that hold a hooked module, or whose ops are
    asked for.
    """
    hooked = list(nodes)
    ours = {node.module for node in hooked}
    asked = {inner for node in hooked if node.scope is not None for inner in node.module.modules()}
    blocks = [block for block in fused if block in asked or not ours.isdisjoint(_fusing(block))]

    def note(run: Any) -> None:
        if SLOW_PATH not in notes and takes_fast_path(blocks):
            notes.append(SLOW_PATH)
            warnings.warn(f"gaff: not bitwise: {SLOW_PATH}", stacklevel=5)

    return note
