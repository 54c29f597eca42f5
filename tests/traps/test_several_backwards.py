"""retain_graph gives one gradient for each backward pass, and nothing is counted twice."""

import pytest
import torch
from torch import nn

import gaff


def test_two_passes_two_values():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with gaff.capture(model, "0:grad_output", "1:grad_input", "0.weight:grad") as got:
        y = model(x)
        y.sum().backward(retain_graph=True)
        (2 * y).sum().backward()
    for site in ("0:grad_output", "1:grad_input", "0.weight:grad"):
        one, two = got.all(site)
        assert torch.allclose(2 * one, two)
    with pytest.raises(gaff.SiteError, match="in 2 backward passes: say got.all"):
        got["0:grad_output"]
