"""Sessions over what is unusual: names that are numbers and words, modules swapped for a run, keys that are true."""

import enum
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import gaff
from gaff import edits, keep


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def linears(*names):
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(3, 3))
    return model


@pytest.mark.parametrize("names", [("stem", "0", "1", "2", "head"), ("3", "1", "2"), ("a", "10", "9", "b", "2")])
def test_a_saved_capture_has_the_order_of_the_model(tmp_path, names):
    model = linears(*names)
    with gaff.capture(model, "*") as got:
        model(torch.randn(2, 3))
    got.save(tmp_path / "got.safetensors")
    loaded = gaff.load(tmp_path / "got.safetensors")
    assert torch.equal(loaded.stack("*"), got.stack("*"))
    loaded.save(tmp_path / "again.safetensors")
    assert torch.equal(gaff.load(tmp_path / "again.safetensors").stack("*"), got.stack("*"))


def test_where_a_module_was_replaced_words_stay_where_they_stood():
    model = linears("stem", "0", "1", "10", "head")
    with gaff.capture(model, "*") as got:
        model(torch.randn(2, 3))
    expected = got.stack("*")
    model.head = nn.Linear(3, 3)
    assert torch.equal(got.stack("*"), expected)


@pytest.mark.parametrize("change", [edits.clip(0.1), edits.clamp(-0.1, 0.1), edits.zero(), edits.quantize("bfloat16")])
@pytest.mark.parametrize("wrap", [lambda one: edits.when(one, runs=0), lambda one: [edits.when(one, runs=0)]])
def test_edits_of_some_runs_act_on_sparse_gradients_as_without(change, wrap):
    def gradient(asked):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        with gaff.edit(table, {"weight:grad": asked}):
            (table(torch.tensor([1, 2, 2, 2])) * 0.3001).sum().backward()
        return table.weight.grad.to_dense()

    assert torch.equal(gradient(wrap(change)), gradient(change))


class Attention(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


@pytest.mark.parametrize("site", ["0/softmax", "0/*softmax", "0/soft*"])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: edits.when(one, runs=0)])
def test_heads_of_weights_of_attention_are_refused_wherever_they_stand(site, wrap):
    model = nn.Sequential(Attention())
    with (
        pytest.raises(gaff.PlanError, match="cuts the last"),
        gaff.edit(model, {site: wrap(edits.at(keep.heads(1, 2), edits.zero()))}),
    ):
        pass


class Two(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Named(nn.Module):
    def forward(self, x) -> Two:
        return Two(x, x)


class Unsaid(nn.Module):
    def forward(self, x):
        made = Two(x, x)
        return made


class Made(nn.Module):
    def forward(self, x):
        return tuple([x, x])  # noqa: C409  # as people write it


@pytest.mark.parametrize("kind", [Named, Unsaid, Made])
def test_a_tensor_cannot_stand_in_for_a_tuple_however_it_is_made(kind):
    with pytest.raises(gaff.PlanError, match="returns a tuple"), gaff.edit(nn.Sequential(kind()), {"0": edits.skip()}):
        pass


def test_a_capture_that_is_opened_again_sees_what_leaves_have_got():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential())
    x = torch.randn(2, 3)
    got = gaff.capture(model, "**")
    with got:
        model(x)
    model[1].add_module("0", nn.Linear(3, 3))
    with got:
        model(x)
    assert "1.0" in got


def test_a_module_that_is_put_back_is_seen_again():
    model, x = linears("0", "1"), torch.randn(2, 3)
    first = model[0]
    with gaff.capture(model, "0") as got:
        for module in (first, nn.Linear(3, 3), first):
            model[0] = module
            model(x)
    assert torch.equal(got.run(0)["0"], first(x))
    assert torch.equal(got.run(2)["0"], first(x))
    with pytest.raises(gaff.ExactnessError, match="was replaced"):
        got.run(1)["0"]
    with gaff.capture(model, "0") as got:
        model[0] = nn.Linear(3, 3)
        model(x)
        model[0] = first
        model(x)
    assert torch.equal(got["0"], first(x))


@pytest.mark.filterwarnings("ignore:gaff. 0. the module was replaced")
def test_a_run_that_an_edit_missed_is_told():
    model, x = linears("0"), torch.randn(2, 3)
    first = model[0]
    with gaff.edit(model, {"0": edits.zero()}) as changed:
        assert not model(x).any()
        model[0] = nn.Linear(3, 3)
        assert model(x).any()
        model[0] = first
        assert not model(x).any()
    assert "was replaced" in changed.receipt.rows[0].reason


@pytest.mark.parametrize("change", [lambda v: v[:1], lambda v: v.mean(), lambda v: v.half(), lambda v: 3.0])
@pytest.mark.parametrize("place", [keep.rows(slice(0, 4)), torch.ones(4, 3, dtype=torch.bool)])
def test_what_a_function_makes_of_a_part_is_like_it(change, place):
    model = linears("0")
    with pytest.raises(gaff.PlanError, match="expected the same"), gaff.edit(model, {"0": edits.at(place, change)}):
        model(torch.randn(4, 3))


def test_take_refuses_one_value_in_two_ways():
    model = linears("0")
    for asked in (("0", {"0": keep.rows(0)}), ("0", {"*": keep.rows(0)})):
        with pytest.raises(gaff.PlanError, match="asked for twice, with different reductions"):
            gaff.take(model, *asked)
    assert list(gaff.take(model, "0", "*")(torch.randn(2, 3))) == ["0"]


