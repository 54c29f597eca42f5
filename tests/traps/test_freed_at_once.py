"""What a capture kept is freed with it, without waiting for the garbage collector."""

import gc
import weakref

import torch
from torch import nn

import gaff


def test_no_cycle_holds_the_values():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    gc.collect()
    gc.disable()
    try:
        with gaff.capture(model, "0", "1:grad_output", "1:grad_input", "0.weight:grad", "0.weight:param") as got:
            model(x).sum().backward()
        kept = [weakref.ref(stream.records[0][2]) for stream in got._iter_streams()]
        assert len(kept) == 5
        del got
        assert [reference() for reference in kept] == [None] * 5
        features = gaff.take(model, "0")(x)
        kept = [weakref.ref(features["0"])]
        del features
        assert kept[0]() is None
    finally:
        gc.enable()
