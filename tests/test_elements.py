"""Which numbers are in a tensor: every kind of tensor has one answer, and all who read values give it."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import gaff
from gaff import edits, keep
from gaff.compat import elements
from gaff.inspection.call_log import gradient_of, measure
from gaff.inspection.nonfinite.ranges import has_nonfinite, range_of
from gaff.inspection.sketches import marks_of
from gaff.sessions.edit_size import plain
from gaff.training.watch.accumulator import readable

BASE = torch.tensor([[1.0, -2.0, 0.0], [4.0, 0.5, 3.0]])
TWO = TwoTensor(BASE, BASE + 10)
KINDS = {
    "plain": (BASE, BASE),
    "expanded": (BASE[:1].expand(4, 3), BASE[:1].expand(4, 3)),
    "bfloat16": (BASE.bfloat16(), BASE.bfloat16()),
    "float8": (BASE.to(torch.float8_e4m3fn), BASE),
    "complex": (torch.complex(BASE, -BASE), torch.stack([BASE, -BASE], -1)),
    "conjugate": (torch.complex(BASE, BASE).conj(), torch.stack([BASE, -BASE], -1)),
    "sparse": (BASE.to_sparse(), torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0])),
    "wrapper of two": (TWO, torch.cat([BASE.flatten(), BASE.flatten() + 10])),
    "wrapper of wrappers": (TwoTensor(TWO, TWO), torch.cat([BASE.flatten(), BASE.flatten() + 10] * 2)),
    "less than a byte": (torch.arange(6, dtype=torch.uint8).view(torch.uint4), torch.arange(6, dtype=torch.uint8)),
    "bits": (torch.arange(6, dtype=torch.uint8).view(torch.bits8), torch.arange(6, dtype=torch.uint8)),
    "parameter": (nn.Parameter(BASE), BASE),
}


with warnings.catch_warnings():  # torch's own, of kinds of tensors that it may drop or change
    warnings.simplefilter("ignore")
    KINDS["quantised"] = torch.quantize_per_tensor(BASE, 0.5, 0, torch.qint8), BASE
    KINDS["compressed"] = BASE.to_sparse_csr(), torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0])
    KINDS["nested"] = torch.nested.nested_tensor([BASE[0], BASE[1, :2]]), torch.tensor([1.0, -2.0, 0.0, 4.0, 0.5])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_the_numbers_are_those_that_the_tensor_stands_for(name):
    tensor, wanted = KINDS[name]
    found = elements.elements(tensor)
    assert not found.requires_grad
    assert sorted(found.flatten().tolist()) == sorted(wanted.flatten().tolist())
    assert has_nonfinite(tensor) is False
    assert plain(tensor).layout == torch.strided


def test_what_has_no_numbers_is_told_so_by_everybody():
    with FakeTensorMode():
        fake = torch.randn(2, 3)
    for tensor in (torch.empty(2, 3, device="meta"), fake):
        assert elements.elements(tensor) is None
        assert elements.dense(tensor) is None
        assert readable(tensor) is None
        assert measure(tensor) is None
        assert marks_of([tensor]) is None
        assert not has_nonfinite(tensor)


def test_the_same_numbers_are_read_by_traces_watching_and_examinations():
    tensor = TwoTensor(BASE, torch.full_like(BASE, float("nan")))
    assert has_nonfinite(tensor)
    assert range_of(tensor, "it").nan == 6
    assert range_of(tensor, "it").elements == 12
    with gaff.edit(nn.Sequential(nn.Identity()), {"0": gaff.edits.scale(2.0)}) as changed:
        changed._model(TwoTensor(BASE, BASE + 10))
    row = changed.receipt.rows[0]
    assert (row.seen, row.changed) == (12, 11)  # a zero stays one
    assert int(measure(tensor)[4]) == 6
    assert readable(tensor).isnan().sum() == 6


def test_stand_ins_of_a_transform_are_no_numbers():
    seen = []

    def look(x):
        seen.append(elements.elements(x))
        return (x * 2).sum()

    torch.func.vmap(look)(BASE)
    assert seen == [None]


def test_a_trace_of_a_model_with_a_wrapper_of_wrappers_tells_its_numbers():
    class Doubled(nn.Module):
        def forward(self, x):
            return TwoTensor(TwoTensor(x, x + 1), TwoTensor(x, x - 1)) * 2

    trace = gaff.trace(nn.Sequential(Doubled()), torch.ones(2, 3))
    assert trace.rows[1].statistics.max == 4.0
    assert trace.rows[1].statistics.min == 0.0


@pytest.mark.parametrize(
    ("gradient", "zeros", "norm"),
    [
        (torch.tensor([0.0, 3.0, 4.0, 0.0]), 0.5, 5.0),
        (torch.complex(torch.tensor([3.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0, 0.0])), 0.5, 5.0),
        (TwoTensor(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])), 0.5, 5.0),
        (torch.tensor([[3.0, 0.0], [4.0, 0.0]]).to_sparse(), 0.5, 5.0),
        (torch.complex(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])).to_sparse(), 0.5, 5.0),
        (torch.zeros(0), 1.0, 0.0),
    ],
    ids=["real", "complex", "wrapper", "sparse", "sparse complex", "empty"],
)
def test_the_share_of_zeros_of_a_gradient_is_of_its_elements(gradient, zeros, norm):
    told = gradient_of(gradient)
    assert (told.zeros, told.norm) == (zeros, norm)


@pytest.mark.parametrize("kind", [torch.uint4, torch.int2, torch.float4_e2m1fn_x2, torch.bits8])
def test_what_torch_only_stores_is_kept_traced_and_saved(kind, tmp_path):
    net = nn.Sequential(nn.Identity(), nn.Identity())
    given = torch.arange(6, dtype=torch.uint8)
    assert len(gaff.trace(net, given.view(kind)).rows) == 3
    with gaff.capture(net, "0") as got:
        net(given.view(kind))
    got.save(tmp_path / "x.safetensors")
    for found in (got["0"], gaff.load(tmp_path / "x.safetensors")["0"]):
        assert found.dtype == kind
        assert torch.equal(found.view(torch.uint8), given)


def test_a_model_without_memory_is_edited_and_nothing_is_measured():
    model = nn.Linear(3, 2, device="meta")
    with gaff.edit(model, {":output": edits.scale(2.0)}, check_finite=True) as changed:
        assert model(torch.ones(4, 3, device="meta")).shape == (4, 2)
    row = changed.receipt.rows[0]
    assert (row.hits, row.measured) == (1, 0)


def test_what_torch_cannot_do_with_ragged_tensors_is_refused_with_the_site():
    ragged = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)
    for edit in (edits.at(keep.positions(0), edits.zero()), edits.patch(torch.ones(2, 4), rows={0: 1})):
        model = nn.Sequential(nn.Identity())
        with (
            pytest.raises(gaff.PlanError, match="the edit does not fit nested float32"),
            gaff.edit(model, {"0": edit}),
        ):
            model(ragged)


def test_on_the_meta_device_there_are_shapes_and_no_false_alarms():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(5, 3)
    with gaff.capture(model, "0") as got:
        model(x)
    assert got["0"].is_meta  # the ReLU writes into it, into no memory at all
    trace = gaff.trace(model, x, backward=lambda y: y.sum())
    assert trace.device == "meta"
    assert next(row for row in trace.parameters if row.site == "0.weight:param").grad.shape == "4x3"
    with pytest.raises(gaff.PlanError, match="gradients on the meta device hold no numbers"):
        gaff.clip_gradients(torch.optim.SGD(model.parameters(), 0.1), norm=1.0)
    with pytest.raises(gaff.PlanError, match="parameters on the meta device hold no numbers"):
        gaff.sample_norms(model)


def test_edits_of_fake_tensors_are_made_and_not_measured():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(3, 4)
        with gaff.edit(model, {"0": gaff.edits.scale(2.0)}, check_finite=True) as got:
            assert model(x).shape == (3, 4)
    assert got.receipt.rows[0].hits == 1
    assert got.receipt.rows[0].measured == 0


def test_a_layer_without_elements_is_no_error_of_torch():
    with warnings.catch_warnings(action="ignore"):  # torch has nothing to draw
        model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2))
    with gaff.sample_norms(model) as norms:
        model(torch.randn(5, 3)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="there is nothing to measure"):
        _ = norms.total


@pytest.mark.parametrize("reduce", [keep.norm(), keep.mean(), keep.rows(1), keep.project(2)])
def test_what_torch_cannot_reduce_is_refused_by_its_address(reduce):
    model, tokens = nn.Embedding(10, 4, sparse=True), torch.tensor([[1, 1], [2, 1]])
    try:
        with gaff.capture(model, "weight:grad", reduce=reduce) as got:
            model(tokens).sum().backward()
    except gaff.PlanError as error:
        assert re.search("weight:grad: .* cannot be kept of this value", str(error))  # noqa: PT017  # or it is exact
    else:  # torch has learned it
        assert torch.equal(got["weight:grad"], reduce(model.weight.grad.to_dense()))


def test_a_capture_is_neither_copied_nor_pickled():
    got = gaff.capture(nn.Linear(2, 2), ":output")
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(gaff.PlanError, match="a capture is neither copied nor pickled"):
            copies(got)


def test_a_trace_on_the_meta_device_does_not_say_what_has_influence():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        x = torch.ones(3, 4)
    trace = gaff.trace(model, x, backward=lambda y: y.mean())
    assert trace.unused_parameters == ()
    with gaff.edit(model, {"1": gaff.edits.noise(0.1)}):
        assert model(x).shape == (3, 5)


def test_where_there_is_no_float64_sums_are_in_float32(monkeypatch, tmp_path):
    """Tensors say that they lie on Apple's MPS, of which none is at hand."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(torch.Tensor, "is_mps", property(lambda tensor: True), raising=False)
    assert elements.wide_type(x) is torch.float32
    with gaff.watch(model, optimizer, every=1, out=tmp_path / "run"), gaff.clip_gradients(optimizer, norm=1e-3):
        for _ in range(3):
            with gaff.edit(model, {"0": gaff.edits.scale(0.5)}) as edit:
                optimizer.zero_grad()
                model(x).square().mean().backward()
            weight = model[0].weight.detach().clone()
            optimizer.step()
            assert edit.receipt
    trace = gaff.trace(model, x)
    monkeypatch.undo()
    assert trace
    assert gaff.load(tmp_path / "run").latest("0.weight:param")["norm"] == pytest.approx(weight.norm().item(), rel=1e-6)
    assert elements.wide_type(x) is torch.float64


