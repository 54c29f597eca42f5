"""Trap: a forward that calls a module with another tensor in the place of its parameter goes on with that one."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import gaff
from gaff import edits


class Hyper(nn.Module):
    """Makes the weight of its part, or hands on what the part has."""

    def __init__(self, is_own):
        super().__init__()
        self.gen, self.core, self.is_own = nn.Linear(4, 16), nn.Linear(4, 4, bias=False), is_own

    def forward(self, x):
        weight = dict(self.core.named_parameters())["weight"] if self.is_own else self.gen(x.mean(0)).view(4, 4)
        return functional_call(self.core, {"weight": weight}, (x,))


def test_an_edit_that_would_be_lost_is_refused():
    model, x = Hyper(is_own=False), torch.randn(3, 4)
    with (
        pytest.raises(gaff.ExactnessError, match="changed this parameter during the run, as functional_call does"),
        gaff.edit(model, {"core.weight:param": edits.zero()}),
    ):
        model(x)
    bare = model(x)
    with gaff.edit(model, {"gen.weight:param": edits.scale(2.0)}):
        assert not torch.equal(model(x), bare)
    assert torch.equal(model(x), bare)


@pytest.mark.parametrize("is_root", [False, True])
def test_what_is_handed_on_and_what_the_whole_model_is_given_are_edited(is_root):
    model, x = Hyper(is_own=True), torch.randn(3, 4)
    given = {"core.weight": torch.eye(4)}
    with gaff.edit(model, {"core.weight:param": edits.scale(2.0)}):
        new = functional_call(model, given, (x,)) if is_root else model(x)
    torch.testing.assert_close(new, 2 * (x if is_root else model(x)))
