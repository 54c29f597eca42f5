"""After a session torch.export and torch.jit.script see a bare model."""

import warnings

import pytest
import torch
from torch import nn

import gaff


def test_export_and_script_after_use():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    with gaff.capture(model, "**", "**:grad_output"):
        model(x).sum().backward()
    gaff.take(model, "0")(x)
    gaff.trace(model, x)
    assert torch.equal(torch.jit.script(model)(x), model(x))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.slow
def test_export():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    with gaff.capture(model, "**"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
