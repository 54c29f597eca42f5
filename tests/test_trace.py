"""trace: one run told as a table, a tree and data."""

import contextlib
import gc
import json
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gaff
from gaff.errors import PlanError
from gaff.inspection.trace import Trace
from zoo import Checkpointed, Net, Shared, Tied


def rows_of(trace):
    return {row.site: row for row in trace.rows}


def test_the_table_tells_shapes_parameters_and_statistics():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    trace = gaff.trace(model, x)
    assert [row.site for row in trace.rows] == [":output", "conv", "relu", "fc1"]
    conv = rows_of(trace)["conv"]
    assert (conv.cls, conv.input, conv.output, conv.dtype) == ("Conv2d", "2x3x8x8", "2x10x4x4", "float32")
    assert conv.parameters == 130
    assert conv.memory_bytes == 2 * 10 * 4 * 4 * 4
    assert conv.flops == 2 * 2 * 10 * 4 * 4 * 3 * 2 * 2
    y = model.conv(x)
    assert conv.statistics.mean == pytest.approx(y.mean().item())
    assert conv.statistics.std == pytest.approx(y.std(correction=0).item())
    assert conv.statistics.min == y.min().item()
    assert conv.grad_output is None
    assert str(trace).splitlines()[1].split()[:4] == ["site", "class", "input", "output"]


def test_gradients_are_told_and_missing_ones_named():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    trace = gaff.trace(model, x, backward=lambda y: y.mean())
    model(x).mean().backward()
    fc1 = rows_of(trace)["fc1"]
    assert fc1.grad_output.shape == "2x5"
    assert fc1.grad_input.shape == "2x160"
    assert rows_of(trace)["conv"].grad_input.reason == "the tensor does not require grad"
    weight = next(row for row in trace.parameters if row.site == "fc1.weight:param")
    assert weight.grad.norm == pytest.approx(model.fc1.weight.grad.norm().item())
    assert "None: the tensor does not require grad" in str(trace)


