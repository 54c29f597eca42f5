"""Lightning's ModelParallelStrategy with FSDP2 on two ranks: the numbers of one process with the same rows."""

import json
import os
import subprocess
import sys

import pytest
import torch

import gaff

pytest.importorskip("pytorch_lightning")

SCRIPT = """
import json, sys, warnings
from contextlib import nullcontext
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
import gaff

world, out = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
told = {"losses": []}

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def configure_model(self):
        if world > 1:
            for one in (self.body[0], self.body[2], self.body):
                fully_shard(one, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, at):
        x, y = (one[self.global_rank::world] for one in batch)
        asked = ["body.0", "body.1:grad_output", "body.2.weight:grad"]
        if at == 1:
            self.got = gaff.capture(self, *asked).__enter__()
        if at == 2:
            self.got.__exit__(None, None, None)
            told["values"] = self.got["body.0"].tolist()
            told["at_output"] = (self.got["body.1:grad_output"] / world).tolist()
            told["gradient"] = full(self.got["body.2.weight:grad"])
        edits = {"body.1": gaff.edits.scale(0.5), "body.0": gaff.edits.at(gaff.keep.channels(3), gaff.edits.zero())}
        with gaff.edit(self, edits) if at == 3 else nullcontext():
            loss = nn.functional.cross_entropy(self.body(x), y)
        told["losses"].append(float(loss))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        self.clipping = gaff.clip_gradients(optimizer, norm=0.05)
        return optimizer

    def on_fit_end(self):
        told["norms"] = [row.norm for row in self.clipping.audit.rows]
        told["weight"] = full(self.body[0].weight)

def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().tolist()

if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(1)), torch.arange(96) % 4)
    strategy = ModelParallelStrategy(world, 1, process_group_backend="gloo") if world > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=16))
    with open(f"{out}-{trainer.global_rank}.json", "w") as file:
        json.dump(told, file)
"""


def run(folder, world):
    """What each rank told, and the record of the watched run."""
    script, out = folder / "train.py", folder / f"told{world}"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "gaff", "watch", "--every", "1", "--out", str(folder / f"run{world}"), "--"]
    told = subprocess.run(
        [*command, sys.executable, str(script), str(world), str(out)],
        env={**environment, "OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    return [json.loads((folder / f"told{world}-{rank}.json").read_text()) for rank in range(world)], gaff.load(
        folder / f"run{world}"
    )


def test_two_ranks_have_the_numbers_of_one(tmp_path):
    (alone,), record = run(tmp_path, 1)
    ranks, spread = run(tmp_path, 2)
    for name in ("gradient", "norms", "weight"):
        for told in ranks:
            torch.testing.assert_close(torch.tensor(told[name]), torch.tensor(alone[name]))
    for name in ("values", "at_output"):  # rows of a batch go to the ranks by turns
        rows = torch.stack([torch.tensor(told[name]) for told in ranks], 1).flatten(0, 1)
        torch.testing.assert_close(rows, torch.tensor(alone[name]))
    mean = torch.tensor([told["losses"] for told in ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(alone["losses"]))
    assert spread.ranks == [0, 1]
    assert spread.sites == record.sites
    for site in record.sites:
        if site.endswith((":param", ":grad", ":update")) or site in ("body.0", "body.1", "body"):
            one, two = (of.series(site, "rms", rank=rank) for of, rank in ((record, 0), (spread, "all")))
            assert list(one.steps) == list(two.steps)
            assert list(two.values) == pytest.approx(list(one.values), rel=1e-4), site
