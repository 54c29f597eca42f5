"""A session kept open over many steps does not pile up dead gradient hooks."""

import torch
from torch import nn

import gaff


def test_hooks_of_dead_graphs_are_forgotten():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(1, 2)
    with gaff.capture(model, "0:grad_output", "1:grad_input", last=1) as got:
        for _ in range(2000):
            model(x).sum().backward()
        assert len(got._session._wiring.gradients._armed) < 1500
    assert len(got.all("0:grad_output")) == 1
