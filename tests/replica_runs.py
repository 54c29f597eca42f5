"""Trainings on two replicas under a guard, for ``tests/slow/test_guard_replicas.py``: what each rank found."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gaff


class Mask(nn.Module):
    def forward(self, scores, padding):
        return scores.masked_fill(padding[:, None, :], float("-inf"))


class Net(nn.Module):
    """Attention whose mask writes -inf, which its softmax heals; with ``counts`` it asks all how many tokens there are."""

    def __init__(self, *, counts):
        super().__init__()
        self.q, self.mask, self.head = nn.Linear(8, 8), Mask(), nn.Linear(8, 2)
        self.counts = counts

    def forward(self, x, padding):
        tokens = (~padding).sum().float()
        if self.counts:
            dist.all_reduce(tokens)
        scores = self.mask(self.q(x) @ x.transpose(1, 2), padding)
        return self.head((scores.softmax(-1) @ x).mean(1)) / tokens


class Task(nn.Module):
    """Holds the replicated net inside, as a LightningModule does."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, padding):
        return self.net(x, padding)


def found_by(rank, way):
    """Gradient norms of each step, and the reports; ``way``: "bare", "around", "inside", "counts"."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Net(counts=way == "counts"))
    model = Task(net) if way == "inside" else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    random, norms = torch.Generator().manual_seed(rank), []
    with contextlib.nullcontext() if way == "bare" else gaff.guard(model, action="warn") as guard:
        for step in range(4):
            x, padding = torch.randn(4, 5, 8, generator=random), torch.zeros(4, 5, dtype=torch.bool)
            if rank == 0 and step == 1:
                padding[0, 3:] = True
            if rank == 0 and step == 2 and way == "counts":
                x[0, 0, 0] = float("nan")
            optimizer.zero_grad()
            for part in range(2):
                with net.no_sync() if part == 0 else contextlib.nullcontext():
                    half = slice(2 * part, 2 * part + 2)
                    (model(x[half], padding[half]).square().mean() * 1e3).backward()
            norms.append(round(net.module.q.weight.grad.norm().item(), 5))
            optimizer.step()
    return norms, [] if guard is None else list(guard.reports)


class Centred(nn.Module):
    """Takes the mean over the batches of all processes off, by a collective that writes in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        h = self.layer(x)
        mean = h.detach().mean(0)
        dist.all_reduce(mean)
        return h - mean / dist.get_world_size()


def received_by(rank, way):
    """What ``gaff.find_nonfinite`` tells of a step that gets a NaN of rank 0: by "ddp", or in the "forward"."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 3)) if way == "ddp" else Centred()
    x = torch.randn(4, 6)
    if rank == 0:
        x[0, 0] = float("nan")
    return gaff.find_nonfinite(lambda: model(x).square().mean().backward(), model=model)
