"""A captured view keeps its value when its base is changed, and when it is changed itself."""

import torch
from torch import nn

import gaff


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


def test_in_a_long_session_every_such_run_is_refused():
    class Writes(nn.Module):
        def forward(self, h):
            h[:, :2].relu_()
            return h * 1.0

    class View(nn.Module):
        def forward(self, h):
            return h.view(2, 4)

    model, x = nn.Sequential(nn.Linear(4, 4), View(), Writes()), torch.randn(2, 4)
    with gaff.capture(model, "2:input_grad") as got:
        for _ in range(300):
            model(x).sum().backward()
    assert got.receipt.rows[0].fired == 300