class Forces(nn.Module):
    """Returns an energy and its gradient, for which the forward runs a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        self.hidden = self.first(x)
        energy = self.last(self.act(self.hidden)).sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]


def of_forces(output):
    return 1000 * output[1].square().sum()


def with_penalty(output):
    grad = torch.autograd.grad(output.sum(), output, create_graph=True)[0]
    return (output * grad).square().sum()


def test_gradients_are_those_of_the_loss_not_of_passes_that_the_forward_runs():
    model, x = Forces(), torch.randn(5, 4)
    rows = rows_of(gaff.trace(model, x, backward=of_forces))
    expected = torch.autograd.grad(of_forces(model(x)), model.hidden)[0]
    assert rows["first"].grad_output.norm == pytest.approx(expected.norm().item(), rel=1e-4)
    assert rows["last"].grad_output.reason == "backward ran, but no gradient reached this tensor"
    by_hand = rows_of(gaff.trace(model, x, backward=lambda output: of_forces(output).backward()))
    assert by_hand["first"].grad_output.norm == rows["first"].grad_output.norm


def test_gradients_are_those_of_the_loss_not_of_a_penalty_before_it():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3)
    rows = rows_of(gaff.trace(model, x, backward=with_penalty, pictures=True))
    output = model(x)
    expected = torch.autograd.grad(with_penalty(output), output)[0]
    assert rows["1"].grad_output.norm == pytest.approx(expected.norm().item(), rel=1e-5)


def test_every_call_of_a_shared_module_is_a_row():
    trace = gaff.trace(Shared(), torch.randn(2, 4))
    assert [row.site for row in trace.rows] == [":output", "shared@0", "shared@1", "shared@2", "head"]
    assert gaff.trace(Tied(), torch.tensor([[1]])).parameters[0].site == "embed.weight:param"
    assert len(gaff.trace(Tied(), torch.tensor([[1]])).parameters) == 1


def test_frozen_parameters_and_the_mode_stand_in_the_first_line_and_tied_ones_in_a_note():
    model = Tied().eval()
    told = str(gaff.trace(model, torch.tensor([[1]])))
    assert told.splitlines()[0].endswith("while watched, in eval mode")
    assert "counts once in the total of parameters: embed.weight = head.weight" in told
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    mixed[0].requires_grad_(False).eval()
    first = str(gaff.trace(mixed, torch.ones(1, 2))).splitlines()[0]
    assert "15 parameters (6 frozen)" in first
    assert first.endswith(", partly in eval mode")
    assert "15 parameters (all frozen)" in str(gaff.trace(mixed.requires_grad_(False), torch.ones(1, 2)))


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.called = nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, x):
        self.called(x)
        return self.used(x)


@pytest.mark.parametrize("backward", [None, lambda y: y.sum()])
def test_what_is_not_used_is_listed(backward):
    trace = gaff.trace(Partly(), torch.randn(1, 2), backward=backward)
    assert trace.unused_modules == ("never",)
    assert trace.unused_parameters == ("called.weight", "called.bias", "never.weight", "never.bias")
    assert "never called: never" in str(trace)


def test_a_reentrant_checkpoint_hides_what_is_used_so_nothing_is_claimed():
    x = torch.randn(2, 4, requires_grad=True)
    assert gaff.trace(Checkpointed(use_reentrant=True), x).unused_parameters == ()
    with_gradients = gaff.trace(Checkpointed(use_reentrant=True), x, backward=lambda y: y.sum())
    assert with_gradients.unused_parameters == ()
    assert rows_of(with_gradients)["first.0"].grad_output.norm > 0


def test_a_trace_survives_saving_and_opens_without_torch(tmp_path):
    trace = gaff.trace(Net(), torch.randn(2, 3, 8, 8), backward=lambda y: y.mean())
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    with pytest.raises(gaff.RecordError, match="is no file"):
        Trace.load(tmp_path / "other.json")
    for text in ("", "{}", '{"gaff_trace": 1, "rows": [{"site": 1}]}', "[1]"):
        with pytest.raises(gaff.RecordError, match="trace cannot be read"):
            Trace.from_json(text)


def test_the_tree_folds_equal_blocks():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)))
    tree = gaff.trace(model, torch.randn(1, 2)).tree().splitlines()
    assert tree[2:] == [
        "  0 ... 3 (4x)  Sequential  1x2 -> 1x2",
        "    0.0  Linear  1x2 -> 1x2  6 params",
        "    0.1  ReLU  1x2 -> 1x2",
    ]


def test_a_depth_leaves_out_what_lies_deeper_and_counts_its_parameters_in_what_holds_it():
    weird = nn.ModuleDict({"a b": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    weird.forward = lambda x: weird["a b"](x)
    model = nn.Sequential(nn.Linear(2, 2), weird, nn.Sequential(nn.Sequential(nn.Linear(2, 3))))
    trace = gaff.trace(model, torch.randn(1, 2))
    assert trace.tree(depth=1).splitlines()[1:] == [
        ":output  Sequential  1x2 -> 1x3",
        "  0  Linear  1x2 -> 1x2  6 params",
        "  1  ModuleDict  1x2 -> 1x2  12 params",
        "  2  Sequential  1x2 -> 1x3  9 params",
        "(5 calls deeper inside left out; params of what holds them are those of all inside)",
    ]
    told = [line.split()[0] for line in trace.table(depth=2).splitlines()[2:-1]]
    assert told == [":output", "0", "1", "1.`a", "2", "2.0"]
    assert trace.tree(depth=0).splitlines()[1] == ":output  Sequential  1x2 -> 1x3  27 params"
    assert trace.table(depth=9) == trace.table()
    assert trace.tree(depth=9) == trace.tree()
    with pytest.raises(PlanError, match="depth=-1: expected 0 for the model alone, or a number of levels below it"):
        trace.table(depth=-1)


class Threaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.b, x)
            return self.a(x) + other.result()


def test_what_another_thread_ran_is_told_not_to_be_here():
    trace = gaff.trace(Threaded(), torch.randn(4, 3))
    assert any("the forward called modules on another thread" in note for note in trace.notes)
    assert not gaff.trace(Threaded().a, torch.randn(4, 3)).notes
    model = Threaded()
    with pytest.raises(gaff.NeverFiredError, match="or only on another thread"), gaff.capture(model, "b"):
        model(torch.randn(4, 3))


def test_nonfinite_values_are_counted():
    class Bad(nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.tensor([float("nan"), float("inf")])])

    trace = gaff.trace(Bad(), torch.ones(3))
    assert trace.rows[0].statistics.nonfinite == 2
    assert "(2 non-finite)" in str(trace)


def test_gradients_and_hooks_of_the_user_are_left_alone():
    model, x = Net(), torch.randn(2, 3, 8, 8, requires_grad=True)
    model(x).sum().backward()
    before = [parameter.grad for parameter in model.parameters()], x.grad
    gaff.trace(model, x, backward=lambda y: y.mean())
    assert all(one is other for one, other in zip(before[0], [p.grad for p in model.parameters()], strict=True))
    assert x.grad is before[1]
    model.fc1.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(gaff.PlanError, match="fc1.weight: has post-accumulate hooks"):
        gaff.trace(model, x, backward=lambda y: y.mean())


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda y: y, r"backward returned shape \(2, 5\): expected a scalar"),
        (lambda y: 3, "backward returned int"),
        (lambda y: y.detach().sum(), "does not depend on any parameter"),
    ],
)
def test_a_backward_that_cannot_work(backward, message):
    with pytest.raises(gaff.PlanError, match=message):
        gaff.trace(Net(), torch.randn(2, 3, 8, 8), backward=backward)


def test_sites_as_a_tree_as_data_and_with_shapes():
    model = Net()
    found = gaff.sites(model)
    assert [row.path for row in found] == ["", "conv", "relu", "fc1"]
    assert str(found).splitlines()[1] == "  conv  <Conv2d>  .weight 10x3x2x2  .bias 10"
    assert "conv" in found
    assert str(gaff.sites(model, "**<Conv2d>")) == "conv  <Conv2d>  .weight 10x3x2x2  .bias 10"
    shaped = gaff.sites(model, torch.randn(1, 3, 8, 8))
    assert (shaped[1].input, shaped[1].output, shaped[1].calls) == ("1x3x8x8", "1x10x4x4", 1)
    assert gaff.sites(model, "fc1.weight:grad")[0].site == "fc1.weight:grad"
    assert found.to_dict()["modules"][1]["parameters"] == {"weight": "10x3x2x2", "bias": "10"}
    with pytest.raises(gaff.SiteError, match="matches nothing"):
        gaff.sites(model, "**<LSTM>")


def test_repeated_blocks_and_shared_modules_in_the_tree():
    model = nn.Module()
    model.h = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(12))
    model.again = model.h[0]
    assert str(gaff.sites(model)).splitlines() == [
        ":output  <Module>  (72 params)",
        "  h  <ModuleList>  (72 params)",
        "    h.0 ... 11 (12x)  <Sequential>  (6 params)",
        "      h.0.0  <Linear>  .weight 2x2  .bias 2",
        "      h.0.1  <GELU>",
        "  again  same module as h.0",
        "    again.0  same module as h.0.0",
        "    again.1  same module as h.0.1",
    ]


def test_a_backward_that_runs_nothing_is_told():
    with pytest.raises(gaff.PlanError, match="no gradient came; return the loss"):
        gaff.trace(Net(), torch.randn(2, 3, 8, 8), backward=lambda y: None)
    with pytest.raises(gaff.PlanError, match="backward=True cannot be called"):
        gaff.trace(Net(), torch.randn(2, 3, 8, 8), backward=True)
    trace = gaff.trace(Net(), torch.randn(2, 3, 8, 8), backward=lambda y: y.mean().backward())
    assert rows_of(trace)["fc1"].grad_output.norm > 0


def test_operations_without_a_formula_are_named():
    trace = gaff.trace(nn.LSTM(6, 7), torch.randn(3, 2, 6))
    assert any(note.startswith("flops are lower bounds") for note in trace.notes)
    assert "flops" not in gaff.trace(Net(), torch.randn(1, 3, 8, 8), flops=False).table().splitlines()[0]


def test_what_is_no_model_is_refused():
    for call in (gaff.capture, gaff.take, gaff.sites):
        with pytest.raises(gaff.PlanError, match="expected a model .* got the class Net: make one first"):
            call(Net, "conv")
    twice = torch.compile(torch.compile(nn.Linear(2, 2), backend="eager"), backend="eager")
    with pytest.raises(gaff.PlanError, match="got a function that torch.compile made: give the model inside"):
        gaff.capture(twice, "*")
    with pytest.raises(gaff.PlanError, match="got a Tensor"):
        gaff.trace(torch.ones(1), torch.ones(1))


@pytest.fixture
def clock(monkeypatch):
    """The time in a list: it stands still, but for what is added to it."""
    now = [0.0]
    monkeypatch.setattr("gaff.inspection.call_log.time.perf_counter", lambda: now[0])
    return now


class Slow(nn.Linear):
    """Takes two seconds by a ``clock`` that stands still."""

    def __init__(self, clock):
        super().__init__(3, 3)
        self.clock = clock

    def forward(self, x):
        self.clock[0] += 2.0
        return super().forward(x)


def taking(clock, result):
    """Something that takes a thousand seconds, whatever it is given."""

    def take(*given):
        clock[0] += 1000.0
        return result

    return take


@pytest.mark.parametrize("backward", [None, torch.sum])
def test_times_leave_out_what_looking_took(clock, monkeypatch, backward):
    """Measuring, the search behind gradients, and counting operations, of which a name is looked at."""
    monkeypatch.setattr("gaff.inspection.call_log.measure", taking(clock, None))
    monkeypatch.setattr("gaff.engine.gradients.share.kept_by", taking(clock, []))
    monkeypatch.setattr("gaff.engine.flops._HEAVY", SimpleNamespace(search=taking(clock, None)))
    model = nn.Sequential(nn.Sequential(Slow(clock), Slow(clock)), Slow(clock))
    trace = gaff.trace(model, torch.rand(2, 3), backward=backward)
    assert clock[0] > 1000.0
    assert [row.time_s for row in trace.rows] == [6.0, 4.0, 2.0, 2.0, 2.0]


def test_the_tokens_of_a_text_are_kept_and_get_names():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    trace = gaff.trace(model, torch.tensor([[3, 1, 2], [0, 0, 0]]))
    assert trace.tokens == ("3", "1", "2")
    named = trace.with_tokens(lambda ids: [f"word{one}" for one in ids])
    assert named.tokens == ("word3", "word1", "word2")
    assert type(trace).from_json(named.to_json()).tokens == named.tokens
    with pytest.raises(PlanError, match="2 names for 3 tokens: expected one for each"):
        trace.with_tokens(lambda ids: ["a", "b"])
    with pytest.raises(PlanError, match="this trace has no tokens: its model was given no tensor of whole numbers"):
        gaff.trace(nn.Linear(3, 2), torch.rand(1, 3)).with_tokens(str)


class Nested(nn.Module):
    """Calls itself twice; what the innermost call raises is caught."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, left=2):
        if left == 0:
            raise ValueError("too deep")
        try:
            x = self(x, left - 1)
        except ValueError:
            x = x + 1
        return self.fc(x)


