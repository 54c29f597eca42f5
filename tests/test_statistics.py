"""The numbers of a tensor: compiled and plain torch against float64, on every kind of tensor, in any split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gaff.errors import GaffError
from gaff.record.statistics import (
    EMPTY,
    M2,
    MEAN,
    SAMPLED,
    WIDTH,
    Numbers,
    bucket_of,
    lower_edge,
    merge,
    stride_of,
)
from gaff.training.statistics import kernel, plain

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EXACT = [at for at in range(WIDTH) if at not in (MEAN, M2)]


@pytest.fixture(scope="session")
def compiled():
    if kernel.load() is None:
        kernel.build()
    return kernel.load()


def new_row():
    return torch.tensor(EMPTY, dtype=torch.float64)


def tensors():
    torch.manual_seed(0)
    odd = torch.randn(9000)
    odd[::7], odd[1::9], odd[5] = math.nan, math.inf, -math.inf
    return {
        "normal": torch.randn(100),
        "large": torch.randn(300_000) * 3 + 7,
        "far from zero": torch.randn(50_000) * 1e-3 + 1000,
        "one outlier": torch.cat([torch.tensor([1e6]), torch.randn(5000)]),
        "subnormal": torch.randn(3000) * 1e-39,
        "squares overflow": torch.randn(3000) * 1e38,
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.0),
        "expanded": torch.randn(5, 1).expand(5, 700),
        "transposed": torch.randn(30, 40).t(),
        "sliced": torch.randn(100, 100)[:, ::3],
        "half zero": torch.relu(torch.randn(70_001)),
        "negative zero": torch.tensor([-0.0, 0.0, 1.0]),
        "not finite": odd,
        "only NaN": torch.full((10,), math.nan),
        "channels last": torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last),
        "permuted slice": torch.randn(70, 80, 90).permute(2, 0, 1)[::2],
        "of size one": torch.randn(1, 5, 1, 4).transpose(0, 2),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", tensors())
def test_both_ways_give_the_numbers_that_float64_gives(compiled, name, dtype):
    x = tensors()[name].to(dtype)
    fast, slow = new_row(), new_row()
    compiled.observe_(x, fast, True)
    plain.observe_(x, slow, True)
    assert torch.equal(fast[EXACT], slow[EXACT])
    finite = x.double()[x.isfinite()]
    for row in (fast, slow):
        found = Numbers(row.tolist())
        assert found.count == finite.numel()
        assert (found.nan, found.nonfinite) == (x.isnan().sum(), (~x.isfinite()).sum())
        if finite.numel():
            std = finite.std(correction=0).item()
            assert found.mean == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-6 * std)
            assert found.std == pytest.approx(std, rel=2e-6)
            assert (found.min, found.max) == (finite.min(), finite.max())
            assert found.zeros == (finite == 0).double().mean()
            assert found.rms == pytest.approx(finite.square().mean().sqrt().item(), rel=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes_fall_into_their_buckets(compiled, dtype):
    x = torch.tensor([0.0, 1.0, 1.5, -2.0, 0.25, 1e-3, math.nan, math.inf]).to(dtype)
    row = new_row()
    compiled.observe_(x, row, True)
    expected = torch.zeros(64)
    for value in x[1:6].tolist():
        expected[bucket_of(math.floor(math.log2(abs(value))))] += 1
    assert torch.equal(row[SAMPLED + 1 :].float(), expected)
    assert row[SAMPLED] == 6  # zero among them


def test_shares_beyond_half_precision_are_those_that_a_cast_loses(compiled):
    torch.manual_seed(0)
    x = (torch.randn(60_000) * torch.logspace(-12, 7, 60_000))[torch.randperm(60_000)]
    row = new_row()
    compiled.observe_(x, row, True)
    found = Numbers(row.tolist())
    for name, dtype in (
        ("float16", torch.float16),
        ("float8_e5m2", torch.float8_e5m2),
        ("float8_e4m3", torch.float8_e4m3fn),
    ):
        cast = x.to(dtype).float()
        lost = ((cast == 0) & (x != 0)).double().mean().item()
        assert found.underflow(name) == pytest.approx(lost, abs=1e-2)  # of a sample
        beyond = (x.abs() >= 2.0 ** {"float16": 16, "float8_e5m2": 16, "float8_e4m3": 9}[name]).double().mean().item()
        assert found.overflow(name) == pytest.approx(beyond, abs=1e-2)


def test_powers_of_two_of_a_large_tensor_are_counted_on_an_odd_sample_and_nothing_else_is_sampled(compiled):
    x = torch.zeros(1 << 20)
    x[1::2] = 1.0  # an even stride would see only zeros
    x[123_456] = 7e9
    x[99] = math.nan
    row = new_row()
    compiled.observe_(x, row, True)
    found = Numbers(row.tolist())
    assert stride_of(x.numel()) % 2 == 1
    assert found.share(bucket_of(0), bucket_of(0)) == pytest.approx(0.5, abs=1e-3)
    assert found.max == x.nan_to_num().max()
    assert found.nan == 1
    assert row[SAMPLED] == pytest.approx(x.numel(), rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((6, 5), 1), ((4, 3, 7, 9), 1), ((3, 11, 8), 2), ((2, 2, 40_000), 1)])
def test_units_know_their_extremes(compiled, dtype, shape, dim):
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype)
    inner = math.prod(shape[dim + 1 :])
    rest = [at for at in range(len(shape)) if at != dim]
    for observe in (compiled.observe_units_, plain.observe_units_):
        units = torch.tensor([[-math.inf], [math.inf], [0.0]], dtype=torch.float64).repeat(1, shape[dim])
        observe(x, units, inner)
        observe(-2 * x, units, inner)
        both = torch.stack([x, -2 * x]).double()
        rest_of_both = [0, *(at + 1 for at in rest)]
        assert torch.equal(units[0], both.amax(rest_of_both))
        assert torch.equal(units[1], both.amin(rest_of_both))
        torch.testing.assert_close(units[2], both.abs().sum(rest_of_both), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(6, 40), (6, 40, 5, 7)])
def test_a_nan_is_no_extreme_of_its_unit(compiled, shape):
    x = torch.randn(shape)
    x[1], x[:, 3] = math.nan, math.nan  # of one input all units, of one unit all inputs
    inner = x[0, 0].numel()
    both = [torch.tensor([[-math.inf], [math.inf], [0.0]], dtype=torch.float64).repeat(1, 40) for _ in range(2)]
    compiled.observe_units_(x, both[0], inner)
    plain.observe_units_(x, both[1], inner)
    assert torch.equal(both[0][:2], both[1][:2])
    by_unit = x.transpose(0, 1).flatten(1).double().nan_to_num(-math.inf).amax(1)
    assert torch.equal(both[1][0], by_unit)


def test_many_at_once_are_the_same_as_one_by_one(compiled):
    torch.manual_seed(0)
    xs = [torch.randn(n) for n in (1, 100, 0, 4096, 500_000)] + [torch.randn(70, 80).t(), torch.tensor([math.nan])]
    rows = new_row().repeat(len(xs), 1)
    compiled.observe_many_(xs, rows, True)
    for x, row in zip(xs, rows, strict=True):
        alone = new_row()
        compiled.observe_(x, alone, True)
        assert torch.equal(row, alone)


def test_the_number_of_threads_changes_no_bit(compiled):
    x = torch.randn(2_000_000)
    rows = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            row = new_row()
            compiled.observe_(x, row, True)
            rows.append(row)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_parts_merge_to_the_whole_in_any_order(values, first, second):
    if kernel.load() is None:
        kernel.build()
    observe = kernel.load().observe_
    x = torch.tensor(values, dtype=torch.float32)
    cuts = sorted((min(first, len(values)), min(second, len(values))))
    parts = [x[: cuts[0]], x[cuts[0] : cuts[1]], x[cuts[1] :]]
    rows = []
    for part in parts:
        row = new_row()
        observe(part, row, True)
        rows.append(row.tolist())
    whole = new_row()
    observe(x, whole, True)
    forward = Numbers(merge(merge(rows[0], rows[1]), rows[2]))
    backward = Numbers(merge(rows[2], merge(rows[1], rows[0])))
    expected = Numbers(whole.tolist())
    scale = max(expected.largest, 1e-300)
    for found in (forward, backward):
        assert (found.count, found.nan, found.nonfinite, found.zeros) == (
            expected.count,
            expected.nan,
            expected.nonfinite,
            expected.zeros,
        )
        if expected.count:
            assert (found.min, found.max) == (expected.min, expected.max)
            assert found.mean == pytest.approx(expected.mean, rel=1e-6, abs=1e-6 * scale)
            assert found.std == pytest.approx(expected.std, rel=1e-5, abs=1e-6 * scale)


def test_adding_to_a_row_merges(compiled):
    x = torch.randn(5000)
    row, whole = new_row(), new_row()
    compiled.observe_(x[:1234], row, True)
    compiled.observe_(x[1234:], row, True)
    compiled.observe_(x, whole, True)
    assert torch.equal(row[EXACT], whole[EXACT])
    torch.testing.assert_close(row, whole, rtol=1e-6, atol=1e-9)


def test_a_denormal_flag_of_the_processor_changes_nothing(compiled):
    x = torch.tensor([1e-40, 0.0, 1.0])
    half = torch.tensor([6e-8, 0.0, 1.0], dtype=torch.float16)
    torch.set_flush_denormal(True)
    try:
        for tensor in (x, half):
            row = new_row()
            compiled.observe_(tensor, row, True)
            assert Numbers(row.tolist()).zeros == pytest.approx(1 / 3)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("x", [torch.arange(3), torch.tensor([True]), torch.zeros(2, dtype=torch.complex64)])
def test_other_types_are_refused(compiled, x):
    with pytest.raises(RuntimeError, match="expected a tensor of float16"):
        compiled.observe_(x, new_row(), False)


def test_rows_of_another_shape_are_refused(compiled):
    with pytest.raises(RuntimeError, match="expected contiguous rows of 74 float64"):
        compiled.observe_(torch.zeros(3), torch.zeros(10, dtype=torch.float64), False)


def test_buckets_tell_where_they_begin():
    for exponent in range(-126, 128):
        bucket = bucket_of(exponent)
        assert lower_edge(bucket) <= exponent
        assert bucket == 63 or exponent < lower_edge(bucket + 1)


def test_without_a_build_there_is_no_kernel(monkeypatch):
    kernel.forget()
    monkeypatch.setenv("GAFF_KERNEL", "plain")
    assert kernel.load() is None
    assert kernel.level() == "plain"
    kernel.forget()


def test_a_build_that_others_may_write_is_not_loaded(tmp_path, monkeypatch, compiled):
    own = (kernel.path_of_build(), *map(kernel.packed, kernel.LEVELS))
    built = next(one for one in own if one.is_file()).read_bytes()
    monkeypatch.setattr(kernel, "packed", lambda level: tmp_path / "no.so")
    monkeypatch.setenv("GAFF_CACHE", str(tmp_path))
    kernel.forget()
    target = kernel.path_of_build()
    target.parent.mkdir(parents=True)
    target.write_bytes(built)
    target.chmod(0o666)
    assert kernel.load() is None
    kernel.forget()


def test_a_failing_compiler_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("GAFF_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(GaffError, match="false failed with exit code 1"):
        kernel.build()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(GaffError, match="/no/such/compiler cannot be run: No such file"):
        kernel.build()
    assert not list(tmp_path.rglob("*.so"))
