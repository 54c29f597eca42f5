"""Sessions of edits: receipts, order, switches, handles, skipped modules, plans as files, messages."""

import contextlib
import copy
import itertools
import math
import pickle
import warnings
import weakref
from collections import OrderedDict
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import gaff
from gaff import edits, keep
from gaff.errors import PlanError, SiteError
from gaff.sessions import edit_size
from zoo import InPlace, Residual, Shared, Structured, Tied


def two():
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), act=nn.Tanh(), b=nn.Linear(4, 2))), torch.randn(3, 4)


def hooks_of(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    hooks = [hook for module in model.modules() for table in tables for hook in getattr(module, table).values()]
    return sum(not getattr(hook, "__qualname__", "").startswith(("FSDPState", "_ReplicateState")) for hook in hooks)


def test_the_receipt_tells_hits_elements_rows_and_the_size_of_the_change():
    model, x = two()
    with gaff.edit(model, {"a": edits.at(keep.rows(1), edits.scale(3.0))}) as changed:
        model(x)
        model(x)
    row = changed.receipt.rows[0]
    a = model.a(x).detach()
    assert (row.hits, row.measured, row.seen, row.changed, row.rows_changed) == (2, 2, 24, 8, 2)
    assert row.delta == pytest.approx((2 * a[1].norm() / a.norm()).item(), rel=1e-5)
    assert "8/24" in repr(changed)


def test_later_events_are_measured_at_powers_of_two():
    model, x = two()
    with gaff.edit(model, {"a": edits.scale(3.0)}) as changed:
        for _ in range(70):
            model(x)
    row = changed.receipt.rows[0]
    assert (row.hits, row.measured) == (70, 16 + 2)
    assert row.changed == row.seen == 18 * 12
    assert " 18 " in str(changed.receipt)


def test_receipts_do_not_wait_for_the_device_until_they_are_read():
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.long):
        old = torch.ones(4, 3, device="meta").to(dtype)  # where reading a number is an error
        sums = edit_size._sums(old, old)
        assert all(one.is_meta for one in edit_size._added(sums, sums))


@pytest.mark.parametrize("size", [1e-200, 1e200, 1e307])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_receipts_of_numbers_whose_squares_are_none(size, dtype):
    model = nn.Sequential(nn.Identity())
    with gaff.edit(model, {"0": edits.scale(0.25)}) as changed:
        model(torch.full((2, 3), size, dtype=dtype))
        model(torch.full((2, 3), size, dtype=dtype))
    row = changed.receipt.rows[0]
    assert (row.changed, row.rows_changed, row.added_nonfinite) == (12, 4, 0)
    assert row.delta == pytest.approx(0.75, rel=1e-12)


def test_a_nan_made_of_an_infinity_is_told_and_raises_where_that_is_asked():
    model, x = nn.Sequential(nn.Identity()), torch.tensor([1.0, -math.inf])
    with gaff.edit(model, {"0": edits.scale(0.0)}) as changed:
        model(x)
    assert changed.receipt.rows[0].added_nonfinite == 1
    with (
        pytest.raises(gaff.PlanError, match="the edit made 1 non-finite elements"),
        gaff.edit(model, {"0": edits.scale(0.0)}, check_finite=True),
    ):
        model(x)


