"""A captured parameter is what it was in that run, whatever the optimizer does next."""

import pytest
import torch
from torch import nn

import gaff


def test_weights_of_every_step():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    true = []
    with gaff.capture(model, "weight:param") as got, gaff.capture(model, "weight:param", reference=True) as loose:
        for _ in range(2):
            true.append(model.weight.detach().clone())
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert [torch.equal(one, other) for one, other in zip(got.all("weight:param"), true, strict=True)] == [True, True]
    with pytest.raises(gaff.ExactnessError, match="weight:param: its memory was changed in place"):
        loose.all("weight:param")
