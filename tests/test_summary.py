"""A run in a few facts: duration, device, end, settings, and what watching cost."""

import json

import pytest
import torch
from torch import nn

import gaff
from gaff.record.summary import Cost, summary_of
from gaff.training.watch.pace import Pace


@pytest.fixture
def run(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.rand(3, 4)).square().mean().backward()
            optimizer.step()
    return tmp_path / "run"


def test_a_run_is_told_in_a_few_facts(run):
    told = summary_of(gaff.load(run))
    assert (told.steps, told.ended, told.has_failed) == (6, "ended", False)
    assert told.device.startswith("cpu (")
    assert 0 < told.step_s < told.seconds * 6
    settings = told.settings
    assert settings["optimizer"] == "AdamW"
    assert settings["optimizer, lr"] == "0.01"
    assert settings["optimizer, betas"] == "0.8, 0.9"
    assert settings["parameters of model"] == "58"
    assert settings["batch"] == "3"


@pytest.mark.parametrize(
    ("code", "told", "failed"),
    [(0, "exit code 0", False), (3, "exit code 3", True), (-9, "killed by SIGKILL", True), (-99, "killed by signal 99", True)],
)  # fmt: skip
def test_how_a_command_ended_is_told(run, code, told, failed):
    (run / "run.json").write_text(json.dumps({"version": 1, "code": code, "command": ["python", "train.py"]}))
    found = summary_of(gaff.load(run))
    assert (found.ended, found.has_failed) == (told, failed)
    assert found.settings["command"] == "python train.py"


def test_what_watching_cost_is_told_with_the_beginning_apart():
    assert str(Cost(0.0, 0.0, 0.0, None)) == "what watching took is not in the record"
    short = str(Cost(0.4, 1.0, 0.1, None))
    assert (
        short
        == "watching took 400 ms of processor time in 1 s (40.0%); the first looks of a run may take half a second"
    )
    long = str(Cost(1.0, 3700.0, 0.1, 0.009))
    assert long == "watching took 1 s of processor time in 1 h 1 min (0.0%), and 0.9% after the first five seconds"


def test_settings_of_all_groups_and_of_tensors_are_told(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 10.0}]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.5))
    with gaff.watch({"optimizer": model}, optimizer, out=tmp_path / "run", every=1):
        model(torch.rand(3, 4)).square().mean().backward()
        optimizer.step()
    told = summary_of(gaff.load(tmp_path / "run"))
    assert told.settings["optimizer"] == "Adam"
    assert told.settings["class of optimizer"] == "Sequential"
    assert told.settings["optimizer, lr"] == "0.5"
    assert told.settings["optimizer, group 1, lr"] == "10"
    assert told.settings["optimizer, groups"] == "2"
    assert str(told).startswith("1 step")


def test_the_steady_share_is_that_after_the_first_five_seconds():
    pace = Pace(0.01)
    assert pace.steady is None
    for step in range(20):  # half a second each, of which the first ten cost a fifth
        pace.stepped(step, 0.5, 0.1 if step < 12 else 0.005, False)
    assert pace.steady == pytest.approx(0.01)


@pytest.mark.slow
def test_a_dead_net_is_no_matter_of_weight_decay(tmp_path):
    """Weights without a gradient get nothing but decay, however small: that says nothing of the decay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.constant_(model[0].bias, -50.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.rand(16, 4)), torch.randint(0, 2, (16,))).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert "weight_decay_too_high" not in {one.rule for one in record.findings}
    assert record.verdict.name == "dead_units"
