"""A linear layer's output on batches of sequences is a view: in-place writes after another use must not cut its gradient."""

import pytest
import torch
from torch import nn

import gaff


class Gated(nn.Module):
    """The activation writes into what the gate has already read."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.fc(x)
        gate = h.sigmoid()
        return (self.act(h) * gate).sum()


def test_the_gradient_of_a_linear_layer_is_whole():
    model, x = Gated(), torch.randn(1, 3, 2)
    h = model.fc(x).detach().requires_grad_()
    (torch.relu(h) * h.sigmoid()).sum().backward()
    with gaff.capture(model, "fc:grad_output") as got:
        model(x).backward()
    assert torch.allclose(got["fc:grad_output"], h.grad)
    assert gaff.trace(model, x, backward=lambda y: y).rows[1].grad_output.norm == pytest.approx(h.grad.norm().item())


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = nn.Flatten()

    def forward(self, x):
        h = self.flat(x * 1)
        other = h * 3
        return (h.relu_() + other).sum()


def test_other_views_are_refused():
    with gaff.capture(Flattened(), "flat:grad_output") as got:
        got._model(torch.randn(2, 2, 2, requires_grad=True)).backward()
    with pytest.raises(gaff.ExactnessError, match="a view that was changed in place later: torch tells a part"):
        got["flat:grad_output"]
