"""Gradients: what arrives at a module in the backward pass, of the value that passed, and of no other."""

import torch
import torch.nn.functional as F
from torch import nn

from traps.against.suite import close, refused, same
from traps.against.values import Branches, Cut, Shared
from zoo import Checkpointed


def square(y):
    return y.pow(2).sum()


def gradient_of(value, function):
    """What arrives at ``value`` when ``function`` of it is the loss, by bare torch."""
    value = value.detach().requires_grad_()
    return torch.autograd.grad(function(value), value)[0]


def trap_gradient_of_a_layer(tool):
    """The plain case: an output that one layer uses."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = gradient_of(model[0](x), lambda h: square(torch.tanh(h)))
    same(tool.gradients(model, ["0:grad_output"], square, x)["0:grad_output"], [true])


def trap_gradient_before_an_in_place_op(tool):
    """The gradient of the value that passed, though the next layer overwrites it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4)
    weights = torch.arange(4.0)
    true = gradient_of(F.linear(x, model[0].weight, model[0].bias), lambda h: torch.relu(h).mul(weights).sum())
    found = tool.gradients(model, ["0:grad_output"], lambda y: y.mul(weights).sum(), x)
    same(found["0:grad_output"], [true])


class Gated(nn.Module):
    """A linear layer of sequences is a view in torch; it is written to after another use."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 4)

    def forward(self, x):
        h = self.fc(x)
        gate = h.sigmoid()
        return F.relu(h, inplace=True) * gate


def trap_gradient_of_a_view_that_is_overwritten(tool):
    """An output with two uses, one of them in place."""
    model, x = Gated(), torch.randn(1, 3, 2)
    true = gradient_of(model.fc(x), lambda h: (torch.relu(h) * h.sigmoid()).sum())
    found = tool.gradients(model, ["fc:grad_output"], lambda y: y.sum(), x)
    close(found["fc:grad_output"], [true])


class WritesToAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.cut = nn.Linear(4, 4), Cut()

    def forward(self, x):
        y = self.lin(x)
        view = self.cut(y)
        view.mul_(5)
        return y


def trap_gradient_of_a_view_that_is_written_to(tool):
    """A view that is written to, for which torch has no gradient: that of the chain rule, or a refusal."""
    model, x = WritesToAView(), torch.randn(3, 4)
    true = torch.full((3, 2), 5.0)
    same(tool.gradients(model, ["cut:grad_output"], lambda y: y.sum(), x)["cut:grad_output"], [true])


class Forked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.lin(x)
        return self.one(h) + torch.tanh(self.two(h))


def trap_gradient_of_an_output_that_is_used_twice(tool):
    """An output that two layers use: the sum of what both bring back."""
    model, x = Forked(), torch.randn(2, 4)
    true = gradient_of(model.lin(x), lambda h: square(model.one(h) + torch.tanh(model.two(h))))
    close(tool.gradients(model, ["lin:grad_output"], square, x)["lin:grad_output"], [true])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        h = self.lin(x)
        return h + self.block(h)


def trap_share_of_a_residual_block(tool):
    """What a residual block passes back to its input: its own share, without that of the connection around it."""
    model, x = Residual(), torch.randn(2, 4)
    h = model.lin(x)
    arriving = gradient_of(h + model.block(h), square)
    true = gradient_of(h, lambda t: (model.block(t) * arriving).sum())
    close(tool.gradients(model, ["block:grad_input"], square, x)["block:grad_input"], [true])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x) * self.two(x)


def trap_gradient_of_what_came_in(tool):
    """The input of a module that uses it twice: the sum of both."""
    model, x = nn.Sequential(nn.Linear(4, 4), Twice()), torch.randn(3, 4)
    true = gradient_of(model[0](x), lambda h: square(model[1](h)))
    close(tool.gradients(model, ["1:input_grad"], square, x)["1:input_grad"], [true])


def trap_gradients_of_a_module_that_serves_twice(tool):
    """A layer that serves twice: each call its own gradient, in their order."""
    model, x = Shared(), torch.randn(2, 4)
    one = model.lin(x)
    true = [
        gradient_of(one, lambda h: square(model.lin(torch.tanh(h)))),
        gradient_of(model.lin(torch.tanh(one)), square),
    ]
    same(tool.gradients(model, ["lin:grad_output"], square, x)["lin:grad_output"], true)


def trap_two_backward_passes(tool):
    """``retain_graph=True``, and again: one gradient each, nothing added up."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = gradient_of(model[0](x), lambda h: square(torch.tanh(h)))
    same(tool.gradients(model, ["0:grad_output"], square, x, passes=2)["0:grad_output"], [true, true])


def trap_gradients_of_autograd_grad(tool):
    """``torch.autograd.grad``, with no ``backward`` anywhere."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    true = gradient_of(model[0](x), lambda h: square(torch.tanh(h)))
    same(tool.gradients(model, ["0:grad_output"], square, x, by_grad=x)["0:grad_output"], [true])


def _recomputed(tool, use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    true = gradient_of(model.first[0](x), lambda h: square(model.second(torch.tanh(h))))
    same(tool.gradients(model, ["first.0:grad_output"], square, x)["first.0:grad_output"], [true])


def trap_gradient_under_a_checkpoint(tool):
    """A layer inside an activation checkpoint."""
    _recomputed(tool, use_reentrant=False)


def trap_gradient_under_a_reentrant_checkpoint(tool):
    """A layer inside a reentrant checkpoint, whose first pass has no graph."""
    _recomputed(tool, use_reentrant=True)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.unused(x)
        return self.used(x)


def trap_output_that_nobody_uses(tool):
    """An output that nobody uses: no gradient, zeros, or a word about it, but no other number."""
    model, x, found = Unused(), torch.randn(2, 4), {}

    def ask():
        found.update(tool.gradients(model, ["unused:grad_output"], square, x))

    if not refused(ask):
        assert not any(one is not None and one.any() for one in found["unused:grad_output"]), "a gradient that is none"


def trap_layer_that_is_frozen(tool):
    """A frozen layer: the true gradient at its output, none, or a word about it; and it stays frozen."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    model[0].requires_grad_(False)
    true, found = gradient_of(model[0](x), lambda h: square(model[1](h))), {}

    def ask():
        found.update(tool.gradients(model, ["0:grad_output"], square, x))

    if not refused(ask):
        values = [one for one in found["0:grad_output"] if one is not None]
        close(values, [true] * len(values))
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True], (
        "other parameters are frozen"
    )


def trap_gradient_of_the_branch_that_ran(tool):
    """The gradient in the branch that the data chose."""
    model, x = Branches(), torch.ones(2, 4)
    true = gradient_of(model.one(x), square)
    same(tool.gradients(model, ["one:grad_output"], square, x)["one:grad_output"], [true])
