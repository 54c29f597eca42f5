"""A module that is replaced while the session is open has not fired: said, not silent."""

import pytest
import torch
from torch import nn

import gaff


def test_a_replaced_module_is_reported():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with pytest.raises(gaff.NeverFiredError, match="'1' never fired.*replaced"), gaff.capture(model, "0", "1"):
        model[1] = nn.ReLU()
        model(x)
