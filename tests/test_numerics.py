"""Numbers at the edges: narrow types, another default type, sums that overflow on the way, whole numbers."""

import contextlib
import math

import pytest
import torch
from torch import nn

import gaff
from gaff import edits, keep


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_projection_is_the_same_whatever_the_default_type_is(dtype):
    x = torch.randn(3, 5)
    wanted = keep.project(4, seed=7)(x)
    keep._matrix.cache_clear()
    with default(dtype):
        assert torch.equal(keep.project(4, seed=7)(x), wanted)
    keep._matrix.cache_clear()


@pytest.mark.parametrize(("dtype", "size", "ratio"), [
    (torch.float32, 1e20, 0.01), (torch.float16, 3e4, 1e-3), (torch.float16, 3e4, 5e-4), (torch.bfloat16, 3e38, 0.01),
])  # fmt: skip
def test_each_unit_is_clipped_to_its_share_of_the_weights(dtype, size, ratio):
    layer = nn.Linear(4, 2, bias=False, dtype=dtype)
    parameter = layer.weight
    nn.init.ones_(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with gaff.clip_gradients(optimizer, adaptive=ratio, model=layer):
        parameter.grad = torch.full((2, 4), size, dtype=dtype)
        optimizer.step()
    assert parameter.grad.double().norm(dim=1).tolist() == pytest.approx([2 * ratio] * 2, rel=5e-3)


@pytest.mark.parametrize("when", ["step", "backward"])
@pytest.mark.parametrize(("count", "limit"), [(10_000, 1.0), (10_000, 0.01)])
def test_a_half_precision_gradient_far_above_its_limit_is_scaled_to_it(when, count, limit):
    parameter = nn.Parameter(torch.zeros(count, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with gaff.clip_gradients(optimizer, norm=limit, per="tensor", when=when):
        (parameter * torch.full((count,), 60000.0, dtype=torch.float16)).sum().backward()
        optimizer.step()
    assert float(parameter.grad.double().norm()) == pytest.approx(limit, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_usual_norms_are_kept_in_full_whatever_the_default_type_is(dtype):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with default(dtype), gaff.clip_gradients(optimizer, deviations=3.0, warmup=3, window=8) as clip:
        for norm in (100300.0, 100100.0, 100200.0, 1e9):
            parameter.grad = torch.tensor([norm], dtype=torch.float32)
            optimizer.step()
    row = clip.audit.rows[-1]
    assert row.limit == pytest.approx(100500.0, rel=1e-4)
    assert float(parameter.grad) == pytest.approx(100500.0, rel=1e-4)


def test_a_mean_is_taken_before_it_is_rounded():
    rows = torch.tensor([[1000.2], [1000.2], [-1000.0], [-1000.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = nn.Identity()
        with gaff.edit(model, {":output": edits.ablate("mean", rows)}):
            assert torch.equal(model(torch.zeros(1, 1, dtype=dtype)), rows.double().mean(0, keepdim=True).to(dtype))


def test_a_reference_without_examples_is_refused():
    model = nn.Identity()
    with (
        pytest.raises(gaff.PlanError, match="expected rows"),
        gaff.edit(model, {":output": edits.ablate("mean", torch.zeros(0, 3))}),
    ):
        model(torch.zeros(2, 3))


@pytest.mark.parametrize("values", [[2e38] * 8, [3e38, 2e38, 1e38], [1e200, -2e200], [1e-310, 3e-310], [1.0, math.inf]])
def test_statistics_of_a_trace_do_not_overflow_on_the_way(values):
    dtype = torch.float64 if max(values) > 4e38 or max(values) < 1e-40 else torch.float32
    x = torch.tensor(values, dtype=dtype)
    told = gaff.trace(nn.Identity(), x).rows[0].statistics
    exact = x.double()
    assert told.mean == pytest.approx(float((exact / 1e3).mean()) * 1e3)
    size = float(exact.abs().max())
    if math.isfinite(size):
        assert told.std == pytest.approx(float((exact / size).std(correction=0)) * size)
    assert told.nonfinite == values.count(math.inf)


def test_the_largest_whole_numbers_are_those_of_largest_size(tmp_path):
    class Whole(nn.Module):
        def forward(self, x):
            return x.to(torch.int8)

    gaff.harvest(nn.Sequential(Whole()), [torch.tensor([[1, -128, 3]])], "0", out=tmp_path / "acts", top=1)
    assert gaff.load(tmp_path / "acts")["0"][:].tolist() == [[-128]]


def test_the_entropy_of_multihead_attention_is_recorded(tmp_path):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.mha(x, x, x)[0]

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gaff.watch(net, optimizer, out=tmp_path / "run", every=1):
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(2, 7, 16)).square().mean().backward()
            optimizer.step()
    latest = gaff.load(tmp_path / "run").latest("mha:output[0]")
    assert 0.9 < latest["entropy"] <= 1.0


@pytest.mark.parametrize(
    ("edit", "value", "words"),
    [
        (edits.quantize("float16"), torch.tensor([2**40]), "rounds floating and complex numbers"),
        (
            edits.scale(torch.tensor(1e-9)),
            torch.ones(2, dtype=torch.float16),
            "holds numbers that torch.float16 has not",
        ),
        (edits.project(torch.ones(2), dim=9), torch.ones(2, 2), "directions of width 2"),
        (edits.fill(2**40), torch.ones(2, dtype=torch.int32), "out of the range of torch.int32"),
        (edits.fill(-5), torch.ones(2, dtype=torch.uint8), "out of the range of torch.uint8"),
        (edits.clamp(0.5, None), torch.ones(2, dtype=torch.int64), "would lose its fraction"),
        (edits.add(torch.tensor([2]), strength=0.5), torch.ones(2, dtype=torch.int64), "would lose its fraction"),
        (edits.clip(1.0), torch.ones(2, dtype=torch.int64), "needs floating or complex numbers"),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_type_cannot_hold_is_refused(edit, value, words, is_compiled):
    model = nn.Sequential(nn.Identity())
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    with pytest.raises(gaff.PlanError, match=words), gaff.edit(run, {"0": edit}):
        run(value)


def edited(value, edit):
    model = nn.Identity()
    with gaff.edit(model, {":output": edit}):
        return model(value)


def test_scaled_rounding_passes_over_what_is_not_finite_and_keeps_the_range_of_float64():
    x = torch.tensor([1.0, 0.5, math.nan, -2.0])
    assert torch.equal(edited(x, edits.quantize("float8_e5m2", scaled=True)).isnan(), x.isnan())
    infinite = torch.tensor([1.0, torch.inf, -torch.inf])  # a type without inf must not make them finite
    assert torch.equal(edited(infinite, edits.quantize("float8_e4m3fn", scaled=True))[1:], infinite[1:])
    wide = torch.tensor([1e39, -5e38, 1e-50], dtype=torch.float64)
    assert torch.allclose(edited(wide, edits.quantize("float16", scaled=True))[:2], wide[:2], rtol=1e-3)
    tiny = torch.tensor([1e-50, 5e-51], dtype=torch.float64)
    assert torch.allclose(edited(tiny, edits.quantize("float16", scaled=True)), tiny, rtol=1e-3, atol=0)
    assert torch.equal(edited(wide, edits.quantize("float64", scaled=True)), wide)


def test_noise_goes_by_places_and_not_by_how_they_lie_in_memory():
    x = torch.zeros(2, 3, 4, 5)
    assert torch.equal(edited(x, edits.noise(1.0)), edited(x.to(memory_format=torch.channels_last), edits.noise(1.0)))


def test_numbers_that_no_edit_can_mean_are_refused_where_they_are_given():
    for call in (
        lambda: edits.fill(10**400),
        lambda: edits.project(torch.tensor([math.inf, 1.0])),
        lambda: gaff.clip_gradients(
            torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1), value=1.0),
    ):  # fmt: skip
        with pytest.raises(gaff.PlanError):
            call()
