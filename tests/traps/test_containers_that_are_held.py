"""Lists and dicts that somebody else holds: what is put into them, and what they hold after the call."""

from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass

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


def test_a_capture_gives_no_other_dict_than_the_one_that_a_module_keeps():
    model, x = ReadsTheCache(), torch.ones(1, requires_grad=True)
    with gaff.capture(model, "q:outer_grad[h]") as got:
        y = model(x)
        y.sum().backward()
    assert y.item() == 6.0
    with pytest.raises(gaff.ExactnessError, match="the module keeps, or was given, the list or dict that it returns"):
        got["q:outer_grad[h]"]


class Table(nn.Module):
    """Hands out the dict that it keeps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.table = {"w": self.weight}

    def forward(self, x):
        return self.table


class ReadsTheTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = Table()

    def forward(self, x):
        return x * self.t(x)["w"]


def test_an_edit_of_an_output_leaves_the_dict_that_the_module_keeps():
    model, x = ReadsTheTable(), torch.ones(2)
    with gaff.edit(model, {"t:output[w]": gaff.edits.scale(2.0)}):
        assert [model(x).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert model(x).tolist() == [1.0, 1.0]
    assert model.t.table["w"] is model.t.weight


def test_two_edits_at_one_entry_leave_the_dict_of_the_caller():
    class Reads(nn.Module):
        def forward(self, state):
            return state["x"] * 1

    model, state = Reads(), {"x": torch.ones(1)}
    before, edits = state["x"], gaff.edits
    with (
        gaff.edit(model, {":input[0][x]": edits.scale(2.0)}),
        gaff.edit(model, {":input[0][x]": edits.scale(5.0)}),
    ):
        assert [model(state).item() for _ in range(3)] == [10.0, 10.0, 10.0]
    assert state == {"x": before}


def test_what_the_module_puts_under_another_key_is_the_edited_tensor():
    class Moves(nn.Module):
        def forward(self, state):
            state["h"] = state["x"]
            state["list"].insert(0, state["x"])
            del state["gone"]

    model, x = Moves(), torch.ones(2)
    state = {"x": x, "gone": x, "list": [x]}
    with gaff.edit(model, {":input[0][x]": gaff.edits.zero()}):
        model(state)
    assert sorted(state) == ["h", "list", "x"]
    assert state["h"].tolist() == [0.0, 0.0]
    assert state["x"] is x
    assert [one.tolist() for one in state["list"]] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_list_that_shrinks_and_grows_inside_the_module():
    class Changes(nn.Module):
        def forward(self, rows):
            rows.pop()
            rows.pop()
            rows.append(rows[0] * 3)

    model, rows = Changes(), [torch.ones(1), torch.ones(1), torch.ones(1)]
    first = rows[0]
    with gaff.edit(model, {":input[0][0]": gaff.edits.scale(2.0)}):
        model(rows)
    assert rows[0] is first
    assert [one.item() for one in rows] == [1.0, 6.0]


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


class Box(MutableMapping):
    """A mapping that keeps its items in a dict of its own, as anybody may write one."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, item):
        self._items[key] = item

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def test_a_mapping_of_somebody_elses_class_is_left_as_it_is():
    class Boxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            return Box(y=self.lin(x))

    class Reads(nn.Module):
        def forward(self, box):
            return box["x"] * 1

    with gaff.capture(Boxes(), ":output") as got:
        out = got._model(torch.ones(1, 2))
    assert out["y"].requires_grad
    model, box = Reads(), Box(x=torch.ones(1))
    before = box["x"]
    with gaff.edit(model, {":input[0][x]": gaff.edits.scale(2.0)}):
        assert [model(box).item() for _ in range(2)] == [2.0, 2.0]
    assert box["x"] is before


def test_a_dataclass_that_the_module_writes_into():
    @dataclass
    class State:
        x: torch.Tensor
        h: torch.Tensor | None = None

    class Writes(nn.Module):
        def forward(self, state):
            state.h = state.x * 3
            return state.h

    state = State(torch.ones(1))
    with gaff.edit(Writes(), {":input[0][x]": gaff.edits.scale(2.0)}) as edited:
        edited._model(state)
    assert (state.x.item(), state.h.item()) == (1.0, 6.0)


def test_what_moves_in_a_list_or_a_dict_is_the_callers_own():
    class Moves(nn.Module):
        def forward(self, rows, cache):
            cache.move_to_end("a")
            return rows.pop(0)

    rows, cache = [torch.ones(1), torch.ones(1) * 10], OrderedDict(a=torch.ones(1), b=torch.ones(1))
    ten = rows[1]
    edit = {":input[0][1]": gaff.edits.scale(2.0), ":input[1][b]": gaff.edits.scale(2.0)}
    with gaff.edit(Moves(), edit) as edited:
        edited._model(rows, cache)
    assert len(rows) == 1
    assert rows[0] is ten
    assert list(cache) == ["b", "a"]
