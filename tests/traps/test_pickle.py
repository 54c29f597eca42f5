"""A pickle made while a session is open loads, computes bare bits, and needs no gaff."""

import pickle

import torch
from torch import nn

import gaff


def test_the_pickle_is_not_watched():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with gaff.capture(model, "0", "0:input") as got:
        stored = pickle.dumps(model)
        model(x)
    twin = pickle.loads(stored)
    assert b"gaff" not in stored
    assert torch.equal(twin(x), model(x))
    assert len(got.all("0")) == 1
