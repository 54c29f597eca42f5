"""Schedules of learning rates: one that nobody steps, and one that is stepped beyond its end."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import gaff


def trained(tmp_path, make, *, steps_by="epoch", epochs=8, begins=0):
    torch.manual_seed(0)
    x = torch.randn(320, 6)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = make(optimizer)
    with gaff.watch(out=tmp_path / "run", every=1):
        for epoch in range(epochs):
            for given, label in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(given), label).backward()
                optimizer.step()
                if steps_by == "batch":
                    scheduler.step()
            if steps_by == "epoch" and epoch >= begins:
                scheduler.step()
    return gaff.load(tmp_path / "run").verdict


def found_in(tmp_path):
    return {one.rule for one in gaff.load(tmp_path / "run").findings}


@pytest.mark.slow
@pytest.mark.parametrize("steps_by", ["epoch", "nobody"])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 30),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
            [3],
        ),
    ],
    ids=["StepLR", "cosine", "sequential"],
)
def test_a_schedule_that_nobody_steps(make, steps_by, tmp_path):
    told = trained(tmp_path, make, steps_by=steps_by)
    assert (told.name == "schedule_not_stepped") is (steps_by == "nobody")
    if steps_by == "nobody":
        assert told.state == "suspicious"
        assert "has made no step in" in told.cause


@pytest.mark.slow
def test_a_schedule_that_begins_later(tmp_path):
    told = trained(tmp_path, lambda optimizer: lr_scheduler.StepLR(optimizer, 30), begins=4, epochs=9)
    assert told.name != "schedule_not_stepped"


@pytest.mark.slow
@pytest.mark.parametrize("steps_by", ["epoch", "batch"])
def test_a_schedule_of_epochs_that_is_stepped_by_batches(steps_by, tmp_path):
    told = trained(tmp_path, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8), steps_by=steps_by)
    assert ("schedule_over" in found_in(tmp_path)) is (steps_by == "batch")
    assert told.state == "healthy"  # some mean it


@pytest.mark.slow
def test_one_that_waits_for_another(tmp_path):
    def make(optimizer):
        make.kept = lr_scheduler.StepLR(optimizer, 100)
        return lr_scheduler.LinearLR(optimizer, total_iters=4)

    assert trained(tmp_path, make).name != "schedule_not_stepped"
