"""Capturing does not move the memory of parameters: other owners of it still see updates."""

import torch
from torch import nn

import gaff


def test_parameters_stay_where_they_are():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    alias = model.weight.detach().numpy()
    where = model.weight.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with gaff.capture(model, "weight:param", "weight:grad", ":output"):
        model(x).sum().backward()
        optimizer.step()
    assert model.weight.data_ptr() == where
    assert (torch.from_numpy(alias) == model.weight).all()
