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


def test_a_broken_branch_that_is_zeroed_sends_no_nan_back():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.weight = nn.Identity(), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.branch((x * self.weight).sqrt()).sum() + self.weight.sum()

    model = Broken()
    with gaff.edit(model, {"branch": edits.zero()}):
        model(torch.zeros(1, 2)).backward()
    assert torch.equal(model.weight.grad, torch.ones(2))


@pytest.mark.parametrize("factor", [torch.arange(5.0)[:, None], torch.arange(15.0).reshape(5, 3)])
def test_a_factor_for_each_row_of_a_sparse_gradient(factor):
    sparse, tokens = nn.Embedding(5, 3, sparse=True), torch.tensor([1, 1, 4])
    with gaff.edit(sparse, {"weight:grad": edits.scale(factor)}):
        sparse(tokens).sum().backward()
    counts = torch.zeros(5, 3).index_add(0, tokens, torch.ones(3, 3))
    assert torch.equal(sparse.weight.grad.to_dense(), counts * factor)
    with (
        pytest.raises(gaff.PlanError, match="does not fit"),
        gaff.edit(sparse, {"weight:grad": edits.scale(torch.ones(2, 1))}),
    ):
        sparse(tokens).sum().backward()


def test_several_edits_of_a_sparse_gradient():
    sparse = nn.Embedding(5, 3, sparse=True)
    with gaff.edit(sparse, {"weight:grad": [edits.scale(100.0), edits.clip(1.0)]}):
        sparse(torch.tensor([1, 1, 4])).sum().backward()
    assert sparse.weight.grad.to_dense().norm().item() == pytest.approx(1.0, rel=1e-4)


def test_an_attached_plan_is_a_context_too_and_tells_the_error_of_the_edit_only():
    model = nn.Sequential(nn.Linear(2, 2))
    with gaff.edit(model, {"0": edits.zero()}).attach() as handle:
        model(torch.ones(1, 2))
    assert handle.receipt.rows[0].hits == 1
    assert not model[0]._forward_hooks
    handle = gaff.edit(model, {"0": edits.add(torch.ones(7))}).attach()
    with pytest.raises(gaff.PlanError, match="does not fit"):
        model(torch.ones(1, 2))
    handle.remove()
