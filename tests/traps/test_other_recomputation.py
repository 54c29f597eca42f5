"""Custom Functions whose backward calls modules in an order, a number or with values of its own: no call is mistaken."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits
from gaff.engine import passed
from gaff.errors import ExactnessError, PlanError


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


class Signs(nn.Module):
    """A step whose last part returns the same for all calls: its arguments tell them apart."""

    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(3, 3), nn.Hardtanh()

    def forward(self, x):
        return x * 2 + self.act(self.lin(x) + 5)


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


def test_calls_whose_outputs_are_alike_are_told_apart_by_their_arguments():
    def run(replay):
        model = Net(replay)
        model.step = Signs()
        with gaff.capture(model, "step.act:grad_output") as got:
            model(torch.full((2, 3), 0.5, requires_grad=True)).square().sum().backward()
        return [got[f"step.act@{call}:grad_output"] for call in range(3)]

    torch.manual_seed(0)
    told = run(in_reverse)
    torch.manual_seed(0)
    torch.testing.assert_close(told, run(None))


class Reversible(torch.autograd.Function):
    """What came in is computed back from what goes out, up to rounding, and the last part comes first."""

    @staticmethod
    def forward(ctx, one, other, x, y, *parameters):
        y = y + one(x)
        x = x + other(y)
        ctx.parts = one, other
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx, dx, dy):
        (one, other), (x, y) = ctx.parts, ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            made = other(y)
            gy, *of_other = torch.autograd.grad(made, [y, *other.parameters()], dx)
            dy = dy + gy
            x = (x - made).detach().requires_grad_()
            gx, *of_one = torch.autograd.grad(one(x), [x, *one.parameters()], dy)
        return None, None, dx + gx, dy, *of_one, *of_other


class Pair(nn.Module):
    def __init__(self, is_reversible):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.is_reversible = is_reversible

    def forward(self, x, y):
        if self.is_reversible:
            return Reversible.apply(self.one, self.other, x, y, *self.one.parameters(), *self.other.parameters())
        y = y + self.one(x)
        return x + self.other(y), y


@pytest.mark.parametrize("part", ["one.0", "other.0"])
def test_values_that_are_computed_back_count_as_the_same(part):
    found = []
    for is_reversible in (True, False):
        model = Pair(is_reversible)
        torch.manual_seed(1)
        x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
        with gaff.capture(model, f"{part}:grad_output") as got:
            sum(model(x, y)).square().sum().backward()
        with gaff.edit(model, {part: edits.scale(0.5)}):
            x.grad = None
            sum(model(x, y)).square().sum().backward()
        found.append((got[f"{part}:grad_output"], x.grad))
    torch.testing.assert_close(*found)


def test_many_calls_take_no_longer_than_they_are_many():
    model = Net(in_reverse)
    seen = []
    original = passed.is_alike
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passed, "is_alike", lambda *given: seen.append(1) or original(*given))
        with gaff.capture(model, "step.0:grad_output"):
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert len(seen) <= 2 * 3


def test_an_edited_parameter_that_is_given_to_the_function_is_refused():
    with pytest.raises(PlanError, match="was given to a custom Function that computes with it again in its backward"):
        gradients(in_reverse, {"step.0.weight:param": edits.scale(3.0)})


def test_a_session_that_is_closed_before_backward_still_refuses_what_it_cannot_repeat():
    model, x = Net(elsewhere), torch.ones(2, 3, requires_grad=True)
    with gaff.edit(model, {"step": edits.scale(3.0)}):
        loss = model(x).sum()
    with pytest.raises(PlanError, match="its edits belong to a forward that cannot be told"):
        loss.backward()


class Forces(nn.Module):
    """Runs a backward pass of its own in its forward, inside a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inp, self.out, self.use_reentrant = nn.Linear(3, 3), nn.Linear(3, 1), use_reentrant

    def region(self, x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.out(self.inp(at).tanh()).square().sum()
            return x + torch.autograd.grad(energy, at, create_graph=True)[0]

    def forward(self, x):
        return checkpoint(self.region, x, use_reentrant=self.use_reentrant)


def test_an_edit_in_a_pass_of_a_checkpointed_region_is_refused():
    model, x = Forces(False), torch.ones(2, 3, requires_grad=True)
    with (
        pytest.raises(ExactnessError, match="it acts on a backward pass inside a checkpoint"),
        gaff.edit(model, {"inp:grad_output": edits.scale(3.0)}),
    ):
        model(x)
