"""grad_input is the module's own share, input_grad the total gradient of the tensor that came in."""

import pytest
import torch
from torch import nn

import gaff
from zoo import Residual


def test_the_share_of_a_residual_block_bit_by_bit():
    model, x = Residual(blocks=2), torch.randn(2, 8)
    first = (x + model.blocks[0](x)).detach().requires_grad_()
    share = torch.autograd.grad(model.blocks[1](first), first, torch.full((2, 8), 2.0))[0]
    with gaff.capture(model, "blocks.1:grad_input") as got:
        model(x).mul(2).sum().backward()
    assert torch.equal(got["blocks.1:grad_input"], share)


def test_the_total_is_another_number():
    model, x = Residual(blocks=2), torch.randn(2, 8)
    with gaff.capture(model, "blocks.1:grad_input", "blocks.1:input_grad", "blocks.0:grad_output") as got:
        model(x).sum().backward()
    assert torch.equal(got["blocks.1:input_grad"], got["blocks.1:grad_input"] + 1)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = Mix()

    def forward(self, x):
        y = x * 1
        return self.mix(y, y) + y


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(3, 3)
        self.k = nn.Linear(3, 3)

    def forward(self, one, two):
        return self.q(one) * self.k(two)


def test_what_cannot_be_told_apart_is_refused():
    model = SelfAttention()
    with gaff.capture(model, "mix:grad_input", "mix.q:grad_input", "mix:input_grad") as got:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="mix:grad_input: the same tensor came in 2 times"):
        got["mix:grad_input"]
    assert got["mix.q:grad_input"].shape == (2, 3)


def test_a_module_that_returns_its_input_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    with gaff.capture(model, "1:grad_input") as got:
        model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="1:grad_input: the module returned its input itself"):
        got["1:grad_input"]


class SideLoss(nn.Module):
    """Keeps a loss for later, as routers of expert mixtures do."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.loss = None

    def forward(self, x):
        self.loss = x.pow(2).sum()
        return self.lin(x)


def test_a_loss_put_aside_inside_the_module_is_part_of_the_share():
    model = nn.Sequential(nn.Linear(3, 3), SideLoss())
    with gaff.capture(model, "1:grad_input", "1:input_grad") as got:
        y = model(torch.randn(2, 3))
        (y.sum() + model[1].loss).backward()
    assert torch.equal(got["1:grad_input"], got["1:input_grad"])
