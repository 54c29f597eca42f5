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


@pytest.mark.parametrize("part", [lambda weight: weight, lambda weight: weight[:2], lambda weight: weight.t()])
@pytest.mark.parametrize("is_fused", [False, True])
def test_what_a_module_returns_of_its_weight_after_a_step_that_torch_does_not_count(part, is_fused):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self):
            return part(self.weight)

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = Returns()

        def forward(self, x):
            return x @ self.own().sum(0, keepdim=True).t()[:3]

    model = Uses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=is_fused)
    true = part(model.own.weight.detach()).clone()
    with gaff.capture(model, "own") as got, gaff.capture(model, "own", graph=True) as loose:
        model(torch.randn(2, len(true.sum(0)))).sum().backward()
        optimizer.step()
    assert torch.equal(got["own"], true)
    assert torch.equal(loose["own"], true)
    assert not torch.equal(part(model.own.weight), true)
