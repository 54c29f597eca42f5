"""A gradient penalty: what a differentiable backward pass made of a module's own nodes belongs to its share, too."""

import gc

import pytest
import torch
from torch import nn

import gaff


class Square(nn.Module):
    def forward(self, x):
        return x**2


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return torch.sigmoid(self.lin(x)) * x


class Residual(nn.Module):
    """The input of the block is used beside it, before and after, in ways that have second derivatives, too."""

    def __init__(self, block):
        super().__init__()
        self.pre, self.block = nn.Linear(3, 3), block

    def forward(self, x):
        h = torch.tanh(self.pre(x))
        return h**3 + self.block(h) * h.cos()


def of_the_input(model, x):
    out = model(x).sum()
    [first] = torch.autograd.grad(out, x, create_graph=True)
    (out + (first**2).sum()).backward()


def of_the_weights(model, x):
    out = model(x).sum()
    first = torch.autograd.grad(out, [model.pre.weight, x], create_graph=True)[0]
    (first**2).sum().backward()


def of_third_order(model, x):
    [first] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    [second] = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    (second**2).sum().backward()


def of_two_passes(model, x):
    out = model(x)
    [first] = torch.autograd.grad(out.sum(), x, create_graph=True)
    gc.collect()  # Python's objects of autograd nodes come and go
    [second] = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    gc.collect()
    (first + second).pow(2).sum().backward()


@pytest.mark.parametrize("penalty", [of_the_input, of_the_weights, of_third_order, of_two_passes])
@pytest.mark.parametrize("block", [Square, Gate, nn.SiLU])
def test_the_share_holds_second_derivatives(block, penalty):
    model = Residual(block()).double()
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    true = []
    handle = model.block.register_full_backward_hook(lambda module, got, given: true.append(got[0].detach().clone()))
    penalty(model, x)
    handle.remove()
    with gaff.capture(model, "block:grad_input") as got:
        penalty(model, x)
    events = got.all("block:grad_input")
    assert len(events) == len(true)
    for one, other in zip(events, true, strict=True):
        torch.testing.assert_close(one, other)


def test_looking_at_shares_of_second_order_changes_no_bit():
    model = Residual(Gate())
    x = torch.randn(2, 3, requires_grad=True)

    def gradients():
        model.zero_grad()
        x.grad = None
        of_the_input(model, x)
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    bare = gradients()
    with gaff.capture(model, "**:grad_input"):
        watched = gradients()
    assert all(map(torch.equal, bare, watched))
