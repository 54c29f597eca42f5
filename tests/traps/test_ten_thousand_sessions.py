"""Ten thousand sessions leave nothing behind."""

import gc

import pytest
import torch
from torch import nn

import gaff


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_growth(count):
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(1, 2)

    def cycle(times):
        for _ in range(times):
            with gaff.capture(model, "0", "1:grad_output") as got:
                model(x).sum().backward()
            assert got["0"] is not None
        gc.collect()
        return len(gc.get_objects())

    cycle(200)
    before = cycle(200)
    assert cycle(count) - before < 100
