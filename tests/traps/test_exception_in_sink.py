"""An error in a reduction stops the run and names the site; the session closes clean."""

import pytest
import torch
from torch import nn

import gaff


def test_a_failing_reduction_raises_in_the_library():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def fail(tensor):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"), gaff.capture(model, ":output", reduce=fail):
        model(x)
    with pytest.raises(gaff.PlanError, match=r":output: dimension 5 asked of a tensor of shape \(2, 3\)"):
        with gaff.capture(model, ":output", reduce=gaff.keep.rows(0, dim=5)):
            model(x)
    assert not model._forward_hooks


def test_a_reduction_that_writes_into_its_argument_changes_nothing():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    bare = model(x)
    with gaff.capture(model, ":output", reduce=lambda tensor: tensor.zero_()) as got:
        assert torch.equal(model(x), bare)
    assert got[":output"].abs().sum() == 0
