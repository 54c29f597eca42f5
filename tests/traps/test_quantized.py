"""Quantized tensors are copied: a copy-on-write copy of one would lose its scale."""

import pytest
import torch
from torch import nn

import gaff

pytestmark = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")  # torch, once a process


class Quantizes(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def test_a_quantized_value_can_be_read():
    model, x = Quantizes(), torch.randn(2, 3)
    with gaff.capture(model, ":output") as got:
        y = model(x)
    assert torch.equal(got[":output"].dequantize(), y.dequantize())
