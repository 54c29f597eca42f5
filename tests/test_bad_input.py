"""What cannot be meant is refused with an error of gaff's own, where it is given; nothing is installed, nothing lost."""

import numpy as np
import pytest
import torch
from torch import nn

import gaff
from gaff import edits, keep
from gaff.errors import PlanError, RecordError, SiteError

MASK = torch.tensor([True, False, True])
ONES = torch.ones(3, 2)


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def clipping(**limits):
    return gaff.clip_gradients(torch.optim.SGD(model().parameters(), lr=0.1), **limits)


def traced():
    return gaff.trace(model(), torch.ones(1, 4))


def captured():
    net = model()
    with gaff.capture(net, "0") as got:
        net(torch.ones(1, 4))
    return got


REFUSED = {
    "rows by a mask": (lambda: keep.rows(MASK), PlanError, "of a mask, mask.nonzero"),
    "rows by a mask of NumPy": (lambda: keep.rows(MASK.numpy()), PlanError, "of a mask"),
    "heads by truth values": (lambda: keep.heads([True, True], 2), PlanError, "of a mask"),
    "a head that there is not": (lambda: keep.heads(7, 4), PlanError, "head 7 of 4 was asked for: expected -4 to 3"),
    "no heads": (lambda: keep.heads(0, 0), PlanError, "count=0"),
    "rows by name": (lambda: keep.rows("a"), PlanError, "expected a whole number"),
    "rows by None": (lambda: keep.rows(None), PlanError, "expected a whole number"),
    "rows by a fraction": (lambda: keep.rows(1.5), PlanError, "expected a whole number"),
    "rows without an order": (lambda: keep.rows({1, 2}), PlanError, "expected a whole number"),
    "rows of rows": (lambda: keep.rows(torch.ones(2, 2, dtype=torch.int64)), PlanError, "expected a whole number"),
    "a dimension by name": (lambda: keep.rows(0, dim="a"), PlanError, "dim='a'"),
    "mean over a list": (lambda: keep.mean([0, 1]), PlanError, "expected a whole number"),
    "a seed by name": (lambda: keep.project(3, seed="a"), PlanError, "seed='a'"),
    "norm over what is not there": (lambda: keep.norm(9)(ONES), PlanError, r"norm over \(9,\)"),
    "patch by a mask": (lambda: edits.patch(ONES, rows=[True, False]), PlanError, "of a mask"),
    "patch from truth values": (lambda: edits.patch(ONES, rows={True: False}), PlanError, "of a mask"),
    "patch nowhere": (lambda: edits.patch(ONES, rows=[]), PlanError, "names no place"),
    "ablate by a number": (lambda: edits.ablate("mean", 3), PlanError, "expected a tensor"),
    "project, keep by name": (lambda: edits.project(torch.ones(2), keep="no"), PlanError, "no truth value"),
    "quantize, scaled by name": (lambda: edits.quantize("float16", scaled="no"), PlanError, "no truth value"),
    "noise from truth": (lambda: edits.noise(1.0, seed=True), PlanError, "expected an integer"),
    "take of a plan that edits": (
        lambda: gaff.take(model(), gaff.Plan.edit({"0": edits.zero()})), PlanError, "the plan edits"),
    "harvest by a plan that edits": (
        lambda: gaff.harvest(model(), [torch.ones(2, 4)], gaff.Plan.edit({"0": edits.zero()}), out="never"), PlanError,
        "the plan edits"),
    "dtype of Python": (lambda: gaff.capture(model(), "0", dtype=float), PlanError, "no floating type"),
    "a device of numbers": (lambda: gaff.capture(model(), "0", to=3.5), PlanError, "no device"),
    "a budget of fractions": (lambda: gaff.capture(model(), "0", budget=1.5), PlanError, "budget=1.5"),
    "last as truth": (lambda: gaff.capture(model(), "0", last=True), PlanError, "last=True"),
    "an option of edits": (lambda: gaff.capture(model(), "0", check_finite=True), PlanError, "not known to a capture"),
    "the same in a plan": (lambda: gaff.Plan.of("0", check_finite=True), PlanError, "not known to a capture"),
    "maybe nothing": (gaff.maybe, PlanError, "no pattern"),
    "a plan for no model": (lambda: gaff.Plan.of("0").check("m"), PlanError, "expected a model"),
    "sample_norms of a plan": (lambda: gaff.sample_norms(model(), gaff.Plan.of("0")), PlanError, "names no site"),
    "allow as text": (lambda: gaff.find_nonfinite(lambda: None, allow="10"), PlanError, "no list of patterns"),
    "allow as numbers": (lambda: gaff.guard(model(), allow=[3]), PlanError, "no list of patterns"),
    "allow a port": (lambda: gaff.guard(model(), allow=["0:input"]), SiteError, "says more than a module"),
    "allow a call": (lambda: gaff.guard(model(), allow=["0@3"]), SiteError, "says more than a module"),
    "trace, flops by name": (lambda: gaff.trace(model(), torch.ones(1, 4), flops="no"), PlanError, "no truth value"),
    "sites, ops by name": (lambda: gaff.sites(model(), torch.ones(1, 4), ops="yes"), PlanError, "no truth value"),
    "a norm of values": (lambda: clipping(value=1.0, norm_type=1), PlanError, "no norm is limited"),
    "values by tensor": (lambda: clipping(value=1.0, per="tensor"), PlanError, "no norm is limited"),
    "no norm": (lambda: clipping(norm=1.0, norm_type=float("nan")), PlanError, "norm_type=nan"),
    "a count": (lambda: clipping(norm=1.0, norm_type=0), PlanError, "norm_type=0 is no norm: expected a positive"),
    "the least": (lambda: clipping(norm=1.0, norm_type=-float("inf")), PlanError, "norm_type=-inf is no norm"),
    "watch nothing by name": (lambda: gaff.watch({}), PlanError, "no model was given"),
    "tell a number": (lambda: gaff.watch(model(), tell=3), PlanError, "cannot be called"),
    "every as truth": (lambda: gaff.watch(model(), every=True), PlanError, "every=True"),
    "batches kept nowhere": (lambda: gaff.watch(model(), keep_batch=True), PlanError, "expected out="),
    "a trace to nowhere": (
        lambda: gaff.trace(model(), torch.ones(1, 4)).save("/nonexistent/a.json"), RecordError, "cannot be written"),
    "an anatomy to nowhere": (
        lambda: gaff.anatomy(model(), torch.ones(1, 4)).save("/nonexistent/a.json"), RecordError, "cannot be written"),
    "a name that is too long": (lambda: gaff.load("a" * 300), RecordError, "is not there"),
    "a harvest to a name that is too long": (
        lambda: gaff.harvest(model(), [torch.ones(2, 4)], "0", out="/tmp/" + "a" * 300), RecordError,
        "cannot be written: File name too long"),
    "a capture to no name": (lambda: captured().save("a\0b.safetensors"), RecordError, "embedded null byte"),
    "a trace as a table": (
        lambda: gaff.trace(model(), torch.ones(1, 4)).save("never.csv"), PlanError, r"expected .* \.json or \.html"),
    "an anatomy as pixels": (
        lambda: gaff.anatomy(model(), torch.ones(1, 4)).save("never.PNG"), PlanError, r"expected .* \.json or \.svg"),
    "a difference as text": (
        lambda: gaff.diff(traced(), traced()).save("never.txt"), PlanError, r"\.txt cannot be written"),
    "a size of truth": (lambda: keep.project(torch.tensor(True)), PlanError, r"projection onto tensor\(True\)"),
    "a run by truth": (lambda: gaff.capture(model(), "0").run(np.True_), PlanError, "expected the number of a run"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_where_it_is_given(case):
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call()


def test_numbers_of_numpy_and_torch_are_places_like_python_s():
    for one in (np.int64(1), torch.tensor(1), 1):
        assert keep.rows(one) == keep.rows(1)
    for several in (np.array([0, 2]), torch.tensor([0, 2]), [np.int64(0), 2], range(0, 4, 2), (0, 2)):
        assert keep.rows(several) == keep.rows([0, 2])
        assert keep.heads(several, 4) == keep.heads([0, 2], 4)
    gaff.Plan.of("0", reduce=keep.rows(torch.tensor([0, 1]))).to_json()


def test_numbers_of_numpy_are_counts_like_python_s(tmp_path):
    net, x, two = model(), torch.randn(3, 4), np.int64(2)
    with gaff.capture(net, "0", last=two, budget=two * 1000) as got:
        for _ in range(3):
            net(x)
    assert len(got.all("0")) == 2
    assert torch.equal(got.run(two)["0"], net[0](x))
    assert keep.project(two) == keep.project(2)
    assert repr(edits.noise(1.0, seed=two)) == repr(edits.noise(1.0, seed=2))
    clipping(norm=1.0, deviations=2.0, warmup=two).remove()
    with gaff.watch(net, every=two):
        pass
    store = gaff.harvest(net, [x, x, x], "0", out=tmp_path / "store", shard=two)
    assert [len(batch) for batch in store.loader("0", batch=two, shuffle=two)] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(("only", "words"), [((), "not given to gaff.watch"), (["nope*"], "leave no module")])
def test_a_run_of_which_nothing_was_watched_is_not_called_healthy(tmp_path, only, words):
    net, other = model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = torch.optim.SGD(other.parameters(), lr=0.1) if not only else None
    with gaff.watch(None if only else net, given, out=tmp_path / "run", only=only):
        for _ in range(30):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    verdict = str(gaff.load(tmp_path / "run").verdict)
    assert "healthy" not in verdict
    assert words in verdict
