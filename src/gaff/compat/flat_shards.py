"""The seam to the first FSDP (``FullyShardedDataParallel``), which lays the parameters of a unit end to end.

Each process has a part of that flat parameter, and of its gradient, as plain tensors: nothing on them tells that they
are parts. Private names of torch's FSDP stand here and nowhere else. A gradient is shown as a DTensor over the same
memory, so that whoever knows DTensors computes with wholes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

FLAT = "the first FSDP lays parameters end to end and each process has a part of that: expected fully_shard (FSDP2)"


def handles_of(model: nn.Module) -> list[Any]:
    """What keeps the flat parameters of the units of ``model`` that are sharded."""
    names = ((module, [base.__name__ for base in type(module).__mro__]) for module in model.modules())
    found = [getattr(module, "_handle", None) for module, bases in names if "FullyShardedDataParallel" in bases]
    return [one for one in found if one is not None and one.uses_sharded_strategy]


def flat_shards(parameters: Iterable[Tensor]) -> dict[int, Any]:
    """By the identity of a parameter that is part of a flat one, or is one: the mesh of the processes that share it.

    Looks through all objects of the process, once, if it has imported FSDP and talks to others.
    """
    torch_file = sys.modules.get("torch.distributed.fsdp._flat_param")
    if torch_file is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    from torch.distributed.device_mesh import DeviceMesh

    wanted = {id(one) for one in parameters}
    found: dict[int, Any] = {}
    meshes: dict[int, Any] = {}  # by process group
    for one in gc.get_objects():
        if type(one) is torch_file.FlatParamHandle and one.uses_sharded_strategy:
            for parameter in _held(one):
                if id(parameter) in wanted:
                    group = one.process_group
                    mesh = meshes.get(id(group)) or DeviceMesh.from_group(group, one.flat_param.device.type)
                    found[id(parameter)] = meshes[id(group)] = mesh
    return found


def as_spread(parameter: Tensor, mesh: Any) -> Tensor:
    """The gradient of a part as a DTensor over its own memory; zeros where this process has none of it."""
    from torch.distributed.tensor import DTensor, Shard

    gradient = parameter.grad
    local = torch.zeros_like(parameter).flatten() if gradient is None else gradient.view(-1)
    shape = torch.Size([local.numel() * mesh.size()])  # not told apart: norms ask for the parts alone
    return DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def place_of(model: nn.Module) -> dict[str, str]:
    """By path of a parameter that lies in flat ones, without wrappers: which part this process holds."""
    sharded = {id(one): handle for handle in handles_of(model) for one in _held(handle)}
    return {
        name.replace("_fsdp_wrapped_module.", ""): f"{torch.distributed.get_rank(sharded[id(one)].process_group)}"
        for name, one in nn.Module.named_parameters(model, remove_duplicate=False)
        if id(one) in sharded
    }


def _held(handle: Any) -> list[Any]:
    return [handle.flat_param, *(handle.flat_param._params or ())]