def test_a_call_that_raised_inside_another_of_the_same_module_is_told_apart():
    torch.manual_seed(0)
    model, x = Nested(), torch.ones(1, 3)
    inner = model.fc(x + 1)
    outer = model.fc(inner)
    trace = gaff.trace(model, x, backward=lambda y: (y * torch.arange(3.0)).sum(), ops=True)
    rows = {row.site: row for row in trace.rows}
    assert [rows[site].output for site in ("@0", "@1", "@2")] == ["1x3", "1x3", "did not return"]
    assert rows["@0"].statistics.mean == pytest.approx(outer.mean().item())
    assert rows["@1"].statistics.mean == pytest.approx(inner.mean().item())
    (share,) = torch.autograd.grad(outer, inner, torch.arange(3.0)[None])
    assert rows["@0"].grad_output.norm == pytest.approx(5**0.5)
    assert rows["@1"].grad_output.norm == pytest.approx(share.norm().item())
    assert rows["@2"].grad_output is None


class Forgiving(nn.Module):
    """Goes on after a module, and after an op, that raised."""

    def __init__(self):
        super().__init__()
        self.bad, self.fc = nn.Linear(5, 5), nn.Linear(4, 4)

    def forward(self, x):
        for wrong in (self.bad, lambda x: torch.cat([x, x[:, :1]], 2)):
            try:
                wrong(x)
            except (RuntimeError, IndexError):
                x = x + 1
        return self.fc(x)


