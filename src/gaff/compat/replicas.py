"""Models of which DistributedDataParallel keeps a copy in each process, without the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def unreplicated(model: Any) -> Any:
    """``model`` without DistributedDataParallel around it or around parts of it, which are changed in place."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return unreplicated(model.module)
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, torch.nn.parallel.DistributedDataParallel):
                module._modules[name] = child.module
    return model


@contextmanager
def unreplicated_calls(model: Any) -> Iterator[None]:
    """Inside parts of ``model`` within DistributedDataParallel, or made replicas in place (``replicate``), run as they
    are: no process asks others for anything."""
    with ExitStack() as undoing:
        for one in _replicators(model):
            plain = {"_pre_forward": lambda *args, **kwargs: (args, kwargs), "_post_forward": lambda output: output}
            own = {name: one.__dict__[name] for name in plain if name in one.__dict__}
            one.__dict__.update(plain)
            undoing.callback(one.__dict__.update, own)
            undoing.callback(list, map(one.__dict__.pop, plain))
        yield


def _replicators(model: Any) -> Iterator[Any]:
    """What keeps parts of ``model`` equal to those of other processes, as they run."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    for one in model.modules():
        if isinstance(one, torch.nn.parallel.DistributedDataParallel):
            yield one
        elif contract is not None:  # asked for there, torch would put an empty table into each module
            states = one.__dict__.get(contract.STATE_KEY, {}).values()
            yield from (state._ddp for state in states if hasattr(state, "_ddp"))
