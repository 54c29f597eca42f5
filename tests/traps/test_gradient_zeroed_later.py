"""A captured parameter gradient survives zero_grad and accumulation in place."""

import torch
from torch import nn

import gaff


def test_the_gradient_of_one_backward_stays_what_it_was():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with gaff.capture(model, "weight:grad") as got:
        model(x).sum().backward()
        first = model.weight.grad.clone()
        model(x).pow(2).sum().backward()
        model.weight.grad.zero_()
    one, two = got.all("weight:grad")
    assert torch.equal(one, first)
    y = nn.functional.linear(x, model.weight, model.bias)
    true = torch.autograd.grad(y.pow(2).sum(), model.weight)[0]
    assert torch.equal(two, true)
