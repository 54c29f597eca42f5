"""What one rank does in runs in which processes differ: importable, so that processes can be spawned with it."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gaff
from gaff.training.watch.slips import is_loaded_with_itself


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def uneven_updates(rank, out):
    """The true rms of each update of a weight of which one process holds two rows, the other a third, steeper one."""
    torch.manual_seed(0)
    model = nn.Linear(20_000, 3, bias=False)
    fully_shard(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    slope = torch.tensor([1.0, 1.0, 20.0])
    with gaff.watch(model, optimizer, out=out, every=1):
        for step in range(3):
            x = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(x) * slope).square().mean().mul(1e-4).backward()
            before = full(model.weight)
            optimizer.step()
            found.append((full(model.weight) - before).square().mean().sqrt().item())
    return found


def half_of_the_rows(rank, out):
    """Trains an embedding of which only the rows in the first process's part are ever asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
    for unit in (*model, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with gaff.watch(model, optimizer, out=out, every=1):
        for step in range(30):
            x = torch.randint(0, 18, (8, 6), generator=torch.Generator().manual_seed(2 * step + rank))
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), (x * 3 + 1).flatten() % 18).backward()
            optimizer.step()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.expert, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = F.gelu(self.inp(x))
        return self.out(h + self.expert(h))


def meant_to_differ(rank, kind, out):
    """Norms of the gradients of the first step, by parameter: of an expert of each rank's own, or averaged weights."""
    torch.manual_seed(0)
    model = Experts()
    if kind == "own expert":
        torch.manual_seed(10 + rank)
        model.expert.reset_parameters()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight", "expert.bias"])
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
    every = 4 if kind == "averaged unseen" else 1
    averager = PeriodicModelAverager(period=4 if every == 4 else 5, warmup_steps=0)
    generator, norms = torch.Generator().manual_seed(rank), []
    with gaff.watch(replica, optimizer, out=out, every=every):
        for _ in range(18):
            x = torch.randn(8, 6, generator=generator) * (1 + rank)
            optimizer.zero_grad()
            if kind in ("own expert", "one moves"):
                F.mse_loss(replica(x), x[:, :3]).backward()
            else:
                with replica.no_sync():
                    F.mse_loss(replica(x), x[:, :3]).backward()
            norms.append({name: one.grad.norm().item() for name, one in model.named_parameters()})
            optimizer.step()
            if kind.startswith("averaged"):
                averager.average_parameters(replica.parameters())
            elif kind.startswith("one") and rank == 1:
                with torch.no_grad():
                    model.out.bias.add_(0.1)
    return norms[0]


def partial_loss(rank, out):
    """Trains with a loss of which each process has a summand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer, placed = torch.optim.SGD(model.parameters(), lr=0.01), []
    with gaff.watch(model, optimizer, out=out, every=1):
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            placed.append(any(one.is_partial() for one in loss.placements))
            optimizer.step()
    return placed


def put_off(rank):
    """What sessions say of gradients that FSDP2 has not reduced yet, and the gradient that training goes on with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for unit in (*model, model):
        fully_shard(unit)
    x, site, found = torch.randn(3, 4), "0.weight:grad", {}

    def backward(*, is_reduced):
        model.set_requires_gradient_sync(is_reduced)
        model(x).square().sum().backward()

    with gaff.capture(model, gaff.maybe(site)) as got:
        backward(is_reduced=False)
    found["put off"] = got[site], str(got.receipt)
    for name, session in (
        ("capture", lambda: gaff.capture(model, site)),
        ("edit", lambda: gaff.edit(model, {site: gaff.edits.zero()})),
    ):
        try:
            with session():
                raise AssertionError("opened")
        except gaff.PlanError as error:
            found[name] = str(error)
    backward(is_reduced=True)
    found["both"] = full(model[0].weight.grad)
    model.zero_grad()
    backward(is_reduced=True)
    found["one"] = full(model[0].weight.grad)
    return found


