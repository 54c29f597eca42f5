"""How a model lies in the processes of a run: replicas of DistributedDataParallel, and parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from gaff.address.resolve import unwrap
from gaff.compat.distributed import has_others, place, replica_ranks
from gaff.training.watch import step_facts
from gaff.training.watch.idle_optimizers import objects_of
from gaff.training.watch.models import Model


def spread_of(model: Model) -> dict[str, Any]:
    """``replicated``: the ranks that have replicas of ``model``; ``world``: how many processes there are; and which
    parts this one has, as ``step_facts.spread_over`` tells it."""
    root = model.root()
    parts = step_facts.spread_over(root) if root is not None else {}
    return {"replicated": _replicas_of(root) if root is not None else [], "world": place()[1], **parts}


def _replicas_of(root: nn.Module) -> list[int]:
    """The ranks over which DistributedDataParallel keeps a model equal: around it, inside it, or inside what compiled
    it. Goes through all of Python's objects where there are other processes."""
    if not has_others():
        return []
    inside = {id(one) for one in root.modules()}
    whole = id(unwrap(root))
    for one in objects_of(nn.parallel.DistributedDataParallel):
        if id(one) in inside or whole in map(id, one.modules()):
            return replica_ranks(one)
    return []
