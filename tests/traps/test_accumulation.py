"""Gradient accumulation: each backward's own contribution, not the running sum."""

import torch
from torch import nn

import gaff


def test_contributions_add_up_to_what_the_optimizer_sees():
    model = nn.Linear(3, 2)
    with gaff.capture(model, "weight:grad") as got:
        for _ in range(3):
            model(torch.randn(2, 3)).sum().backward()
    parts = got.all("weight:grad")
    assert len(parts) == 3
    assert torch.equal(parts[0] + parts[1] + parts[2], model.weight.grad)
