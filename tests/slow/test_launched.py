"""``gaff watch -- torchrun ...``: two processes, of which one is slow, or killed."""

import os
import subprocess
import sys

import pytest

import gaff

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
is_odd = dist.get_rank() == 1
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(30):
    if is_odd and sys.argv[1] == "slow":
        time.sleep(0.05)
    if is_odd and sys.argv[1] == "killed" and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def launch(folder, how):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "gaff", "watch", "--out", folder / "run", "--", *torchrun, script, how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return done, gaff.load(folder / "run")


def test_a_slow_rank_is_named(tmp_path):
    done, record = launch(tmp_path, "slow")
    assert done.returncode == 0, done.stderr
    assert record.ranks == [0, 1]
    [finding] = [one for one in record.findings if one.rule.startswith("rank_")]
    assert (finding.rule, finding.rank) == ("rank_slow", 1)
    assert "rank 1 begins its forward pass" in finding.message


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")  # on Linux it runs
def test_a_killed_rank_is_named_though_all_were_stopped(tmp_path):
    done, record = launch(tmp_path, "killed")
    assert done.returncode != 0
    [finding] = [one for one in record.findings if one.rule.startswith("rank_")]
    assert (finding.rule, finding.rank) == ("rank_lost", 1)
    assert "rank 1 ended first (" in finding.message  # its signal where torchrun did not ask before it was read
    assert "rank_lost" in done.stderr


PIPELINE = """
import copy
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
import gaff

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 4))
x, y = torch.randn(8, 8), torch.randn(8, 4)
alone, part = copy.deepcopy(whole), nn.Sequential(*whole[2 * rank : 2 * rank + 2])
schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=4, loss_fn=nn.functional.mse_loss)
with gaff.capture(part, "0", "0:grad_output", "0.weight:grad") as got:
    schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank else {}))
site = f"{2 * rank}"
with gaff.capture(alone, site, f"{site}:grad_output", f"{site}.weight:grad") as want:
    for rows, target in zip(x.chunk(4), y.chunk(4)):
        nn.functional.mse_loss(alone(rows), target).backward()
for port in ("", ":grad_output", ".weight:grad"):
    found, true = got.all("0" + port)[-4:], want.all(site + port)  # before them torch looks at shapes
    assert all(map(torch.allclose, found, true)), (rank, port)
assert torch.allclose(part[0].weight.grad * 4, alone[2 * rank].weight.grad)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_stage_of_a_pipeline_is_a_model_and_each_micro_batch_a_run(tmp_path):
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


SPAWNED = """
import sys
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        self.encoder = nn.Linear(4, 4)

    def __len__(self):
        return 24

    def __getitem__(self, at):
        with torch.no_grad():
            return self.encoder(torch.full((4,), float(at)))


def act(queue):
    with torch.no_grad():
        queue.put(nn.Linear(4, 4)(torch.ones(4)).sum().item())


if __name__ == "__main__":
    if sys.argv[1] == "actor":
        queue = mp.get_context("spawn").Queue()
        actor = mp.get_context("spawn").Process(target=act, args=(queue,))
        actor.start()
        queue.get()
        actor.join()
        batches = [torch.randn(6, 4) for _ in range(4)]
    else:
        batches = DataLoader(Rows(), batch_size=6, num_workers=1, multiprocessing_context="spawn")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("which", "processes"), [("actor", 2), ("workers", 1)])
def test_processes_that_only_call_a_model_do_not_stand_for_the_one_that_trains(tmp_path, which, processes):
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    command = [sys.executable, "-m", "gaff", "watch", "--out", tmp_path / "run", sys.executable, script, which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    record = gaff.load(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert len(record.scalar("loss")) == 4
    assert len(record.ranks) == processes
