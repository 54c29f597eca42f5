"""no_grad and inference_mode: values are exact, gradients are None with the reason."""

import pytest
import torch
from torch import nn

import gaff


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_without_grad_mode(mode):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(2, 3)
    with mode(), gaff.capture(model, "0", "0:grad_output", "0:input") as got:
        model(x)
    assert torch.equal(got["0"], nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(got["0:input"], x)
    assert got["0:grad_output"] is None
    assert "grad mode was off" in got.receipt.rows[1].reason
