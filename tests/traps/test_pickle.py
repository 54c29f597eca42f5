"""A pickle made while a session is open loads, computes bare bits, and needs no gaff."""

import pickle

import torch
from torch import nn

import gaff
from traps.tools import Gaff, same


def test_the_pickle_is_not_watched():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with gaff.capture(model, "0", "0:input") as got:
        stored = pickle.dumps(model)
        model(x)
    twin = pickle.loads(stored)
    assert b"gaff" not in stored
    assert torch.equal(twin(x), model(x))
    assert len(got.all("0")) == 1


def trap(tool):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)

    def step():
        pickle.loads(pickle.dumps(model))(2 * x)
        model(x)

    found = tool.seen(model, ["0:output"], step)
    same(found["0:output"], [model[0](x)])


def test_gaff_is_right():
    trap(Gaff())
