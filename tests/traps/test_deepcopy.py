"""A deepcopy made while a session is open computes bare bits and does not hold the session."""

import copy
import gc
import weakref

import torch
from torch import nn

import gaff
from traps.tools import Gaff, same


def test_the_copy_is_not_watched():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with gaff.capture(model, "0", "0:input", "0:grad_output") as got:
        twin = copy.deepcopy(model)
        twin(x).sum().backward()
        assert got.receipt.rows[0].fired == 0
        model(x).sum().backward()
    assert torch.equal(twin(x), model(x))
    assert len(got.all("0")) == 1
    session = weakref.ref(got._session)
    del got
    gc.collect()
    assert session() is None


def trap(tool):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)

    def step():
        copy.deepcopy(model)(2 * x)
        model(x)

    found = tool.seen(model, ["0:output"], step)
    same(found["0:output"], [model[0](x)])


def test_gaff_is_right():
    trap(Gaff())
