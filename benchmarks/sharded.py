"""What watching costs beside a training step of FSDP2 on two processes: wall time, medians of rank 0, interleaved."""

import contextlib
import os
import random
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gaff
from benchmarks.compiled import transformer
from benchmarks.harness import table

WAYS = {
    "FSDP2": lambda model, optimizer: contextlib.nullcontext(),
    "watched, every 10th step looked at": lambda model, optimizer: gaff.watch(model, optimizer, every=10),
    "watched, every step looked at": lambda model, optimizer: gaff.watch(model, optimizer, every=1),
}
STEPS = 10


def steps_of(mesh, watch):
    torch.manual_seed(0)
    model, x = transformer(blocks=6)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def run():
        with watch(model, optimizer):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    return run


def rank_main(rank, store, rounds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    ways = {name: steps_of(mesh, watch) for name, watch in WAYS.items()}
    times = {name: [] for name in ways}
    order = list(ways)
    shuffle = random.Random(0).shuffle  # alike on both ranks
    for number in range(rounds + 1):
        shuffle(order)
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            ways[name]()
            dist.barrier()
            if number:
                times[name].append((time.perf_counter() - began) / STEPS)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        table("Training step of a transformer of 6 blocks, FSDP2 on two processes", medians, base="FSDP2")
    dist.barrier()
    dist.destroy_process_group()


def prices(rounds=9):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (f"{folder}/store", rounds), nprocs=2)
