"""An argument that others may hold is kept by reference; changed later, reading it is refused."""

import pytest
import torch
from torch import nn

import gaff


def test_reading_a_changed_argument_is_refused_and_clone_helps():
    model, x = nn.ReLU(inplace=True), torch.randn(2, 3)
    true = x.clone()
    with gaff.capture(model, ":input") as got, gaff.capture(model, ":input", clone=True) as copied:
        model(x)
    with pytest.raises(
        gaff.ExactnessError, match=":input: its memory was changed in place after the capture.*clone=True"
    ):
        got[":input"]
    assert torch.equal(copied[":input"], true)


def test_a_numpy_view_of_an_argument_still_follows_it():
    x = torch.zeros(4)
    alias = x.numpy()
    with gaff.capture(nn.Identity(), ":output") as got:
        nn.Identity()
        got._model(x)
    x += 1
    assert alias.tolist() == [1, 1, 1, 1]
