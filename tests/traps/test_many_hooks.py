"""What a run has dropped before its backward pass is told of as None, however many hooks a session has."""

import gc

import pytest
import torch
from torch import nn

import gaff


class Dropping(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.side = nn.Linear(3, 3), nn.Tanh()
        self.body = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        self.side(x)
        for layer in self.body:
            x = layer(x)
        return x


@pytest.mark.parametrize("layers", [20, 300])
def test_none_is_told_once_for_every_run(layers):
    model = Dropping(layers)
    with gaff.capture(model, "side:grad_output", "body.*:grad_output") as got:
        for _ in range(3):
            model(torch.randn(2, 3)).sum().backward()
    assert list(got.all("side:grad_output")) == [None] * 3
    assert len(got.all("body.0:grad_output")) == 3
    assert "no gradient reached this tensor" in str(got.receipt)


def test_runs_without_a_backward_pass_leave_no_hooks_behind():
    model = Dropping(20)
    with gaff.capture(model, "**:grad_output") as got:
        for _ in range(100):
            model(torch.randn(2, 3))
        assert sum(type(one).__name__ == "Armed" for one in gc.get_objects()) < 1000
        model(torch.randn(2, 3)).sum().backward()
    assert len(got.all("body.0:grad_output")) == 1