@pytest.mark.parametrize("ops", [False, True])
def test_what_follows_a_caught_exception_is_not_inside_it(ops):
    trace = gaff.trace(Forgiving(), torch.randn(3, 4), ops=ops)
    depths = {row.site: row.depth for row in trace.rows}
    assert depths["fc"] == depths["bad"] == 1
    if ops:
        assert depths["fc/linear#0"] == 2
        assert depths["/add#0"] == depths["/add#1"] == 1


@pytest.mark.parametrize("model", [nn.Softmax(-1), nn.Sequential(nn.ReLU(), nn.Flatten())])
def test_backward_through_a_model_without_parameters(model):
    x = torch.tensor([[1.0, -2.0, 3.0]], requires_grad=True)
    trace = gaff.trace(model, x, backward=lambda out: out.square().sum())
    x.grad = None
    model(x).square().sum().backward()
    assert trace.rows[0].grad_input.norm == pytest.approx(float(x.grad.norm()))


@pytest.mark.parametrize("size", [1e-25, 1.5e38])
def test_norms_of_gradients_whose_squares_no_float32_holds(size):
    model = nn.Linear(2, 2)
    trace = gaff.trace(model, torch.ones(1, 2), backward=lambda out: (out * size).sum())
    assert trace.rows[0].grad_output.norm == pytest.approx(size * 2**0.5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (
            nn.MultiheadAttention(8, 2, batch_first=True).eval(),
            [torch.ones(1, 3, 8)] * 3,
            "_native_multi_head_attention",
        ),
        (nn.Bilinear(2, 3, 4), [torch.ones(1, 2), torch.ones(1, 3)], "_trilinear"),
        (nn.PairwiseDistance(), None, ""),
    ],
)
def test_work_without_a_formula_is_named(model, given, name):
    trace = gaff.trace(model, *(given or [torch.ones(2, 2)] * 2))
    assert any(f"no formula for {name}" in note for note in trace.notes) is bool(name)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_passes_of_sparse_matrices_is_no_dense_product():
    class Sparse(nn.Module):
        def forward(self, x):
            return torch.eye(5).to_sparse_csr() @ x

    trace = gaff.trace(Sparse(), torch.ones(5, 4))
    assert trace.rows[0].flops == 0
    assert any("operations of sparse tensors" in note for note in trace.notes)


