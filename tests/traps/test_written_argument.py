"""A module whose effect leaves through an argument that it writes into has a share all the same."""

import torch
from torch import nn

import gaff


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, total):
        total.add_(self.fc(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.adds = Adds()

    def forward(self, x):
        total = torch.zeros(2, 3)
        self.adds(x * 2, total)
        return total.sum()


def test_the_share_is_found():
    model, x = Model(), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "adds:grad_input") as got:
        model(x).backward()
    assert torch.allclose(got["adds:grad_input"], model.adds.fc.weight.sum(0).expand(2, 3))


class TwoInputs(nn.Module):
    def forward(self, x, v):
        return (x * 2).sum() + (v * 3).sum()


class Stale(nn.Module):
    """The second argument is a view whose base was changed: torch makes its node when somebody asks."""

    def __init__(self):
        super().__init__()
        self.inner = TwoInputs()

    def forward(self, x):
        h = x * 1
        v = h[:2]
        h.add_(1)
        return self.inner(h, v)


def test_another_inputs_share_is_not_added():
    model, x = Stale(), torch.ones(4, requires_grad=True)
    with gaff.capture(model, "inner:grad_input") as got:
        model(x).backward()
    assert got["inner:grad_input"].tolist() == [2, 2, 2, 2]
