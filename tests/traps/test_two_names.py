"""Both names of one module lead to the same values, and a pattern counts it once."""

import torch

import gaff
from zoo import Shared


def test_every_name_can_be_read():
    model, x = Shared(), torch.randn(2, 4)
    with gaff.capture(model, "**<Linear>") as got:
        model(x)
    assert [row.site for row in got.receipt.rows] == ["shared", "head"]
    assert len(got.all("shared")) == len(got.all("again")) == 3
    assert torch.equal(got["again@2"], got["shared@2"])
