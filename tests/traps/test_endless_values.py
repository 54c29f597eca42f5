"""A value that contains itself is refused in words, not by the end of the stack."""

import pytest
import torch
from torch import nn

import gaff


class Endless(nn.Module):
    def forward(self, x):
        value = [x]
        value.append(value)
        return value


class Linked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.links = []
        self.links.append(self.links)

    def forward(self, x):
        return self.lin(x)


def test_endless_outputs_and_attributes():
    with pytest.raises(gaff.PlanError, match="nested deeper than 64 levels, or contains itself"):
        with gaff.capture(Endless(), ":output") as got:
            got._model(torch.ones(1))
    model = Linked()
    with gaff.capture(model, ":grad_input") as got:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert got[":grad_input"].shape == (1, 2)
