"""autograd.grad with no .backward() tells gradients as well."""

import torch
from torch import nn

import gaff


def test_gradients_of_autograd_grad():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "0:grad_output", "0:grad_input") as got:
        (slope,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(got["0:grad_input"], slope)
    assert got["0:grad_output"].shape == (2, 3)
