import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import digest, digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank, world, file, finished):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)
    x, y = digits()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(15):
        chosen = torch.randint(0, len(x), (16,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    if rank == 0:
        print(digest(model))
    finished.wait()  # gloo aborts a process whose peer goes away while it still talks
    dist.destroy_process_group()
    finished.wait()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        finished = mp.get_context("spawn").Barrier(2)
        mp.spawn(work, (2, os.path.join(folder, "meet"), finished), nprocs=2)
