"""The tasks and faults of ``train.py`` under loops that somebody else wrote: Trainer, Lightning, accelerate.

python stacks.py --stack trainer --task rows --fault lr-high --seed 1
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from diagnose.train import FAULTS, HEALTHY, TASKS, Task, change_model, loss_of  # a script: it finds its neighbour


class WithLoss(nn.Module):
    """What transformers' Trainer wants: a model that returns its loss."""

    def __init__(self, task, model):
        super().__init__()
        self.task, self.inner = task, model

    def forward(self, x, y):
        return {"loss": loss_of(self.task, self.inner, x, y)}


def trainer(task, model, optimizer, steps):
    from transformers import Trainer, TrainingArguments

    def joined(rows):
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=task.batch, use_cpu=True, report_to=[],
            save_strategy="no", remove_unused_columns=False, max_grad_norm=0.0, disable_tqdm=True, logging_steps=50,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        wrapped = WithLoss(task, model)
        Trainer(
            wrapped, given, data_collator=joined, train_dataset=task.train, optimizers=(optimizer, schedule)
        ).train()


def lightning(task, model, optimizer, steps):
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return loss_of(task, self.net, *batch)

        def configure_optimizers(self):
            return optimizer

    pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Lit(), DataLoader(task.train, batch_size=task.batch, shuffle=True, drop_last=True))  # fmt: skip


def accelerated(task, model, optimizer, steps):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(task.train, batch_size=task.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_of(task, model, x, y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step >= steps:
                break


STACKS = {"trainer": trainer, "lightning": lightning, "accelerate": accelerated}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stack", choices=STACKS, required=True)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--fault", choices=(*HEALTHY, *FAULTS), default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(options.seed)
    fault = options.fault
    task = Task(options.task, fault, options.seed)
    model = change_model(task)
    factor = {"lr-high": 300, "lr-low": 1e-5, "oddity-large-lr": 3}.get(fault, 1)
    decay = {"decay": 1.0, "oddity-weight-decay": 1e-3}.get(fault)
    owned = list(model.parameters())
    owned = owned[: len(owned) // 2] if fault == "forgotten-group" else owned
    more = {} if decay is None else {"weight_decay": decay}
    optimizer = task.optimizer_of([one for one in owned if one.requires_grad], lr=task.lr * factor, **more)
    if fault == "replaced-head":
        owner, name = task.head_at
        old = owner.get_submodule(name)
        parent = owner.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], nn.Linear(old.in_features, old.out_features))
    STACKS[options.stack](task, model, optimizer, options.steps)


if __name__ == "__main__":
    main()
