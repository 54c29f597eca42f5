"""A module called twice gives two values, in order."""

import pytest
import torch

import gaff
from traps.against.values import Shared


def test_reading_one_of_two_needs_to_say_which():
    model, x = Shared(), torch.randn(2, 4)
    with gaff.capture(model, "lin") as got:
        model(x)
    assert torch.equal(got["lin@1"], model(x))
    with pytest.raises(
        gaff.SiteError, match="fired 2 times, calls 0 and 1: say got\\['lin@0'\\], or got.all\\('lin'\\)"
    ):
        got["lin"]
