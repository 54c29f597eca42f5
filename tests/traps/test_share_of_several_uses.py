"""The own share adds up all uses inside the module, bit by bit as torch does."""

import torch
from torch import nn

import gaff


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).T, -1) @ self.v(x)


def test_the_share_is_the_sum():
    model, x = nn.Sequential(nn.Linear(4, 4), Attends()), torch.randn(3, 4)
    hidden = model[0](x).detach().requires_grad_()
    model[1](hidden).pow(2).sum().backward()
    with gaff.capture(model, "1:grad_input") as got:
        model(x).pow(2).sum().backward()
    assert torch.equal(got["1:grad_input"], hidden.grad)
