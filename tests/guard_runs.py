"""Guarded runs of a model that lies on several processes, with something wrong on the last of them: importable."""

import torch
import torch.distributed as dist
from torch import nn

import gaff

WIDTH, ROWS = 8, 4
FAULTS = ("weight", "last weight", "op", "part", "quiet part", "backward")
SPREADS = {"tp": 2, "sequence": 2, "dtensor": 2, "fsdp2": 2, "2d": 4}


class Fault(nn.Module):
    """Something is wrong with one number of the last process, or of the last rows."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.is_on, self.is_here = fault, False, True

    def forward(self, x):
        spoiled = torch.zeros_like(x.to_local() if hasattr(x, "to_local") else x)
        if self.is_on and self.is_here:
            spoiled[-1, -1] = 1
        if hasattr(x, "to_local"):
            spoiled = type(x).from_local(spoiled, x.device_mesh, x.placements)
        if self.fault == "op" and self.is_on:
            return (x - 50).log()
        if self.fault.endswith("part"):
            return x / (1 - spoiled)
        if self.fault == "backward":
            return (x * x * (1 - spoiled)).sqrt()
        return x


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), Fault(fault), nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Halved(torch.autograd.Function):
    """An op that nothing shows, between one module's conversion from a DTensor and the next one's to it."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.blocks = nn.Sequential(Block(""), Block(fault), Block(""))
        self.last, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.last(Halved.apply(self.blocks(x))))


def spread(model, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if kind == "2d" else None
    if kind != "fsdp2":
        plan = {"up": ColwiseParallel(use_local_output=kind != "dtensor"), "down": RowwiseParallel()}
        if kind == "sequence":
            plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0)),
                    "down": RowwiseParallel(output_layouts=Shard(0))}  # fmt: skip
        for block in model.blocks:
            parallelize_module(block, mesh["tp"] if mesh else init_device_mesh("cpu", (2,)), plan)
        if kind != "sequence":
            last = {"last": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(model, mesh["tp"] if mesh else init_device_mesh("cpu", (2,)), last)
    if kind in ("fsdp2", "2d"):
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh["dp"] if mesh else init_device_mesh("cpu", (2,)))
    return model


def spoil(parameter):
    """The last number: it lies on one process, or on several that hold the same part."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    is_last = not hasattr(parameter, "to_local") or all(
        place.is_replicate() or at == parameter.device_mesh.size(dim) - 1
        for dim, (place, at) in enumerate(
            zip(parameter.placements, parameter.device_mesh.get_coordinate(), strict=True)
        )
    )
    if is_last:
        with torch.no_grad():
            local[-1, -1] = float("nan")


def guarded(model, fault, rows, rank=None):
    """What the guard says of three steps, of which the second goes wrong."""
    x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))[rows]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    act = model.blocks[1].act
    act.is_here = rank is None or rank == dist.get_world_size() - 1
    try:
        with gaff.guard(model) as guard, torch.set_grad_enabled(fault != "quiet part"):
            for step in range(3):
                if step == 1:
                    act.is_on = True
                    if fault == "weight":
                        spoil(model.blocks[1].up.weight)
                    if fault == "last weight":
                        spoil(model.blocks[1].down.weight)
                loss = model(x).square().mean()
                if fault != "quiet part":
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    except gaff.NonFiniteError as error:
        return error.report
    return guard.reports


def found_by(rank, kind):
    """By fault: the report of this rank."""
    found = {}
    for fault in FAULTS:
        torch.manual_seed(0)
        model = spread(Net(fault), kind)
        half = {"sequence": rank, "fsdp2": rank, "2d": rank // 2}.get(kind)
        rows = slice(None) if half is None else slice(half * ROWS, (half + 1) * ROWS)
        found[fault] = guarded(model, fault, rows, rank)
    return found
