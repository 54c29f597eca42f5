"""Where a program runs, if not as it stands: compiled, or on two ranks that are given the same numbers.

Averages over such ranks are what one process has, so the truth is the same for all; parts are put together before they
are compared.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import inside

RANKS = ("ddp", "fsdp2", "tp")
EVERY = ("output", "input", "grad_output", "outer_grad", "grad_input", "input_grad", "grad")
PORTS = {
    "aot_eager": ("output", "grad_output"),  # whose hooks are inside of compiled code
    "ddp": EVERY,
    "fsdp2": tuple(port for port in EVERY if port != "input_grad"),  # each call has an input of its own there
    "tp": EVERY,
}
OF_PARALLEL = (
    "output",
    "grad_output",
    "outer_grad",
)  # of a layer that is tensor-parallel: it is given parts, and returns the whole


def start_ranks() -> None:
    """Meet the other process, which torchrun has started."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))


def leave(code: int) -> None:
    """End this process, together with the other rank where there is one."""
    inside.leave_together(code)
    sys.exit(code)


def prepared(model: nn.Module, setting: str | None) -> nn.Module:
    """The model as it is used in a setting; of a backend of torch.compile, compiled."""
    if setting is None:
        return model
    if setting == "ddp":
        from torch.distributed._composable import replicate

        replicate(model)
        replicate.state(model).lazy_init()  # at once: it writes into parameters
    elif setting == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for one in [one for one in model.modules() if isinstance(one, nn.Linear) and one is not model]:
            fully_shard(one)
        fully_shard(model)
    elif setting == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        linear = [path for path, one in model.named_modules() if isinstance(one, nn.Linear) and path]
        parallelize_module(model, mesh, {path: ColwiseParallel(output_layouts=Replicate()) for path in linear})
    else:
        return torch.compile(model, backend=setting)  # type: ignore[return-value]
    return model


@contextmanager
def parts_mix(setting: str | None) -> Iterator[None]:
    """Lets parts of tensors meet whole ones, as the losses of programs have them."""
    if setting in ("fsdp2", "tp"):
        from torch.distributed.tensor.experimental import implicit_replication

        with implicit_replication():
            yield
    else:
        with nullcontext():
            yield


def whole(tensor: Any) -> Any:
    """A tensor of which each rank has a part, put together: all ranks must ask."""
    if not isinstance(tensor, Tensor) or not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.full_tensor()


def means_the_same(model: nn.Module, path: str, port: str, setting: str | None) -> bool:
    """Whether the port of a module means in a setting what it means in one process."""
    if setting == "tp" and port in EVERY[:-1] and isinstance(model.get_submodule(path), nn.Linear):
        return port in OF_PARALLEL
    return port in PORTS[str(setting)]


def why_not(source: str, setting: str | None) -> str:
    """Why a program means something else there than one process has; empty if it does not."""
    if setting in RANKS and "in_thread(" in source:
        return "ranks meet on one thread"
    if setting in RANKS and ("new_linear(" in source or "deepcopy(" in source or "pickled(" in source):
        return "a module that is replaced or copied is not spread"
    return ""
