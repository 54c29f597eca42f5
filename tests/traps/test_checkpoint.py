"""Under activation checkpointing nothing is captured twice, and gradients are there, in both variants."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from zoo import Checkpointed

SITES = ["first", "second.0", "first.0:grad_output", "second:grad_output", "second.0:grad_input", "first.0.weight:grad"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_values_and_gradients_are_those_of_the_plain_model(use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    plain = nn.Sequential(copy.deepcopy(model.first), copy.deepcopy(model.second))
    names = {"first": "0", "second": "1"}
    true_sites = [
        names[site.split(".")[0].split(":")[0]] + site.removeprefix("first").removeprefix("second") for site in SITES
    ]
    with gaff.capture(plain, *true_sites) as true:
        plain(x).pow(2).sum().backward()
    with gaff.capture(model, *SITES) as got:
        for _ in range(2):
            model(x).pow(2).sum().backward()
    for site, true_site in zip(SITES, true_sites, strict=True):
        values = got.all(site)
        assert len(values) == 2, site
        assert torch.equal(values[0], true[true_site]), site
        assert torch.equal(values[1], true[true_site]), site


class SharedSegments(nn.Module):
    """One module inside two checkpointed segments."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def segment(self, x):
        return torch.tanh(self.lin(x))

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.segment, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_in_two_segments_keeps_its_calls_apart(use_reentrant):
    model, x = SharedSegments(use_reentrant), torch.randn(2, 4, requires_grad=True)
    one = model.lin(x)
    one.retain_grad()
    two = model.lin(torch.tanh(one))
    two.retain_grad()
    torch.tanh(two).pow(2).sum().backward()
    with gaff.capture(model, "lin", "lin:grad_output") as got:
        model(x).pow(2).sum().backward()
    assert len(got.all("lin")) == 2
    assert torch.equal(got["lin@0:grad_output"], one.grad)
    assert torch.equal(got["lin@1:grad_output"], two.grad)


class Nested(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def inner(self, x):
        return torch.tanh(self.two(x))

    def outer(self, x):
        return checkpoint(self.inner, torch.tanh(self.one(x)), use_reentrant=self.use_reentrant)

    def forward(self, x):
        return checkpoint(self.outer, x, use_reentrant=self.use_reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, in the first pass of the outer
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside_checkpoints(use_reentrant):
    model, x = Nested(use_reentrant), torch.randn(2, 4, requires_grad=True)
    one = model.one(x)
    one.retain_grad()
    two = model.two(torch.tanh(one))
    two.retain_grad()
    torch.tanh(two).pow(2).sum().backward()
    with gaff.capture(model, "one:grad_output", "two:grad_output", "two") as got:
        model(x).pow(2).sum().backward()
    assert torch.equal(got["one:grad_output"], one.grad)
    assert torch.equal(got["two:grad_output"], two.grad)
    assert len(got.all("two")) == 1


def test_two_forwards_before_their_backwards_keep_their_runs():
    model = Checkpointed(use_reentrant=True)
    inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    with gaff.capture(model, "first.0:grad_output") as got:
        outputs = [model(x) for x in inputs]
        for y in outputs:
            y.pow(2).sum().backward()
    for run, x in enumerate(inputs):
        hidden = model.first[0](x)
        hidden.retain_grad()
        model.second(model.first[1](hidden)).pow(2).sum().backward()
        assert torch.equal(got.run(run)["first.0:grad_output"], hidden.grad)


class Twice(nn.Module):
    """A layer under a reentrant checkpoint, inside another one if it is ``deep``, then one that is not."""

    def __init__(self, is_deep):
        super().__init__()
        self.a, self.out, self.is_deep = nn.Linear(4, 4), nn.Linear(4, 2), is_deep

    def forward(self, x):
        inner = (lambda y: checkpoint(self.a, y, use_reentrant=True)) if self.is_deep else self.a
        return self.out(checkpoint(inner, x, use_reentrant=True))


@pytest.mark.parametrize("is_deep", [False, True])
def test_the_gradient_of_a_weight_inside_a_reentrant_checkpoint_belongs_to_its_run(is_deep):
    model, x = Twice(is_deep), torch.randn(2, 4, requires_grad=True)
    with gaff.capture(model, "a.weight:grad") as got:
        losses = [model(x).sum(), model(2 * x).sum()]
        losses[0].backward()
        first = model.a.weight.grad.clone()
        losses[1].backward()
    assert torch.equal(got.run(0)["a.weight:grad"], first)
    assert torch.allclose(got.run(1)["a.weight:grad"], model.a.weight.grad - first)
    model.zero_grad()
    with gaff.edit(model, {"**.weight:grad": gaff.edits.when(gaff.edits.zero(), runs=0)}):
        losses = [model(x).sum(), model(2 * x).sum()]
        losses[0].backward()
    assert not model.a.weight.grad.any()
    assert not model.out.weight.grad.any()
