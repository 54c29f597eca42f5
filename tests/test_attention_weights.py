"""``:weights`` of fused attention: told from its inputs, edited by the plain formula, refused where neither is true."""

import contextlib
import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits, keep
from gaff.errors import ExactnessError, NeverFiredError, PlanError, SiteError

SITE = "attn/scaled_dot_product_attention:weights"
MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.4
MASK[2] = False  # a query that may see nothing

# Shapes of query and key, options of the call.
CALLS = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), {}),
    "one head": ((2, 5, 8), (2, 7, 8), {}),
    "one example": ((5, 8), (7, 8), {}),
    "five dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), {}),
    "broadcast": ((2, 4, 5, 8), (1, 4, 7, 8), {}),
    "causal": ((2, 4, 5, 8), (2, 4, 7, 8), {"is_causal": True}),
    "causal, more queries": ((2, 4, 7, 8), (2, 4, 5, 8), {"is_causal": True}),
    "scale": ((2, 4, 5, 8), (2, 4, 7, 8), {"scale": 0.7}),
    "negative scale": ((2, 4, 5, 8), (2, 4, 7, 8), {"scale": -0.7}),
    "truth values": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": MASK}),
    "added": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.randn(2, 1, 5, 7)}),
    "added -inf": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.zeros(5, 7).masked_fill(~MASK, -math.inf)}),
    "one row of a mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.randn(2, 1, 1, 7)}),
    "groups": ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "groups, masked": ((2, 4, 5, 8), (2, 1, 7, 8), {"enable_gqa": True, "attn_mask": MASK}),
    "lower right": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": causal_lower_right(5, 7)}),
}


class Attn(nn.Module):
    """Calls attention on what it is given, ``times`` times."""

    def __init__(self, times=1, **options):
        super().__init__()
        self.options = options
        self.times = times
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        for _ in range(self.times):
            out = F.scaled_dot_product_attention(q * self.scale, k, v, **self.options)
        return out


class Model(nn.Module):
    def __init__(self, times=1, is_again=False, checkpointed=None, **options):
        super().__init__()
        self.attn = Attn(times, **options)
        self.is_again = is_again
        self.checkpointed = checkpointed

    def forward(self, q, k, v):
        if self.checkpointed is not None:
            return checkpoint(self.attn, q, k, v, use_reentrant=self.checkpointed)
        out = self.attn(q, k, v)
        return self.attn(out, k, v) if self.is_again else out


def inputs(query=(2, 4, 5, 8), key=(2, 4, 7, 8), dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(query, dtype=dtype), torch.randn(key, dtype=dtype), torch.randn(key, dtype=dtype)


def from_torch(q, k, options):
    """The weights by torch's fused op itself: attention to an identity matrix."""
    eye = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-1], k.shape[-2])
    with torch.no_grad():
        return F.scaled_dot_product_attention(q, k, eye, **options)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_told_is_what_the_fused_op_uses(name):
    query, key, options = CALLS[name]
    q, k, v = inputs(query, key)
    model = Model(**options)
    bare = model(q, k, v)
    with gaff.capture(model, SITE) as got:
        assert torch.equal(model(q, k, v), bare)
    weights = got[SITE]
    assert weights.dtype == q.dtype
    assert not weights.requires_grad
    torch.testing.assert_close(weights, from_torch(q, k, options))
    assert got.receipt.notes == ()


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_those_of_torchs_plain_path(name):
    query, key, options = CALLS[name]
    q, k, v = inputs(query, key)
    plain = dict(options)
    mask = plain.pop("attn_mask", None)
    mask = mask._materialize("cpu") if name == "lower right" else mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(5, 7).masked_fill(~mask, -math.inf)
    wanted = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, **plain)[1]
    model = Model(**options)
    with gaff.capture(model, SITE) as got:
        model(q, k, v)
    assert torch.equal(got[SITE], wanted)


def test_queries_without_features_see_all_alike():
    q, k, v = torch.randn(2, 5, 0), torch.randn(2, 7, 0), torch.randn(2, 7, 3)
    model = Model()
    with gaff.capture(model, SITE) as got:
        out = model(q, k, v)
    torch.testing.assert_close(got[SITE], torch.full((2, 5, 7), 1 / 7))
    torch.testing.assert_close(got[SITE] @ v, out)


