"""Containers of classes of the user's own: made anew as they were, else refused; attributes beside are not kept live."""

import functools
import types
from collections.abc import MutableMapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gaff
from gaff.errors import PlanError, SiteError


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Deep(MutableMapping):
    """Keeps its items in ``tensors`` of something in an attribute."""

    def __init__(self, store, **items):
        self._inner = store(tensors=dict(items))

    def _items(self):
        return self._inner["tensors"] if isinstance(self._inner, dict) else self._inner.tensors

    def __getitem__(self, key):
        return self._items()[key]

    def __setitem__(self, key, value):
        self._items()[key] = value

    def __delitem__(self, key):
        del self._items()[key]

    def __iter__(self):
        return iter(self._items())

    def __len__(self):
        return len(self._items())


@pytest.mark.parametrize("store", [dict, types.SimpleNamespace])
def test_a_mapping_whose_items_lie_deeper_is_left_alone(store):
    inner = Calls(lambda x: Deep(store, h=x * 2))
    model = nn.Sequential(nn.Linear(2, 2), inner, Calls(lambda out: out["h"].sum()))
    x = torch.ones(1, 2)
    with gaff.capture(model, "1", "1:output[h]", reduce=gaff.keep.norm()) as got:
        loss = model(x)
    assert loss.requires_grad
    assert torch.equal(loss, model(x))
    assert torch.equal(got["1:output[h]"], (model[0](x) * 2).norm())

    given = Deep(store, h=torch.ones(2))
    reads = nn.Sequential(Calls(lambda batch: batch["h"] * 1))
    with gaff.edit(reads, {"0:input[0][h]": gaff.edits.scale(2.0)}):
        with pytest.raises(PlanError, match="Deep cannot be given another tensor"):
            reads(given)
    assert given["h"].tolist() == [1, 1]


class Attributes(dict):
    """The common dict whose keys are its attributes."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


def test_an_edit_reaches_a_dict_whose_keys_are_its_attributes():
    model = nn.Sequential(Calls(lambda x: Attributes(h=x + 0)), Calls(lambda out: out.h + out["h"]))
    with gaff.edit(model, {"0:output[h]": gaff.edits.scale(3.0)}), gaff.capture(model, "0") as got:
        assert model(torch.ones(2)).tolist() == [6, 6]
    assert got["0"].h.tolist() == got["0"]["h"].tolist() == [3, 3]


@dataclass
class Extra:
    h: torch.Tensor

    def __post_init__(self):
        self.extra, self.name = self.h * 2, "told"


@dataclass
class Cached:
    h: torch.Tensor

    @functools.cached_property
    def extra(self):
        return self.h * 2


class Box(dict):
    pass


def _cached(x):
    made = Cached(x + 0)
    assert made.extra is not None
    return made


def _box(x):
    made = Box(h=x + 0)
    made.extra = x * 2
    return made


@pytest.mark.parametrize("make", [Extra, _cached, _box])
def test_tensors_in_attributes_beside_are_told_by_their_own_address_only(make):
    model = nn.Sequential(Calls(make), Calls(lambda out: out.extra.fill_(99)))
    with gaff.capture(model, "0") as got, gaff.capture(model, "0:output[extra]") as alone:
        model(torch.ones(2))
    assert got["0:output[h]"].tolist() == [1, 1]
    assert getattr(got["0"], "name", "told") == "told"
    assert repr(got["0"].extra) == "<not captured: Tensor>"
    with pytest.raises(SiteError, match=r"'0:output\[extra\]' was not captured with what it lies in"):
        got["0:output[extra]"]
    assert alone["0:output[extra]"].tolist() == [2, 2]


class Pair(tuple):
    def __new__(cls, *items):
        return super().__new__(cls, items)


class Halved(tuple):
    def __new__(cls, items):
        return super().__new__(cls, [one / 2 for one in items])


@pytest.mark.parametrize("make", [lambda x: Pair(x, x * 4), lambda x: Halved([x * 2, x * 8])])
def test_a_tuple_with_a_constructor_of_its_own(make):
    model = nn.Sequential(Calls(make), Calls(lambda pair: pair))
    with gaff.edit(model, {"0:output[0]": gaff.edits.scale(1.0)}), gaff.capture(model, "0") as got:
        out = model(torch.ones(2))
    for pair in (out, got["0"], got["0"]):
        assert type(pair) is type(make(torch.ones(1)))
        assert [one.tolist() for one in pair] == [[1, 1], [4, 4]]
