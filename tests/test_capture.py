"""Options of capture: what is kept, where, how much; and how it is read."""

import pytest
import torch
from torch import nn

import gaff
from gaff import keep
from zoo import Net, Residual, Structured


@pytest.fixture
def model():
    return Net()


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("part", "index"),
    [
        (keep.rows(1), (slice(1, 2),)),
        (keep.rows(slice(0, 2)), (slice(0, 2),)),
        (keep.channels([3, -1]), (slice(None), [3, 9])),
        (keep.positions(slice(None, None, 3)), (slice(None), slice(None, None, 3))),
        (keep.channels(-1, dim=-1), (..., slice(3, 4))),
    ],
)
def test_slices_at_the_source(model, x, part, index):
    with gaff.capture(model, "conv", reduce=part) as got:
        model(x)
    assert torch.equal(got["conv"], model.conv(x)[index])


def test_reductions_and_functions_at_the_source(model, x):
    with gaff.capture(model, {"conv": keep.mean(2, 3), "fc1": keep.norm()}, "relu", reduce=lambda t: t.amax()) as got:
        model(x)
    conv = model.conv(x)
    assert torch.equal(got["conv"], conv.mean((2, 3)))
    assert torch.equal(got["fc1"], torch.linalg.vector_norm(model(x)))
    assert torch.equal(got["relu"], conv.relu().amax())


def test_heads_are_cut_out_of_the_last_dimension():
    model, x = nn.Linear(6, 12), torch.randn(2, 5, 6)
    with gaff.capture(model, ":output", reduce=keep.heads([2, 0], count=3)) as got:
        model(x)
    assert torch.equal(got[":output"], model(x).unflatten(-1, (3, 4))[:, :, [2, 0]])
    with pytest.raises(gaff.PlanError, match=":output: 5 heads asked of a tensor of shape"):
        with gaff.capture(model, ":output", reduce=keep.heads(0, count=5)):
            model(x)
    with pytest.raises(gaff.PlanError, match="index 9 is outside dimension 0 of shape"):
        with gaff.capture(model, ":output", reduce=keep.rows(9)):
            model(x)


def test_a_small_slice_does_not_hold_the_whole_tensor(model, x):
    with gaff.capture(model, "conv", reduce=keep.rows(0)) as got:
        model(x)
    assert got["conv"].untyped_storage().nbytes() == got["conv"].nbytes


def test_dtype_applies_to_floating_tensors_only():
    model = Structured()
    with gaff.capture(model, ":output", dtype="bfloat16") as got:
        model(torch.randn(2, 4))
    assert got[":output"].hidden.dtype == torch.bfloat16
    assert got[":output"].extra[3][2] == 7


def test_values_with_their_graph_serve_auxiliary_losses(model, x):
    with gaff.capture(model, "conv", graph=True) as got:
        model(x)
    got["conv"].pow(2).mean().backward()
    true = torch.autograd.grad(model.conv(x).pow(2).mean(), model.conv.weight)[0]
    assert torch.allclose(model.conv.weight.grad, true)
    assert torch.equal(got["conv"], model.conv(x))  # although the ReLU after it writes in place


def test_last_keeps_the_newest_events(model, x):
    with gaff.capture(model, "conv", last=2) as got:
        for scale in (1, 2, 3):
            model(x * scale)
    assert [torch.equal(value, model.conv(x * scale)) for value, scale in zip(got.all("conv"), (2, 3), strict=True)]
    assert got.receipt.rows[0].fired == 3
    assert "1 older events let go" in got.receipt.rows[0].reason
    with pytest.raises(gaff.SiteError, match="'conv' has no event in run 0; 1 older events were let go"):
        got.run(0)["conv"]


def test_clear_lets_go_and_goes_on_counting(model, x):
    with gaff.capture(model, "conv") as got:
        model(x)
        got.clear()
        model(2 * x)
    assert torch.equal(got["conv"], model.conv(2 * x))
    assert got.receipt.rows[0].fired == 2


def test_a_budget_refuses_and_names_the_way_out(model, x):
    with pytest.raises(
        gaff.PlanError, match=r"conv: capture holds .* over its budget of 1000B; keep less: last=n, reduce="
    ):
        with gaff.capture(model, "conv", budget=1000):
            model(x)


def test_a_budget_lets_the_oldest_go_when_asked(model, x):
    size = model.conv(x).nbytes
    with gaff.capture(model, "conv", budget=2 * size + 10, evict="oldest") as got:
        for _ in range(5):
            model(x)
    assert [len(got.run(run).all("conv")) for run in range(5)] == [0, 0, 0, 1, 1]


def test_shared_memory_counts_once():
    model, x = Residual(blocks=1), torch.randn(2, 8)
    size = 2 * 8 * 4
    with gaff.capture(model, "**", ":output", budget=4 * size) as got:  # blocks.0 and blocks.0.1 are one tensor
        model(x)
    assert torch.equal(got["blocks.0"], got["blocks.0.1"])


def test_the_default_budget_is_looked_up_only_when_it_matters(model, x, monkeypatch):
    monkeypatch.setattr("gaff.sessions.budget._LOOK_FIRST_AT", 1000)
    monkeypatch.setattr("gaff.sessions.budget._free_bytes", lambda device: 4000)
    with pytest.raises(gaff.PlanError, match="over its budget of"):
        with gaff.capture(model, "conv"):
            for _ in range(9):
                model(x)