def test_a_part_of_the_strength_makes_no_nan_of_infinities():
    """What the edit leaves is as it was; what is infinite before or after it stays so, and gradients are those of lerp."""
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([[1.0, -math.inf, 0.0], [2.0, -math.inf, 1.0]], requires_grad=True)
    with gaff.edit(model, {"0": edits.at(keep.rows(0), edits.scale(2.0))}) as changed:
        changed.strength(0.5)
        y = model(x)
        y.masked_fill(y.isinf(), 0.0).sum().backward()
    assert y.tolist() == [[1.5, -math.inf, 0.0], [2.0, -math.inf, 1.0]]
    assert x.grad.tolist() == [[1.5, 0.0, 1.5], [1.0, 0.0, 1.0]]
    with gaff.edit(model, {"0": edits.fill(math.inf)}) as filled:
        filled.strength(0.5)
        assert model(torch.ones(2)).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    "values", [[1.0, 2.0, 0.0], [1.0, float("nan"), 0.0], [float("inf"), 1.0, 2.0], [1e30, 1.0, 3e38]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_of_a_receipt_are_right_for_any_values(values, dtype):
    old = torch.tensor([values, [1.0, 1.0, 1.0]], dtype=dtype)
    new = old.clone()
    new[0] = new[0] * 2
    with gaff.edit(nn.Identity(), {":output": lambda t: new.clone()}) as changed:
        changed._session._model(old)
    row = changed.receipt.rows[0]
    same = (old == new) | (old.isnan() & new.isnan())
    both = old.isfinite() & new.isfinite()
    assert row.changed == (~same).sum()
    assert row.rows_changed == (~same).any(1).sum()
    assert row.added_nonfinite == (old.isfinite() & ~new.isfinite()).sum()
    change, value = (new.double() - old.double())[both].norm(), old.double()[both].norm()
    assert row.delta == pytest.approx((change / value).item(), rel=1e-2 if values[0] == 1e30 else 1e-5)


def test_edits_at_one_site_act_in_the_order_given_and_sessions_in_that_of_opening():
    model, x = two()
    a = model.a(x)
    with gaff.edit(model, {"*<Linear>": edits.add(1.0), "a": edits.scale(2.0)}), gaff.capture(model, "a") as got:
        model(x)
    assert torch.equal(got["a"], (a + 1) * 2)
    first, second = gaff.edit(model, {"a": edits.scale(2.0)}), gaff.edit(model, {"a": edits.add(1.0)})
    seen_by_others = []
    model.a.register_forward_hook(lambda module, args, output: seen_by_others.append(output))
    with gaff.capture(model, "a") as around, first, second, gaff.capture(model, "a") as inside:
        model(x)
    for seen in (around["a"], inside["a"], seen_by_others[0]):  # what the model goes on with, whoever came first
        assert torch.equal(seen, a * 2 + 1)


def test_inputs_are_captured_as_the_module_gets_them_whoever_came_first():
    model, x = two()
    with gaff.capture(model, "b:input") as around, gaff.edit(model, {"b:input": edits.scale(2.0)}):
        model(x)
    assert torch.equal(around["b:input"], 2 * torch.tanh(model.a(x)))


def test_gradient_edits_at_nested_modules_act_parent_first():
    model = nn.Sequential(OrderedDict(inner=nn.Sequential(nn.Linear(4, 4)), head=nn.Linear(4, 2)))
    x = torch.randn(3, 4, requires_grad=True)
    hidden = model.inner(x)
    hidden.register_hook(lambda g: (g * 10).clamp(-1, 1) + 1)  # the outer module first, then the inner one
    model.head(hidden).pow(2).sum().backward()
    true, x.grad = x.grad, None
    changes = {"inner.0:grad_output": edits.add(1.0), "inner:grad_output": [edits.scale(10.0), edits.clamp(-1, 1)]}
    with gaff.edit(model, changes):
        model(x).pow(2).sum().backward()
    assert torch.equal(x.grad, true)


def test_switches_and_strength_while_open():
    model, x = two()
    y, zero = model(x), model.b(torch.zeros(3, 4))
    with gaff.edit(model, {"act": edits.zero(), "a": edits.scale(1.0)}) as changed:
        assert torch.equal(model(x), zero)
        changed.off("act")
        assert torch.equal(model(x), y)
        changed.on()
        changed.strength(0.5, "act")
        torch.testing.assert_close(model(x), (y + zero) / 2)
        with pytest.raises(gaff.SiteError, match="'b' is not edited: expected one of act, a"):
            changed.off("b")
    assert "let pass 1 times" in str(changed.receipt)


def test_when_limits_an_edit_to_runs_calls_and_steps():
    model, x = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain, found = model(x), []
    with gaff.edit(model, {"a": edits.when(edits.scale(2.0), runs=range(1, 5), steps=[0, 2])}) as changed:
        for _ in range(4):
            found.append(torch.equal(model(x), plain))
            optimizer.step()
    assert found == [True, True, False, True]
    assert changed.receipt.rows[0].hits == 1
    shared, x = Shared(), torch.randn(2, 4)
    with gaff.edit(shared, {"shared": edits.when(edits.zero(), calls=slice(1, None))}) as changed:
        shared(x)
    assert changed.receipt.rows[0].hits == 2


def test_when_that_never_holds_is_a_miss():
    model, x = two()
    with (
        pytest.raises(gaff.NeverFiredError, match=r"'a' never fired in 1 run: let pass 1 times"),
        gaff.edit(model, {"a": edits.when(edits.zero(), runs=7)}),
    ):
        model(x)


@pytest.mark.parametrize(
    "edit",
    [
        [edits.when(edits.zero(), runs=7)],
        edits.at(keep.rows(0), edits.when(edits.zero(), runs=7)),
        edits.chain(edits.when(edits.zero(), runs=7), edits.when(edits.scale(2.0), calls=3)),
        edits.when(edits.when(edits.zero(), runs=7), runs=0),
    ],
)
def test_when_inside_of_another_edit_that_never_holds_is_a_miss_too(edit):
    model, x = two()
    with pytest.raises(gaff.NeverFiredError, match="let pass 1 times"), gaff.edit(model, {"a": edit}):
        model(x)


@pytest.mark.parametrize("site", ["nosuch", "a.weigth:grad", "**<Conv2d>"])
def test_an_address_that_names_nothing_raises_before_anything_is_installed(site):
    model, _ = two()
    with pytest.raises(gaff.SiteError, match="nearest|classes here"):
        gaff.edit(model, {site: edits.zero()}).__enter__()
    assert hooks_of(model) == 0


def test_a_site_that_was_never_hit_raises_at_closing_and_maybe_allows_it():
    model, x = two()
    with pytest.raises(gaff.NeverFiredError, match="'b' never fired") as caught, gaff.edit(model, {"b": edits.zero()}):
        model.a(x)
    assert caught.value.receipt.rows[0].hits == 0
    with (
        pytest.raises(gaff.NeverFiredError, match=r"a gradient needs backward\(\) inside the session"),
        gaff.edit(model, {"b:grad_output": edits.zero()}),
    ):
        model(x)
    with gaff.edit(model, {gaff.maybe("b"): edits.zero(), gaff.maybe("nosuch.*"): edits.zero()}):
        pass


BAD = {
    "shape": (lambda t: t[:1], r"a: the edit returned 1x4 float32 where 3x4 float32 passes"),
    "dtype": (lambda t: t.half(), r"a: the edit returned 3x4 float16 where 3x4 float32 passes"),
    "device": (lambda t: t.to("meta"), r"3x4 float32 on meta where 3x4 float32 on cpu passes"),
    "layout": (lambda t: t.to_sparse(), r"3x4 float32 as torch.sparse_coo where"),
    "nothing": (lambda t: None, r"a: the edit returned NoneType None: expected a tensor"),
    "in place": (lambda t: t.mul_(2), r"a: the edit wrote into what it was given: expected a new tensor"),
    "patch": (edits.patch(torch.zeros(2, 4)), r"a: patch of shape 2x4 given where 3x4 passes: map them"),
    "rows": (edits.patch(torch.zeros(2, 4), rows={0: 5}), r"a: 0: 5 is outside dimension 0 of 3x4 \(here\) or 2x4"),
    "index": (edits.at(keep.rows(7), edits.zero()), r"a: index 7 is outside dimension 0 of shape \(3, 4\)"),
    "step": (
        lambda t: edits.at(keep.positions(4), edits.zero()).change(t[:, None], None)[:, 0],
        r"index 4 is outside dimension 1 of shape \(3, 1, 4\); a step of generate with a cache passes one position",
    ),
    "mask": (edits.at(torch.ones(9, dtype=torch.bool), edits.zero()), r"a: mask of shape \(9,\) does not fit"),
    "width": (edits.project(torch.ones(5)), r"a: directions of width 5 given"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_an_edit_may_not_return_is_refused_at_the_site(name):
    model, x = two()
    edit, message = BAD[name]
    with pytest.raises(gaff.PlanError, match=message), gaff.edit(model, {"a": edit}):
        model(x)
    assert hooks_of(model) == 0


WRONG = [
    (lambda m: gaff.edit(m, {"a": 3}), "edit 3 cannot be called"),
    (lambda m: gaff.edit(m, {"a": edits.zero}), r"edit gaff\.edits\.zero was not called"),
    (lambda m: gaff.edit(m, {"a": nn.Tanh}), "edit Tanh is a class"),
    (lambda m: gaff.edit(m, ["a"]), "are no dict"),
    (lambda m: gaff.edit(m, {}), "are none"),
    (lambda m: gaff.Plan.edit({"a": edits.zero()}, last=1), "option 'last' is not known to an edit"),
    (lambda m: gaff.edit({"a": edits.zero()}), "pattern 'a' needs a model"),
    (lambda m: gaff.edit(m, {"a:output[0]": edits.skip()}), "skip takes the place of a whole module"),
    (lambda m: gaff.edit(nn.BatchNorm1d(3), {"running_mean:buffer": edits.zero()}), "buffers cannot be edited"),
    (lambda m: gaff.edit(m, {"a.weight:param": edits.zero()}, threads="all"), "expected threads='own'"),
    (lambda m: gaff.edit(m, gaff.Plan.of("a")), "the plan captures"),
    (lambda m: gaff.capture(m, gaff.Plan.edit({"a": edits.zero()})), "the plan edits"),
    (lambda m: gaff.edit(m, gaff.Plan.of("a")).attach(), "the plan captures"),
    (lambda m: edits.clamp(2, 1), "keeps nothing apart"),
    (lambda m: edits.clip(0), "is no limit"),
    (lambda m: edits.clip(1, per="token"), "per='token' is not known"),
    (lambda m: edits.clip(1, per="row", dim=1), r"clip\(per='row', dim=1\): a dim is that of units"),
    (lambda m: edits.noise(-1), "is no standard deviation"),
    (lambda m: edits.scale("2"), "factor='2' is a str"),
    (lambda m: edits.quantize("int8"), "is no floating type"),
    (lambda m: edits.ablate("median"), "ablate 'median' is not known"),
    (lambda m: edits.ablate("mean"), "a reference of activations goes with"),
    (lambda m: edits.project(torch.zeros(3)), "span nothing"),
    (lambda m: edits.at(3, edits.zero()), "index 3 is no place"),
    (lambda m: edits.at(keep.mean(), edits.zero()), "is no place"),
    (lambda m: edits.when(edits.zero(), runs="first"), "names no numbers"),
    (lambda m: edits.patch(torch.zeros(3), rows="first"), "expected a whole number"),
    (lambda m: edits.patch(torch.zeros(3), run="x"), "run='x' is no number"),
    (lambda m: edits.clamp(float("nan"), 1), "keeps nothing apart"),
    (lambda m: edits.ablate(seed="a"), "seed='a' is no number"),
    (lambda m: edits.project(torch.ones(3), dim=1.0), "dim=1.0 is no number"),
    (lambda m: edits.scale(2**64), "beyond the whole numbers of torch"),
    (lambda m: gaff.edit(m, {"a": edits.zero()}).strength("a"), "strength 'a' is none"),
    (lambda m: gaff.edit(m, {"a": edits.zero()}).strength(float("nan")), "strength nan is none"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_bad_input_is_refused_before_anything_is_installed(make, message):
    model, _ = two()
    with pytest.raises(gaff.PlanError, match=message):
        make(model)
    assert hooks_of(model) == 0


def test_a_value_with_several_tensors_says_which_there_are():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    model, x = Net(), torch.randn(2, 3, 4)
    parts = r"say which, or give an edit for each: {0}:output\[0\] \(2x3x5 float32\), {0}:output\[1\]\[0\] \(1x2x5 float32\)"
    for asked, told in (("lstm:output", "lstm"), ("l*", "lstm"), ("lstm@0", "lstm@0")):
        start = f"{told}: its value is a tuple of 2 and holds 3 tensors, an edit changes one: "
        with pytest.raises(gaff.SiteError, match=start + parts.format(told)), gaff.edit(model, {asked: edits.zero()}):
            model(x)
    with gaff.edit(model, {"lstm:output[0]": edits.zero(), "lstm:output[1][0]": edits.zero()}) as changed:
        assert not model(x).any()
    assert [row.hits for row in changed.receipt.rows] == [1, 1]


def test_structures_ask_which_tensor_and_are_put_together_again():
    model, x = Structured(), torch.randn(2, 4)
    with pytest.raises(
        gaff.SiteError, match=r"holds 2 tensors.*say which, .*: pair:output\[first\] .*, pair:output\[second\]"
    ):
        with gaff.edit(model, {"pair": edits.zero()}):
            model(x)
    with gaff.edit(model, {"pair:output[first]": edits.zero(), ":output[extra][3][0]": edits.scale(5.0)}):
        out = model(x)
    hidden = model.lin(x)
    assert torch.equal(out.hidden, hidden)
    assert torch.equal(out.extra["second"], hidden - 1)
    assert torch.equal(out.extra[3][0], hidden * 10)
    assert out.extra[3][1:] == [None, 7]
    with (
        pytest.raises(gaff.SiteError, match=r"has no \[third\]"),
        gaff.edit(model, {"pair:output[third]": edits.zero()}),
    ):
        model(x)


def test_exceptions_pass_and_leave_nothing():
    model, x = two()

    def fail(t):
        raise ZeroDivisionError("mine")

    with (
        pytest.raises(ZeroDivisionError, match="mine") as caught,
        gaff.edit(model, {"a": fail, "b:grad_output": edits.zero()}),
    ):
        model(x)
    assert any(
        "in the edit at a, run 0, call 0" in note
        for note in getattr(caught.value, "__notes__", ["in the edit at a, run 0, call 0"])
    )
    assert hooks_of(model) == 0


@pytest.mark.parametrize("value", [None, torch.ones(3, 4), lambda x: x * 2], ids=["input", "tensor", "function"])
def test_a_skipped_module_is_not_run(value):
    model, x = two()
    calls = []
    inner = model.act.forward
    model.act.forward = lambda t: calls.append(1) or inner(t)
    with gaff.edit(model, {"act": edits.skip(value)}) as changed:
        found = model(x)
    a = model.a(x)
    assert torch.equal(found, model.b(a if value is None else value if isinstance(value, torch.Tensor) else value(a)))
    assert not calls
    assert changed.receipt.rows[0].hits == 1
    assert "forward" in vars(model.act)  # the user's own is back
    model(x)
    assert calls == [1]


def test_a_skipped_module_is_copied_and_pickled_as_it_was():
    model, x = two()
    y = model(x)
    with gaff.edit(model, {"act": edits.skip()}):
        assert not torch.equal(model(x), y)
        assert torch.equal(copy.deepcopy(model)(x), y)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    assert "forward" not in vars(model.act)


def test_attached_edits_stay_until_removed():
    model, x = two()
    plan = gaff.Plan.edit({"a": edits.scale(0.0)})
    y = model(x)
    handle = gaff.edit(model, plan).attach()
    zero = model.b(torch.zeros(3, 4))
    assert torch.equal(model(x), zero)
    for bare in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(bare(x), y)
    assert handle.receipt.rows[0].hits >= 1
    assert "attached" in repr(handle)
    handle.off()
    assert torch.equal(model(x), y)
    handle.remove()
    handle.remove()
    assert hooks_of(model) == 0


def test_a_handle_without_a_hit_warns_once_and_raises_at_the_end():
    model, x = two()
    model.extra = nn.Linear(2, 2)
    model.forward = lambda t: model.b(model.act(model.a(t)))
    handle = gaff.edit(model, {"extra": edits.zero()}).attach()
    with pytest.warns(UserWarning, match="attached edits at extra were not hit in the first full step"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    with pytest.raises(gaff.NeverFiredError):
        handle.remove()
    assert hooks_of(model) == 0


def test_a_parameter_is_stood_in_for_everywhere_and_never_written_to():
    model, tokens = Tied(), torch.tensor([[1, 2, 3]])
    weight = model.embed.weight
    before = weight.detach().clone()
    with gaff.edit(model, {"embed.weight:param": edits.scale(2.0)}) as changed:
        found = model(tokens)
        found.sum().backward()
    assert model.embed.weight is model.head.weight is weight
    assert torch.equal(weight, before)
    doubled = (before * 2).requires_grad_()
    true = torch.tanh(doubled[tokens]) @ doubled.T
    true.sum().backward()
    assert torch.equal(found, true)
    torch.testing.assert_close(weight.grad, doubled.grad * 2)
    assert changed.receipt.rows[0].hits == 1


@pytest.mark.parametrize("build", [lambda: nn.LSTM(4, 3, batch_first=True), lambda: nn.GRU(4, 3, batch_first=True)])
def test_recurrent_weights_are_stood_in_for(build):
    model, x = build(), torch.randn(2, 5, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight_hh_l0.mul_(3)
    with gaff.edit(model, {"weight_hh_l0:param": edits.scale(3.0)}):
        assert torch.equal(model(x)[0], other(x)[0])
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    if not x.is_cuda:  # where torch lays them out anew
        assert not model._weights_have_changed()  # by which torch sees weights that were exchanged


def test_the_weight_of_a_layer_that_is_never_called_is_stood_in_for():
    model, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.out_proj.weight.mul_(3)
    with gaff.edit(model, {"out_proj.weight:param": edits.scale(3.0)}):
        assert torch.equal(model(x, x, x)[0], other(x, x, x)[0])


def test_a_failing_run_gives_the_parameter_back():
    model, x = two()
    weight = model.a.weight
    with gaff.edit(model, {"a.weight:param": edits.zero()}):
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 9))
        assert model.a.weight is weight
        model(x)
    assert model.a.weight is weight


@pytest.mark.parametrize("port", ["grad_output", "grad_input", "input_grad"])
def test_gradient_edits_in_models_that_write_in_place(port):
    model, x = InPlace(), torch.randn(2, 4)
    true, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = model.lin(true)
    if port == "grad_output":
        y.register_hook(lambda g: g * 3)
    y = y + 1
    y = torch.cat([y[:, :2] * 3, y[:, 2:]], 1)
    if port != "grad_output":
        y.register_hook(lambda g: g * 3)
    model.out(torch.relu(y)).sum().backward()
    with gaff.edit(model, {"lin:grad_output" if port == "grad_output" else f"act:{port}": edits.scale(3.0)}):
        model(found).sum().backward()
    torch.testing.assert_close(found.grad, true.grad)


def test_the_share_of_a_residual_block_is_edited_without_the_rest():
    model, x = Residual(1), torch.randn(2, 8)
    true, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    own = true.view_as(true)
    own.register_hook(lambda g: g * 0)
    (true + model.blocks[0](own)).pow(2).sum().backward()
    with gaff.edit(model, {"blocks.0:grad_input": edits.zero()}):
        model(found).pow(2).sum().backward()
    assert torch.equal(found.grad, true.grad)


class Flat(nn.Module):
    """A view that is changed in place later."""

    def __init__(self):
        super().__init__()
        self.flat, self.lin = nn.Flatten(), nn.Linear(4, 3)

    def forward(self, x):
        return self.lin(self.flat(x * 3).add_(1).mul_(2))


@pytest.mark.parametrize("site", ["flat:grad_input", "flat:grad_output"])
def test_a_gradient_that_torch_does_not_tell_raises(site):
    model, x = Flat(), torch.randn(2, 2, 2, requires_grad=True)
    with (
        pytest.raises(gaff.ExactnessError, match="a view that was changed in place later"),
        gaff.edit(model, {site: edits.scale(2.0)}),
    ):
        model(x).sum().backward()


def test_the_output_of_a_linear_layer_in_three_dimensions_changed_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 4)
    true, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    hidden = nn.functional.linear(true.reshape(-1, 4), model[0].weight, model[0].bias)
    hidden.register_hook(lambda g: g * 3)
    torch.relu(hidden).pow(2).sum().backward()
    with gaff.edit(model, {"0:grad_output": edits.scale(3.0)}):
        model(found).pow(2).sum().backward()
    torch.testing.assert_close(found.grad, true.grad)


def test_double_backward_goes_through_edits_of_gradients():
    model, x = two()
    true, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    hidden = model.a(true)
    hidden.register_hook(lambda g: g * g)
    [first] = torch.autograd.grad(model.b(torch.tanh(hidden)).pow(2).sum(), true, create_graph=True)
    [second] = torch.autograd.grad(first.pow(2).sum(), true)
    with gaff.edit(model, {"a:grad_output": lambda g: g * g}):
        [one] = torch.autograd.grad(model(found).pow(2).sum(), found, create_graph=True)
        [two_] = torch.autograd.grad(one.pow(2).sum(), found)
    assert torch.equal(one, first)
    torch.testing.assert_close(two_, second)


numbers = st.floats(-1e3, 1e3, allow_nan=False)
leaves = st.one_of(
    st.builds(edits.scale, numbers),
    st.builds(edits.add, numbers, numbers),
    st.builds(edits.fill, numbers),
    st.builds(lambda low, width: edits.clamp(low, low + width), numbers, st.floats(0, 10)),
    st.builds(edits.clip, st.floats(0.1, 10), st.sampled_from(["tensor", "row"])),
    st.builds(edits.clip, st.floats(0.1, 10), st.just("unit"), st.integers(-1, 1)),
    st.builds(edits.noise, st.floats(0, 5), st.integers(0, 9)),
    st.builds(edits.quantize, st.sampled_from(["float16", "bfloat16", "float8_e5m2"]), scaled=st.booleans()),
    st.builds(edits.reverse, numbers),
    st.just(edits.stop()),
    st.just(edits.ablate()),
    st.builds(lambda n: edits.patch(torch.arange(float(n)), rows={0: n - 1}), st.integers(1, 4)),
    st.builds(lambda n: edits.project(torch.ones(n)), st.integers(1, 4)),
)
forwards = st.slices(4).filter(lambda one: (one.step or 1) > 0)
places = st.one_of(
    st.builds(keep.rows, st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1), forwards)),
    st.builds(keep.heads, st.integers(0, 3), st.just(4)),
    st.just(torch.tensor([True, False])),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(edits.at, places, inner),
        st.builds(lambda row: edits.chain(*row), st.lists(inner, max_size=3)),
        st.builds(lambda e, r, s: edits.when(e, runs=r, steps=s), inner, st.integers(0, 5), st.just(range(3))),
    ),
    max_leaves=4,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["a", "h.*:grad_output", "**<Linear>", "x.w:grad"]), nested, min_size=1))
