"""In inference mode an argument that is changed in place later keeps its captured value."""

import torch
from torch import nn

import gaff


def test_the_argument_is_copied_where_there_is_no_version_counter():
    model = nn.ReLU(inplace=True)
    with torch.inference_mode(), gaff.capture(model, ":input") as got:
        x = torch.randn(2, 3) * 1
        true = x.clone()
        model(x)
    assert torch.equal(got[":input"], true)
