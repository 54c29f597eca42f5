"""A site that never fires is an error at closing, after captures became readable."""

import pytest
import torch
from torch import nn

import gaff


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.skipped = nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def test_closing_raises_with_the_receipt():
    model, x = Skips(), torch.randn(2, 3)
    capture = gaff.capture(model, "used", "skipped")
    with pytest.raises(
        gaff.NeverFiredError, match="'skipped' never fired in 1 run: the modules were not called"
    ) as caught:
        with capture:
            model(x)
    assert torch.equal(capture["used"], model(x))
    assert caught.value.receipt.silent == ("skipped",)
    with gaff.capture(model, "used", gaff.maybe("skipped")):
        model(x)
    with gaff.capture(model, "*") as got:
        model(x)
    assert [row.fired for row in got.receipt.rows] == [1, 0]