def test_a_query_that_may_see_nothing_has_zeros_as_in_torch():
    q, k, v = inputs()
    model = Model(attn_mask=MASK)
    with gaff.capture(model, SITE) as got:
        out = model(q, k, v)
    assert not got[SITE][:, :, 2].any()
    assert not out[:, :, 2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_told_as_they_are_and_computed_as_torch_does(dtype):
    q, k, v = inputs(dtype=dtype)
    with gaff.capture(Model(), SITE) as got:
        got._model(q, k, v)
    weights = got[SITE]
    assert weights.dtype == dtype
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(weights, torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[1])


@pytest.mark.parametrize("mask", [None, torch.randn(5, 7), MASK])
def test_under_autocast_attention_is_that_of_the_lower_precision(mask):
    q, k, v = inputs()
    model = Model(attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16), gaff.capture(model, SITE) as got:
        out = model(q, k, v)
    assert out.dtype == got[SITE].dtype == torch.bfloat16
    low = [one.bfloat16() for one in (q, k, v)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.bfloat16()
    with gaff.capture(Model(attn_mask=mask), SITE) as wanted:
        wanted._model(*low)
    assert torch.equal(got[SITE], wanted[SITE])


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_told_alone_and_are_those_of_the_whole(name):
    query, key, options = CALLS[name]
    q, k, v = inputs(query, key)
    model = Model(**options)
    with gaff.capture(model, SITE) as got:
        model(q, k, v)
    whole = got[SITE]
    parts = [
        keep.rows([3, 1], dim=-2),
        keep.rows(-1, dim=-2),
        keep.positions(slice(1, 4), dim=-2),
        keep.rows(0, dim=-1),
    ]
    parts += [keep.rows(0), keep.rows([1, 0, 1])] if whole.dim() > 2 else []
    parts += [keep.channels([2, 0]), keep.rows(slice(1, 3), dim=1)] if whole.dim() > 3 else []
    for part in parts:
        with gaff.capture(model, {SITE: part}) as got:
            model(q, k, v)
        torch.testing.assert_close(got[SITE], part(whole))


def test_only_the_rows_that_are_kept_are_ever_made():
    q, k, v = (torch.randn(1, 2, 4096, 8) for _ in range(3))
    model = Model(is_causal=True)
    made = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out.is_meta:
                made.append(out.untyped_storage().nbytes())
            return out

    with torch.no_grad(), Sizes(), gaff.capture(model, {SITE: keep.rows([0, 4095], dim=-2)}) as got:
        model(q, k, v)
    assert got[SITE].shape == (1, 2, 2, 4096)
    assert max(made) <= 4 * 2 * 4096 * 8  # the bytes of a key


def test_more_than_the_budget_is_refused_before_it_is_computed():
    q, k, v = inputs()
    model = Model()
    with pytest.raises(PlanError, match=r"attn/.*:weights: it would take 1120B.*not computed; keep some rows"):
        with gaff.capture(model, SITE, budget=1000):
            model(q, k, v)
    with gaff.capture(model, {SITE: keep.rows([0], dim=-2)}, budget=1000) as got:
        model(q, k, v)
    assert got[SITE].shape == (2, 4, 1, 7)
    with gaff.capture(model, {SITE: keep.mean(0, 1)}, budget=1000) as got:
        model(q, k, v)
    assert got[SITE].shape == (5, 7)
    with gaff.capture(model, SITE, budget=1000, dtype="float16") as got:
        model(q, k, v)


def test_a_row_that_is_not_there_is_an_error_with_the_shape_of_the_weights():
    with pytest.raises(PlanError, match=r"attn/scaled.*:weights: index \(9,\) is outside .*\(2, 4, 5, 7\)"):
        with gaff.capture(Model(), {SITE: keep.rows([9], dim=-2)}) as got:
            got._model(*inputs())


def test_dropout_is_left_out():
    q, k, v = inputs()
    model = Model(dropout_p=0.5)
    state = torch.get_rng_state()
    with gaff.capture(model, SITE) as got:
        model(q, k, v)
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    model(q, k, v)
    assert torch.equal(drawn, torch.get_rng_state())  # nothing is drawn for what is told
    torch.testing.assert_close(got[SITE].sum(-1), torch.ones(2, 4, 5))


def test_calls_and_numbers_are_those_of_other_ops():
    q, k, v = inputs((2, 4, 7, 8))
    model = Model(times=2, is_again=True)
    with gaff.capture(model, SITE, "attn/scaled_dot_product_attention#1@1:weights") as got:
        model(q, k, v)
    assert [len(got.all(f"attn/scaled_dot_product_attention#{number}:weights")) for number in (0, 1)] == [2, 2]
    first, second = got.all("attn/scaled_dot_product_attention#1:weights")
    assert torch.equal(second, got["attn/scaled_dot_product_attention#1@1:weights"])
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, from_torch(q, k, {}))


def test_globs_name_the_weights_of_all_attention_and_nothing_else():
    q, k, v = inputs()
    model = Model()
    for pattern in ("**/*:weights", "attn/*:weights", "*/scaled_*:weights"):
        with gaff.capture(model, pattern) as got:
            model(q, k, v)
        assert list(got.keys()) == ["attn/scaled_dot_product_attention#0:weights"]


def test_no_grad_inference_mode_graphs_and_take():
    q, k, v = inputs()
    model = Model()
    with torch.no_grad(), gaff.capture(model, SITE) as got:
        model(q, k, v)
    wanted = got[SITE]
    with torch.inference_mode(), gaff.capture(model, SITE) as got:
        model(q, k, v)
    assert torch.equal(got[SITE], wanted)
    with gaff.capture(model, SITE, graph=True) as got:
        model(q, k, v)
    (gradient,) = torch.autograd.grad(got[SITE].square().sum(), model.attn.scale)
    assert gradient.abs() > 0
    site = SITE.replace(":", "#0:")
    found = gaff.take(model, site)(q, k, v)
    assert torch.equal(found[site], wanted)
    assert found[site].requires_grad
    rows = gaff.take(model, site, reduce=keep.rows([1], dim=-2))
    assert rows(q, k, v)[site].shape == (2, 4, 1, 7)
    assert rows.receipt.rows[0].fired == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_checkpoints_do_not_notice_a_capture(reentrant, graph):
    q, k, v = inputs()
    q.requires_grad_()
    model = Model(checkpointed=reentrant)
    model(q, k, v).sum().backward()
    wanted, q.grad = q.grad, None
    with gaff.capture(model, SITE, graph=graph) as got:
        model(q, k, v).sum().backward()
    assert torch.equal(q.grad, wanted)
    torch.testing.assert_close(got[SITE].detach(), from_torch(q, k, {}))  # told once


def plain(q, k, v, change, options):
    """Attention with changed weights, by hand."""
    options = dict(options)
    mask, is_causal, scale = options.get("attn_mask"), options.get("is_causal"), options.get("scale")
    if options.get("enable_gqa"):
        k, v = (one.repeat_interleave(q.shape[-3] // one.shape[-3], -3) for one in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        mask = mask._materialize("cpu") if hasattr(mask, "_materialize") else mask
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return change(scores.softmax(-1).nan_to_num(0.0)) @ v


CHANGES = {
    "zero": (edits.zero(), torch.zeros_like),
    "scale": (edits.scale(0.5), lambda w: w * 0.5),
    "function": (lambda w: w.flip(-1), lambda w: w.flip(-1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CALLS)
def test_attention_goes_on_with_edited_weights_and_gradients_flow(name, change):
    query, key, options = CALLS[name]
    edit, by_hand = CHANGES[change]
    q, k, v = (one.requires_grad_() for one in inputs(query, key))
    wanted = plain(q, k, v, by_hand, options)
    model = Model(**options)
    with gaff.edit(model, {SITE: edit}) as changed:
        out = model(q, k, v)
    torch.testing.assert_close(out, wanted)
    given = (q, k, v) if "nothing" not in name and "truth" not in name and "inf" not in name else (v,)
    found = torch.autograd.grad(out.square().sum(), given, allow_unused=True, materialize_grads=True)
    truth = torch.autograd.grad(wanted.square().sum(), given, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, truth)
    (note,) = changed.receipt.notes
    assert "not by torch's fused op" in note
    assert "not bitwise: attention whose weights are edited" in str(changed.receipt)
    assert changed.receipt.rows[0].site == "attn/scaled_dot_product_attention#0:weights"


def test_heads_are_silenced_alone():
    q, k, v = inputs()
    model = Model()
    bare = model(q, k, v)
    with gaff.edit(model, {SITE: edits.at(keep.channels([1, 3]), edits.zero())}):
        out = model(q, k, v)
    torch.testing.assert_close(out[:, [0, 2]], bare[:, [0, 2]])
    assert not out[:, [1, 3]].any()


def test_dropout_of_edited_weights_is_that_of_torchs_plain_path():
    q, k, v = inputs()
    model = Model(dropout_p=0.5)
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = model(q, k, v)
    torch.manual_seed(3)
    with gaff.edit(model, {SITE: edits.scale(1.0)}):
        assert torch.equal(model(q, k, v), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_edited_as_torch_computes_it(dtype):
    q, k, v = inputs(dtype=dtype)
    with gaff.edit(model := Model(), {SITE: edits.scale(1.0)}):
        out = model(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=5e-3, rtol=2e-2)
    low = inputs()
    with torch.autocast("cpu", dtype), gaff.edit(model, {SITE: edits.scale(1.0)}):
        out = model(*low)
    assert out.dtype == dtype
    wanted = F.scaled_dot_product_attention(*(one.to(dtype) for one in low))
    torch.testing.assert_close(out, wanted, atol=5e-3, rtol=2e-2)


def test_where_the_edit_does_not_act_the_fused_op_runs_and_nothing_is_said():
    q, k, v = inputs()
    model = Model()
    bare = model(q, k, v)
    with gaff.edit(model, {SITE: edits.when(edits.zero(), runs=[1])}) as changed:
        assert torch.equal(model(q, k, v), bare)
        assert changed.receipt.notes == ()
        assert not model(q, k, v).any()
        assert len(changed.receipt.notes) == 1
        changed.off()
        assert torch.equal(model(q, k, v), bare)


def test_whoever_looks_sees_edited_weights_whichever_session_came_first():
    q, k, v = inputs()
    model = Model()
    looking = [
        gaff.capture(model, {SITE: keep.rows([0], dim=-2)}),
        gaff.capture(model, SITE, SITE.replace("weights", "output")),
    ]
    with looking[0] as early, gaff.edit(model, {SITE: edits.zero()}), looking[1] as late:
        model(q, k, v)
    assert early[SITE].shape == (2, 4, 1, 7)
    assert not early[SITE].any()
    assert not late[SITE].any()
    assert not late[SITE.replace("weights", "output")].any()


def test_edits_of_weights_inputs_and_outputs_compose_in_two_sessions():
    q, k, v = inputs()
    model = Model()
    output, value = SITE.replace("weights", "output"), SITE.replace("weights", "input[2]")
    with (
        gaff.edit(model, {output: edits.add(torch.ones(()))}),
        gaff.edit(model, {SITE: edits.zero(), value: edits.scale(2.0)}),
    ):
        assert torch.equal(model(q, k, v), torch.ones(2, 4, 5, 8))
    with gaff.edit(model, {SITE: [edits.scale(0.5), edits.scale(4.0)], value: edits.scale(3.0)}) as changed:
        torch.testing.assert_close(model(q, k, v), F.scaled_dot_product_attention(q, k, v * 6.0))
    with gaff.edit(model, {"attn/*:weights": edits.scale(0.5), SITE: edits.scale(4.0)}) as changed:
        torch.testing.assert_close(model(q, k, v), F.scaled_dot_product_attention(q, k, v * 2.0))
    assert [row.hits for row in changed.receipt.rows] == [1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_under_a_checkpoint_an_edit_acts_again_also_after_the_session(reentrant, inside):
    q, k, v = inputs()
    q.requires_grad_()
    edit = edits.at(keep.channels([1]), edits.scale(3.0))
    model = Model()
    with gaff.edit(model, {SITE: edit}):
        model(q, k, v).square().sum().backward()
    wanted, q.grad = q.grad, None
    model = Model(checkpointed=reentrant)
    with gaff.edit(model, {SITE: edit}) as changed:
        out = model(q, k, v)
        if inside:
            out.square().sum().backward()
    if not inside:
        out.square().sum().backward()
    assert torch.equal(q.grad, wanted)
    assert changed.receipt.rows[0].hits == 1


def test_an_edit_that_is_off_leaves_a_checkpoint_as_it_is():
    q, k, v = inputs()
    q.requires_grad_()
    model = Model(checkpointed=False)
    model(q, k, v).square().sum().backward()
    wanted, q.grad = q.grad, None
    with gaff.edit(model, {gaff.maybe(SITE): edits.zero()}) as changed:
        changed.off()
        out = model(q, k, v)
        changed.on()
        out.square().sum().backward()  # as its forward was
    assert torch.equal(q.grad, wanted)
    q.grad = None
    out = model(q, k, v)
    with gaff.edit(model, {gaff.maybe(SITE): edits.zero()}):
        out.square().sum().backward()  # of a forward before the session
    assert torch.equal(q.grad, wanted)


def test_gradients_at_the_op_are_told_while_its_weights_are_edited():
    q, k, v = inputs()
    q.requires_grad_()
    gradient = "attn/scaled_dot_product_attention:grad_output"
    model = Model()
    with gaff.edit(model, {SITE: edits.scale(0.5)}), gaff.capture(model, gradient) as got:
        model(q, k, v).sum().backward()
    assert torch.equal(got[gradient], torch.ones(2, 4, 5, 8))


@pytest.mark.parametrize("reduce", [None, keep.rows([1], dim=-2)])
def test_plans_with_weights_are_saved_and_read_again(tmp_path, reduce):
    plan = gaff.Plan.of(SITE, reduce=reduce)
    plan.save(tmp_path / "plan.json")
    q, k, v = inputs()
    model = Model()
    with gaff.capture(model, gaff.Plan.load(tmp_path / "plan.json")) as got:
        model(q, k, v)
    assert got[SITE].shape[-2] == (5 if reduce is None else 1)


def test_sites_list_the_weights_with_their_shape_without_computing_them():
    q, k, v = inputs()
    listed = gaff.sites(Model(), q, k, v, ops=True)
    (row,) = [row for row in listed if row.site == "attn/scaled_dot_product_attention#0:weights"]
    assert (row.output, row.dtype, row.note) == ("2x4x5x7", "float32", "computed when they are asked for")
    (op,) = [row for row in listed if row.site == "attn/scaled_dot_product_attention#0"]
    assert op.note == "one fused call: what its softmax gives is :weights"
    assert [row.site for row in gaff.sites(Model(), SITE, q, k, v, ops=True)] == [row.site]
    assert [one.site for one in gaff.sites(Model(), SITE.partition(":")[0], q, k, v, ops=True)] == [op.site]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("attn:weights", r"a module has no :weights: expected .*\.\.\./scaled_dot_product_attention:weights"),
        ("attn/softmax:weights", "/softmax has no :weights: expected .* written out has them as /softmax"),
        ("attn/soft*:weights", r"/soft\* has no :weights"),
        ("*:weights", "a module has no :weights"),
        ("attn/scaled_dot_product_attention:weights[0]", "the weights are one tensor, without keys"),
        ("attn/multi_head_attention_forward:weights", "/multi_head_attention_forward has no :weights"),
    ],
)
def test_weights_of_something_else_are_refused_by_name(address, message):
    with pytest.raises(PlanError, match=message):
        gaff.capture(Model(), address)


def test_gradients_of_weights_are_refused_by_name():
    with pytest.raises(SiteError, match="have no :grad_output, fused attention never makes them.*/softmax:grad_output"):
        gaff.capture(Model(), f"{SITE}:grad_output")


def test_skip_means_nothing_at_weights():
    with pytest.raises(PlanError, match="skip takes the place of a whole module"):
        gaff.edit(Model(), {SITE: edits.skip()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_and_other_classes_are_refused_by_name():
    nested = [
        torch.nested.as_nested_tensor(list(torch.randn(2, 3, 8)), layout=torch.jagged)
        .unflatten(-1, [2, 4])
        .transpose(1, 2)
        for _ in range(3)
    ]
    model = Model()
    with torch.no_grad(), gaff.capture(model, SITE) as got:
        out = model(*nested)
    assert out.is_nested
    with pytest.raises(
        ExactnessError, match=r":weights: attention over a nested tensor \(query\) is not what the plain"
    ):
        got[SITE]
    with (
        torch.no_grad(),
        pytest.raises(ExactnessError, match=r"cannot be made: attention over a nested tensor \(query\)"),
    ):
        with gaff.edit(model, {SITE: edits.zero()}):
            model(*nested)
    with torch.no_grad(), pytest.raises(PlanError, match="attention over a nested tensor"):
        gaff.take(model, SITE.replace(":", "#0:"))(*nested)

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = inputs()
    with gaff.capture(model := Model(attn_mask=torch.zeros(5, 7).as_subclass(Odd)), SITE) as got:
        model(q, k, v)
    with pytest.raises(ExactnessError, match="its attn_mask is a tensor of Odd"):
        got[SITE]
    (row,) = [row for row in gaff.sites(model, q, k, v, ops=True) if row.site.endswith(":weights")]
    assert row.output == ""
    assert row.note.startswith("its attn_mask is a tensor of Odd")


def test_an_error_of_the_call_itself_stays_torchs():
    q, k, v = inputs()
    with pytest.raises(RuntimeError) as bare:
        Model()(q, k[..., :3], v)
    with pytest.raises(RuntimeError) as seen, gaff.capture(model := Model(), SITE):
        model(q, k[..., :3], v)
    assert str(seen.value) == str(bare.value)


class Block(nn.Module):
    """An attention of torch's own."""

    def __init__(self, **asked):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.asked = asked

    def forward(self, x):
        return self.self_attn(x, x, x, **self.asked)


@pytest.mark.filterwarnings("ignore:gaff. not bitwise. nn.Transformer's fused fast path")
@pytest.mark.parametrize("mask", [None, "causal", "padding"])
@pytest.mark.parametrize("mode", [True, False])
def test_multihead_attention_has_weights_where_it_calls_the_fused_op(mask, mode):
    torch.manual_seed(0)
    asked = {"causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
             "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False, False, True, True, True]])}}.get(mask, {})  # fmt: skip
    model, x = Block(need_weights=False, **asked).train(mode), torch.randn(2, 5, 8)
    site = "self_attn/scaled_dot_product_attention:weights"
    with torch.set_grad_enabled(mode), gaff.capture(model, site) as got:
        model(x)
    written = Block(need_weights=True, average_attn_weights=False, **{**asked, "is_causal": False}).train(mode)
    written.load_state_dict(model.state_dict())
    torch.testing.assert_close(got[site], written(x)[1])
    with gaff.edit(model, {site: edits.zero()}):
        assert torch.equal(model(x)[0], model.self_attn.out_proj.bias.expand(2, 5, 8))


def test_multihead_attention_that_returns_its_weights_says_what_to_ask_instead():
    x = torch.randn(2, 5, 8)
    with pytest.raises(NeverFiredError, match="it writes attention out: ask self_attn/softmax"):
        with gaff.capture(model := Block(need_weights=True), "self_attn/scaled_dot_product_attention:weights"):
            model(x)
    with gaff.capture(model, "self_attn/softmax") as got:
        weights = model(x)[1]
    torch.testing.assert_close(got["self_attn/softmax"].view(2, 2, 5, 5).mean(1), weights)
    models = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(NeverFiredError, match="attention that is written out has its weights as /softmax"):
        with gaff.capture(models, "**/scaled_dot_product_attention:weights"):
            models(x)


def test_the_layers_of_a_transformer_take_the_slow_path_and_say_so():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    site = "self_attn/scaled_dot_product_attention:weights"
    with torch.no_grad(), pytest.warns(UserWarning, match="fast path"), gaff.capture(layer, site) as got:
        layer(torch.randn(2, 5, 8))
    torch.testing.assert_close(got[site].sum(-1), torch.ones(2, 2, 5))
    assert "fast path" in str(got.receipt)


def test_gpt2_of_transformers_told_and_edited_by_one_pattern():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=64)
    fused = transformers.GPT2LMHeadModel._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    eager = transformers.GPT2LMHeadModel._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(fused.state_dict())
    x = torch.randint(3, 90, (2, 7))
    pattern = "transformer.h.*.attn/scaled_dot_product_attention:weights"
    with torch.no_grad(), gaff.capture(fused, pattern) as got:
        fused(x)
    with torch.no_grad():
        wanted = eager(x, output_attentions=True).attentions
    assert len(got) == 3
    for layer, weights in enumerate(wanted):
        torch.testing.assert_close(got[f"transformer.h.{layer}.attn/scaled_dot_product_attention:weights"], weights)
    silent = edits.at(keep.channels([2]), edits.zero())
    with torch.no_grad(), gaff.edit(fused, {pattern: silent}) as changed:
        out = fused(x).logits
    with torch.no_grad(), gaff.edit(eager, {"transformer.h.*.attn/softmax": silent}):
        torch.testing.assert_close(out, eager(x).logits)
    assert [row.hits for row in changed.receipt.rows] == [1, 1, 1]
    listed = gaff.sites(fused, pattern, input_ids=x, ops=True)
    assert [row.output for row in listed] == ["2x4x7x7"] * 3
    with pytest.raises(NeverFiredError, match="attention that is written out has its weights as /softmax"):
        with torch.no_grad(), gaff.capture(eager, pattern):
            eager(x)


def test_arguments_by_keyword_and_the_root_itself():
    q, k, v = inputs()

    class Named(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(value=v, key=k, query=q, is_causal=False)

    with gaff.capture(
        model := nn.ModuleDict({"attn": Named()})["attn"], "/scaled_dot_product_attention:weights"
    ) as got:
        model(q, k, v)
    torch.testing.assert_close(got["/scaled_dot_product_attention:weights"], from_torch(q, k, {}))


def test_a_flop_counter_counts_what_the_model_computes():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs()
    model = Model()
    counts = []
    for patterns in ((), (SITE,)):
        with FlopCounterMode(display=False) as counter:
            with gaff.capture(model, "attn", *patterns):
                model(q, k, v)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_every_pair_of_options_agrees_with_the_fused_op():
    masks = {"none": None, "bool": MASK, "float": torch.randn(2, 1, 5, 7)}
    for mask, scale, heads, dtype in itertools.product(masks, (None, 0.3), (4, 2, 1), (torch.float32, torch.float64)):
        q, k, v = inputs((2, 4, 5, 8), (2, heads, 7, 8), dtype)
        value = masks[mask]
        value = value.to(dtype) if mask == "float" else value
        options = {"attn_mask": value, "scale": scale, "enable_gqa": heads != 4}
        with gaff.capture(model := Model(**options), SITE) as got:
            model(q, k, v)
        torch.testing.assert_close(got[SITE], from_torch(q, k, options))


def test_heads_are_a_dimension_of_their_own():
    """Cut into heads, the last dimension would give some of the keys, wherever their number allows it."""
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 4, 8)
    site = "/scaled_dot_product_attention:weights"
    for ask in (
        lambda: gaff.capture(model, {site: keep.heads(1, 2)}),
        lambda: gaff.capture(model, site, reduce=keep.heads(1, 2)),
        lambda: gaff.edit(model, {site: edits.at(keep.heads(1, 2), edits.zero())}),
        lambda: gaff.edit(model, {site: edits.at(keep.rows(0), edits.at(keep.heads(1, 2), edits.zero()))}),
    ):
        with pytest.raises(PlanError, match=r"expected gaff.keep.channels\(2\) for head 2"):
            ask()
    with gaff.capture(model, {site: keep.channels(1)}) as got:
        model(x, x, x, need_weights=False)
    assert got[site].shape == (3, 1, 4, 4)


def of_decode_steps(attention, edited):
    """Attention weights of a model whose heads share keys, by step, and logits: three tokens after a padded prompt."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=50,
                                      num_attention_heads=8, num_key_value_heads=2, attn_implementation=attention)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(3, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    site = "model.layers.1.self_attn/" + (
        "softmax:output" if attention == "eager" else "scaled_dot_product_attention:weights"
    )
    silence = {site: edits.at(keep.channels(5), edits.zero())}
    editing = gaff.edit(model, silence) if edited else contextlib.nullcontext()
    with torch.no_grad(), editing, gaff.capture(model, site) as got:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False,
                             return_dict_in_generate=True, output_logits=True)  # fmt: skip
    return got.all(site), out.logits


@pytest.mark.parametrize("edited", [False, True])
def test_heads_that_share_keys_are_heads_also_where_a_single_token_is_decoded(edited):
    """transformers lays them into the rows of one there, and does not in its eager attention."""
    (weights, logits), (true, true_logits) = (of_decode_steps(one, edited) for one in ("sdpa", "eager"))
    assert [tuple(one.shape) for one in weights] == [(2, 8, 7, 7), (2, 8, 1, 8), (2, 8, 1, 9), (2, 8, 1, 10)]
    for one, other in zip((*weights[1:], *logits), (*true[1:], *true_logits), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
