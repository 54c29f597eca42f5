"""Lightning and transformers' Trainer with FSDP2 on two ranks: the numbers of one process with the same rows.

accelerate, through which the Trainer shards, takes CPUs for no devices to shard on; the script tells it otherwise.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import gaff

pytestmark = pytest.mark.slow

LIGHTNING = """
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


TRAINER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
import gaff

world, out = int(sys.argv[1]), sys.argv[2]
rank = int(os.environ.get("RANK", "0"))
torch.set_num_threads(1)
made = AcceleratorState.__init__

def make(self, *args, **options):
    made(self, *args, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = options.get("fsdp_plugin") or FullyShardedDataParallelPlugin(fsdp_version=2)

if world > 1:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    os.environ.update(FSDP_TRANSFORMER_CLS_TO_WRAP="GPT2Block")
    AcceleratorState.__init__ = make

told = {}

def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().tolist()

class Look(TrainerCallback):
    def on_train_begin(self, arguments, state, control, model=None, optimizer=None, **more):
        self.clipping = gaff.clip_gradients(optimizer.optimizer, norm=0.05)

    def on_step_begin(self, arguments, state, control, model=None, **more):
        if state.global_step == 1:
            self.asked = ["transformer.h.0", "transformer.h.1:grad_output", "transformer.h.1.mlp.c_fc.weight:grad"]
            self.session = self.got = gaff.capture(model, *self.asked).__enter__()
        elif state.global_step == 3:
            edits = {"transformer.h.0.mlp": gaff.edits.scale(0.5), "lm_head": gaff.edits.at(gaff.keep.channels(3), gaff.edits.zero())}
            self.session = gaff.edit(model, edits).__enter__()

    def on_step_end(self, arguments, state, control, **more):
        if state.global_step in (2, 4):
            self.session.__exit__(None, None, None)
        if state.global_step == 2:
            told["values"] = self.got[self.asked[0]].tolist()
            told["at_output"] = (self.got[self.asked[1]] / world).tolist()
            told["gradient"] = full(self.got[self.asked[2]])

    def on_train_end(self, arguments, state, control, model=None, **more):
        told["norms"] = [row.norm for row in self.clipping.audit.rows]
        told["weight"] = full(model.transformer.h[0].mlp.c_fc.weight)
        told["losses"] = [one["loss"] for one in state.log_history if "loss" in one]

torch.manual_seed(0)
size = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False))
rows = torch.randint(0, 64, (96, 12), generator=torch.Generator().manual_seed(1))
arguments = TrainingArguments(
    output_dir=out, per_device_train_batch_size=16 // world, max_steps=6, report_to=[], use_cpu=True, logging_steps=1,
    save_strategy="no", disable_tqdm=True, max_grad_norm=0.0, seed=0, learning_rate=1e-3,
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[Look()])
assert trainer.is_fsdp_enabled == (world > 1)
trainer.train()
assert (type(model.lm_head.weight).__name__ == "DTensor") == (world > 1)
with open(f"{out}-{rank}.json", "w") as file:
    json.dump(told, file)
"""


def run(folder, text, world, launcher=()):
    """What each rank told, and the record of the watched run."""
    script, out = folder / "train.py", folder / f"told{world}"
    script.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "gaff", "watch", "--every", "1", "--out", str(folder / f"run{world}"), "--"]
    told = subprocess.run(
        [*command, *(launcher if world > 1 else [sys.executable]), str(script), str(world), str(out)],
        env={**environment, "OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    ranks = [json.loads((folder / f"told{world}-{rank}.json").read_text()) for rank in range(world)]
    return ranks, gaff.load(folder / f"run{world}")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
STACKS = {
    "Lightning": (LIGHTNING, [sys.executable], True, ("body.0", "body.1", "body")),
    "Trainer": (TRAINER, TORCHRUN, False, ("transformer.h.0", "transformer.h.1.mlp", "lm_head")),
}


@pytest.mark.parametrize("stack", STACKS)
def test_two_ranks_have_the_numbers_of_one(tmp_path, stack):
    pytest.importorskip("pytorch_lightning" if stack == "Lightning" else "accelerate")
    text, launcher, by_turns, watched = STACKS[stack]
    (alone,), record = run(tmp_path, text, 1)
    ranks, spread = run(tmp_path, text, 2, launcher)
    for name in ("gradient", "norms", "weight"):
        for told in ranks:
            torch.testing.assert_close(torch.tensor(told[name]), torch.tensor(alone[name]))
    for name in ("values", "at_output"):  # rows of a batch go to the ranks by turns, or half by half
        rows = [torch.tensor(told[name]) for told in ranks]
        rows = torch.stack(rows, 1).flatten(0, 1) if by_turns else torch.cat(rows)
        torch.testing.assert_close(rows, torch.tensor(alone[name]))
    mean = torch.tensor([told["losses"] for told in ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(alone["losses"]))
    assert spread.ranks == [0, 1]
    assert spread.sites == record.sites
    for site in record.sites:
        if site.endswith((":param", ":grad", ":update")) or site in watched:
            one, two = (of.series(site, "rms", rank=rank) for of, rank in ((record, 0), (spread, "all")))
            assert list(one.steps) == list(two.steps)
            assert list(two.values) == pytest.approx(list(one.values), rel=1e-4), site
