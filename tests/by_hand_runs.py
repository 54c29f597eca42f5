"""Models that go on by hand where torch's parallel layers end, and ranks that do not see the same: what each rank finds.

For ``slow/test_by_hand.py``. Each function runs in every process and returns texts and numbers.
"""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gaff
from gaff import edits, keep


def told(work):
    """What ``work`` returns, or the first line of the error of gaff's that it raises."""
    try:
        return work()
    except gaff.GaffError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


class CopyForward(torch.autograd.Function):
    """Megatron's way into a parallel region: the same in all processes, whose gradients are summands."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Local(nn.Module):
    """A linear layer whose weight is a DTensor, of which it uses this process's part."""

    def __init__(self, weight, mesh, dim):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]))

    def forward(self, x):
        return F.linear(x, self.weight.to_local())


class Copy(nn.Module):
    def forward(self, x):
        return CopyForward.apply(x)


class Sum(nn.Module):
    def forward(self, x):
        return SumUp.apply(x)


def by_hand(mesh):
    true = alone()
    up, down = true[2].weight.detach(), true[4].weight.detach()
    return nn.Sequential(true[0], Copy(), Local(up, mesh, 0), nn.Tanh(), Local(down, mesh, 1), Sum(), true[5])


def alone():
    torch.manual_seed(0)
    first, inner, outer = nn.Linear(6, 6), nn.Linear(6, 8, False), nn.Linear(8, 6, False)
    return nn.Sequential(first, nn.Identity(), inner, nn.Tanh(), outer, nn.Linear(6, 2))


EDITS = {"add": edits.add(1.0), "fill": edits.fill(0.3), "clamp": edits.clamp(-0.2, 0.2), "clip": edits.clip(0.5),
         "scale": edits.scale(0.5), "zero": edits.zero(), "list": [edits.scale(2.0), edits.add(1.0)]}  # fmt: skip


def summands(rank):
    """By site and edit: whether the edit is that of one process, or the refusal."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.linspace(-1, 1, 24).view(4, 6)
    found = {}
    for site, other in (("4", "4"), ("1:grad_output", "1:grad_output"), ("5", "4"), ("1", "1")):
        for name, edit in EDITS.items():

            def made(site=site, other=other, edit=edit):
                model, true = by_hand(mesh), alone()
                with gaff.edit(model, {site: edit}):
                    out = model(x)
                    out.square().mean().backward()
                with gaff.edit(true, {other: edit}):
                    expected = true(x)
                    expected.square().mean().backward()
                pairs = (out, expected), (model[0].weight.grad, true[0].weight.grad)
                return all(one is other or torch.allclose(one, other, atol=1e-5) for one, other in pairs)

            found[site, name] = told(made)
    return found


class HandsOn(nn.Module):
    """Hands its local copy to a plain computation, and says that its gradient is a summand."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        x = x * 1.0
        if self.mesh is None:
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class Rows(nn.Module):
    """Sums up by hand, in place."""

    def __init__(self, weight, mesh):
        super().__init__()
        self.mesh, self.weight = mesh, nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))

    def forward(self, x):
        x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
        y = F.linear(x, self.weight).to_local()
        dist.all_reduce(y)
        return y


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(-1, -2).contiguous()