def test_a_plan_is_saved_and_loaded_as_it_was(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = gaff.Plan.edit(changes, check_finite=True)
    plan.save(path)
    loaded = gaff.Plan.load(path)
    assert loaded.digest == plan.digest
    assert str(loaded) == str(plan)
    assert loaded.options == plan.options


def test_a_loaded_plan_does_what_the_first_did(tmp_path):
    model, x = two()
    plan = gaff.Plan.edit({"a": [edits.add(torch.arange(4.0)), edits.at(keep.rows(0), edits.noise(1.0, seed=4))]})
    plan.save(tmp_path / "plan.json")
    with gaff.edit(model, plan):
        true = model(x)
    with gaff.edit(model, gaff.Plan.load(tmp_path / "plan.json")):
        assert torch.equal(model(x), true)
    other = nn.Sequential(OrderedDict(a=nn.Linear(4, 5)))
    with pytest.raises(gaff.GaffError), gaff.edit(other, gaff.Plan.load(tmp_path / "plan.json")):
        other(x)
    with pytest.raises(gaff.SiteError, match="no module 'a'"):
        gaff.edit(nn.Sequential(nn.Linear(4, 4)), plan)


def test_plans_that_cannot_be_saved_or_read_say_why(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(gaff.PlanError, match="^a: edit call is a function or a module: a plan that holds one cannot"):
        gaff.Plan.edit({"b": edits.zero(), "a": torch.tanh}).save(path)
    with pytest.raises(gaff.PlanError, match="holds 1 tensors, which are no text"):
        gaff.Plan.edit({"a": edits.add(torch.ones(2))}).to_json()
    gaff.Plan.edit({"a": edits.add(torch.ones(2))}).save(path)
    (tmp_path / "plan.json.safetensors").unlink()
    with pytest.raises(gaff.RecordError, match="tensor 'direction.0' of the plan is missing"):
        gaff.Plan.load(path)
    for text in (
        '{"gaff_plan": 1, "requests": [{"pattern": "a", "edit": {"kind": "exec"}}], "options": {}}',
        "[]",
        "x",
    ):
        path.write_text(text)
        with pytest.raises(gaff.RecordError, match="cannot be read"):
            gaff.Plan.load(path)
    with pytest.raises(gaff.RecordError, match="cannot be read"):
        gaff.Plan.load(tmp_path / "nosuch.json")


def test_a_module_replaced_while_edited_does_not_go_unnoticed():
    model, x = two()
    session = gaff.edit(model, {"act": edits.zero()})
    session.__enter__()
    model(x)
    model.act = nn.ReLU()
    model(x)
    with pytest.warns(UserWarning, match="act: the module was replaced while the session was open"):
        session.__exit__(None, None, None)
    assert "its successor was not edited" in str(session.receipt)


def scale_by(value):
    return gaff.Plan.edit({"a": edits.scale(torch.full((4,), value))})


def test_plans_keep_their_tensors_apart_and_touch_no_other_file(tmp_path):
    scale_by(1.0).save(tmp_path / "steer.v1")
    scale_by(-1.0).save(tmp_path / "steer.v2")
    assert gaff.Plan.load(tmp_path / "steer.v1").digest == scale_by(1.0).digest
    with pytest.raises(gaff.PlanError, match="is a name for the tensors of a plan"):
        scale_by(1.0).save(tmp_path / "p.safetensors")
    (tmp_path / "steer.v1.safetensors").write_bytes((tmp_path / "steer.v2.safetensors").read_bytes())
    with pytest.raises(gaff.RecordError, match="holds the tensors of another plan"):
        gaff.Plan.load(tmp_path / "steer.v1")
    for junk in (b"", b"junkjunkjunk", b"\xff" * 64):
        (tmp_path / "steer.v1.safetensors").write_bytes(junk)
        with pytest.raises(gaff.RecordError, match="of the plan cannot be read"):
            gaff.Plan.load(tmp_path / "steer.v1")


HOSTILE = [
    '{"kind": "clip", "norm": -1}',
    '{"kind": "clip", "norm": 1, "per": "foo"}',
    '{"kind": "ablate", "how": "mean"}',
    '{"kind": "quantize", "dtype": "int8"}',
    '{"kind": "quantize", "dtype": "save"}',
    '{"kind": "clamp", "low": 2, "high": 1}',
    '{"kind": "noise", "std": 1, "seed": "x"}',
    '{"kind": "scale", "factor": "abc"}',
    '{"kind": "scale", "factor": true}',
    '{"kind": "scale"}',
    '{"kind": "fill", "value": null}',
    '{"kind": "chain", "edits": 5}',
    '{"kind": "chain", "edits": [5]}',
    '{"kind": "when", "edit": 7}',
    '{"kind": "when", "edit": {"edit": {"kind": "stop"}}, "runs": "abc"}',
    '{"kind": "skip", "value": "x"}',
    '{"kind": "replace", "value": 3}',
    '{"kind": "patch", "source": 5}',
    '{"kind": "project", "directions": 3}',
    '{"kind": "at", "index": 3, "edit": {"edit": {"kind": "stop"}}}',
    '{"kind": "with_event", "function": "x"}',
    '{"kind": ["scale"]}',
    "7",
]


@pytest.mark.parametrize("edit", HOSTILE)
def test_files_that_no_plan_wrote_are_refused_when_they_are_read(edit):
    text = '{"gaff_plan": 1, "requests": [{"pattern": "a", "edit": %s}], "options": {}}'
    with pytest.raises(gaff.RecordError, match="plan cannot be read"):
        gaff.Plan.from_json(text % edit)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"gaff_plan": true, "requests": [{"pattern": "a"}], "options": {}}',
        '{"gaff_plan": 1, "requests": [], "options": {}}',
        '{"gaff_plan": 1, "requests": [{"pattern": "a"}], "options": []}',
        '{"gaff_plan": 1, "requests": [{"pattern": "a", "optional": "false"}], "options": {}}',
        '{"gaff_plan": 1, "requests": [{"pattern": "a"}], "options": {"budget": "%sGB"}}' % ("9" * 400),
        '{"gaff_plan": 1, "requests": [{"pattern": "%s"}], "options": {}}' % ("**." * 14 + "zz"),
    ],
)
def test_texts_that_are_no_plans(text):
    with pytest.raises(gaff.RecordError, match="plan cannot be read"):
        gaff.Plan.from_json(text)


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    small, two_ = numpy.float32(0.5), numpy.int64(2)
    for edit in (
        edits.clip(small),
        edits.fill(small),
        edits.noise(small, two_),
        edits.clamp(small),
        edits.reverse(two_),
    ):
        assert edit.change(torch.ones(3), edits.Event()).shape == (3,)
        assert gaff.Plan.edit({"a": edit}).to_json()
    assert edits.patch(torch.zeros(3), rows=numpy.array([1])).rows == ((1, 1),)
    for wrong in (lambda: edits.clamp(torch.ones(4)), lambda: edits.patch(torch.ones(2), rows=True)):
        with pytest.raises(gaff.PlanError):
            wrong()


