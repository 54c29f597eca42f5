"""Trap: where saved tensors may be written to, torch finds them again by address, which copy-on-write copies change."""

import pytest
import torch
from torch import nn

import gaff


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.e, self.b = nn.Linear(4, 4), Exp(), nn.Linear(4, 4)

    def forward(self, x):
        h = self.e(self.a(x))
        y = h * h
        h.mul_(2)
        return self.b(y + h)


@pytest.mark.parametrize("options", [{}, {"graph": True}, {"clone": True}])
@pytest.mark.parametrize("address", ["e", "**", "e/exp"], ids=["module", "all", "op"])
def test_gradients_are_those_of_the_bare_run(address, options):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)

    def gradient():
        model.zero_grad()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            model(x).sum().backward()
        return model.a.weight.grad.clone()

    bare = gradient()
    with gaff.capture(model, address, **options) as got:
        assert torch.equal(gradient(), bare)
    if address == "e":
        assert torch.allclose(got["e"], model.a(x).exp())
