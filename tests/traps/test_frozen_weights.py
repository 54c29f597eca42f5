"""A frozen parameter counts as fired with None."""

import torch
from torch import nn

import gaff


def test_frozen_is_none_with_the_reason():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    with gaff.capture(model, "0.weight:grad", "1.weight:grad") as got:
        model(torch.randn(2, 3)).sum().backward()
    assert got["0.weight:grad"] is None
    assert torch.equal(got["1.weight:grad"], model[1].weight.grad)
    assert got.receipt.rows[0].reason == "the tensor does not require grad"