def test_tensors_of_any_make_are_saved_or_refused(tmp_path):
    tensors = [
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(1).expand(4),
        torch.ones(2, 3).T,
        torch.tensor(2.0),
    ]
    for number, tensor in enumerate([*tensors, torch.ones(2).bfloat16(), nn.Parameter(torch.ones(2))]):
        plan = gaff.Plan.edit({"a": edits.add(tensor)})
        plan.save(tmp_path / f"{number}.json")
        assert gaff.Plan.load(tmp_path / f"{number}.json").digest == plan.digest
    for tensor in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(gaff.PlanError, match="expected a plain one to save"):
            gaff.Plan.edit({"a": edits.add(tensor)}).save(tmp_path / "x.json")
    assert not (tmp_path / "x.json.safetensors").exists()


@pytest.mark.parametrize("is_edit", [True, False])
def test_a_module_that_is_replaced_is_told_where_its_ops_are_asked_for_too(is_edit):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    session = gaff.edit(model, {"0/linear": edits.scale(2.0)}) if is_edit else gaff.capture(model, "0/linear")
    with pytest.warns(UserWarning, match="0/linear#0: the module was replaced"), session:  # noqa: PT031
        model(x)
        model[0] = nn.Linear(4, 4)
        model(x)
    assert "the module was replaced" in str(session.receipt)


