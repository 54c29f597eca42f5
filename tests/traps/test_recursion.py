"""A module that calls itself is one run with several calls."""

import torch

import gaff
from zoo import Tree


def test_recursion_is_one_run():
    model, x = Tree(), torch.randn(2, 4)
    with gaff.capture(model, ":output", "leaf") as got:
        y = model(x, depth=2)
    assert [torch.equal(value, y) for value in got.all(":output")] == [True, True, True]
    assert len(got.all("leaf")) == 3
    assert got.receipt.runs == 1
    assert torch.equal(got["leaf@0"], model.leaf(x))
