"""Under autocast values have the dtype that passed, gradients that of their value."""

import torch
from torch import nn

import gaff


def test_dtypes_are_those_that_passed():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    with gaff.capture(model, "0", "0:grad_output", "0.weight:grad") as got:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
    assert got["0"].dtype == torch.bfloat16
    assert got["0:grad_output"].dtype == torch.bfloat16
    assert got["0.weight:grad"].dtype == torch.float32
