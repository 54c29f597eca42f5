"""Copies of a model with a skipped module run it; sessions may end in any order."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff import edits


def hundredfold(module, x):
    return F.linear(x, module.weight) * 100


def test_a_forward_of_the_users_own_is_copied_with_the_module():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    model[0].forward = types.MethodType(hundredfold, model[0])
    true = model(x)
    with gaff.edit(model, {"0": edits.skip()}):
        assert torch.equal(model(x), x)
        assert torch.equal(copy.deepcopy(model)(x), true)
    assert torch.equal(model(x), true)


def test_a_shallow_copy_runs_with_its_own_weights():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with gaff.edit(model, {"0": edits.skip()}):
        model(x)
        shallow = copy.copy(model[0])
        shallow._parameters = dict.fromkeys(("weight", "bias"))
        shallow.weight, shallow.bias = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3))
        shallow._forward_hooks, shallow._forward_pre_hooks = {}, {}
        assert torch.equal(shallow(x), torch.ones(2, 3))


@pytest.mark.parametrize("order", [1, -1])
def test_handles_are_removed_in_any_order(order):
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    true = model(x)
    handles = [gaff.edit(model, {gaff.maybe("0"): edits.skip()}).attach() for _ in range(2)]
    assert torch.equal(model(x), x)
    for handle in handles[::order]:
        handle.remove()
    assert "forward" not in vars(model[0])
    assert torch.equal(model(x), true)
