"""``:outer_grad`` is what torch's full backward hook calls ``grad_output``, also where the total at the output differs."""

from contextlib import ExitStack
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits
from gaff.errors import ExactnessError


class Both(nn.Module):
    """Returns a tensor that it uses itself."""

    def forward(self, x):
        y = x * 1.5
        return y, (y * 2).tanh()


class Keeps(nn.Module):
    """Puts a loss aside that is made of what it returns."""

    def forward(self, x):
        y = x * 1.5
        self.loss = y.square().sum()
        return y, x * 2


class Given(nn.Module):
    """Returns what it was given, which others use, too."""

    def forward(self, x):
        return x, x * 3


class Parameter(nn.Module):
    """Returns a leaf."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        return self.weight, x + self.weight


class Plain(nn.Module):
    def forward(self, x):
        return x * 1.5, x * 2


class Net(nn.Module):
    def __init__(self, inner, how=None):
        super().__init__()
        self.first, self.inner, self.how = nn.Linear(3, 3), inner, how

    def forward(self, x):
        h = self.first(x)
        if self.how is None:
            a, b = self.inner(h)
        else:
            a, b = checkpoint(self.inner, h, use_reentrant=self.how)
        return (a * 2 + b * b + a.sin() + h * 5).sum() + getattr(self.inner, "loss", 0.0)


def hooked(model, x):
    seen = []
    handle = model.inner.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output))
    model(x).backward()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", [Both, Keeps, Given, Parameter, Plain])
@pytest.mark.parametrize("how", [None, False, True])
def test_it_is_what_the_hook_shows(kind, how):
    if how is True and kind in (Keeps, Parameter):
        pytest.skip("a loss put aside has no graph there, and a parameter that is returned leads back into itself")
    torch.manual_seed(0)
    model, x = Net(kind(), how).double(), torch.randn(2, 3, dtype=torch.double)
    expected = hooked(model, x)
    with gaff.capture(model, "inner:outer_grad[0]", "inner:outer_grad[1]") as got:
        model(x).backward()
    for at in range(2):
        torch.testing.assert_close(got[f"inner:outer_grad[{at}]"], expected[at], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Both, Keeps, Given, Parameter, Plain])
def test_gradients_stay_and_the_receipt_says_that_a_view_was_given(kind):
    torch.manual_seed(0)
    model, x = Net(kind()), torch.randn(2, 3)
    model(x).backward()
    bare = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    with gaff.capture(model, "**:outer_grad") as got:
        model(x).backward()
    for one, other in zip(bare, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)
    assert "was given a view of what it returned" in str(got.receipt)


def test_what_a_users_hook_has_collected_inside_is_not_from_outside():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(3, 3)

        def forward(self, x):
            y = x * 1.5
            self.side(y)
            return y

    model, x, collected = Inner(), torch.randn(2, 3, requires_grad=True), []
    model.side.register_forward_hook(lambda module, given, output: collected.append(output))
    with gaff.capture(model, ":outer_grad", ":grad_output") as got:
        (model(x) * 3).sum().backward(retain_graph=True)
        collected[0].sum().backward()
    assert [torch.unique(one).tolist() for one in got.all(":outer_grad")] == [[3.0]]
    assert len(got.all(":grad_output")) == 2


def test_a_view_that_was_written_to_is_refused():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(2, 3)
    with gaff.capture(model, "0:outer_grad") as got:
        model(x).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="it is a view that was changed in place later"):
        got["0:outer_grad"]


def test_an_edit_changes_what_comes_from_outside_alone():
    torch.manual_seed(0)
    model, x = Both().double(), torch.randn(2, 3, dtype=torch.double, requires_grad=True)

    def by_hand(factor):
        y = x * 1.5
        tapped = y.view_as(y)
        tapped.register_hook(lambda gradient: gradient * factor)
        return torch.autograd.grad((tapped.sin() + (y * 2).tanh()).sum(), x)[0]

    with gaff.edit(model, {":outer_grad[0]": edits.scale(0.5)}):
        a, b = model(x)
        (a.sin() + b).sum().backward()
    torch.testing.assert_close(x.grad, by_hand(0.5))
    with gaff.edit(model, {":outer_grad[0]": edits.zero()}):
        x.grad = None
        a, b = model(x)
        (a.sin() + b).sum().backward()
    torch.testing.assert_close(x.grad, by_hand(0.0))


def test_an_op_has_none_and_an_output_of_several_must_be_said():
    model = Both()
    with pytest.raises(gaff.GaffError, match="an op has no :outer_grad: expected output, input, grad_output"):
        gaff.capture(model, "/mul:outer_grad").__enter__()
    with (
        pytest.raises(gaff.GaffError, match="holds 2 tensors, a gradient belongs to one"),
        gaff.capture(model, ":outer_grad"),
    ):
        model(torch.randn(2, 3, requires_grad=True))


def test_second_derivatives_of_the_module_itself_are_not_from_outside():
    model, x = nn.Sequential(nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, ":outer_grad", ":grad_output") as got:
        y = model(x)
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        (y.sum() * 2 + first.sum()).backward()
    outer, total = got.all(":outer_grad"), got.all(":grad_output")
    assert torch.equal(outer[0], total[0])
    torch.testing.assert_close(
        outer[1], 2 + torch.autograd.functional.vhp(lambda o: o.sin().sum(), y.detach(), 1 - y.detach() ** 2)[1]
    )
    assert not torch.allclose(outer[1], total[1])


class Residual(nn.Module):
    """Hands what its first part returned to another module, too."""

    def __init__(self):
        super().__init__()
        self.both, self.next = Both(), nn.Linear(3, 3)

    def forward(self, x):
        a, b = self.both(x)
        return self.next(a) + b * 7 + a.sin()


@pytest.mark.parametrize("sessions", [1, 2])
def test_asking_for_it_changes_no_total_and_no_edit_elsewhere(sessions):
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual()).double(), torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    others = ["0.both:grad_output[0]", "0.next:input_grad", "0.next:grad_input"]
    outer = [["0.both:outer_grad[0]"], others] if sessions == 2 else [["0.both:outer_grad[0]", *others]]

    def told(groups):
        x.grad = None
        with ExitStack() as stack:
            got = [stack.enter_context(gaff.capture(model, *group)) for group in groups][-1]
            model(x).sum().backward()
        return [got[address] for address in others]

    for one, other in zip(told([others]), told(outer), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    def edited(groups):
        x.grad = None
        with ExitStack() as stack:
            for group in groups:
                stack.enter_context(gaff.capture(model, *group))
            with gaff.edit(model, {"0.next:input_grad": edits.scale(10.0)}):
                model(x).sum().backward()
        return x.grad

    torch.testing.assert_close(edited([]), edited([["0.both:outer_grad[0]"]]), rtol=1e-12, atol=1e-12)


def test_a_module_that_returns_its_input_under_no_grad_cuts_no_graph():
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            h = x * 1.0
            with torch.no_grad():
                h = self.same(h)
            return h * 2

    model, x = Passes(), torch.ones(2, requires_grad=True)
    with gaff.capture(model, "same:outer_grad", "same:grad_output") as got:
        model(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert got["same:outer_grad"].tolist() == [2.0, 2.0]
    assert got["same:grad_output"].tolist() == [2.0, 2.0]


def test_a_container_that_cannot_be_made_anew_is_refused_at_that_site_and_does_not_stop_the_run():
    class Two(nn.Module):
        def forward(self, x):
            return MappingProxyType({"one": x * 2, "other": x * 3})

    model, x = nn.Sequential(nn.Linear(3, 3), Two()), torch.randn(2, 3)
    with gaff.capture(model, "**:outer_grad") as got:
        sum(model(x).values()).sum().backward()
    assert got["0:outer_grad"].shape == (2, 3)
    assert "ask for :grad_output" in str(got.receipt)


def test_a_pass_that_ends_at_the_view_is_named_where_a_total_is_missing():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with gaff.capture(model, "0:outer_grad", gaff.maybe("0:grad_output")) as got:
        h = model[0](x)
        torch.autograd.grad(model[1](h).sum(), h)
    assert got["0:outer_grad"].shape == (2, 3)
    assert "the view which :outer_grad gives" in str(got.receipt)


class Twice(nn.Module):
    """Returns one tensor at two places."""

    def forward(self, x):
        y = x * 1.5
        return y, {"same": y}


def test_each_place_of_a_tensor_that_is_returned_twice_has_its_own_uses():
    model, x = Twice(), torch.randn(2, 3, requires_grad=True)

    def backward():
        one, two = model(x)
        (one.sum() + 10 * two["same"].sum()).backward()

    told = []
    handle = model.register_full_backward_hook(lambda module, inner, outer: told.append(outer[0]))
    backward()
    handle.remove()
    with gaff.capture(model, ":outer_grad[0]", ":outer_grad[1][same]", ":grad_output[0]") as got:
        backward()
    assert torch.equal(got[":outer_grad[0]"], told[0])
    assert got[":outer_grad[0]"].unique().tolist() == [1.0]
    assert got[":outer_grad[1][same]"].unique().tolist() == [10.0]
    assert got[":grad_output[0]"].unique().tolist() == [11.0]
    for changed, want in (({":outer_grad[0]": edits.zero()}, 15.0), ({":outer_grad[1][same]": edits.scale(0.5)}, 9.0),
                          ({":outer_grad[0]": edits.scale(2.0), ":outer_grad[1][same]": edits.scale(3.0)}, 48.0)):  # fmt: skip
        x.grad = None
        with gaff.edit(model, changed):
            backward()
        assert x.grad.unique().tolist() == [want], changed


def test_uses_of_what_was_passed_in_are_no_part_of_what_an_in_place_module_returned():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.SiLU(inplace=True)), torch.randn(2, 3)
    with gaff.capture(model[1], ":outer_grad", ":grad_output") as got:
        h = model[0](x)
        (model[1](h).sum() + 10 * h.sum()).backward()
    assert got[":outer_grad"].unique().tolist() == [1.0]
    assert got[":grad_output"].unique().tolist() == [11.0]
    assert "returned a tensor that it was given: what its caller does with that itself is no part" in str(got.receipt)


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(3, 4)


def _kept_alone(net, x):
    """The gradient of the first weight where only what was kept of module 1 has a loss."""
    hidden = net[1](net[0](x))
    return torch.autograd.grad(10 * hidden.sum(), net[0].weight)[0]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("port", ["1:outer_grad", "2:grad_input"])
def test_what_is_computed_from_a_kept_value_is_no_part_whoever_came_first(port, is_first):
    net, x = _layers()
    site = "1" if port == "1:outer_grad" else "2:input"
    share = net[2].weight.sum(0).expand(3, 6)

    def step(make, others):
        net.zero_grad()
        sessions = [lambda: gaff.capture(net, site, graph=True), make]
        with ExitStack() as stack:
            opened = [stack.enter_context(one()) for one in (sessions if is_first else sessions[::-1])]
            kept, other = opened if is_first else opened[::-1]
            (net(x).sum() + 10 * kept[site].sum()).backward()
            return others(other)

    if port == "2:grad_input" and not is_first:  # what the later session keeps lies inside the module's call
        with pytest.raises(ExactnessError, match="ask for :input_grad"):
            step(lambda: gaff.capture(net, port), lambda got: got[port])
    else:
        torch.testing.assert_close(step(lambda: gaff.capture(net, port), lambda got: got[port]), share)
    step(lambda: gaff.edit(net, {port: edits.zero()}), lambda edit: None)
    torch.testing.assert_close(net[0].weight.grad, _kept_alone(net, x))


def test_an_edit_of_it_leaves_what_an_earlier_hook_of_the_user_holds():
    net, x = _layers()
    kept = {}
    net[1].register_forward_hook(lambda module, given, output: kept.update(hidden=output))

    def step(*sessions):
        net.zero_grad()
        with ExitStack() as stack:
            opened = [stack.enter_context(one) for one in sessions]
            (net(x).sum() + 10 * kept["hidden"].sum()).backward()
        return opened

    [got] = step(gaff.capture(net, "1:outer_grad"))
    alone = got["1:outer_grad"]
    got, _ = step(gaff.capture(net, "1:outer_grad"), gaff.edit(net, {"1:outer_grad": edits.scale(1.0)}))
    torch.testing.assert_close(got["1:outer_grad"], alone)
    step(gaff.edit(net, {"1:outer_grad": edits.zero()}))
    torch.testing.assert_close(net[0].weight.grad, _kept_alone(net, x))
    # a value edit beside it is still what the user's hook sees
    with gaff.edit(net, {"1": edits.scale(2.0)}), gaff.edit(net, {"1:outer_grad": edits.zero()}):
        net(x).sum().backward()
    torch.testing.assert_close(kept["hidden"], 2 * net[1](net[0](x)))


@pytest.mark.parametrize("beside", [gaff.capture, lambda net, site: gaff.edit(net, {site: edits.scale(1.0)})])
def test_a_value_is_kept_behind_views_of_both_kinds(beside):
    net, x = _layers()
    with gaff.capture(net, "1:outer_grad") as got, beside(net, "2:grad_input"):
        with gaff.capture(net, "2:input", graph=True) as kept:
            (net(x).sum() + 10 * kept["2:input"].sum()).backward()
    torch.testing.assert_close(got["1:outer_grad"], net[2].weight.sum(0).expand(3, 6))
