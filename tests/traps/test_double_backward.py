"""Second-order gradients work and their values are those of a bare run."""

import torch
from torch import nn

import gaff


def penalty(model, x):
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    slope.pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_gradient_penalty_has_bare_bits():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(2, 3, requires_grad=True)
    bare = penalty(model, x)
    model.zero_grad()
    with gaff.capture(model, "**", "**:grad_output", "**:grad_input", "**:grad") as got:
        watched = penalty(model, x)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert not any(value.requires_grad for value in got.all("1:grad_output"))
