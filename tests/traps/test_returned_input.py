"""A module that returns its input itself: the two gradients are one tensor's, and are not told apart."""

import pytest
import torch
from torch import nn

import gaff


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip = nn.Identity()
        self.f = nn.Linear(2, 2)

    def forward(self, x):
        h = x * 1
        return (self.f(h) + self.skip(h)).sum()


def test_its_gradient_is_refused_and_the_total_is_there():
    model, x = Model(), torch.randn(1, 2, requires_grad=True)
    with gaff.capture(model, "skip:grad_output", "skip:input_grad") as got:
        model(x).backward()
    with pytest.raises(gaff.ExactnessError, match="skip:grad_output: the module returned its input itself"):
        got["skip:grad_output"]
    assert torch.equal(got["skip:input_grad"], x.grad)
