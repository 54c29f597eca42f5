"""Several sessions on one model, nested and overlapping, do not disturb each other."""

import pytest
import torch
from torch import nn

import gaff


def test_sessions_close_in_any_order():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    one, two = gaff.capture(model, "0", "0:grad_output"), gaff.capture(model, "**")
    one.__enter__()
    two.__enter__()
    model(x).sum().backward()
    one.__exit__(None, None, None)
    model(x)
    two.__exit__(None, None, None)
    assert (len(one.all("0")), len(two.all("0"))) == (1, 2)
    assert torch.equal(one["0"], two.all("0")[0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_edits_open_once():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    session = gaff.edit(model, {":output": gaff.edits.zero()})
    with session:
        model(x)
    with pytest.raises(gaff.PlanError, match="this session was opened before"):
        session.__enter__()
