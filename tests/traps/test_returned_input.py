"""A module that returns its input itself: one tensor, whose gradient is the total; the receipt says so."""

import pytest
import torch
from torch import nn

import gaff


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip = nn.Identity()
        self.f = nn.Linear(2, 2)

    def forward(self, x):
        h = x * 1
        return (self.f(h) + self.skip(h)).sum()


def test_the_total_is_told_with_a_remark_and_the_share_refused():
    model, x = Model(), torch.randn(1, 2, requires_grad=True)
    with gaff.capture(model, "skip:grad_output", "skip:input_grad", "skip:grad_input") as got:
        model(x).backward()
    assert torch.equal(got["skip:grad_output"], x.grad)
    assert torch.equal(got["skip:input_grad"], x.grad)
    assert "input and output are one tensor, this is its total gradient" in got.receipt.rows[0].reason
    assert got.receipt.rows[0].skipped == 0
    with pytest.raises(gaff.ExactnessError, match="skip:grad_input: the module returned its input itself"):
        got["skip:grad_input"]
