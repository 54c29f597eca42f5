"""The gradient of the value before an in-place operation, not of the one after it."""

import torch
from torch import nn

from traps.tools import Gaff, same


def trap(tool):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    y = nn.functional.linear(x, model[0].weight, model[0].bias).detach().requires_grad_()
    torch.relu(y).mul(torch.arange(4.0)).sum().backward()
    found = tool.seen(model, ["0:grad_output"], lambda: model(x).mul(torch.arange(4.0)).sum().backward())
    same(found["0:grad_output"], [y.grad])


def test_gaff_is_right():
    trap(Gaff())