def test_an_edit_inside_a_parametrisation_is_refused_where_torch_keeps_what_that_makes():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    site, weight = "0.parametrizations.weight.original1:param", model[0].parametrizations.weight.original1
    change = {gaff.maybe(site): edits.scale(2.0)}
    with parametrize.cached(), gaff.edit(model, change):
        with pytest.raises(gaff.PlanError, match="parametrize.cached"):
            model(torch.ones(2, 4))
        assert model[0].parametrizations.weight.original1 is weight
    with gaff.edit(model, change), parametrize.cached(), pytest.raises(gaff.PlanError, match="cached"):
        model(torch.ones(2, 4))


def test_a_gradient_inside_a_parametrisation_is_edited_though_torch_keeps_what_that_makes():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    leaf = model[0].parametrizations.weight.original1
    model(torch.ones(2, 4)).sum().backward()
    truth, leaf.grad = leaf.grad, None
    with gaff.edit(model, {"0.parametrizations.weight.original1:grad": edits.scale(0.5)}), parametrize.cached():
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(leaf.grad, truth * 0.5)


def test_switches_take_a_module_and_a_predicate():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    with torch.no_grad(), gaff.edit(model, {model[0]: edits.zero(), "1": edits.scale(2.0)}) as changed:
        bare = F.linear(x, model[0].weight, model[0].bias)
        changed.off(model[0])
        assert torch.equal(model(x), 2 * F.linear(bare, model[1].weight, model[1].bias))
        changed.off(lambda site: site.path == "1")
        assert torch.equal(model(x), F.linear(bare, model[1].weight, model[1].bias))
        changed.on(model[0])
        changed.strength(0.5, model[0])
        assert torch.equal(model(x), F.linear(0.5 * bare, model[1].weight, model[1].bias))
        with pytest.raises(SiteError, match="is not part of"):
            changed.off(nn.Linear(3, 3))
        with pytest.raises(PlanError, match="names no site"):
            changed.off(["0"])


