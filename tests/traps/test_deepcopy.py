"""A deepcopy made while a session is open computes bare bits and does not hold the session."""

import copy
import gc
import weakref

import torch
from torch import nn

import gaff


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
