"""Under GradScaler gradients are those that passed: scaled."""

import torch
from torch import nn

import gaff


def test_scaled_gradients_are_shown_as_they_are():
    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gaff.capture(model, "weight:grad") as got:
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        unscaled = model.weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(got["weight:grad"], unscaled * 1024)
