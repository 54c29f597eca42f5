"""A call of a submodule alone is a run of its own."""

import torch

import gaff
from zoo import Net


def test_every_outermost_call_is_a_run():
    model = Net()
    x = torch.randn(1, 3, 8, 8)
    with gaff.capture(model, "conv", "relu:input") as got:
        model(x)
        model.conv(x)
        model.relu(model.conv(x))
    assert got.receipt.runs == 4
    assert len(got.all("conv")) == 3
    assert torch.equal(got.run(1)["conv"], model.conv(x))
