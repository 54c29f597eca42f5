"""An edited parameter is edited wherever the forward uses it: in a list, a closure, a module that the model does not know."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff import edits


class Holds(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.lin = nn.Linear(3, 3, bias=False)
        weight = self.lin.weight
        self.weights, self.by_closure = [weight], lambda x: F.linear(x, weight)
        other = nn.Linear(3, 3, bias=False)
        other.weight = weight
        self.others, self.how = (other,), how

    def forward(self, x):
        return getattr(self, self.how)(x)

    def a_list(self, x):
        return F.linear(x, self.weights[0])

    def a_closure(self, x):
        return self.by_closure(x)

    def an_unknown_module(self, x):
        return self.others[0](x)

    def turned(self, x):
        return x @ self.weights[0].T

    def data(self, x):
        return x @ self.weights[0].data.t() + 0 * self.weights[0].sum()

    def in_a_list_of_tensors(self, x):
        return x @ torch.stack([self.weights[0]]).sum(0).t()

    def beside_the_module(self, x):
        return self.lin(x) + x @ self.weights[0].t()


HOWS = ["a_list", "a_closure", "an_unknown_module", "turned", "data", "in_a_list_of_tensors", "beside_the_module"]


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_the_value_stands_in(how, has_grad):
    model, x = Holds(how), torch.randn(2, 3)
    with torch.set_grad_enabled(has_grad), gaff.edit(model, {"lin.weight:param": edits.scale(3.0)}):
        y = model(x)
    torch.testing.assert_close(y, model(x) * 3)
    assert type(model.lin.weight) is nn.Parameter


@pytest.mark.parametrize("how", [how for how in HOWS if how != "data"])
def test_gradients_reach_the_parameter_through_the_edit(how):
    model, x = Holds(how), torch.randn(2, 3)
    model(x).sum().backward()
    bare, model.lin.weight.grad = model.lin.weight.grad, None
    with gaff.edit(model, {"lin.weight:param": edits.scale(3.0)}), gaff.capture(model, "lin.weight:grad") as got:
        model(x).sum().backward()
    torch.testing.assert_close(model.lin.weight.grad, bare * 3)
    assert torch.equal(got["lin.weight:grad"], model.lin.weight.grad)


def test_what_is_of_the_leaf_stays_of_the_leaf():
    class Looks(Holds):
        def a_list(self, x):
            weight = self.weights[0]
            self.seen = weight.requires_grad, weight.is_leaf, weight.grad, type(weight).__name__, weight.shape
            weight.register_hook(lambda gradient: self.came.append(gradient))
            return F.linear(x, weight)

    model, model_came = Looks("a_list"), []
    model.came = model_came
    with gaff.edit(model, {"lin.weight:param": edits.scale(3.0)}):
        model(torch.ones(1, 3)).sum().backward()
    assert model.seen == (True, True, None, "Parameter", (3, 3))
    assert torch.equal(model_came[0], model.lin.weight.grad)


def test_two_sessions_and_an_exception():
    model, x = Holds("a_list"), torch.randn(2, 3)
    with gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}):
        with gaff.edit(model, {"lin.weight:param": edits.scale(3.0)}):
            y = model(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 4))
        once = model(x)
    torch.testing.assert_close(y, model(x) * 6)
    torch.testing.assert_close(once, model(x) * 2)
    assert type(model.lin.weight) is nn.Parameter


def test_a_copy_made_in_the_middle_of_a_run_works():
    class Copies(Holds):
        def a_list(self, x):
            self.copied = copy.deepcopy(self.weights)
            return F.linear(x, self.weights[0])

    model, x = Copies("a_list"), torch.randn(2, 3)
    with gaff.edit(model, {"lin.weight:param": edits.scale(3.0)}):
        model(x)
    assert torch.equal(F.linear(x, model.copied[0]), model(x) * 3) or torch.equal(
        F.linear(x, model.copied[0]), model(x)
    )


def test_it_stands_in_where_torch_s_composable_checkpoint_recomputes():
    """Its hook begins the region at the entry of the module, so that what is noted there must come after it."""
    from torch.distributed._composable import checkpoint

    model, x = nn.Sequential(nn.Linear(3, 3), Holds("beside_the_module")), torch.randn(2, 3)
    both = []
    for is_recomputed in (False, True):
        if is_recomputed:
            checkpoint(model[1])
        model.zero_grad()
        with gaff.edit(model, {"1.lin.weight:param": edits.scale(3.0)}):
            model(x).pow(2).sum().backward()
        both.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)
