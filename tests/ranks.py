"""Runs a function in several processes that talk to each other by gloo, and gathers what each of them found."""

import faulthandler
import os
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LONGEST_S = 900.0  # of all that a rank does
LONGEST = timedelta(seconds=120)  # of waiting for another rank


def of_ranks(function, world, *arguments):
    """By rank: what ``function(rank, *arguments)``, which spawned processes can import, returned."""
    finished = torch.multiprocessing.get_context("spawn").Barrier(world)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_main, (function, world, folder, finished, arguments), nprocs=world)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _main(rank, function, world, folder, finished, arguments):
    warnings.simplefilter("ignore")
    faulthandler.enable()  # where it is killed
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)  # where it hangs, rather than for ever
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LONGEST)
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    finished.wait()  # gloo aborts a process whose peer goes away while it still talks
    os._exit(0)  # and now and then one that ends
