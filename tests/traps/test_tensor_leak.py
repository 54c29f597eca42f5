"""A captured gradient does not keep the graph alive."""

import weakref

import torch
from torch import nn

import gaff


def test_activations_are_freed_with_the_loss():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    alive = []
    model[0].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    with gaff.capture(model, "0:grad_output", "0:grad_input", "1:input_grad") as got:
        y = model(x)
        y.sum().backward()
        del y
        assert alive[0]() is None
    assert got["0:grad_output"] is not None
