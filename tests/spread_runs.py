"""What one rank of a sharded run does, for the tests of it: importable, so that processes can be spawned with it."""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
import gaff.compat.distributed

WIDTH, ROWS = 8, 4  # rows of each rank
SITES = ("blocks.1", "blocks.1:input", "blocks.1:grad_output", "blocks.1:grad_input", "blocks.1.fc.weight:grad",
         "inp.weight:grad", "blocks.1.fc.weight:param", "blocks.1.fc/linear")  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(F.gelu(self.fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, is_checkpointed=False):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def build(*, is_checkpointed=False):
    torch.manual_seed(0)
    return Net(is_checkpointed=is_checkpointed)


def batch(rank, world):
    x = torch.randn(world * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    y = torch.randn(world * ROWS, 3, generator=torch.Generator().manual_seed(2))
    part = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return x[part], y[part]


def spread(kind, world):
    """The model of ``build``, as ``kind`` spreads it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build(is_checkpointed=kind == "fsdp2-checkpoint")
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "tp" or kind == "2d":
        dims = (world,) if kind == "tp" else (2, 2)
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=("tp",) if kind == "tp" else ("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"fc": ColwiseParallel(), "out": RowwiseParallel()})
        if kind == "tp":
            return model
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")) if kind == "hsdp" else None
    mesh = mesh or init_device_mesh("cpu", (world,))
    for block in model.blocks:
        if kind == "fsdp2-compile":
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, reshard_after_forward=kind != "fsdp2-keep")
    fully_shard(model, mesh=mesh, reshard_after_forward=kind != "fsdp2-keep")
    return model


def whole(value):
    """A tensor of all processes; asked by all."""
    if value is None:
        return None
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def inner(model):
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def step(model, data):
    x, y = data
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    return {name: whole(one.grad) for name, one in inner(model).named_parameters()}


def run_capture(model, data, rank):
    with gaff.capture(model, *SITES) as got:
        gradients = step(model, data)
    found = {site: whole(got[site if "/" not in site else "blocks.1.fc/linear#0"]) for site in SITES}
    found["placements"] = [str(getattr(got[site], "placements", "")) for site in SITES[:7]]
    return {**found, "after": gradients}


EDITS = {
    "blocks.0": gaff.edits.scale(0.5),
    "blocks.1:grad_output": gaff.edits.scale(2.0),
    "blocks.2.fc.weight:grad": gaff.edits.scale(0.25),
    "head.weight:param": gaff.edits.scale(3.0),
    "blocks.0.fc.weight:grad": gaff.edits.add(torch.arange(128.0).view(16, 8) / 100),
    "blocks.0.fc.bias:grad": gaff.edits.replace(torch.arange(16.0)),
    "inp.weight:grad": gaff.edits.add(torch.arange(8.0)),
}


def run_edit(model, data, rank):
    with gaff.edit(model, EDITS) as changed:
        gradients = step(model, data)
    assert all(row.hits for row in changed.receipt.rows)
    return {"edited": gradients, "bare": step(model, data)}


def run_take(model, data, rank):
    if not gaff.compat.distributed.can_stop(model):  # FSDP2 of torch 2.10
        with contextlib.suppress(gaff.PlanError):  # as it must be
            gaff.take(model, "blocks.1")
            raise AssertionError("a forward was stopped that cannot be")
        with gaff.capture(model, "blocks.1") as got:
            gradients = step(model, data)
        return {"feature": whole(got["blocks.1"]), "after": gradients}
    take = gaff.take(model, "blocks.1")
    with torch.set_grad_enabled(not isinstance(model, nn.parallel.DistributedDataParallel)):
        feature = take(data[0])["blocks.1"]
    return {"feature": whole(feature), "after": step(model, data)}


def run_clip(model, data, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.clip_gradients(optimizer, norm=0.1, model=model) as handle:
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(data[0]), data[1]).backward()
            optimizer.step()
    weights = {name: whole(one) for name, one in inner(model).named_parameters()}
    return {"norms": [row.norm for row in handle.audit.rows], "weights": weights}


def run_guard(model, data, rank):
    x, y = data
    if rank in (None, 0):
        x = x.clone()
        x[0, 0] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with gaff.guard(model):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    except gaff.NonFiniteError as error:
        return {"raised": True, "site": error.report.site}
    return {"raised": False}


def run_averaged(model, data, rank):
    """What a guard tells where one process alone was given a target that is NaN."""
    x, y = data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with gaff.guard(model):
            F.mse_loss(model(x), torch.full_like(y, math.nan) if rank in (None, 0) else y).backward()
            optimizer.step()
    except gaff.NonFiniteError as error:
        return {"cause": error.report.cause}
    return {}


def run_accumulate(model, data, rank):
    """Micro-batches without and with synchronisation, an exception in between, and what an open capture makes of it."""
    x, y = data
    with gaff.capture(model, "blocks.1.fc.weight:grad"):
        for part in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part.start != 0)
            loss = F.mse_loss(model(x[part]), y[part]) / 2
            loss.backward()
    gradients = {name: whole(one.grad) for name, one in inner(model).named_parameters()}

    def spoil(module, args, output):
        output.register_hook(_fail)

    after = []
    for session in (contextlib.nullcontext(), gaff.capture(model, gaff.maybe("blocks.1.fc.weight:grad"))):
        with session:
            if hasattr(model, "reset_iter_state"):  # of FSDP2, which is asked for it after an exception
                handle = model.blocks[1].norm.register_forward_hook(spoil)
                try:
                    F.mse_loss(model(x), y).backward()
                except ValueError:
                    handle.remove()
                model.reset_iter_state()
            after.append(step(model, data))
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    assert not any(
        "post_backward" in vars(group) for state in states for group in gaff.compat.distributed.groups_of(state)
    )
    return {"accumulated": gradients, "bare": after[0], "captured": after[1]}


def _fail(gradient):
    raise ValueError("in the middle of backward")


def run_divergent(model, data, rank):
    """Rank 0 alone asks for an edit: it is refused, and the others go on."""
    gaff.compat.distributed.PATIENCE_S = 1.0
    told = ""
    if rank == 0:
        try:
            with gaff.edit(model, {"blocks.0": gaff.edits.scale(0.5)}):
                pass
        except gaff.PlanError as error:
            told = str(error)
    return {"told": told, "after": step(model, data)}


def run_unlike(model, data, rank):
    """Other numbers on each rank: of a weight's gradient, and, wherever one mesh computes on the same rows, of a value."""
    gaff.compat.distributed.PATIENCE_S = 20.0  # a store of files tells the time in whole seconds
    name = next(name for name, _ in inner(model).named_parameters())
    plans = {
        "grad": {f"{name}:grad": gaff.edits.clip(0.1 + (rank or 0))},
        "value": {"blocks.0": gaff.edits.add(torch.full((1,), 1.0 + (rank or 0)))},
    }
    told = {}
    for name, plan in plans.items():
        try:
            with gaff.edit(model, plan):
                pass
        except gaff.GaffError as error:  # with the same numbers that nothing was edited
            told[name] = str(error)
    return told


def run_watch(model, data, rank):
    """One look at one step; the processes write one record."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(model, optimizer, out=f"{OUT[0]}/{'alone' if rank is None else 'record'}", every=1):
        step(model, data)
        meshes = [getattr(parameter.grad, "device_mesh", None) for parameter in model.parameters()]
        if all(mesh == meshes[0] for mesh in meshes):  # else torch knows no norm of all
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # clips nothing
        optimizer.step()
    return {}


OUT = ["."]  # where the processes of a run write
RUNS = {name.removeprefix("run_"): run for name, run in list(globals().items()) if name.startswith("run_")}


def found_by(rank, world, kind, out):
    """What every run finds, each on a model of its own."""
    found = {}
    OUT[0] = out
    replica = {"tp": None, "2d": rank // 2}.get(kind, rank)  # ranks of tensor parallelism share their rows
    rows = {"tp": 1, "2d": 2}.get(kind, world)
    for name, run in RUNS.items():
        data = batch(0 if replica is None else replica, rows)
        found[name] = run(spread(kind, world), data, rank)
    return found
