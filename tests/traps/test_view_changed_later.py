"""A captured view keeps its value when its base is changed, and when it is changed itself."""

import torch
from torch import nn

import gaff
from traps.against.values import Views


def test_it_keeps_what_passed():
    model, x = Views(), torch.randn(3, 4)
    with gaff.capture(model, "cut") as got:
        model(x)
    assert torch.equal(got["cut"], (x * 2)[:, :2])


def test_in_a_long_session_every_such_run_is_refused():
    class Writes(nn.Module):
        def forward(self, h):
            h[:, :2].relu_()
            return h * 1.0

    class View(nn.Module):
        def forward(self, h):
            return h.view(2, 4)

    model, x = nn.Sequential(nn.Linear(4, 4), View(), Writes()), torch.randn(2, 4)
    with gaff.capture(model, "2:input_grad") as got:
        for _ in range(300):
            model(x).sum().backward()
    assert got.receipt.rows[0].fired == 300
