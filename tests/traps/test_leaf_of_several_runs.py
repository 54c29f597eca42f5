"""A leaf that serves several runs: each backward's gradient belongs to its own run."""

import torch
from torch import nn

import gaff


def test_one_gradient_for_each_run():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        for factor in (1, 2, 3):
            (model(x) * factor).sum().backward()
    base = model[0].weight.sum(0)
    for run in range(3):
        assert torch.allclose(got.run(run)[":input_grad"], base * (run + 1))


def test_backwards_in_another_order():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        losses = [(model(x) * factor).sum() for factor in (1, 2)]
        for loss in reversed(losses):
            loss.backward()
    base = model[0].weight.sum(0)
    assert [torch.allclose(got.run(run)[":input_grad"], base * (run + 1)) for run in range(2)] == [True, True]


def test_one_backward_for_two_runs_is_told_once():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        (model(x).sum() + model(x).sum()).backward()
    told = [run for run in range(2) if _is_told(got, run)]
    assert len(told) == 1
    assert torch.allclose(got.run(told[0])[":input_grad"], 2 * model[0].weight.sum(0))


def _is_told(got, run):
    try:
        return got.run(run)[":input_grad"] is not None
    except gaff.ExactnessError:
        assert "one backward pass served several runs" in str(got.receipt)
        return False