def test_the_mean_of_infinite_elements_is_infinite():
    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.full((4,), float("inf"))])

    row = gaff.trace(Joined(), torch.ones(3)).rows[0]
    assert (row.statistics.mean, row.statistics.nonfinite) == (float("inf"), 4)


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) / torch.tensor([0.0, 1.0, 1.0, 1.0])

    trace = gaff.trace(Broken(), torch.full((2, 4), math.inf))
    file = tmp_path / "trace.json"
    trace.save(file)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    json.loads(file.read_text(), parse_constant=refuse)
    assert '"number": "nan"' in file.read_text()
    assert Trace.load(file).to_json() == trace.to_json()


def test_a_trace_of_the_format_before_is_read():
    """It had a digest of the inputs alone, from which nothing tells how far two are apart."""
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    trace = gaff.trace(model, x)
    data = json.loads(trace.to_json())
    assert data["gaff_trace"] == 3
    before = Trace.from_json(json.dumps(data | {"gaff_trace": 2, "given": data["given"]["digest"]}))
    assert not gaff.diff(before, trace).first
    assert gaff.diff(before, trace).rows[0].state == "same"
    with pytest.raises(gaff.RecordError, match="another format, expected 3"):
        Trace.from_json(json.dumps(data | {"gaff_trace": 4}))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"ops": True}, {"pictures": True}])
@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_with_gradients_lets_the_model_go(options, fails):
    def loss(output):
        made = output.square().sum()
        if fails:
            made.backward()
            raise ValueError
        return made

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    held = weakref.ref(model)
    with contextlib.suppress(ValueError):
        gaff.trace(model, torch.randn(3, 4), backward=loss, **options)
    del model
    gc.collect()
    assert held() is None


