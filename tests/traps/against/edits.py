"""Edits: the model computes, and learns, as if the changed value had passed there."""

import itertools

import torch
from torch import nn

from traps.against.gradients import gradient_of, square
from traps.against.suite import Cannot, close, must_be_told, refused, same
from traps.against.values import Inside, Shared, Skips
from zoo import Checkpointed


def half(value):
    return value * 0.5


def trap_edit_of_an_output(tool):
    """The plain case: half of what a layer returned."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = torch.tanh(model[0](x) * 0.5)
    same([tool.changed(model, {"0": half}, x)], [true])


def trap_model_after_an_edit(tool):
    """Afterwards the model computes what it did before."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = model(x)
    tool.changed(model, {"0": half}, x)
    same([model(x)], [true])


def trap_edit_before_an_in_place_op(tool):
    """The next layer overwrites what the edit returned."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(2, 4)
    true = model[2](torch.relu(model[0](x) * 0.5))
    same([tool.changed(model, {"0": half}, x)], [true])


def trap_gradient_through_an_edit(tool):
    """Parameters before the edit learn through it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = torch.autograd.grad(square(torch.tanh(model[0](x) * 0.5)), model[0].weight)[0]
    tool.changed(model, {"0": half}, x, loss=square)
    close([model[0].weight.grad], [true])


def _recomputed(tool, use_reentrant, change, factor):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    true = gradient_of(x, lambda h: square(model.second(torch.tanh(model.first[0](h) * factor))))
    tool.changed(model, {"first.0": change}, x, loss=square)
    close([x.grad], [true])


def trap_edit_under_a_checkpoint(tool):
    """Under a checkpoint the recomputation is edited, too: gradients are those of the edited model."""
    _recomputed(tool, False, lambda value: value * 3, 3)


def trap_edit_under_a_reentrant_checkpoint(tool):
    """Under a reentrant checkpoint, too, gradients are those of the edited model."""
    _recomputed(tool, True, lambda value: value * 3, 3)


def _after(tool, use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    true = gradient_of(x, lambda h: square(model.second(torch.tanh(model.first[0](h) * 3))))
    square(tool.changed(model, {"first.0": lambda value: value * 3}, x)).backward()
    close([x.grad], [true])


def trap_backward_after_the_edit_was_closed(tool):
    """A function returns the loss of an edited, checkpointed model; its caller calls backward."""
    _after(tool, False)


def trap_edit_that_draws_numbers_under_a_checkpoint(tool):
    """An edit that draws torch's random numbers under a checkpoint: the recomputation draws the same."""
    model, x = Checkpointed(False), torch.randn(2, 4, requires_grad=True)
    torch.manual_seed(1)
    factor = 1 + torch.rand(())
    true = gradient_of(x, lambda h: square(model.second(torch.tanh(model.first[0](h) * factor))))
    torch.manual_seed(1)
    tool.changed(model, {"first.0": lambda value: value * (1 + torch.rand(()))}, x, loss=square)
    close([x.grad], [true])


def trap_edit_with_a_state_of_its_own_under_a_checkpoint(tool):
    """An edit that is another at each call, which torch forbids under a checkpoint: that of the forward, or a refusal."""
    model, x = Checkpointed(False), torch.randn(2, 4, requires_grad=True)
    true = gradient_of(x, lambda h: square(model.second(torch.tanh(model.first[0](h) * 2.0))))
    factors = itertools.count(2.0, 3.0)
    if not refused(lambda: tool.changed(model, {"first.0": lambda value: value * next(factors)}, x, loss=square)):
        close([x.grad], [true])


def trap_edit_of_the_second_call_alone(tool):
    """A layer that serves twice, changed at its second call."""
    model, x = Shared(), torch.randn(2, 4)
    true = model.lin(torch.tanh(model.lin(x))) * 0.5
    same([tool.changed(model, {"lin@1": half}, x)], [true])


def trap_edit_of_every_call(tool):
    """A layer that serves twice, changed wherever it is called."""
    model, x = Shared(), torch.randn(2, 4)
    true = model.lin(torch.tanh(model.lin(x) * 0.5)) * 0.5
    same([tool.changed(model, {"lin": half}, x)], [true])


def trap_edit_of_a_path_that_is_not_there(tool):
    """A name with a typing error."""
    model, x = Skips(), torch.ones(2, 4)
    must_be_told(lambda: tool.changed(model, {"usde": half}, x), "usde")


def trap_edit_that_touches_nothing(tool):
    """A module that is never called: the edit changed nothing, and the tool says so."""
    model, x = Skips(), torch.ones(2, 4)
    must_be_told(lambda: tool.changed(model, {"skipped": half}, x), "skipped")


def trap_edit_inside_a_dict(tool):
    """A module that returns a dict, of which one entry is changed."""
    model = Inside(lambda y: {"rest": y * 2, "hidden": y}, lambda out: out["hidden"] + out["rest"])
    x = torch.randn(2, 4)
    h = model.inner.lin(x)
    true = (h * 0.5 + h * 2) * 2
    same([tool.changed(model, {"inner[hidden]": half}, x)], [true])


def trap_edit_inside_somebody_elses_code(tool):
    """A function that calls the model several times sees the edited model."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = sum(torch.tanh(model[0](x * scale) * 0.5) for scale in (1, 2))
    same([tool.changed_during(model, {"0": half}, lambda: sum(model(x * scale) for scale in (1, 2)))], [true])


def trap_edit_of_a_model_that_is_compiled_already(tool):
    """``torch.compile`` has compiled the model, which has run; the edit still acts, or the tool refuses."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = torch.tanh(model[0](x) * 0.5)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    try:
        found = tool.changed_during(model, {"0": half}, lambda: compiled(x))
    except Cannot:
        found = tool.changed(compiled, {"0": half}, x)
    close([found], [true])


def trap_edit_that_raises(tool):
    """An error in the function gets out, and the model is as before."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = model(x)

    def fails(value):
        raise ValueError("the function's own")

    assert refused(lambda: tool.changed(model, {"0": fails}, x)), "the error was lost"
    same([model(x)], [true])


class Energy(nn.Module):
    """A force: the forward itself differentiates."""

    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.out(torch.tanh(self.lin(x) * self.factor)).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    factor = 1.0


def trap_edit_in_a_model_that_differentiates(tool):
    """Second derivatives through an edit: the parameters' gradients are those of the edited model."""
    model, x = Energy(), torch.randn(2, 4)
    model.factor = 0.5
    true = torch.autograd.grad(square(model(x)), model.lin.weight)[0]
    model.factor = 1.0
    tool.changed(model, {"lin": half}, x, loss=square)
    close([model.lin.weight.grad], [true])
