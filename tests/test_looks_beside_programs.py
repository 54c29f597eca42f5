"""Looks that run a model by themselves leave a program's own pending backward, graphs and numbers as they are."""

import math

import pytest
import torch
from torch import nn

import gaff
from gaff.compat.replacements import Replacements
from gaff.inspection.call_log import gradient_of
from gaff.inspection.diff.difference import sketched
from gaff.inspection.diff.rounding import Drift, allowance
from gaff.inspection.trace import Trace
from gaff.record.trace_rows import Fingerprint


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("near", torch.eye(4).to_sparse())

    def forward(self, x):
        return self.near @ self.lin(x)


LOOKS = {
    "trace": lambda model, x: gaff.trace(model, x),
    "trace with backward": lambda model, x: gaff.trace(model, x, backward=lambda out: out.sum()),
    "sites": lambda model, x: gaff.sites(model, x, ops=True),
    "anatomy": lambda model, x: gaff.anatomy(model, x),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Sparse], ids=["batch norm", "sparse buffer"]
)
def test_a_backward_pass_that_waits_goes_through_after_a_look(make, look):
    model, x = make(), torch.randn(4, 4)
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    loss = model(x).square().sum()
    after = {name: one.clone() for name, one in model.named_buffers()}
    LOOKS[look](model, x)
    loss.backward()
    for name, one in model.named_buffers():
        same = torch.equal(one.to_dense(), after[name].to_dense())
        assert same, (name, buffers[name])


def test_a_buffer_whose_data_was_cast_is_put_back():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            self.scale.data = self.scale.data.half()
            return x * self.scale

    model = Casting()
    gaff.sites(model, torch.ones(2))
    assert model.scale.dtype == torch.float32


def test_the_graph_behind_an_input_is_the_callers():
    model, source = nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    given = source.tanh()
    gaff.trace(model, given, backward=lambda out: out.sum())
    given.sum().backward()
    assert source.grad is not None


def test_complex_overflow_is_told_of_the_op_that_made_it():
    def step():
        x = torch.full((2,), 1e200, dtype=torch.complex128, requires_grad=True)
        return (x * x).abs().sum()

    found = gaff.find_nonfinite(step)
    assert found
    assert "mul" in str(found)


def test_norms_of_gradients_that_float64_cannot_square():
    for size in (1e200, 1e-200):
        assert gradient_of(torch.full((4,), size, dtype=torch.float64)).norm == pytest.approx(2 * size)
    assert gradient_of(torch.zeros(4, dtype=torch.float64)).norm == 0.0
    assert gradient_of(torch.full((4,), torch.inf, dtype=torch.float64)).norm == math.inf


def test_what_rounding_explains_in_half_precision_does_not_grow_without_end():
    row = type("Row", (), {"dtype": "bfloat16"})()
    few, many = (allowance(None, Drift(calls, 2.0**-8), row) for calls in (4, 100_000))
    assert few < many == pytest.approx(0.1)
    assert allowance(None, Drift(), type("Row", (), {"dtype": "float8_e5m2"})()) == pytest.approx(0.25, rel=0.01)


def test_marks_of_an_older_format_are_compared_by_their_digest():
    old, other, new = Fingerprint("a"), Fingerprint("b"), Fingerprint("a", (1.0, 2.0))
    assert sketched(old, old) == 0.0
    assert sketched(old, other) == math.inf
    assert sketched(old, new) == math.inf


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "\udcff"], ids=["deep", "empty", "no text"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(gaff.errors.RecordError):
        Trace.load(tmp_path / "x.json")


def test_an_anatomy_with_a_nan_is_printed_after_it_was_read_back(tmp_path):
    class Nan(nn.Module):
        def forward(self, x):
            return x * torch.tensor(torch.nan)

    told = gaff.anatomy(Nan(), torch.ones(2, requires_grad=True))
    told.save(tmp_path / "a.json")
    assert str(gaff.load(tmp_path / "a.json")) == str(told)


def test_a_replacement_that_breaks_off_in_the_middle_leaves_nothing():
    class Place:
        one = two = staticmethod(len)

    def breaks(_plain):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Replacements((Place, "one", lambda plain: staticmethod(max)), (Place, "two", breaks)).__enter__()
    assert Place.one is len


def test_a_rank_without_a_number_of_ranks_says_nothing(monkeypatch):
    from gaff.compat.distributed import place

    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert place() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert place() == (1, 2)


def test_a_plan_with_a_type_that_no_file_holds_is_refused(tmp_path):
    plan = gaff.Plan.edit({"0": gaff.edits.replace(torch.ones(2, dtype=torch.complex128))})
    with pytest.raises(gaff.PlanError, match="complex128, which safetensors does not hold"):
        plan.save(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ([[1, 2], [3.5]], torch.float64),
        ([[1], [2**63 + 5]], torch.uint64),
        ([[-1], [2**63 + 5]], torch.float64),
        ([[False, True], [2]], torch.int64),
        ([[1], [2]], torch.int64),
    ],
)
def test_samples_of_one_column_have_one_type_whichever_comes_first(columns, wanted):
    from gaff.harvesting.sequences import _alike, _numbers

    for order in (columns, columns[::-1]):
        found = _alike([_numbers(one) for one in order])
        assert [one.dtype for one in found] == [wanted] * 2
        assert [one.tolist() for one in found] == [pytest.approx([float(x) for x in one]) for one in order]


def test_a_mask_of_no_rows_is_no_empty_list(tmp_path):
    stored = gaff.harvest(nn.Linear(2, 2), [torch.randn(4, 2)], ":output", out=tmp_path / "h", progress=False)
    column = stored[":output"]
    assert column[[]].shape == (0, 2)
    assert column[torch.empty(0, dtype=torch.int64)].shape == (0, 2)
    with pytest.raises(IndexError, match="mask of shape"):
        column[torch.empty(0, dtype=torch.bool)]
    with pytest.raises(IndexError, match="expected a row"):
        column[torch.tensor(1.0)]


def test_a_trace_dict_forgets_the_run_before_and_refuses_layers_that_are_not_there():
    from gaff.integrations.baukit import TraceDict

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(gaff.errors.SiteError):
        TraceDict(model, ["nope"], retain_output=False)
    traced = TraceDict(model, ["0"], retain_grad=True)
    with traced:
        model(torch.ones(1, 2))
    assert traced["0"].output is not None
    with traced:
        assert traced["0"].output is None
        model(torch.ones(1, 2))