class Around(nn.Module):
    """``t(h) + h`` of a linear layer's output: a share of the gradient there is not its total."""

    def __init__(self):
        super().__init__()
        self.a, self.t = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        h = self.a(x)
        return self.t(h) + h


def opened(*sessions):
    """All of them, opened in their order."""
    stack = ExitStack()
    for one in sessions:
        stack.enter_context(one)
    return stack


@pytest.mark.parametrize("is_edit_first", [True, False])
@pytest.mark.parametrize("port", ["grad_input", "input"])
def test_the_total_at_an_input_is_that_of_what_was_passed_in_whoever_came_first(port, is_edit_first):
    model, x = Around(), torch.randn(3, 4)
    edit = gaff.edit(model, {f"t:{port}": lambda value: value * 3})
    got = gaff.capture(model, "t:input_grad")
    with opened(*((edit, got) if is_edit_first else (got, edit))):
        model(x).sum().backward()
    torch.testing.assert_close(got["t:input_grad"].sum(0), model.a.bias.grad)
    model.zero_grad()
    edit = gaff.edit(model, {f"t:{port}": lambda value: value * 3})
    zero = gaff.edit(model, {"t:input_grad": gaff.edits.zero()})
    with opened(*((edit, zero) if is_edit_first else (zero, edit))):
        model(x).sum().backward()
    assert not model.a.bias.grad.any()


