"""A captured argument does not keep the graph behind it alive."""

import gc
import weakref

import torch
from torch import nn

import gaff


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.token = Token()
        alive.append(weakref.ref(ctx.token))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Token:
    pass


alive = []


def test_the_graph_is_freed():
    alive.clear()
    model = nn.Linear(2, 2)
    with gaff.capture(model, ":input") as got:
        h = Watched.apply(torch.ones(1, 2, requires_grad=True))
        model(h)
        del h
        gc.collect()
        assert alive[0]() is None
    assert got[":input"].tolist() == [[2, 2]]
