"""An object gaff does not know is not kept as a reference that changes later."""

import torch
from torch import nn

import gaff


class Cache:
    def __init__(self, keys):
        self.keys_seen = keys


class WithCache(nn.Module):
    def forward(self, x):
        return {"y": x + 1, "cache": Cache(x * 2)}


def test_unknown_objects_are_left_out_and_can_be_reached_by_key():
    model, x = WithCache(), torch.randn(2, 3)
    with gaff.capture(model, ":output", ":output[cache][keys_seen]") as got:
        y = model(x)
        y["cache"].keys_seen.zero_()
    assert repr(got[":output"]["cache"]) == "<not captured: Cache>"
    assert torch.equal(got[":output[cache][keys_seen]"], x * 2)