@pytest.mark.parametrize("is_op", [False, True])
@pytest.mark.parametrize("port", ["grad_output", "grad_input", "input_grad", "outer_grad"])
def test_sessions_and_patterns_act_in_their_order_on_gradients(port, is_op):
    if is_op and port == "outer_grad":
        pytest.skip("an op has none")
    model, x = Around(), torch.randn(3, 4)
    site = f"t/tanh:{port}" if is_op else f"t:{port}"
    pattern = f"?/tanh:{port}" if is_op else f"**<Tanh>:{port}"

    def first(value):
        return value + 1

    def second(value):
        return value * 2

    def gradient(*sessions):
        model.zero_grad()
        with opened(*(gaff.edit(model, one) for one in sessions)):
            model(x).sum().backward()
        return model.a.bias.grad

    both = gradient({site: lambda value: second(first(value))})
    assert not torch.equal(both, gradient({site: lambda value: first(second(value))}))
    assert torch.equal(gradient({site: first}, {site: second}), both)
    assert torch.equal(gradient({pattern: first, site: second}), both)


@pytest.mark.parametrize("is_edit_first", [True, False])
@pytest.mark.parametrize("port", ["grad_input", "outer_grad"])
def test_a_capture_of_a_part_tells_what_came_before_its_edit(port, is_edit_first):
    model, x = Around(), torch.randn(3, 4)
    with gaff.capture(model, f"t:{port}") as bare:
        model(x).sum().backward()
    edit, got = gaff.edit(model, {f"t:{port}": gaff.edits.scale(3.0)}), gaff.capture(model, f"t:{port}")
    with opened(*((edit, got) if is_edit_first else (got, edit))):
        model(x).sum().backward()
    torch.testing.assert_close(got[f"t:{port}"], bare[f"t:{port}"])


@pytest.mark.parametrize("is_edit_first", [True, False])
@pytest.mark.parametrize("edited", ["1.0:grad_output", "1:grad_output", "2:input_grad", "1.0/linear#0:grad_output"])
def test_one_tensor_has_one_gradient_by_whichever_address_it_is_edited(edited, is_edit_first):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    names = ["1.0:grad_output", "1:grad_output", "2:input_grad", "1.0/linear#0:grad_output"]
    x = torch.randn(3, 4)
    got, edit = gaff.capture(model, *names), gaff.edit(model, {edited: gaff.edits.scale(2.0)})
    with opened(*((edit, got) if is_edit_first else (got, edit))):
        model(x).sum().backward()
    for name in names:
        torch.testing.assert_close(got[name].sum(0), model[1][0].bias.grad)


@pytest.mark.parametrize("is_edit_first", [True, False])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_tensors_and_parameters_tell_the_edited_gradient_whoever_came_first(is_leaf, is_edit_first):
    model = nn.Linear(4, 2)
    start = torch.randn(3, 4, requires_grad=True)
    x = start if is_leaf else start * 1
    got = gaff.capture(model, ":input_grad", "weight:grad", x=x)
    edit = gaff.edit(model, {"weight:grad": gaff.edits.scale(2.0)})
    also = gaff.edit({x: gaff.edits.scale(2.0)})
    with ExitStack() as stack:
        for one in (edit, also, got) if is_edit_first else (got, edit, also):
            stack.enter_context(one)
        model(x).sum().backward()
    torch.testing.assert_close(got["x"], start.grad)
    torch.testing.assert_close(got[":input_grad"], start.grad)
    torch.testing.assert_close(got["weight:grad"], model.weight.grad)
    torch.testing.assert_close(start.grad, 2 * model.weight.sum(0).expand(3, 4))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("edit", [lambda t: t.mul_(2), edits.at(keep.rows(0), lambda t: t.mul_(2))])
def test_an_edit_that_writes_into_a_parameter_is_refused_and_leaves_it_as_it_was(edit, is_frozen, mode):
    model = nn.Linear(2, 2).requires_grad_(not is_frozen)
    before = model.weight.detach().clone()
    with (
        mode(),
        pytest.raises(PlanError, match="wrote into what it was given"),
        gaff.edit(model, {"weight:param": edit}),
    ):
        model(torch.ones(1, 2))
    assert torch.equal(model.weight, before)
    with mode(), gaff.edit(model, {"weight:param": lambda t: t}):
        same = model(torch.ones(1, 2))
    assert torch.equal(same, model(torch.ones(1, 2)))


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")))
def test_the_total_of_an_input_that_several_edits_change(order):
    """Each edit makes another tensor of it; what the caller passed is told, and edited, by all."""
    model, x = nn.Sequential(nn.Identity(), nn.Linear(2, 1, bias=False)), torch.ones(3, 2, requires_grad=True)
    got = gaff.capture(model, "1:input_grad")
    made = {
        "A": gaff.edit(model, {"1:input": lambda value: value * 3}),
        "B": gaff.edit(model, {"1:input": lambda value: value * 5, "*:input": edits.scale(1.0)}),
        "C": got,
    }
    with ExitStack() as stack:
        for name in order:
            stack.enter_context(made[name])
        model(x).sum().backward()
    torch.testing.assert_close(got["1:input_grad"], 15 * (torch.ones(3, 1) @ model[1].weight.detach()))
    torch.testing.assert_close(got["1:input_grad"], x.grad)


def test_the_input_of_a_second_call_is_not_that_of_the_first():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.d = nn.Dropout().eval()

        def forward(self, x):
            return self.d(self.d(x))

    model, x = Twice().eval(), torch.ones(1, 3, requires_grad=True)
    with gaff.edit(model, {"d:input": lambda value: value * 3}), gaff.capture(model, "d:input_grad") as got:
        model(x).sum().backward()
    assert [one[0, 0].item() for one in got.all("d:input_grad")] == [9.0, 3.0]


@pytest.mark.parametrize(
    ("first", "second"), [("1:grad_output", "1.0:grad_output"), ("2:input_grad", "1.0:grad_output")]
)
def test_sessions_act_in_their_order_on_one_tensor_by_whatever_address(first, second):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Identity())
    with gaff.edit(model, {first: lambda value: value * 2}), gaff.edit(model, {second: lambda value: value + 1}):
        model(torch.randn(3, 4)).sum().backward()
    assert torch.equal(model[1][0].bias.grad, torch.full((4,), 9.0))


