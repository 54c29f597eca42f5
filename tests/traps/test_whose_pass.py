"""Tensors that are older than the runs which meet them: each gradient is told to the run whose pass brought it."""

import threading

import pytest
import torch
from torch import nn

import gaff
from gaff import edits

SITE = "0:input_grad"


def elsewhere(make):
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]


def long_chain(w):
    for _ in range(500):
        w = w * 1.0
    return w


def of_another_thread(w):
    return elsewhere(lambda: long_chain(w))


def stale_view(w):
    whole = w * 1.0
    part = whole[:, :3]
    whole.mul_(2)
    return part


@pytest.mark.parametrize("made", [of_another_thread, stale_view])
@pytest.mark.parametrize("which", [0, 1])
def test_what_both_runs_were_given_brings_the_gradient_of_one(made, which):
    torch.manual_seed(0)
    model, w = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    features = made(w)
    with gaff.capture(model, SITE) as got:
        outputs = [model(features), model(features)]
        outputs[which].sum().backward()
    assert [len(got.run(one).all(SITE)) for one in (0, 1)] == [which == 0, which == 1]
    bare, w.grad = w.grad, None
    features = made(w)
    with gaff.edit(model, {SITE: edits.scale(2.0)}):
        outputs = [model(features), model(features)]
        outputs[which].sum().backward()
    torch.testing.assert_close(w.grad, 2 * bare)


class Holding(nn.Module):
    """Works with what it was not given."""

    def __init__(self, features):
        super().__init__()
        self.features, self.inner = features, nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inner(self.features)) + x


@pytest.mark.parametrize("which", [0, 1])
def test_what_two_runs_only_hold(which):
    model = Holding(of_another_thread(torch.randn(2, 3, requires_grad=True)))
    with gaff.capture(model, "inner:input_grad") as got:
        outputs = [model(torch.ones(2, 3)), model(torch.ones(2, 3))]
        outputs[which].sum().backward()
    assert [len(got.run(one).all("inner:input_grad")) for one in (0, 1)] == [which == 0, which == 1]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.f(x), self.g(x)


def test_a_run_of_which_one_output_is_gone_still_has_its_pass():
    torch.manual_seed(0)
    model, x = Two(), torch.randn(1, 2, requires_grad=True)
    with gaff.capture(model, "f:input_grad") as got:
        first, second = model(x)
        first.sum().backward()
        del first
        model(x)
        second.sum().backward()
    assert [len(got.run(one).all("f:input_grad")) for one in (0, 1)] == [2, 0]
    x.grad = None
    only_later = edits.when(edits.scale(2.0), runs=[1])
    with gaff.edit(model, {gaff.maybe("f:input_grad"): only_later}):
        first, second = model(x)
        first.sum().backward()
        del first
        x.grad = None
        model(x)
        second.sum().backward()
    torch.testing.assert_close(x.grad, model.g.weight.sum(0, keepdim=True))


class Square(nn.Module):
    def forward(self, x):
        return x * x


@pytest.mark.parametrize("between", [0, 40])
def test_a_penalty_on_one_run_beside_the_loss_of_another_is_refused_for_the_first(between):
    """Also where so many runs have come between that some are forgotten."""
    model, x = nn.Sequential(Square()), torch.tensor([3.0], requires_grad=True)
    with gaff.capture(model, SITE) as got:
        first = model(x)
        (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        for _ in range(between):
            model(x).sum().backward()
        second = model(x)
        (slope.pow(2).sum() + second.sum()).backward()
    assert got.run(between + 1).all(SITE)[0].item() == 30
    with pytest.raises(gaff.ExactnessError, match="runs used this leaf, and nothing tells whose pass"):
        got.run(0).all(SITE)
