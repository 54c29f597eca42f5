"""An input that needs no gradient counts as fired, with None and a reason."""

import torch
from torch import nn

import gaff


def test_none_is_read_as_none():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with gaff.capture(model, "0:grad_input", "0:input_grad", "1:grad_input") as got:
        model(torch.randn(2, 3)).sum().backward()
    assert got["0:grad_input"] is None
    assert got["0:input_grad"] is None
    assert got["1:grad_input"] is not None
    row = got.receipt.rows[0]
    assert (row.fired, row.none, row.reason) == (1, 1, "the tensor does not require grad")
