"""An exception in the model passes through, everything is removed, what was seen stays readable."""

import pytest
import torch
from torch import nn

import gaff


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x):
        self.lin(x)
        raise ValueError("the model's own")


def test_the_users_exception_is_never_masked():
    model, x = Fails(), torch.randn(2, 3)
    capture = gaff.capture(model, "lin", "never")
    with pytest.raises(ValueError, match="the model's own"), capture as got:
        model(x)
    assert torch.equal(got["lin"], model.lin(x))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_runs_are_told_apart_after_an_exception():
    model, x = Fails(), torch.randn(2, 3)
    with gaff.capture(model, "lin") as got:
        for _ in range(2):
            with pytest.raises(ValueError, match="own"):
                model(x)
    assert len(got.all("lin")) == 2
    assert torch.equal(got.run(1)["lin"], model.lin(x))
