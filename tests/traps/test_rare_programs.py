"""Programs that few write, with tools that ask torch much: ragged tensors, torch's operators for control flow."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import gaff
from gaff import edits


def ragged(layout):
    return torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=layout)


class Flexible(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        x = self.lin(x)
        return flex_attention(x, x, x)


class Masked(nn.Module):
    """An encoder that makes a nested tensor of what it is given, where nobody stands in the way."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
        return self.head(self.encoder(x, src_key_padding_mask=mask))


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


PROGRAMS = {
    "strided": (layers, lambda: ragged(torch.strided)),
    "jagged": (layers, lambda: ragged(torch.jagged)),
    "flex": (Flexible, lambda: torch.randn(2, 2, 8, 4)),
    "masked": (Masked, lambda: torch.randn(2, 5, 8)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:gaff. not bitwise", "ignore:enable_nested_tensor"),
]


@pytest.fixture(params=PROGRAMS)
def program(request):
    torch.manual_seed(0)
    make, given = PROGRAMS[request.param]
    return make().eval(), given()


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"ops": True}, {"pictures": True}])
def test_trace(program, how):
    model, x = program
    trace = gaff.trace(model, x, **how)
    called = {name for name, one in model.named_modules() if not list(one.children()) and "out_proj" not in name}
    assert {row.site for row in trace.rows} >= called
    assert all(row.output for row in trace.rows)


@pytest.mark.skipif(torch.__version__.startswith("2.10"), reason="torch 2.10 counts no flops of flex_attention")
@torch.no_grad()
def test_flops_of_functions_in_an_operator_and_of_what_has_no_shape():
    model, x = Flexible(), torch.randn(2, 2, 8, 4)
    assert gaff.trace(model, x).rows[0].flops == 4 * (2 * 8 * 4 * 4) + 4 * 2 * (2 * 8 * 4 * 8)
    trace = gaff.trace(layers(), ragged(torch.strided))
    assert trace.rows[0].flops == 0
    assert any("operations of nested tensors" in note for note in trace.notes)


@torch.no_grad()
def test_ops_and_the_other_tools(program):
    model, x = program
    with gaff.capture(model, gaff.maybe("**/*"), gaff.maybe("/*")) as got:
        model(x)
    assert got.receipt
    assert not gaff.find_nonfinite(lambda: model(x), model=model)
    assert not gaff.diff(gaff.trace(model, x), gaff.trace(model, x))
    assert gaff.sites(model, x, ops=True)


def test_watching_nested_batches(tmp_path):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            sum(one.sum() for one in model(ragged(torch.strided)).unbind()).backward()
            optimizer.step()
    assert gaff.load(tmp_path / "run").steps == 3


@torch.no_grad()
def test_ops_inside_of_an_encoder_that_would_nest_its_input():
    model, x = Masked().eval(), torch.randn(2, 5, 8)
    with gaff.capture(model, "encoder.layers.*.self_attn/scaled_dot_product_attention:weights", "encoder/*") as got:
        out = model(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(out, model(x))  # as torch itself goes where its fused path is off
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    weights = got["encoder.layers.0.self_attn/scaled_dot_product_attention:weights"]
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 5))
    assert not weights[1, :, :, 3:].any()
    assert any("fused fast path was not taken" in note for note in got.receipt.notes)


def test_a_reduction_that_gives_no_tensor_is_told_so():
    model = layers()
    with pytest.raises(gaff.PlanError, match="reduce= returned NoneType: expected a function that gives a tensor"):
        with gaff.capture(model, "0", reduce=lambda value: None):
            model(torch.ones(2, 4))


class PartlyScripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    def forward(self, x):
        return self.last(self.scripted(self.first(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_part_that_is_torchscript_is_left_out_and_the_rest_is_told(tmp_path):
    torch.manual_seed(0)
    model, x = PartlyScripted(), torch.randn(6, 4)
    before = model.scripted.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    trace = gaff.trace(model, x, backward=lambda out: out.sum())
    assert [row.site for row in trace.rows] == [":output", "first", "last"]
    assert all(torch.equal(value, before[name]) for name, value in model.scripted.state_dict().items())
    with gaff.capture(model, "**", "last:grad_output", "first.weight:grad") as got:
        model(x).sum().backward()
    assert list(got) == ["first", "last", "last:grad_output", "first.weight:grad"]
    assert torch.equal(got["first.weight:grad"], model.first.weight.grad)
    assert any("TorchScript" in note for note in got.receipt.notes)
    for address in ("scripted", "scripted.0", "scripted.0.weight:grad"):
        with pytest.raises(gaff.PlanError, match="'scripted' is TorchScript, which takes no hooks"):
            gaff.capture(model, address)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1), gaff.guard(model):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    run = gaff.load(tmp_path / "run")
    assert run.series("last", "rms", rank=run.ranks[0]).steps == [0, 1, 2]


MASKED = torch.tensor([True, False, False, False])


class MaskedLogits(nn.Module):
    """Closes a choice, and returns logits of which one is -inf."""

    def __init__(self, close):
        super().__init__()
        self.lin, self.close = nn.Linear(4, 4), close

    def forward(self, x):
        return self.close(self.lin(x))


@pytest.mark.parametrize(
    "close",
    [
        lambda y: y.masked_fill(MASKED, float("-inf")),
        lambda y: y.masked_fill_(MASKED, float("-inf")),
        lambda y: torch.where(MASKED, float("-inf"), y),
        lambda y: y + torch.tensor([float("-inf"), 0.0, 0.0, 0.0]),
    ],
)
def test_logits_that_are_closed_on_purpose_are_no_alarm(close):
    model = MaskedLogits(close)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.guard(model) as guard:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.ones(3, 4)), torch.tensor([1, 2, 3])).backward()
            optimizer.step()
    assert guard.reports == []


def test_what_stood_for_torch_compile_does_nothing_after_the_session():
    """Somebody may have kept it."""
    kept = []

    class Keeps(nn.Linear):
        def forward(self, x):
            kept.append(torch.compile)
            return super().forward(x)

    model = Keeps(2, 2)
    with gaff.capture(model, ":output"):
        model(torch.ones(1, 2))
    kept[0](nn.Linear(2, 2), backend="eager")
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("change", ["method", "class", "recompiled"])
def test_code_that_changes_while_something_stands_as_forward_runs(change):
    """An edited parameter, and what is skipped, stand as the forward of the instance; the class may get another."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return self.lin(x)

    class Doubling(Block):
        def forward(self, x):
            return self.lin(x) * 2

    x = torch.randn(2, 3)
    model = torch.fx.symbolic_trace(Block()) if change == "recompiled" else Block()
    with gaff.edit(model, {"lin.weight:param": edits.scale(3.0)}):
        plain = model(x)
        if change == "method":
            Block.forward = Doubling.forward
        elif change == "class":
            model.__class__ = Doubling
        else:
            output = next(node for node in model.graph.nodes if node.op == "output")
            with model.graph.inserting_before(output):
                doubled = model.graph.call_function(torch.mul, (output.args[0], 2))
            output.args = (doubled,)
            model.recompile()
        assert torch.equal(model(x), plain * 2)
    assert torch.equal(model(x), model.lin(x) * 2)
    assert "forward" not in vars(model)


def test_an_edit_of_a_share_in_inference_mode_changes_nothing():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    with gaff.edit(model, {gaff.maybe("1:grad_input"): edits.zero()}):
        with torch.inference_mode():
            y = model(x)
        hidden = model[0](x)
        with torch.inference_mode():
            inside = model[1](hidden)
    with torch.no_grad():
        assert torch.equal(y, model(x))
        assert torch.equal(inside, y)


def test_shares_on_a_device_without_autocast():
    model, x = nn.Linear(3, 3, device="meta"), torch.randn(2, 3, device="meta", requires_grad=True)
    with gaff.capture(model, ":grad_input") as got:
        model(x).sum().backward()
    assert got[":grad_input"].shape == x.shape


@pytest.mark.filterwarnings("ignore")  # that TorchScript is deprecated
def test_frozen_torchscript_inside_a_model_has_no_mode_and_is_left_alone():
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(3, 3))).eval())
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(2, 3)
    model.insert(1, frozen)
    y = model(x)
    assert {row.site for row in gaff.trace(model, x).rows} >= {"0", "2"}
    assert gaff.sites(model, x)
    assert torch.equal(model(x), y)
    assert model.training
