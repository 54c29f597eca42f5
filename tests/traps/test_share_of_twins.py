"""The share of a tensor that is given several times is edited as a whole, and stays one tensor for the module."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


class Twins(nn.Module):
    def forward(self, a, b, pair):
        return a * b * pair[0] if a is not b else a * 100 * pair[0]


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.twins = Twins()

    def forward(self, x):
        return self.twins(x, b=x, pair=[x]) + x


def test_all_of_them_are_edited_and_the_module_takes_the_same_way():
    model, x = Around(), torch.full((2,), 3.0, requires_grad=True)
    with gaff.edit(model, {"twins:grad_input": edits.scale(0.0)}):
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, torch.full((2,), 903.0))
    assert torch.equal(x.grad, torch.ones(2))


def test_self_attention():
    attention, x = nn.MultiheadAttention(4, 1, batch_first=True, bias=False), torch.randn(1, 3, 4, requires_grad=True)
    model = nn.ModuleDict({"attention": attention})
    model.forward = lambda x: attention(x, x, x)[0]
    with gaff.edit(model, {"attention:grad_input": edits.zero()}):
        model(x).pow(2).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("key", ["[0]", "[b]", "[pair][0]"])
def test_one_of_them_alone_is_refused(key):
    model, x = Around(), torch.full((2,), 3.0, requires_grad=True)
    with pytest.raises(gaff.ExactnessError, match="came in 3 times.*twins:grad_input edits what comes by all of them"):
        with gaff.edit(model, {f"twins:grad_input{key}": edits.scale(0.0)}):
            model(x).sum().backward()
    with gaff.edit(model, {f"twins:grad_input{key}": edits.scale(0.0)}):
        model.twins(x, b=x * 1, pair=[x * 1]).sum().backward()
