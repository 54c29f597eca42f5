"""BatchNorm whose running statistics are not what it has seen, and BatchNorm whose are."""

import copy

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


class Net(nn.Sequential):
    """A class of the program's own: other models of it are followed from their first call on."""


def followed(tmp_path, follow, *, used=True):
    """A model, and a copy of it that ``follow(model, copy)`` brings up to date after each step, is evaluated by."""
    torch.manual_seed(0)
    model = Net(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    averaged = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(200, 8)
    y = x[:, :3].argmax(1)
    with gaff.watch(out=tmp_path / "run", every=5):
        for step in range(60):
            rows = torch.randint(0, 200, (32,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            follow(model, averaged)
            if step % 20 == 19 and used:
                with torch.no_grad():
                    F.cross_entropy(averaged(x), y)
    return [one for one in gaff.load(tmp_path / "run").findings if one.rule == "statistics_unfilled"]


@torch.no_grad()
def weights(model, averaged):
    for one, other in zip(model.parameters(), averaged.parameters(), strict=True):
        other.lerp_(one, 0.1)


def weights_by_data(model, averaged):
    for one, other in zip(model.parameters(), averaged.parameters(), strict=True):
        other.data.mul_(0.9).add_(one.data, alpha=0.1)


def weights_and_buffers(model, averaged):
    weights(model, averaged)
    for one, other in zip(model.buffers(), averaged.buffers(), strict=True):
        other.copy_(one)


@pytest.mark.parametrize("follow", [weights, weights_by_data])
def test_a_copy_whose_statistics_were_never_filled_is_told(tmp_path, follow):
    (found,) = followed(tmp_path, follow)
    assert "averaged is evaluated by a mean of 0 and a variance of 1 in all of its 1 BatchNorm" in found.message
    assert "those of model have seen" in found.message
    assert "buffers" in found.remedy


@pytest.mark.parametrize("follow", [weights_and_buffers, lambda model, averaged: None], ids=["buffers", "untrained"])
def test_a_copy_with_buffers_and_one_that_stays_as_it_was_are_right(tmp_path, follow):
    assert followed(tmp_path, follow) == []
