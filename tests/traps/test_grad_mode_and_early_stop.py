"""A model that is stopped while it had switched grad mode off leaves it as it was."""

import torch
from torch import nn

import gaff


class Toggles(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        torch.set_grad_enabled(False)
        x = self.b(self.a(x))
        torch.set_grad_enabled(True)
        return x


def test_grad_mode_is_restored():
    gaff.take(Toggles(), "a")(torch.randn(1, 2))
    assert torch.is_grad_enabled()