@pytest.mark.parametrize("kind", [torch.quint8, torch.qint8, torch.qint32])
def test_numbers_keep_their_fraction_in_quantised_tensors(kind):
    """They are no integers, though they are not floating either."""
    model, value = nn.Sequential(nn.Identity()), BASE.abs()
    given = torch.quantize_per_tensor(value, 0.1, 0, kind)
    for edit, truth in ((edits.clamp(0.6, 1.4), value.clamp(0.6, 1.4)), (edits.fill(1.8), value * 0 + 1.8)):
        with gaff.edit(model, {"0": edit}):
            assert torch.allclose(model(given).dequantize(), truth)
    far = 1e12 if kind == torch.qint32 else 100.0
    for number in (far, float("nan")):
        refused = pytest.raises(gaff.PlanError, match=f"fill with .* is out of the range of {kind}")
        with refused, gaff.edit(model, {"0": edits.fill(number)}):
            model(given)


def test_an_infinity_stays_not_finite_in_float8(tmp_path):
    """torch makes it 448, the largest number of float8_e4m3fn, which has no infinity."""
    model, kind = nn.Sequential(nn.Identity()), "float8_e4m3fn"
    given = torch.tensor([[float("inf"), 1.0], [464.0, -float("inf")], [464.0, -2.0], [465.0, 0.0]])
    finite = given.isfinite()
    if torch.tensor(465.0).to(torch.float8_e4m3fn).float().isnan():  # as torch 2.10 makes it
        given[3, 0] = 464.0
    with gaff.capture(model, "0", dtype=kind) as got:
        model(given)
    assert torch.equal(got["0"].float().isfinite(), finite)
    with gaff.edit(model, {"0": edits.quantize(kind)}):
        assert torch.equal(model(given).isfinite(), finite)
    with pytest.warns(UserWarning, match="[23] of 4 rows hold a NaN or an infinity, or a number beyond 448"):
        store = gaff.harvest(model, [given], "0", out=tmp_path / "acts", dtype=kind, nonfinite="mark")
    assert torch.equal(store["0"][:].float().isfinite(), finite)
    assert store.labels["finite"][:].tolist() == [False, False, True, given[3, 0] == 464]  # which is rounded to 448


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_numbers_are_beyond_a_type_where_they_become_infinite(kind):
    most = torch.finfo(kind).max
    numbers = most * torch.linspace(1.0, 1.2, 400, dtype=torch.float64)
    assert torch.equal(elements.is_beyond(numbers, kind), numbers.to(kind).float().isinf())


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_words_of_what_is_negated_or_conjugated_when_read(shape):
    z = torch.randn(shape, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, torch._neg_view(z.real)):
        assert torch.equal(elements.words(lazy), elements.words(lazy.clone().resolve_conj().resolve_neg()))
