"""A captured view keeps its value when its base is changed, and when it is changed itself."""

import torch
from torch import nn

from traps.tools import Gaff, same


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = Cut()

    def forward(self, x):
        y = x * 2
        view = self.cut(y)
        y.add_(1)
        view.mul_(5)
        return y


class Cut(nn.Module):
    def forward(self, y):
        return y[:, :2]


def trap(tool):
    model, x = Views(), torch.randn(3, 4)
    found = tool.seen(model, ["cut:output"], lambda: model(x))
    same(found["cut:output"], [(x * 2)[:, :2]])


def test_gaff_is_right():
    trap(Gaff())