class TiedNet(nn.Module):
    """An embedding whose table is the last layer's weight, too, and a layer that two parts share."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.enc = nn.Sequential(nn.Embedding(50, 8), shared)
        self.dec = nn.Sequential(shared, nn.Linear(8, 50))
        self.dec[1].weight = self.enc[0].weight

    def forward(self, x):
        return self.dec(self.enc(x))


def test_parameters_of_what_holds_others_are_its_own_wherever_they_are_used_too():
    model, x = TiedNet(), torch.randint(0, 50, (2, 3))
    for trace in (gaff.trace(model, x),):
        lines = trace.table(depth=1).splitlines()
        for name in ("enc", "dec"):
            [line] = [one for one in lines if one.startswith(f"{name} ")]
            assert str(sum(one.numel() for one in getattr(model, name).parameters())) in line.split()
        assert f"{sum(one.numel() for one in model.parameters())} parameters" in lines[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_total_holds_what_torchscript_holds():
    model = nn.Sequential(nn.Linear(4, 3), torch.jit.script(nn.Linear(3, 2)))
    assert "23 parameters" in gaff.trace(model, torch.ones(1, 4)).table()


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x


class HasDecoder(nn.Module):
    """Its forward is the encoder alone."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        return self.encoder(x)


def test_what_a_run_leaves_to_others_is_told():
    model, x = HasDecoder(), torch.randn(3, 4)
    told = gaff.trace(model, x, backward=lambda z: model.decoder(z).square().mean())
    assert "flops are those of the model's own run: calls that backward= makes are told without" in told.notes
    assert not any("flops" in note for note in gaff.trace(model, x, backward=lambda z: z.square().mean()).notes)
    [note] = gaff.trace(Steps(), x).notes
    assert note.startswith("the model returned a generator")


def test_a_convolution_without_a_formula_is_named():
    class Tbc(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.zeros(5))

        def forward(self, x):
            return torch.conv_tbc(x, self.weight, self.bias)

    [note] = gaff.trace(Tbc(), torch.randn(10, 2, 4)).notes
    assert "torch has no formula for conv_tbc" in note


def test_a_module_whose_parameters_are_something_else():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def parameters(self, x=None, recurse=True):
            return super().parameters(recurse) if x is None else self.layer(x)

        def forward(self, x):
            return self.parameters(x)

    model = nn.Sequential(nn.Linear(4, 4), Head())
    assert "30 parameters" in gaff.trace(model, torch.ones(1, 4)).table()


def _updating(model, how):
    """Has the parameters of a model updated as soon as backward brings their gradients."""
    for parameter in model.parameters():
        if how == "tensor hooks":

            def update(gradient, parameter=parameter):
                with torch.no_grad():
                    parameter.sub_(0.1 * gradient)

            parameter.register_hook(update)
        else:
            parameter._in_backward_optimizers = [torch.optim.SGD([parameter], lr=0.1)]


@pytest.mark.parametrize("tool", ["trace", "anatomy"])
def test_what_updates_weights_in_backward_is_put_back_or_refused(tool):
    run = {
        "trace": lambda model, x: gaff.trace(model, x, backward=lambda y: y.square().mean()),
        "anatomy": lambda model, x: gaff.anatomy(model, x),
    }[tool]
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)
    before = [one.detach().clone() for one in model.parameters()]
    _updating(model, "tensor hooks")
    run(model, x)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    _updating(model, "torch's own")
    with pytest.raises(gaff.PlanError, match=r"0\.weight: has post-accumulate hooks, or an optimizer in backward"):
        run(model, x)


def test_gradients_of_other_leaves_are_what_they_were():
    model, judge, x = nn.Linear(4, 3), nn.Linear(3, 1), torch.randn(5, 4)
    judge(torch.randn(2, 3)).sum().backward()
    before = {one: (one.grad, one.grad.clone()) for one in judge.parameters()}
    gaff.trace(model, x, backward=lambda y: -judge(y).mean())
    assert all(one.grad is kept and torch.equal(kept, copy) for one, (kept, copy) in before.items())
    prompt = torch.zeros(4, requires_grad=True)
    model.register_forward_pre_hook(lambda module, args: (args[0] + prompt,))
    gaff.trace(model, x, backward=lambda y: y.mean())
    gaff.anatomy(model, x)
    assert prompt.grad is None