def test_packed_sequences_are_given_as_they_are():
    model = nn.LSTM(2, 3)
    packed = pack_sequence([torch.randn(4, 2), torch.randn(2, 2)])
    take = gaff.take(model, ":output[1][0]", reduce=lambda value: value[0])
    assert torch.equal(take.over([packed])[":output[1][0]"], model(packed)[1][0][0])
    with pytest.raises(gaff.PlanError, match="a batch is empty"):
        take.over([[]])


def test_keys_that_are_truth_values_are_their_own():
    for function, keys in (
        (lambda h: {True: h * 2, False: h * 3}, ["True", "False"]),
        (lambda h: (h, h * 3), ["0", "1"]),
    ):
        model, x = nn.Sequential(Call(function)), torch.randn(2, 3, requires_grad=True)
        with gaff.capture(model, "*:grad_output") as got:
            made = model(x)
            sum(made.values() if isinstance(made, dict) else made).sum().backward()
        assert list(got) == [f"0:grad_output[{key}]" for key in keys]
        assert all(got[name].shape == (2, 3) for name in got)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "given"), [(float("inf"), torch.ones(1, dtype=torch.complex64)), (-0.0, torch.ones(1))]
)
def test_a_fill_is_bitwise_the_same_in_compiled_code(value, given):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            return self.inner(x * 1)

    torch._dynamo.reset()
    model = torch.compile(Model(), backend="eager")
    with gaff.edit(model, {"inner": edits.fill(value)}):
        made = model(given)
    expected = torch.full_like(given, value)
    assert torch.view_as_real(made).tolist() == torch.view_as_real(expected).tolist() if made.is_complex() else True
    assert str(made) == str(expected)


def test_float8_may_be_edited_by_an_edit_and_a_function():
    model, x = nn.Sequential(nn.Identity()), torch.randn(2, 3).to(torch.float8_e5m2)
    with gaff.edit(model, {"0": [edits.scale(2.0), lambda value: value.clone()]}):
        assert torch.equal(model(x).float(), (x.float() * 2).to(x.dtype).float())
    with gaff.edit(model, {"0": edits.ablate("mean", x)}):
        assert torch.equal(model(x).float()[0], x.float().mean(0).to(x.dtype).float())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_is_not_here_is_refused():
    model = linears("0")
    for device in ("xla", "hpu"):
        with pytest.raises(gaff.PlanError, match="torch finds no such device here"):
            gaff.capture(model, "0", to=device)
    with pytest.raises(gaff.SiteError, match="a number of 5000 digits"):
        gaff.capture(model, "0@" + "9" * 5000)
    plan = gaff.Plan.edit({"0": edits.replace(torch.zeros(2, dtype=torch.complex32))})
    with pytest.raises(gaff.PlanError, match="complex32, which safetensors does not hold"):
        plan.save("unused.json")


def test_the_last_value_alone_counts_against_the_budget():
    model, x = nn.Sequential(nn.Linear(3, 2**18)), torch.randn(1, 3)
    with gaff.capture(model, "0", last=1, budget="1.5MB") as got:
        model(x)
        model(x)
    assert got["0"].shape == (1, 2**18)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a

    def forward(self, x):
        return self.b(x)


@pytest.mark.parametrize("name", [lambda model: model.b, lambda model: "a", lambda model: "b"])
def test_an_edit_of_a_shared_module_is_switched_by_any_of_its_names(name):
    model, x = Shared(), torch.randn(2, 3)
    with gaff.edit(model, {"b": edits.zero()}) as changed:
        assert not model(x).any()
        changed.off(name(model))
        assert model(x).any()


def test_a_patch_of_a_tuple_with_one_tensor_is_of_that():
    model, x = nn.Sequential(Call(lambda h: (h * 2,))), torch.randn(2, 3)
    with gaff.capture(model, "0") as got:
        model(x)
    with gaff.edit(model, {"0": edits.patch(got)}):
        assert torch.equal(model(x + 1)[0], x * 2)


def test_a_bias_has_one_norm_whatever_the_dimension_is():
    model = linears("0")
    with gaff.edit(model, {"0.*:grad": edits.clip(0.1, per="unit", dim=1)}):
        model(torch.randn(2, 3)).sum().backward()
    assert model[0].bias.grad.norm().item() == pytest.approx(0.1, rel=1e-4)


class Color(enum.IntEnum):
    RED = 1


def test_numbers_of_other_classes_are_saved_as_what_they_are(tmp_path):
    model = nn.Sequential(Call(lambda x: (x, numpy.float64(3), Color.RED)))
    with gaff.capture(model, "0") as got:
        model(torch.ones(1))
    got.save(tmp_path / "got.safetensors")
    _, number, color = gaff.load(tmp_path / "got.safetensors")["0"]
    assert (number, type(number), color, type(color)) == (3.0, float, 1, int)


def test_a_slash_in_a_name_is_no_op():
    model = linears("l")
    model.l.add_module("a/b", nn.ModuleDict({"x": nn.Linear(3, 3), "y": nn.Linear(3, 3)}))
    with pytest.raises(gaff.NeverFiredError, match="not called"), gaff.capture(model, "l.`a/b`.*", "l"):
        model(torch.randn(1, 3))
    with gaff.capture(model, "l", gaff.maybe("nothing*")) as got:
        model(torch.randn(1, 3))
    assert got.receipt.size == "1 run, 1 site"
