"""A module called in a loop of data-dependent length keeps every call."""

import torch
from torch import nn

from traps.tools import Gaff, same


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = self.lin(x)
        return x


def trap(tool):
    model, x = Loop(), torch.randn(2, 4)
    true, y = [], x
    for _ in range(3):
        y = model.lin(y)
        true.append(y)
    found = tool.seen(model, ["lin:output"], lambda: model(x, 3))
    same(found["lin:output"], true)


def test_gaff_is_right():
    trap(Gaff())
