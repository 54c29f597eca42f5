"""Gradients of plain tensors, leaf or not, without retain_grad."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


def test_leaf_and_intermediate():
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    with gaff.capture(a=a, b=b) as got:
        b.mean().backward()
    assert got["a"].tolist() == pytest.approx([0.4] * 5)
    assert got["b"].tolist() == pytest.approx([0.2] * 5)
    assert b.grad_fn is not None
    assert not b._backward_hooks


def test_beside_a_model():
    model, x = nn.Linear(3, 2), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, ":output", x=x) as got:
        model(x).sum().backward()
    assert torch.equal(got["x"], x.grad)


def test_what_cannot_work_is_refused():
    with pytest.raises(gaff.PlanError, match="tensor 'b' does not require grad"):
        gaff.capture(b=torch.ones(2))
    with pytest.raises(gaff.PlanError, match="'last' is an option of capture, but was given a tensor"):
        gaff.capture(last=torch.ones(2, requires_grad=True))
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(3, requires_grad=True)
    with pytest.raises(gaff.PlanError, match="name '0' is also the path of a captured site"):
        gaff.capture(model, "0", **{"0": x})


def written(view, base, what):
    """Something is made of the view, then it or its base is written to, and the loss is of all."""
    before = view.sum()
    (view if what == "view" else base).mul_(3)
    (before + base.pow(2).sum()).backward()


@pytest.mark.parametrize("what", ["view", "base"])
def test_a_view_that_is_changed_in_place_later_is_refused_rather_than_told_in_part(what):
    base = nn.Linear(4, 6)(torch.randn(5, 4))
    view = base[1:]
    with gaff.capture(view=view, base=base) as got:
        written(view, base, what)
    with pytest.raises(gaff.ExactnessError, match="view:grad: it is a view that was changed in place later"):
        got.all("view")
    assert got["base"].shape == (5, 6)
    base = nn.Linear(4, 6)(torch.randn(5, 4))
    with pytest.raises(gaff.ExactnessError, match="changed in place later"), gaff.edit({base[1:]: edits.zero()}):
        written(base[1:] if what == "base" else base._base or base, base, "base")


def test_a_view_that_nobody_changes_is_told():
    base = nn.Linear(4, 6)(torch.randn(5, 4))
    view = base[1:]
    with gaff.capture(view=view) as got:
        (view.pow(2).sum() + base.sum()).backward()
    assert torch.equal(got["view"], 2 * view.detach())


def test_a_tensor_that_no_pass_came_to_has_its_own_words():
    b = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(gaff.NeverFiredError, match=r"'b' never fired in 0 runs: a gradient needs backward\(\)"):
        with gaff.capture(b=b):
            pass
