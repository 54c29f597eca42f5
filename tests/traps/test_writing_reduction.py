"""A reduction that writes into its argument reaches neither the caller's tensors nor the weights."""

import torch
from torch import nn

import gaff


def test_arguments_and_weights_stay():
    model, x = nn.Sequential(nn.Linear(2, 2)), -torch.ones(1, 2)
    weight = model[0].weight.detach().clone()
    with gaff.capture(model, {"0:input": lambda t: t.relu_(), "0.weight:param": lambda t: t.zero_()}) as got:
        model(x)
    assert x.tolist() == [[-1, -1]]
    assert torch.equal(model[0].weight, weight)
    assert got["0:input"].tolist() == [[0, 0]]
    assert got["0.weight:param"].tolist() == [[0, 0], [0, 0]]
