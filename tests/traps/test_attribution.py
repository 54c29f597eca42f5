"""Whose gradient it is: told by what the pass came by, not by which run was the last."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.fixture
def features(model):
    """What the second layer returned, as a hook of the user's collects it."""
    found = []
    model[1].register_forward_hook(lambda module, args, output: found.append(output))
    return found


def test_leaves_of_two_runs_with_a_loss_on_features(model, features):
    a, b = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    with gaff.capture(model, "0:input_grad") as got:
        model(a)
        model(b)
        (features[0] - features[1]).pow(2).sum().backward()
    one, other = got.all("0:input_grad")
    assert torch.equal(one, a.grad)
    assert torch.equal(other, b.grad)


def test_one_leaf_of_two_runs_with_a_loss_on_the_features_of_the_first(model, features):
    x = torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "0:input_grad") as got:
        model(x)
        model(x)
        features[0].sum().backward()
    assert torch.equal(got.run(0)["0:input_grad"], x.grad)
    assert got.run(1).all("0:input_grad") == []


def test_edits_of_leaves_of_two_runs_are_made(model, features):
    a, b = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    with gaff.edit(model, {"0:input_grad": edits.zero()}):
        model(a)
        model(b)
        (features[0] - features[1]).pow(2).sum().backward()
    assert not a.grad.any()
    assert not b.grad.any()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_an_edit_meant_for_one_of_two_runs_acts_once_on_their_total(model, is_leaf):
    x = torch.randn(2, 3, requires_grad=True)
    given = x if is_leaf else x * 1.0
    (model(given).sum() + model(given).sum()).backward()
    bare, x.grad = x.grad, None
    given = x if is_leaf else x * 1.0
    with gaff.edit(model, {"0:input_grad": edits.when(edits.scale(0.5), runs=[0])}):
        (model(given).sum() + model(given).sum()).backward()
    torch.testing.assert_close(x.grad, bare / 2)


def test_a_leaf_that_several_runs_met_without_a_mark_is_refused():
    class Passes(nn.Module):
        def forward(self, x):
            return x

    model, x = nn.Sequential(Passes(), nn.Linear(3, 1)), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "0:input_grad") as got:
        model(x)
        model(x)
        (x * 2).sum().backward()  # of no run
    with pytest.raises(gaff.ExactnessError, match="2 runs used this leaf"):
        got.run(0)["0:input_grad"]


def test_weights_with_a_loss_on_the_features_of_the_first_run(model, features):
    x = torch.randn(2, 3)
    with gaff.capture(model, "0.weight:grad") as got:
        model(x)
        model(2 * x)
        features[0].sum().backward()
    assert torch.equal(got.run(0)["0.weight:grad"], model[0].weight.grad)
    assert got.run(1).all("0.weight:grad") == []


def test_a_loss_on_a_weight_alone_is_of_no_run(model):
    x = torch.randn(2, 3)
    with gaff.capture(model, "0.weight:grad") as got:
        model(x)
        model(x)
        model[0].weight.pow(2).sum().backward()
    assert torch.equal(got.run(-1)["0.weight:grad"], model[0].weight.grad)


def test_a_tensor_that_is_written_to_by_one_with_grad_has_no_gradient_of_its_first_value():
    class Ones(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ones, self.lin = Ones(), nn.Linear(3, 3)

        def forward(self, x):
            y = self.ones(x)
            y.mul_(self.lin(x))
            return y

    model, x = Net(), torch.randn(1, 3)
    with gaff.capture(model, "ones:grad_output") as got:
        (model(x) * 2).sum().backward()
    assert got["ones:grad_output"] is None
    assert "what was written into it later does" in str(got.receipt)


class TurnsGradModeOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            side = self.side(x)
        return self.lin(x) + side * 0.5


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.pre, self.inner = nn.Linear(4, 4), inner

    def forward(self, x):
        h = self.pre(x)
        return checkpoint(self.inner, h, use_reentrant=True) + 10 * h


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("port", ["grad_output", "grad_input", "input_grad"])
def test_grad_mode_inside_a_reentrant_checkpoint(port, passes):
    model, x = Checkpointed(TurnsGradModeOn()), torch.randn(2, 4, requires_grad=True)
    with gaff.capture(model, f"inner.side:{port}", "pre:grad_output") as got:
        y = model(x).sum()
        for left in range(passes)[::-1]:
            y.backward(retain_graph=left > 0)
    side = torch.full((2, 4), 0.5)
    true = {
        "grad_output": side,
        "grad_input": side @ model.inner.side.weight,
        "input_grad": got.all("pre:grad_output")[0],
    }
    events = got.all(f"inner.side:{port}")
    assert len(events) == passes
    for event in events:
        torch.testing.assert_close(event, true[port])


def test_a_function_that_keeps_the_graph_it_makes_in_its_forward():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = module(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, gradient):
            return None, torch.autograd.grad(ctx.y, ctx.x, gradient)[0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return Keeps.apply(self.lin, x)

    model, x = Net(), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "lin:grad_output", "lin:grad_input") as got:
        model(x).sum().backward()
    assert torch.equal(got["lin:grad_output"], torch.ones(2, 3))
    assert torch.equal(got["lin:grad_input"], x.grad)


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("what", ["an earlier forward", "the parameter alone"])
def test_a_gradient_of_no_run_is_told_as_one_however_many_there_were(model, runs, what):
    x = torch.randn(2, 3)
    loss = model(x).sum()
    with gaff.capture(model, "0.weight:grad") as got:
        for _ in range(runs):
            model(x)
        (loss if what == "an earlier forward" else model[0].weight.pow(2).sum()).backward()
    assert torch.equal(got.run(-1)["0.weight:grad"], model[0].weight.grad)
    assert not any(got.run(run).all("0.weight:grad") for run in range(runs))
