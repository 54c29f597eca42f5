"""State that a module keeps as a plain attribute stays where it is: its NumPy views go on following it."""

import torch
from torch import nn

import gaff


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(2)
        self.view = self.total.numpy()

    def forward(self, x):
        self.total.add_(x)
        return self.total


def test_the_numpy_view_follows():
    model = Sums()
    with gaff.capture(model, ":output", clone=True) as got:
        model(torch.ones(2))
        model(torch.ones(2))
    with gaff.capture(model, ":output"):
        model(torch.ones(2))
    model(torch.ones(2))
    assert model.view.tolist() == [4, 4]
    assert [value.tolist() for value in got.all(":output")] == [[1, 1], [2, 2]]
