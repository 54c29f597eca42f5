"""A captured value is what passed, not what a later in-place operation left behind."""

import torch
from torch import nn

from traps.tools import Gaff, same


def trap(tool):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    true = nn.functional.linear(x, model[0].weight, model[0].bias)
    found = tool.seen(model, ["0:output"], lambda: model(x))
    same(found["0:output"], [true])


def test_gaff_is_right():
    trap(Gaff())
