"""Gradients of a module called twice are told apart by their forward call."""

import torch

import gaff
from traps.against.suite import same
from traps.against.values import Shared


def gradients(model, x):
    """Of both calls, by retained gradients."""
    one = model.lin(x)
    one.retain_grad()
    two = model.lin(torch.tanh(one))
    two.retain_grad()
    two.pow(2).sum().backward()
    return [one.grad, two.grad]


def test_each_call_can_be_addressed():
    model, x = Shared(), torch.randn(2, 4)
    true = gradients(model, x)
    with gaff.capture(model, "lin:grad_output") as got:
        model(x).pow(2).sum().backward()
    same([got["lin@0:grad_output"], got["lin@1:grad_output"]], true)
