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


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_argument_that_an_optimizer_changes_is_as_it_passed(is_fused):
    model, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1, fused=is_fused)
    true = x.detach().clone()
    with gaff.capture(model, ":input") as got:
        model(x).sum().backward()
        optimizer.step()
    assert torch.equal(got[":input"], true)


def test_what_is_expanded_is_not_written_out():
    class Expands(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 4))

        def forward(self):
            return self.weight.expand(1000, 4)

    model = Expands()
    with gaff.capture(model, ":output") as got:
        y = model()
    assert torch.equal(got[":output"], y)
    assert got[":output"].untyped_storage().nbytes() < 100