def places(rank):
    """What ``got.full`` tells where placements are told by code, change by hand, or pass a module that turns them."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    weight, x = torch.arange(48.0).view(6, 8) / 10, torch.linspace(-1, 1, 16).view(2, 8)
    gradients = []
    for lies_on in (None, mesh):
        torch.manual_seed(0)
        first, hands, act = nn.Linear(8, 8), HandsOn(lies_on), nn.Tanh()
        last = Local(weight, mesh, 0) if lies_on else nn.Linear(8, 6, False)
        model = nn.Sequential(first, hands, act, last)
        if lies_on is None:
            with torch.no_grad():
                last.weight.copy_(weight)
        with gaff.capture(model, "1:grad_output", "2:grad_output") as got:
            model(x).square().sum().backward()
        gradients.append([got.full(site) for site in ("1:grad_output", "2:grad_output")])
    found["gradients"] = all(torch.allclose(one, other, atol=1e-4) for one, other in zip(*gradients, strict=True))
    with torch.no_grad():
        model = nn.Sequential(Rows(weight, mesh))
        with gaff.capture(model, "0") as got:
            model(x)
        found["summed"] = torch.allclose(got.full("0"), F.linear(x, weight), atol=1e-4)
        turned = parallelize_module(nn.Sequential(nn.Linear(4, 8), Turned()), mesh, {"0": ColwiseParallel()})
        with gaff.capture(turned, "1") as got:
            turned(torch.randn(4, 4))
        found["turned"] = told(lambda: got.full("1"))
    return found


class Dead(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.a(x))))


def one_value(rank):
    """A part of one value on one rank, and parts that are unlike with equal sums: every rank says the same."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for values in (None, ([1.0, 0, 0, 1], [0.0, 1, 1, 0])):
        torch.manual_seed(0)
        model = Dead()
        with torch.no_grad():
            if values is None:
                model.a.bias[:4] = -100.0  # the units of rank 0 are dead
            else:
                model.a.weight.zero_()
                model.a.bias.copy_(torch.tensor([*values[0], *values[1]]))
        parallelize_module(model, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
        with gaff.capture(model, "drop") as got:
            model(torch.randn(3, 4))
        found.append(told(lambda got=got: got.full("drop")))
        change = {"drop": edits.at(keep.heads(1, 4), edits.zero())}
        with gaff.edit(model, change) as edit:
            found.append(told(lambda model=model: model(torch.randn(3, 4)).shape))
            del edit
    return found


def bad_rows(rank, kind):
    """A NaN in the rows of one rank while the training is watched: how far each rank has come, and what is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    with gaff.watch(model, optimizer, out=f"{folders[0]}/run", every=1):
        for step in range(4):
            x = torch.ones(4, 6)
            if rank == 1 and step == 1:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    dist.barrier()
    return step, [(one.rule, one.rank, one.site, one.cause) for one in gaff.load(f"{folders[0]}/run").findings]


def origin(rank):
    """What ``find_nonfinite`` tells on the rank whose own rows are fine."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(3, 4)
    if rank == 1:
        x[0, 0] = float("nan")

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return gaff.find_nonfinite(step, model=model).cause


def uneven(rank):
    """Guarded inside ``join``, with more batches on one rank: the weights, and those of a bare run."""
    found = []
    for is_guarded in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with gaff.guard(model) if is_guarded else torch.enable_grad(), model.join():
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                model(torch.full((3, 4), float(step))).square().mean().backward()
                optimizer.step()
        found.append([one.detach().clone() for one in model.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def refusals(rank):
    """What is refused, by name."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignoring = copy.deepcopy(plain)
    fully_shard(ignoring, ignored_params=set(ignoring[1].parameters()))
    optimizer = torch.optim.SGD(ignoring.parameters(), 0.1)
    found = {"norms": told(lambda: gaff.sample_norms(ignoring))}
    with gaff.clip_gradients(optimizer, norm=0.1, model=ignoring):
        ignoring(torch.full((2, 4), rank + 1.0)).square().mean().backward()
        found["mixed"] = told(optimizer.step)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    found["localized"] = told(lambda: gaff.edit(model, {"0": edits.scale(2.0)}).attach())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found["clipped"] = told(lambda: gaff.clip_gradients(optimizer, norm=0.1))
    parallel = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    found["skip"] = told(lambda: gaff.edit(parallel, {"0": edits.skip(torch.ones(2, 4))}).attach())
    return found


class Region(nn.Module):
    """A checkpoint around a function that uses a weight by itself, beside the module that owns it."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.body(x)
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=self.use_reentrant)

    def body(self, x):
        return F.linear(self.a(F.linear(x, self.a.weight).tanh()).tanh(), self.a.weight)


def recomputed_regions(rank, kind):
    """By kind of checkpoint: whether gradients of an edited weight are those of one process without a checkpoint."""
    found = {}
    for use_reentrant in (False, True):
        both = []
        for region in (None, use_reentrant):
            torch.manual_seed(0)
            model, x = Region(region), torch.randn(3, 4).requires_grad_()
            if region is not None and kind == "fsdp2":
                fully_shard(model)
            if region is not None and kind == "tp":
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                for name, one in list(model.a.named_parameters()):
                    model.a.register_parameter(name, nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)])))
                given = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
            else:
                given = x
            with gaff.edit(model, {"a.weight:param": edits.scale(2.0)}):
                model(given).square().sum().backward()
            grads = [given.grad, model.a.weight.grad]
            both.append([one.full_tensor() if isinstance(one, DTensor) else one for one in grads])
        found[use_reentrant] = all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*both, strict=True))
    return found
