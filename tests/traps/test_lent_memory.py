"""Memory that is only lent: FSDP2 gathers a parameter, hands it out, and frees it while somebody may still hold it."""

import pytest
import torch
from torch import nn

import gaff


class Lends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x):
        lent = nn.Parameter(torch.full((2, 3), 0.5))
        y = x + self.inner(lent)
        lent.untyped_storage().resize_(0)
        return y


def test_a_parameter_that_is_freed_is_told_as_it_was():
    model = Lends()
    with gaff.capture(model, "inner:input") as got:
        model(torch.zeros(2, 3))
    assert torch.equal(got["inner:input"], torch.full((2, 3), 0.5))


def test_what_was_freed_is_refused_and_never_read():
    model, x = nn.Sequential(nn.Tanh()), torch.zeros(2, 3)
    with gaff.capture(model, "0:input") as got:
        model(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(gaff.ExactnessError, match="its memory was freed after the capture.*clone=True"):
        got["0:input"]
