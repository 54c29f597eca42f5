"""A function that draws random numbers, or counts its calls, under a checkpoint: right, or an error, never a wrong gradient."""

import torch

import gaff
from traps.tools import Gaff
from zoo import Checkpointed


def trap(tool):
    model, x = Checkpointed(), torch.randn(2, 4, requires_grad=True)
    factors = iter([2.0, 5.0])
    try:
        with tool.changed(model, {"first.0": lambda t: t * next(factors)}):
            loss = model(x).pow(2).sum()
            loss.backward()
    except gaff.GaffError:
        return
    true = x.detach().clone().requires_grad_()
    model.second(torch.tanh(model.first[0](true) * 2.0)).pow(2).sum().backward()
    assert torch.allclose(x.grad, true.grad)


def test_gaff_is_right():
    trap(Gaff())
