"""Custom Functions whose backward calls modules in an order, a number or with values of its own: no call is mistaken."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits
from gaff.errors import PlanError


class Solver(torch.autograd.Function):
    """Steps forward without a graph; backward runs ``replay(step, states)`` of its own."""

    @staticmethod
    def forward(ctx, step, replay, x, *parameters):
        states = [x]
        for _ in range(3):
            states.append(step(states[-1]))
        ctx.step, ctx.replay, ctx.states = step, replay, states
        return states[-1]

    @staticmethod
    def backward(ctx, gradient):
        return None, None, *ctx.replay(ctx.step, ctx.states, gradient)


def step_back(step, state, gradient):
    with torch.enable_grad():
        x = state.detach().requires_grad_()
        return torch.autograd.grad(step(x), [x, *step.parameters()], gradient)


def in_reverse(step, states, gradient):
    """The last step first, each with the state that it was given: an exact adjoint."""
    total = None
    for state in reversed(states[:-1]):
        gradient, *own = step_back(step, state, gradient)
        total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
    return gradient, *total


def elsewhere(step, states, gradient):
    """One step, at a point that the forward has not come by."""
    return step_back(step, states[-1], gradient)


def more_often(step, states, gradient):
    for _ in range(5):
        step(states[-1] * 0.99)
    return in_reverse(step, states, gradient)


class Net(nn.Module):
    def __init__(self, replay=None):
        super().__init__()
        torch.manual_seed(0)
        self.step = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.replay = replay

    def forward(self, x):
        if self.replay is not None:
            return Solver.apply(self.step, self.replay, x, *self.step.parameters())
        for _ in range(3):
            x = self.step(x)
        return x


def gradients(replay, change=None):
    model, x = Net(replay), torch.ones(2, 3, requires_grad=True)
    site = "step.0"
    with gaff.edit(model, change or {}) if change else gaff.capture(model, site + ":grad_output") as session:
        model(x).sum().backward()
    told = [session[f"{site}@{call}:grad_output"] for call in range(3)] if not change else []
    return told, x.grad, model.step[0].weight.grad, session


@pytest.mark.parametrize("replay", [in_reverse, more_often])
def test_calls_that_come_back_in_reverse_are_told_apart(replay):
    told, *bare, _ = gradients(replay)
    expected, *truth, _ = gradients(None)
    torch.testing.assert_close(bare, truth)
    torch.testing.assert_close(told, expected)


@pytest.mark.parametrize("call", range(3))
def test_an_edit_of_one_call_is_made_again_in_that_call(call):
    change = {f"step@{call}": edits.scale(3.0)}
    _, *got, _ = gradients(in_reverse, change)
    _, *truth, _ = gradients(None, change)
    torch.testing.assert_close(got, truth)


def test_a_call_with_other_values_is_no_repetition():
    told, *_, session = gradients(elsewhere)
    assert told == [None] * 3
    assert "nothing recomputed it" in str(session.receipt)
    with pytest.raises(PlanError, match="Sequential was called inside a backward pass, and its edits belong to"):
        gradients(elsewhere, {"step": edits.scale(3.0)})
