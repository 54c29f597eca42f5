"""A tied weight has one gradient for each backward: the total of all its uses."""

import torch

import gaff
from zoo import Tied


def test_both_names_give_the_total():
    model, tokens = Tied(), torch.randint(10, (2, 3))
    with gaff.capture(model, "embed.weight:grad", "head.weight:param") as got:
        model(tokens).pow(2).sum().backward()
    assert torch.equal(got["embed.weight:grad"], model.embed.weight.grad)
    assert torch.equal(got["head.weight:grad"], model.embed.weight.grad)
    assert torch.equal(got["embed.weight:param"], model.embed.weight)
