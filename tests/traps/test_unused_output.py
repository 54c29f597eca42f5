"""A gradient that never arrives although backward ran is None with a reason; without backward it is an error."""

import pytest
import torch
from torch import nn

import gaff


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        self.unused(x)
        return self.used(x)


def test_what_backward_left_out_is_none():
    model = Branches()
    with gaff.capture(model, "unused:grad_output", "unused.weight:grad", "used.weight:grad") as got:
        model(torch.randn(2, 3)).sum().backward()
    assert got["unused:grad_output"] is None
    assert got["unused.weight:grad"] is None
    assert got["used.weight:grad"] is not None
    assert "no gradient reached this tensor" in str(got.receipt)


def test_without_backward_it_has_not_fired():
    model = Branches()
    with pytest.raises(
        gaff.NeverFiredError, match="'used:grad_output' never fired in 1 run: a gradient needs backward"
    ):
        with gaff.capture(model, "used:grad_output"):
            model(torch.randn(2, 3))