def test_runs_calls_and_names_when_reading(model, x):
    with gaff.capture(model, "conv", "**:param") as got:
        model(x)
        model(x * 2)
    assert torch.equal(got.run(1)["conv"], model.conv(x * 2))
    assert torch.equal(got.run(1)["conv@0"], got.run(1)["conv"])
    assert [value.shape for value in got.all("conv")] == [(4, 10, 4, 4)] * 2
    with pytest.raises(gaff.SiteError, match=r"in runs 0 and 1: say got.run\(0\)\['conv'\], or got.all\('conv'\)"):
        got["conv"]
    with pytest.raises(gaff.SiteError, match="'fc1' was not captured: expected one of fc1.weight:param"):
        got["fc1"]
    with pytest.raises(gaff.SiteError, match=r"'conv@7' has no event; it fired with calls \[0\]"):
        got["conv@7"]
    assert "conv" in got
    assert "fc1" not in got
    assert len(got) == 5


def test_only_one_call_on_request():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    twice = nn.Sequential(model[0], nn.Tanh(), model[0])
    with gaff.capture(twice, "0@1", "0@1:grad_output") as got:
        twice(x).sum().backward()
    assert torch.equal(got["0@1"], twice(x))
    assert torch.equal(got["0@1:grad_output"], torch.ones(1, 2))
    assert len(got.all("0@1")) == 1


def test_steps_are_those_of_the_models_own_optimizer():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other)]
    with gaff.capture(model, ":output") as got:
        for _ in range(3):
            (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    stream = next(iter(got._by_object.values()))
    assert [run.step for run, _, _ in stream.records] == [0, 1, 2]


def test_odd_tensors_are_kept_exactly():
    class Odd(nn.Module):
        def forward(self, x):
            return {
                "empty": x[:0],
                "expanded": x[:1].expand(4, -1),
                "strided": x[:, ::2],
                "complex": torch.fft.fft(x),
                "bool": x > 0,
                "sparse": x.to_sparse(),
                "scalar": x.sum(),
            }

    x = torch.randn(4, 6)
    with gaff.capture(Odd(), ":output") as got:
        true = got._model(x)
    value = got[":output"]
    for name in true:
        one, other = (t.to_dense() if t.is_sparse else t for t in (value[name], true[name]))
        assert torch.equal(one, other), name
        assert one.stride() == other.stride()


def test_the_receipt_as_text_and_data(model, x):
    with gaff.capture(model, "c*", "fc1:grad_input", gaff.maybe("nope")) as got:
        model(x).sum().backward()
    row = got.receipt.rows[0]
    assert (row.pattern, row.site, row.fired, row.none, row.skipped, row.changed, row.delta) == (
        "c*",
        "conv",
        1,
        0,
        0,
        0,
        0.0,
    )
    assert str(got.receipt).splitlines()[0] == "1 run, 2 sites"
    assert repr(got).startswith("<gaff capture, closed>")


def test_what_is_read_can_be_written_into(model, x):
    given = x.clone()
    with gaff.capture(model, "fc1", "conv:input", "fc1.weight:grad") as got:
        y = model(x)
        y.sum().backward()
    for name in list(got):
        value = got[name]
        value.zero_()
        assert got[name].abs().sum() > 0, name
    assert torch.equal(x, given)
    assert model.fc1.weight.grad.abs().sum() > 0


def test_reading_too_early_or_in_the_wrong_way(model, x):
    got = gaff.capture(model, "conv", gaff.maybe("fc1@3"))
    with pytest.raises(gaff.PlanError, match="this session was never opened: use `with gaff.capture"):
        got["conv"]
    with got:
        with pytest.raises(gaff.SiteError, match="'conv' has no event; the model was not called in this session yet"):
            got["conv"]
        model(x)
        with pytest.raises(gaff.SiteError, match="'conv' has no event in run 9; there were 1 runs"):
            got.run(9)["conv"]
        with pytest.raises(gaff.SiteError, match=r"got\[0\]: expected an address as text"):
            got[0]
    assert got.receipt.rows[1].reason == "it was not called, or did not return"


def test_a_module_that_raised_is_not_told_never_to_have_been_called():
    class Falls(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.first(x)
            except RuntimeError:
                return self.second(x)

    with pytest.raises(gaff.NeverFiredError, match="not called in these runs, or did not return"):
        gaff.take(Falls(), "first")(torch.ones(2, 4))


def test_the_gradient_of_what_an_unfollowed_object_holds_is_refused_and_not_told_as_none():
    class Set(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            return {self.lin(x)}

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Set()

        def forward(self, x):
            return sum(self.a(x))

    model = Sums()
    for site in ("a:grad_output", "a:outer_grad"):
        with gaff.capture(model, site) as got:
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(gaff.ExactnessError, match="holds a set, into which gaff does not look"):
            got[site]


def test_the_sites_of_a_lazy_model_are_refused():
    with pytest.raises(gaff.PlanError, match="not initialised yet"):
        gaff.sites(nn.Sequential(nn.LazyLinear(3)))


def test_a_value_kept_without_the_graph_that_was_asked_for_is_told():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with gaff.capture(model, ":output", graph=True) as got, torch.no_grad():
        model(x)
    assert "without its autograd graph: grad mode was off there" in str(got.receipt)
    with gaff.capture(model, ":output", graph=True) as got:
        model(x)
    assert "without its autograd graph" not in str(got.receipt)