@pytest.mark.parametrize("order", list(itertools.permutations("GVC")))
def test_gradients_are_edited_of_what_all_edits_of_an_output_have_made(order):
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    made = {
        "G": gaff.edit(model, {"0:grad_output": edits.zero()}),
        "V": gaff.edit(model, {"0": edits.scale(3.0)}),
        "C": gaff.capture(model, "0:grad_output"),
    }
    with ExitStack() as stack:
        for name in order:
            stack.enter_context(made[name])
        model(torch.ones(1, 2)).sum().backward()
    assert not made["C"]["0:grad_output"].any()
    assert not model[0].bias.grad.any()


@pytest.mark.parametrize("is_attached", [True, False])
def test_what_a_caller_lets_go_of_is_free_at_once(is_attached):
    model = nn.Linear(4, 4)

    def evaluated(given):
        batch = torch.ones(2, 4)
        gone = weakref.ref(batch)
        with torch.no_grad():
            given(batch)
        del batch
        return gone() is None

    edit = gaff.edit(model, {":output": edits.scale(2.0)})
    if is_attached:
        edit.attach()
        assert evaluated(model)
        edit.remove()
    else:
        with edit:
            assert evaluated(model)


@pytest.mark.parametrize("is_edit_first", [True, False])
def test_the_edited_weight_of_a_layer_that_is_never_called_is_told_whoever_came_first(is_edit_first):
    model, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 3, 4)
    edit = gaff.edit(model, {"out_proj.weight:param": edits.scale(2.0)})
    got = gaff.capture(model, "out_proj.weight:param")
    with opened(*((edit, got) if is_edit_first else (got, edit))):
        model(x, x, x)
    torch.testing.assert_close(got["out_proj.weight:param"], 2 * model.out_proj.weight)


class Passing(nn.Module):
    """``same`` and ``inner`` return the very tensor that they were given or that was made in them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        self.same = nn.Identity()

    def forward(self, x):
        return self.same(self.same(self.inner(x))).tanh()


ONE_TENSOR = ("inner:grad_output", "inner.0:grad_output", "inner.0.0:grad_output", "same:grad_output")


@pytest.mark.parametrize("order", ["12L", "L21"])
@pytest.mark.parametrize("addresses", list(itertools.permutations(ONE_TENSOR, 3)))
def test_edits_of_one_tensor_by_three_addresses(addresses, order):
    first, second, looked = addresses
    torch.manual_seed(0)
    model = Passing()
    model.inner[0][0].weight.data.abs_()
    names = {"1": first, "2": second}
    did = {"1": lambda value: value * 2, "2": lambda value: value + 1}
    x = torch.randn(3, 4)
    with ExitStack() as stack:
        for one in order:
            if one == "L":
                seen = stack.enter_context(gaff.capture(model, looked))
            else:
                stack.enter_context(gaff.edit(model, {names[one]: did[one]}))
        model(x).sum().backward()
        expected = 1 - model.inner(x).tanh() ** 2
    for one in order.replace("L", ""):  # modules that are called twice edit twice, and looks tell what went on
        for _ in range(2 if "same" in names[one] else 1):
            expected = did[one](expected)
    torch.testing.assert_close(seen.all(looked)[-1], expected)
    torch.testing.assert_close(model.inner[0][0].weight.grad, expected.T @ x)


@pytest.mark.parametrize("names", list(itertools.permutations(ONE_TENSOR, 2)))
def test_edits_of_one_session_act_at_one_tensor_from_the_last_call_on(names):
    torch.manual_seed(0)
    model = Passing()
    did = dict(zip(names, ([torch.sin, lambda value: value + 1], [lambda value: value**2 - value]), strict=True))
    x = torch.randn(3, 4)
    with gaff.edit(model, did):
        model(x).sum().backward()
    expected = 1 - model.inner(x).tanh() ** 2
    for name in ("same:grad_output", "same:grad_output", *ONE_TENSOR[:3]):
        for change in did.get(name, ()):
            expected = change(expected)
    torch.testing.assert_close(model.inner[0][0].weight.grad, expected.T @ x)


class Constant(nn.Module):
    """A part that is called without a tensor."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.value * 2


class WithConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.constant, self.lin = Constant(), nn.Linear(3, 3)

    def forward(self, x):
        return self.lin(x) + self.constant()


@pytest.mark.parametrize("port", ["input", "grad_input", "input_grad"])
def test_a_pattern_of_inputs_passes_over_what_is_called_without_a_tensor(port):
    model, x = WithConstant(), torch.ones(1, 3, requires_grad=True)
    with gaff.edit(model, {f"**:{port}": edits.scale(0.5)}):
        model(x).sum().backward()
    if port == "input_grad":
        with pytest.raises(gaff.SiteError, match="constant:input_grad: the call was given no tensor"):
            with gaff.edit(model, {f"constant:{port}": edits.scale(0.5)}):
                model(x)


class Counted(nn.Module):
    """Has a length that nobody may ask for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def __len__(self):
        raise RuntimeError("it has none yet")

    def forward(self, x):
        return x * self.weight


def test_nobody_asks_whether_a_module_is_true():
    model = nn.Sequential(Counted(), nn.Linear(3, 3))
    with gaff.capture(model, "0.weight:grad") as got:
        model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(got["0.weight:grad"], model[0].weight.grad)


@pytest.mark.parametrize("site", ["a", "a:grad_output", "a.weight:grad"])
def test_a_receipt_says_that_the_edit_raised(site):
    def fails(value):
        raise ValueError("mine")

    model, x = two()
    with gaff.edit(model, {site: fails}) as edited, contextlib.suppress(ValueError):
        model(x).sum().backward()
    assert edited.receipt.rows[0].reason == "it raised ValueError: mine"


def test_the_receipt_of_edits_that_were_never_opened_says_so():
    model, x = two()
    edited = gaff.edit(model, {"a": edits.zero()})
    model(x)
    assert "never opened: use it in a with block, or attach()" in str(edited.receipt)
    with edited:
        model(x)
    assert "never opened" not in str(edited.receipt)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skipped_are_no_steps(fused):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    steps = []

    def note(value, event):
        steps.append(event.step)
        return value

    with gaff.edit(model, {":output": gaff.edits.with_event(note)}):
        for at in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if at == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert steps == [0, 1, 1, 2]
