"""A view changed in place later gets no gradient of its own in torch: refused, not None."""

import pytest
import torch
from torch import nn

import gaff


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.cut = Cut()

    def forward(self, x):
        y = self.lin(x)
        view = self.cut(y)
        view.mul_(5)
        return y


class Cut(nn.Module):
    def forward(self, y):
        return y[:, :2]


def test_reading_it_is_refused_with_the_reason():
    model, x = Views(), torch.randn(3, 4)
    with gaff.capture(model, "cut:grad_output") as got:
        model(x).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="cut:grad_output: no gradient arrived, and it is a view"):
        got["cut:grad_output"]
    assert "view" in str(got.receipt)
