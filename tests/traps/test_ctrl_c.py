"""Ctrl-C in the middle of a forward: the session closes, or goes on with a new run."""

import pytest
import torch
from torch import nn

import gaff


class Interrupts(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.is_interrupting = True

    def forward(self, x):
        y = self.lin(x)
        if self.is_interrupting:
            raise KeyboardInterrupt
        return y


def test_nothing_remains_after_ctrl_c():
    model, x = nn.Sequential(Interrupts()), torch.randn(2, 3)
    with pytest.raises(KeyboardInterrupt), gaff.capture(model, "0.lin", "0") as got:
        model(x)
    assert torch.equal(got["0.lin"], model[0].lin(x))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_caught_ctrl_c_does_not_blur_the_next_run():
    model, x = nn.Sequential(Interrupts()), torch.randn(2, 3)
    with gaff.capture(model, "0.lin") as got:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[0].is_interrupting = False
        model(x)
        model(x)
    assert [len(got.run(run).all("0.lin")) for run in range(3)] == [1, 1, 1]
