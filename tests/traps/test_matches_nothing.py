"""A pattern that matches nothing is an error at opening; maybe allows it."""

import pytest
import torch
from torch import nn

import gaff


def test_it_is_refused_before_anything_is_installed():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(gaff.SiteError, match="no module 'l1' in Sequential of 1 modules"):
        gaff.capture(model, "0", "l1")
    assert not model[0]._forward_hooks


def test_maybe_allows_it_and_the_receipt_says_so():
    model = nn.Sequential(nn.Linear(3, 3))
    with gaff.capture(model, "0", gaff.maybe("**<Conv2d>", "nope")) as got:
        model(torch.randn(1, 3))
    assert [row.reason for row in got.receipt.rows[1:]] == ["nothing in the model matches"] * 2
