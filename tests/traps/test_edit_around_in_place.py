"""Gradient edits before and after an in-place operation on one tensor act at their own places."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


@pytest.mark.parametrize(
    ("before", "after"),
    [("0:grad_output", "1:grad_output"), ("1:input_grad", "1:grad_output"), ("0:grad_output", "2:input_grad")],
)
def test_each_edit_acts_at_its_own_version(before, after):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), torch.randn(5, 3)
    hidden = model[0](x)
    hidden.register_hook(lambda g: g * 3 + 0.1)
    hidden = hidden.relu_()
    hidden.register_hook(lambda g: g + 1)
    model[2](hidden).sum().backward()
    true = model[0].weight.grad.clone()
    model.zero_grad()
    with gaff.edit(model, {before: lambda g: g * 3 + 0.1, after: lambda g: g + 1}):
        model(x).sum().backward()
    assert torch.equal(model[0].weight.grad, true)


def test_what_an_edit_returns_may_be_written_to_though_it_is_a_view():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(2, 3)
    kept = torch.ones(1, 4)
    with gaff.edit(model, {"0": lambda t: torch.stack([t, t * 2])[1], "0:grad_output": edits.scale(2.0)}):
        model(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, 4 * (model[0](x) > 0).float().T @ x)
    with gaff.edit(nn.Sequential(nn.Linear(3, 4)), {"0": edits.project(torch.ones(1, 4))}) as changed:
        for _ in range(3):  # the first time is the long way
            assert not changed._model(x)._is_view()
    with gaff.edit(model, {"0": lambda t: kept.expand(2, 4)}):
        assert torch.equal(model(x), torch.ones(2, 4))
    assert torch.equal(kept, torch.ones(1, 4))


def test_the_receipt_says_so_where_the_output_is_the_input_itself():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            x = x * 1
            self.act(x)
            return x

    with gaff.edit(Ignores(), {"act": edits.scale(5.0)}) as changed:
        changed._model(torch.ones(3))
    assert "who ignores what it returns misses the edit" in str(changed.receipt)
