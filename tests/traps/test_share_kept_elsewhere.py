"""A module's own share, where something that the module made of its input leaves it by another way than its output."""

import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff.compat.autograd import graph_life

KEPT = []


class Keeps(nn.Module):
    """Puts a feature aside in a list that no module knows; also made for nothing (``is_dropped``)."""

    def __init__(self, *, is_dropped=False):
        super().__init__()
        self.lin, self.other, self.is_dropped = nn.Linear(4, 4), nn.Linear(4, 4), is_dropped

    def forward(self, x):
        feature = self.other(x)
        if not self.is_dropped:
            KEPT.append(feature)
        return self.lin(x)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        x = x * 1.0
        return x + self.inner(x)


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()
    yield
    KEPT.clear()


def own_share(model, x, loss):
    """The truth: what arrives at a view that only the inner module is given."""
    seen = []

    def give_view(module, args):
        view = args[0].view_as(args[0])
        view.register_hook(lambda g: seen.append(g.clone()))
        return (view,)

    with model.inner.register_forward_pre_hook(give_view):
        loss(model(x)).backward()
    KEPT.clear()
    model.zero_grad()
    return seen[0] if seen else None


LOSSES = {
    "output": lambda y: y.pow(2).sum(),
    "kept": lambda y: KEPT[-1].pow(2).sum(),
    "both": lambda y: y.pow(2).sum() + KEPT[-1].pow(2).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_share_is_whole_or_refused(name, is_leaf):
    model, x = Residual(Keeps()), torch.randn(2, 4)
    truth = own_share(model, x.clone().requires_grad_(), LOSSES[name])
    x.requires_grad_()
    address = ":grad_input" if is_leaf else "inner:grad_input"
    with gaff.capture(model.inner if is_leaf else model, address) as got:
        y = model.inner(x) + x if is_leaf else model(x)
        LOSSES[name](y).backward()
    if name == "output":
        torch.testing.assert_close(got[address], truth)
    else:
        with pytest.raises(gaff.ExactnessError, match="somebody kept something that the module made of its input"):
            got[address]


@pytest.mark.parametrize("is_residual", [True, False])
def test_what_was_made_for_nothing_costs_no_share(is_residual):
    inner = Keeps(is_dropped=True)
    model = Residual(inner) if is_residual else nn.Sequential(nn.Tanh(), inner)
    x = torch.randn(2, 4, requires_grad=True)
    with gaff.capture(model, "*:grad_input") as got:
        for _ in range(3):
            model(x).pow(2).sum().backward()
    expected = 2 * (inner.lin.weight.T @ (model(x).detach()).T).T
    for run in range(3):
        name = "inner:grad_input" if is_residual else "1:grad_input"
        torch.testing.assert_close(got.run(run)[name], expected)


@pytest.mark.slow
def test_hooks_for_it_leave_a_leaf_and_hold_no_graph():
    model, x = Keeps(is_dropped=True), torch.randn(2, 4, requires_grad=True)
    with gaff.capture(model, ":grad_input", last=2):
        for _ in range(600):
            y = model(x)
            y.sum().backward()
        life = graph_life([y])
        assert len(x._backward_hooks) < 600
        del y
        gc.collect()
        assert life() is None
    assert not x._backward_hooks


def test_an_edit_of_a_share_that_a_module_writes_into_raises_where_it_cannot_see_all():
    class Writes(nn.Module):
        def forward(self, x):
            KEPT.append(x * 2)
            return x.relu_()

    model = Residual(Writes())
    with gaff.edit(model, {"inner:grad_input": gaff.edits.scale(2.0)}), pytest.raises(gaff.ExactnessError):
        y = model(torch.randn(2, 4, requires_grad=True))
        (y.sum() + KEPT[-1].sum()).backward()


def test_a_pass_for_chosen_inputs_tells_no_part_of_a_share():
    class Stacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return torch.stack([self.lin(x), x]).mean(0)

    model, x = Stacks(), torch.randn(2, 4, requires_grad=True)
    with gaff.capture(model, gaff.maybe(":grad_input")) as got:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert got.all(":grad_input") == [None]
    with gaff.capture(model, ":grad_input") as got:
        (total,) = torch.autograd.grad(model(x).sum(), [x])
    torch.testing.assert_close(got[":grad_input"], total)


class Slotted:
    __slots__ = ("x",)


WAYS_TO_KEEP = {
    "closure": lambda block, x: setattr(block, "read", lambda: x),
    "default": lambda block, x: setattr(block, "read", lambda x=x: x),
    "partial": lambda block, x: setattr(block, "read", functools.partial(torch.Tensor.view_as, x, x)),
    "method": lambda block, x: setattr(block, "read", x.abs),
    "slots": lambda block, x: (setattr(block.held, "x", x), setattr(block, "read", lambda: block.held.x)),
    "set": lambda block, x: (setattr(block, "some", {x}), setattr(block, "read", lambda: next(iter(block.some)))),
    "list": lambda block, x: (KEPT.append(x), setattr(block, "read", lambda: KEPT[-1])),
    "nowhere": lambda block, x: None,
}


class KeepsInput(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.lin, self.way, self.held, self.read = nn.Linear(4, 4), way, Slotted(), None

    def forward(self, x):
        WAYS_TO_KEEP[self.way](self, x)
        return self.lin(x)


class ReadsLater(nn.Module):
    """A residual block; what its inner part has kept of its input is used after the call, if ``is_used``."""

    def __init__(self, way, *, is_used):
        super().__init__()
        self.first, self.inner, self.is_used = nn.Linear(4, 4), KeepsInput(way), is_used

    def forward(self, x):
        hidden = self.first(x)
        output = self.inner(hidden)
        later = self.inner.read().square() if self.is_used else 0
        return output.square() + later + (hidden if self.is_used or self.inner.way == "nowhere" else 0)


@pytest.mark.parametrize("way", list(WAYS_TO_KEEP)[:-1])
def test_an_input_that_is_kept_anywhere_and_used_later_is_refused(way):
    model = ReadsLater(way, is_used=True)
    with gaff.capture(model, "inner:grad_input") as got:
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="the module kept the input, and this backward pass came by it"):
        got["inner:grad_input"]


@pytest.mark.parametrize("way", WAYS_TO_KEEP)
def test_an_input_that_is_kept_for_nothing_costs_no_share(way):
    """Also a residual connection, as long as the inner part keeps nothing: a graph's own hold is no reference."""
    model, x = ReadsLater(way, is_used=False), torch.randn(2, 4)
    with gaff.capture(model, "inner:grad_input") as got:
        model(x).sum().backward()
    hidden = model.first(x)
    share = torch.autograd.grad(model.inner(hidden).square().sum(), hidden)[0]
    assert torch.equal(got["inner:grad_input"], share)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class HeldByOthers(nn.Module):
    """Something holds the input on, by which no code of the module comes to it."""

    def __init__(self, way):
        super().__init__()
        self.lin, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        if self.way == "checkpoint":
            return checkpoint(lambda: self.lin(x), use_reentrant=False)
        if self.way == "keyword of a checkpoint":
            return checkpoint(self.lin, use_reentrant=False, input=x)
        if self.way == "function":
            return self.lin(Doubled.apply(x))
        output = self.lin(x)
        if self.way == "hook of a tensor":
            output.register_hook(lambda gradient: gradient * (x == x))
        elif self.way == "a cycle":

            def again(depth):
                return x if depth == 0 else again(depth - 1)

            again(2)
        return output


@pytest.mark.parametrize(
    "way", ["checkpoint", "keyword of a checkpoint", "function", "hook of a tensor", "a cycle", "hook of the module"]
)
def test_what_others_hold_costs_no_share_of_a_residual_block(way):
    model, x, seen = Residual(HeldByOthers(way)), torch.randn(2, 4, requires_grad=True), []
    if way == "hook of the module":
        model.inner.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    with gaff.capture(model, "inner:grad_input") as got:
        model(x).square().sum().backward()
    hidden = x.detach().clone().requires_grad_()
    inner = model.inner(hidden)
    share = torch.autograd.grad(inner, hidden, 2 * (hidden + inner).detach())[0]
    torch.testing.assert_close(got["inner:grad_input"], share)


def test_a_container_that_is_kept_with_the_input_is_refused():
    class KeepsBatch(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, batch):
            KEPT.append(batch)
            return self.lin(batch[0])

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), KeepsBatch()

        def forward(self, x):
            return self.inner([self.first(x)]) + KEPT[-1][0].square()

    model = Uses()
    with gaff.capture(model, "inner:grad_input") as got:
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="the module kept the input"):
        got["inner:grad_input"]
