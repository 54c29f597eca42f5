"""Reading what was captured: a mapping, by every way to write an address, by pattern, by module, stacked, in notebooks."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import gaff
from zoo import Shared, Structured


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.wide = nn.Linear(4, 6)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return self.wide(x), self.lstm(x)


@pytest.fixture
def model():
    return Stack()


@pytest.fixture
def x():
    return torch.randn(2, 3, 4)


def test_a_capture_is_a_mapping_of_what_was_asked_for_in_its_order(model, x):
    with gaff.capture(
        model, "wide@0:output", "h.*", "`lstm`:output[0]", gaff.maybe("none.such"), "h.0:grad_output"
    ) as got:
        assert list(got) == []
        with torch.no_grad():
            model(x)
    keys = ["wide@0:output", "h.0", "h.1", "h.2", "`lstm`:output[0]", "h.0:grad_output"]
    assert isinstance(got, Mapping)
    assert list(got.keys()) == keys
    assert [name for name, _ in got.items()] == keys
    assert len(got) == 6
    assert all(value is None or isinstance(value, torch.Tensor) for value in got.values())
    assert got["h.0:grad_output"] is None  # grad mode was off
    assert "h.0:grad_output" in got
    assert dict(got)["wide@0:output"].shape == (2, 3, 6)
    assert got == got
    assert got != gaff.capture(model, "h.0")
    assert len({got, got}) == 1


SPELLINGS = [
    "@0:output",
    ":output",
    "h.0@0:output",
    "h.0:output",
    "h.0@00",
    "`h`.0",
    "lstm:output[ 0]".replace(" ", ""),
]


@pytest.mark.parametrize("address", SPELLINGS)
def test_what_was_asked_by_is_what_it_is_read_by(model, x, address):
    found = gaff.take(model, address)(x)
    assert list(found) == [address]
    with gaff.capture(model, address) as got:
        model(x)
    assert list(got) == [address]
    one, other = (value[0] if isinstance(value, tuple) else value for value in (found[address], got[address]))
    assert torch.equal(one, other)
    assert gaff.take(model, gaff.Plan.of(address))(x).keys() == {address}


def test_two_spellings_of_one_site_are_two_features_and_one_site_of_a_capture(model, x):
    assert list(gaff.take(model, "h.0", "h.0:output")(x)) == ["h.0", "h.0:output"]
    with gaff.capture(model, "h.0", "h.0:output") as got:
        model(x)
    assert list(got) == ["h.0"]
    assert torch.equal(got["h.0:output"], got["h.0"])


def test_by_module_and_by_site(model, x):
    with gaff.capture(model, model.h[1], model) as got:
        model(x)
    assert torch.equal(got[model.h[1]], got["h.1"])
    assert torch.equal(got[gaff.Site("h.1")], got["h.1"])
    assert got[model][0].shape == (2, 3, 6)
    assert model.h[1] in got
    assert model.h[0] not in got
    with pytest.raises(gaff.SiteError, match="'h.0' was not captured: expected one of h.1"):
        got[model.h[0]]
    with pytest.raises(gaff.SiteError, match="module Linear given as a pattern is not part of Stack"):
        got[nn.Linear(1, 1)]


def test_get_and_in(model, x):
    with gaff.capture(model, "h.0", "wide:grad_output", last=1) as got, torch.no_grad():
        model(x)
        model(x)
    assert got.get("nope") is None
    assert got.get("h.1", 3) == 3
    assert got.get("wide:grad_output", 3) is None  # it has an event, whose value is None
    assert torch.equal(got.get("h.0"), got["h.0"])
    for missing in ("h.1", "[[", 3, None, ("h.0",), "nope.*", lambda site: True):
        assert missing not in got
    assert "h.*" in got
    assert "**<Linear>" in got
    with gaff.capture(model, "h.0") as two:
        model(x)
        model(x)
    with pytest.raises(gaff.SiteError, match="'h.0' fired 2 times, in runs 0 and 1"):
        two.get("h.0", 3)  # several are no miss
    with pytest.raises(gaff.SiteError, match="'h.0' fired 2 times, in runs 0 and 1"):
        dict(two)
    assert list(dict(two.run(1))) == ["h.0"]
    assert list(two.run(2)) == []
    assert "h.0" not in two.run(2)
    assert repr(two.run(1)) == "<run 1 of a gaff capture: h.0>"


def test_in_reads_nothing(x):
    model = nn.Sequential(nn.Linear(4, 4))
    with gaff.capture(model, "0:input") as got:
        model(x)
    x.zero_()
    assert "0:input" in got
    with pytest.raises(gaff.ExactnessError, match="its memory was changed in place"):
        got["0:input"]


def test_all_of_a_pattern_in_order_of_run_call_and_site(model, x):
    with gaff.capture(model, "h.0", "h.2", "wide") as got:
        model(x)
        model(2 * x)
    found = got.all("h.*")
    assert len(found) == 4
    true = [got.run(run)[name] for run in (0, 1) for name in ("h.0", "h.2")]
    assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))
    assert len(got.all("**<Linear>")) == 6
    assert len(got.run(1).all("h.*")) == 2
    with pytest.raises(gaff.SiteError, match=r"'l\*' was captured nowhere: expected one of h.0, h.2, wide"):
        got.all("l*")
    with pytest.raises(gaff.SiteError, match=r"pattern 'zz\*' matches nothing"):
        got.all("zz*")
    with pytest.raises(
        gaff.SiteError, match=r"is a pattern: expected one exact site, .*got.all\('h.\*'\) gives all, got"
    ):
        got["h.*"]


def test_patterns_reach_single_tensors_and_other_names_of_a_shared_module(x):
    model = Structured()
    with gaff.capture(model, "pair*:grad_output") as got:
        out = model(torch.randn(2, 4))
        out.hidden.sum().backward()
    assert [value is None or value.shape for value in got.all("pair*:grad_output")] == [
        value is None or value.shape for value in got.values()
    ]
    shared = Shared()
    with gaff.capture(shared, "shared@0") as got:
        shared(torch.randn(2, 4))
    other = [name for name, one in shared.named_modules(remove_duplicate=False) if one is shared.shared]
    assert torch.equal(got[f"{other[1]}@0"], got["shared@0"])


def test_sites_are_stacked_to_one_tensor(model, x):
    with gaff.capture(model, "h.*", "wide", "lstm") as got:
        model(x)
    stacked = got.stack("h.*")
    assert stacked.shape == (3, 2, 3, 4)
    assert torch.equal(stacked, torch.stack([got["h.0"], got["h.1"], got["h.2"]]))
    assert torch.equal(got.stack("h.2", model.h[0]), stacked[[2, 0]])
    assert torch.equal(got.stack(list(model.h)), stacked)
    assert torch.equal(got.stack(["h.0", "lstm:output[0]"])[1], got["lstm"][0])
    assert torch.equal(got.run(0).stack("h.*"), stacked)
    with pytest.raises(
        gaff.SiteError, match=r"shape, dtype and device: 2x3x4 float32 on cpu: h.0, h.1, h.2; 2x3x6 flo"
    ):
        got.stack("h.*", "wide")
    with pytest.raises(gaff.SiteError, match=r"'lstm' cannot be stacked, its value is a tuple of 2: say which, such as "
                                             r"'lstm:output\[0\]'"):  # fmt: skip
        got.stack("lstm")
    with pytest.raises(gaff.SiteError, match="stack was given no address"):
        got.stack()


def test_what_cannot_be_stacked_is_named(model, x):
    with gaff.capture(model, {"h.0": lambda t: t.double(), "h.1": lambda t: t}, "h.2:grad_output") as got:
        with torch.no_grad():
            model(x)
    with pytest.raises(gaff.SiteError, match="2x3x4 float64 on cpu: h.0; 2x3x4 float32 on cpu: h.1"):
        got.stack("h.*")
    with pytest.raises(
        gaff.SiteError, match="'h.2:grad_output' cannot be stacked, its value is None: expected a tensor"
    ):
        got.stack("h.2:grad_output")
    with gaff.capture(model, "h.*", gaff.maybe("h.2@4")) as got:
        assert got.all("h.*") == []
        with pytest.raises(gaff.SiteError, match="'h.0' has no event; the model was not called"):
            got.stack("h.*")
        model(x)
        model(x)
    with pytest.raises(gaff.SiteError, match=r"in runs 0 and 1: say got.run\(0\)\['h.0'\], or got.all\('h.0'\)"):
        got.stack("h.*")
    assert got.run(1).stack("h.*").shape == (3, 2, 3, 4)


def test_a_stack_of_values_with_their_graph_has_one(model, x):
    with gaff.capture(model, "h.*", graph=True) as got:
        model(x)
    got.stack("h.*").sum().backward()
    assert model.h[0].weight.grad is not None


def test_what_was_never_opened_says_so_and_plain_tensors_have_no_patterns(model, x):
    got = gaff.capture(model, "h.0")
    for ask in (
        lambda: got["h.0"],
        lambda: got.all("h.*"),
        lambda: got.stack("h.*"),
        lambda: got.save("x.safetensors"),
    ):
        with pytest.raises(gaff.PlanError, match="this session was never opened"):
            ask()
    assert "h.0" not in got
    b = torch.ones(2, requires_grad=True)
    with gaff.capture(b=b) as plain:
        (b * 2).sum().backward()
    assert list(plain) == ["b"]
    assert plain["b"].tolist() == [2, 2]
    with pytest.raises(gaff.SiteError, match=r"b\* names modules, and this capture has no model"):
        plain.all("b*")


def test_what_it_says_of_itself_in_text_and_in_notebooks(model, x):
    odd = nn.Sequential()
    odd.add_module("<b>&", nn.Linear(4, 4))
    with gaff.capture(odd, "*", gaff.maybe(":grad_output")) as got:
        odd(x)
        odd(x)
    html = got._repr_html_()
    assert "<b>" not in html
    assert "<td>`&lt;b&gt;&amp;`</td><td><img " in html  # with a small picture of its first example
    assert '<td>2x3x4 float32</td><td class="r">2</td>' in html
    assert "<p>gaff capture, closed: 2 runs, 2 sites</p><table>" in html
    with gaff.capture(model, "lstm", "h.0:grad_output", gaff.maybe("zz*")) as got, torch.no_grad():
        model(x)
    assert repr(got).splitlines() == [
        "<gaff capture, closed>",
        "1 run, 2 sites",
        "site             value       events  none  reason",
        "lstm             tuple of 2       1",
        "h.0:grad_output                   1  1     " + got.receipt.rows[1].reason,
        "zz*                               0        nothing in the model matches",
    ]
    many = nn.Sequential(*(nn.Identity() for _ in range(250)))
    with gaff.capture(many, "*") as got:
        many(x)
    html = got._repr_html_()
    assert html.count("<tr>") == 201
    assert html.endswith("<p>50 more sites</p></div>")


class Pairs(nn.Module):
    """Returns a tuple, of one tensor or of two."""

    def __init__(self, count):
        super().__init__()
        self.lin, self.count = nn.Linear(2, 2), count

    def forward(self, x):
        return (self.lin(x), None) if self.count == 1 else (self.lin(x), self.lin(x) * 2)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_tensors_inside_a_value_by_the_address_of_the_whole(count):
    model = nn.Sequential(Pairs(count))
    with gaff.capture(model, "0*:grad_output" if count > 1 else "0:grad_output") as got:
        sum(one.sum() for one in model(torch.ones(1, 2)) if one is not None).backward()
    assert "0:grad_output" in got
    assert len(got.all("0:grad_output")) == count
    if count == 1:
        assert torch.equal(got["0:grad_output"], torch.ones(1, 2))
        assert torch.equal(got.get("0:grad_output"), torch.ones(1, 2))
    else:
        with pytest.raises(gaff.SiteError, match=r"names 2 tensors: say which, 0:grad_output\[0\], 0:grad_output\[1\]"):
            got["0:grad_output"]


class Sorts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        values, places = x.sort(1)
        return (values, values * 2, places) if self.count == 2 else (values, places)


def test_the_one_tensor_that_can_have_a_gradient_is_meant():
    weights = torch.arange(6.0).view(2, 3)
    model, x = nn.Sequential(nn.Linear(3, 3), Sorts(1)), torch.randn(2, 3)
    with gaff.capture(model, "1:grad_output", "1:outer_grad") as got:
        (model(x)[0] * weights).sum().backward()
    assert torch.equal(got["1:grad_output"], weights)
    assert torch.equal(got["1:outer_grad"], weights)
    model[0].zero_grad()
    with gaff.edit(model, {"1:grad_output": gaff.edits.zero()}):
        (model(x)[0] * weights).sum().backward()
    assert not model[0].weight.grad.any()
    several = r"holds 3 tensors, 2 of which can have a gradient; it belongs to one; say which: 1:grad_output\[0\], "
    with (
        pytest.raises(gaff.SiteError, match=several),
        gaff.capture(two := nn.Sequential(nn.Linear(3, 3), Sorts(2)), "1:grad_output"),
    ):
        two(x)


def test_a_parameter_of_functional_call_is_told_and_nothing_is_called_skipped():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.ones(1, 3)
    own = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    with gaff.capture(model, "0.weight:grad") as got:
        torch.func.functional_call(model, own, x).sum().backward()
    assert torch.equal(got["0.weight:grad"], own["0.weight"].grad)
    (row,) = got.receipt.rows
    assert (row.fired, row.skipped) == (1, 0)
    assert "or one stood in for it" in row.reason


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.lin(x)


@pytest.mark.parametrize("patterns", [("*/add", "1/add#0"), ("1/add#0", "*/add"), ("**/add",)])
def test_an_op_that_two_patterns_ask_for_counts_once(patterns):
    model, x = nn.Sequential(Adds(), Adds(), Adds()), torch.randn(2, 4)
    with gaff.capture(model, *patterns) as got:
        model(x)
    truth = [model[0](x), model[1](model[0](x)), model(x)]
    assert len(got) == len(got.all(patterns[-1] if len(patterns) == 1 else "*/add")) == 3
    torch.testing.assert_close(got.stack("**/add"), torch.stack(truth))  # though the layers inside run none


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(self.l(x))


def test_a_call_of_an_op_that_was_asked_for_beside_all_calls_counts_once():
    model, x = Twice(), torch.randn(2, 4)
    with gaff.capture(model, "l/linear", "l/linear@1") as got:
        y = model(x)
    assert len(got.all("l/linear@1")) == 1
    torch.testing.assert_close(got["l/linear@1"], y)


def test_a_part_of_a_gradient_that_was_asked_for_twice_is_one_key():
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3))
    with gaff.capture(model, "*:grad_output", "1:grad_output[0]") as got:
        model(torch.randn(5, 2, 4))[0].sum().backward()
    assert list(got) == list(dict(got)) == list(dict.fromkeys(got))
    assert "1:grad_output[0]" in got
