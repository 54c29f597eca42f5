"""Gradients of plain tensors, leaf or not, without retain_grad."""

import pytest
import torch
from torch import nn

import gaff


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
