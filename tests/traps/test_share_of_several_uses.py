"""The own share adds up all uses inside the module, bit by bit as torch does."""

import torch
from torch import nn

from traps.tools import Gaff, same


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).T, -1) @ self.v(x)


def trap(tool):
    inner = Twice()
    model = nn.Sequential(nn.Linear(4, 4), inner)
    x = torch.randn(3, 4)
    hidden = model[0](x).detach().requires_grad_()
    inner(hidden).pow(2).sum().backward()
    found = tool.seen(model, ["1:grad_input"], lambda: model(x).pow(2).sum().backward())
    same(found["1:grad_input"], [hidden.grad])


def test_gaff_is_right():
    trap(Gaff())
