"""Lists and dicts that somebody else holds: what is put into them, and what they hold after the call."""

import pytest
import torch
from torch import nn

import gaff


class Caches(nn.Module):
    def forward(self, x):
        self.cache = {"h": x * 2}
        return self.cache


class ReadsTheCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = Caches()

    def forward(self, x):
        out = self.q(x)
        out["h"] = out["h"] * 3
        return self.q.cache["h"]


def test_a_capture_leaves_a_dict_that_a_module_keeps_the_same_object():
    model, x = ReadsTheCache(), torch.ones(1, requires_grad=True)
    with gaff.capture(model, "q:outer_grad[h]") as got:
        y = model(x)
        y.sum().backward()
    assert y.item() == 6.0
    assert got["q:outer_grad[h]"].item() == 3.0


def test_an_edit_of_an_output_is_in_the_dict_that_the_module_keeps():
    model = ReadsTheCache()
    with gaff.edit(model, {"q:output[h]": gaff.edits.scale(10.0)}):
        assert model(torch.ones(1)).item() == 60.0


class WritesState(nn.Module):
    def forward(self, state):
        state["y"] = state["x"] * 2
        state["list"].append(state["x"])
        return state["x"] * 3


class GivesState(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = WritesState()

    def forward(self, x):
        self.state = {"x": x * 1.0, "y": x * 0, "list": [x]}
        self.before = self.state["x"]
        return self.p(self.state) + self.state["y"] + self.state["list"][-1]


@pytest.mark.parametrize("address", ["p:grad_input", "p:input"])
def test_a_module_writes_into_the_dict_of_its_caller_also_where_it_is_edited(address):
    model, x = GivesState(), torch.ones(1, requires_grad=True)
    with gaff.edit(model, {address if address == "p:grad_input" else "p:input[0][x]": gaff.edits.scale(1.0)}):
        y = model(x)
        y.sum().backward()
    assert y.item() == 6.0
    assert x.grad.item() == 6.0
    assert model.state["x"] is model.before  # the caller's own again


def test_the_dict_of_the_caller_is_as_it_was_after_an_exception():
    class Raises(nn.Module):
        def forward(self, state):
            raise RuntimeError("no")

    model, state = Raises(), {"x": torch.ones(1)}
    before = state["x"]
    with gaff.edit(model, {gaff.maybe(":input[0][x]"): gaff.edits.scale(2.0)}), pytest.raises(RuntimeError):
        model(state)
    assert state["x"] is before


def test_attributes_on_tensors_go_with_the_view_that_takes_their_place():
    class Tags(nn.Module):
        def forward(self, x):
            y = x * 2
            y.tag = 3
            return y

    model, x = nn.Sequential(Tags(), nn.Tanh()), torch.ones(1, requires_grad=True)
    seen = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].tag))
    with gaff.capture(model, "0:outer_grad"):
        model(x).sum().backward()
    assert seen == [3]