def spread_groups(rank):
    """Adaptive clipping of a weight whose units lie across the parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 9, 3, groups=3))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gaff.clip_gradients(optimizer, model=model, adaptive=1e-3).__enter__()
    except gaff.PlanError as error:
        return str(error)
    return "opened"


def kept_beside_gloo(rank):
    """Whether what is kept shares the memory of the value, and holds what that was."""
    model, outputs = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    handle = model[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    with gaff.capture(model, "0") as got:
        model(torch.ones(2, 4))
    handle.remove()
    [value] = outputs
    return torch._C._is_cow_tensor(value), torch.equal(got["0"], value)


def two_stages(rank, out):
    """A pipeline of two stages whose modules have the same names, by hand; the loss of the last stage at each step."""
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator, told = torch.Generator().manual_seed(1), []
    with gaff.watch(out=out, every=1):
        for _ in range(24):
            x = torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            if rank == 0:
                made = stage(x)
                dist.send(made.detach(), 1)
                back = torch.empty_like(made)
                dist.recv(back, 1)
                made.backward(back)
            else:
                given = torch.empty(16, 8)
                dist.recv(given, 0)
                loss = nn.functional.cross_entropy(stage(given.requires_grad_()), x.argmax(1))
                loss.backward()
                told.append(loss.item())
                dist.send(given.grad, 0)
            optimizer.step()
    return told


def one_probes(rank, out):
    """DistributedDataParallel; between epochs the first process alone fits something else."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(out=out, every=1):
        for _ in range(2):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 8)).square().sum().backward()
                optimizer.step()
            if rank == 0:
                probe = nn.Linear(16, 4)
                own = torch.optim.Adam(probe.parameters())
                for _ in range(4):
                    own.zero_grad()
                    probe(torch.randn(8, 16)).sum().backward()
                    own.step()
            dist.barrier()


def two_models(rank, out):
    """DistributedDataParallel of two models with an optimizer each; the second makes every third step."""
    torch.manual_seed(0)
    first, second = (DistributedDataParallel(nn.Linear(6, 6)) for _ in range(2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (first, second)]
    generator = torch.Generator().manual_seed(rank)
    with gaff.watch({"D": first, "G": second}, out=out, every=1):
        for step in range(12):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                if model is second and step % 3 < 2:
                    continue
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=generator)).square().mean().backward()
                optimizer.step()


class Encoder(nn.Module):
    """Is trained by a method that FSDP2 knows as another forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def encode(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.encode(x))


def another_forward(rank):
    """Norms of a gradient bare, halved, and captured, where only such a method is called, from the first step on."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))

    def norm(tensor):
        return full(tensor).norm().item()

    def step(model):
        model.zero_grad()
        model.encode(x).sum().backward()
        return norm(model.a.weight.grad)

    def made():
        torch.manual_seed(0)
        model = Encoder()
        fully_shard(model.a)
        fully_shard(model)
        register_fsdp_forward_method(model, "encode")
        return model

    true = step(made())
    model = made()
    with gaff.edit(model, {"a.weight:grad": gaff.edits.scale(0.5)}):
        halved = [step(model) for _ in range(2)]
    model = made()
    with gaff.capture(model, "a.weight:grad") as got:
        step(model)
    return true, halved, norm(got["a.weight:grad"])


def limited_beside_a_scaler(rank):
    """What a step changes where one process alone holds elements of a gradient that are not finite, in a program whose
    GradScaler is for something else; and whether a state that was never copied, of parts, is told as nothing."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer, other = torch.optim.SGD(model.parameters(), 1.0), nn.Parameter(torch.zeros(1))
    before = model.weight.full_tensor().clone()
    with gaff.clip_gradients(optimizer, value=1.0, when="backward", nonfinite="zero", model=model):
        torch.amp.GradScaler("cpu").scale(other.sum())
        (model(torch.ones(1, 4)) * torch.tensor([math.inf, 1e6, 0.5, 0.25])).sum().backward()
        optimizer.step()
    return (model.weight.full_tensor() - before)[:, 0].tolist(), is_loaded_with_itself(model, model.state_dict())


def wrapped(rank, how, out):
    """Replicas of which rank 1's drift apart; DistributedDataParallel comes late, or around what is watched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with gaff.watch(out=out, every=1) if how == "late" else nullcontext():
        if how == "late":
            model(torch.randn(2, 8)).sum().backward()
        replicated = nn.parallel.DistributedDataParallel(model)
        run = nn.Sequential(replicated) if how == "inside another" else replicated
        watched = {"around": model, "inside another": run, "late": None}[how]
        with nullcontext() if watched is None else gaff.watch(watched, out=out, every=1):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            data = torch.Generator().manual_seed(rank)
            for step in range(10):
                x = torch.randn(16, 8, generator=data)
                optimizer.zero_grad()
                (run(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                if step == 5 and rank:
                    with torch.no_grad():
                        model[0].weight.mul_(1.5)


def sharded_late(rank, out):
    """The norm of all gradients at each step, of a model that ran once before it was spread over the processes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    norms = []
    with gaff.watch(out=out, every=1):
        model(torch.randn(2, 8)).sum().backward()
        model.zero_grad()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            norms.append(math.hypot(*(one.grad.full_tensor().norm().item() for one in model.parameters())))
            optimizer.step()
    return norms


def kept_batches(rank, out):
    """A NaN in the batch of rank 1 at step 3."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=out, every=1, keep_batch=True):
        for step in range(4):
            x = torch.randn(16, 8)
            if step == 3 and rank:
                x[2, 1] = math.nan
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
