"""BatchNorm whose running statistics are not what it has seen, and BatchNorm whose are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff


def finding(tmp_path, norm, batches, epochs=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(200, 8)
    y = x[:, :3].argmax(1)
    with gaff.watch(out=tmp_path / "run", every=5):
        for _ in range(epochs):
            model.train()
            for _ in range(batches):
                rows = torch.randint(0, 200, (32,))
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(x), y)
    found = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "batch_norm_momentum"]
    return found[0].message if found else ""


def loaded(momentum):
    """As one that was trained elsewhere, whose statistics shall hardly move any more."""
    norm = nn.BatchNorm1d(16, momentum=momentum)
    norm.running_var.fill_(0.05)
    return norm


@pytest.mark.parametrize(
    ("norm", "batches", "told"),
    [
        (lambda: nn.BatchNorm1d(16, momentum=0.001), 40, "momentum 0.001 has seen 120 batches in training: 89% of"),
        (lambda: nn.BatchNorm1d(16, momentum=0.99), 40, "normalises by 99% of the last one in evaluation"),
        (lambda: nn.BatchNorm1d(16), 40, ""),
        (lambda: nn.BatchNorm1d(16, momentum=0.01), 150, ""),
        (lambda: nn.BatchNorm1d(16, momentum=None), 40, ""),
        (lambda: nn.BatchNorm1d(16, momentum=0.0), 40, ""),
        (lambda: nn.BatchNorm1d(16, momentum=0.001, track_running_stats=False), 40, ""),
        (lambda: loaded(0.001), 40, ""),
    ],
    ids=["too small", "turned around", "default", "small, and many batches", "average", "frozen", "none", "loaded"],
)
def test_running_statistics_that_are_not_what_was_seen_are_told(tmp_path, norm, batches, told):
    message = finding(tmp_path, norm(), batches)
    assert (told in message) if told else message == ""
