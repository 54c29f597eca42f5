"""Containers of every make are put together again around an edited tensor, with all that they carry."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


class Marked(tuple):
    """A tuple with an attribute."""

    def __new__(cls, values, extra=None):
        made = super().__new__(cls, values)
        made.extra = extra
        return made


@dataclass(frozen=True)
class Frozen:
    __slots__ = ("first", "second")
    first: torch.Tensor
    second: torch.Tensor


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


CASES = {
    "a tuple with an attribute": (lambda x: Marked((x, x + 1), extra="E"), "[0]", lambda y: y[0]),
    "a frozen dataclass with slots": (lambda x: Frozen(x, x + 1), "[first]", lambda y: y.first),
    "what torch.topk returns": (lambda x: torch.topk(x, 2), "[values]", lambda y: y.values),
}


@pytest.mark.parametrize("name", CASES)
def test_containers(name):
    make, key, read = CASES[name]
    model, x = nn.Sequential(Returns(make)), torch.ones(3)
    with gaff.edit(model, {f"0:output{key}": edits.zero()}):
        y = model(x)
    assert type(y) is type(make(x))
    assert not read(y).any()
    assert getattr(y, "extra", "E") == "E"


def test_a_tensor_that_is_there_twice_is_remarked():
    model = nn.Sequential(Returns(lambda x: {"h": x, "all": [x]}))
    with gaff.edit(model, {"0:output[h]": edits.zero()}) as changed:
        model(torch.ones(3))
    assert "holds one tensor several times" in str(changed.receipt)


def test_nested_tensors():
    ragged = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    with gaff.edit(nn.Sequential(nn.Linear(2, 2)), {"0": edits.scale(0.5)}) as changed:
        changed._model(ragged)
    assert changed.receipt.rows[0].seen == 10


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (edits.clip(0.1), lambda g: g * (0.1 / (g.norm() + 1e-6))),
        (edits.zero(), lambda g: g * 0),
        (edits.clamp(-0.5, 0.5), lambda g: g.clamp(-0.5, 0.5)),
    ],
)
def test_sparse_gradients(edit, change):
    sparse, dense = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3)
    tokens = torch.tensor([1, 1, 4])
    with gaff.edit(sparse, {"weight:grad": edit}):
        sparse(tokens).sum().backward()
    dense(tokens).sum().backward()
    torch.testing.assert_close(sparse.weight.grad.to_dense(), change(dense.weight.grad))


def test_a_zeroed_last_layer_can_still_be_trained_through():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with gaff.edit(model, {"1": edits.zero()}):
        model(torch.ones(1, 2)).sum().backward()
    assert not model[0].weight.grad.any()


def test_an_attached_plan_is_a_context_too_and_tells_the_error_of_the_edit_only():
    model = nn.Sequential(nn.Linear(2, 2))
    with gaff.Plan.edit({"0": edits.zero()}).attach(model) as handle:
        model(torch.ones(1, 2))
    assert handle.receipt.rows[0].hits == 1
    assert not model[0]._forward_hooks
    handle = gaff.Plan.edit({"0": edits.add(torch.ones(7))}).attach(model)
    with pytest.raises(gaff.PlanError, match="does not fit"):
        model(torch.ones(1, 2))
    handle.remove()
