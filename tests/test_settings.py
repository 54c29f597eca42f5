"""Every cell of the table of what works where, of one process; those of several are in slow/test_sharded.py."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
import settings
from gaff.compat.compiler import traces_gradient_hooks
from spread_runs import WIDTH, build

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:The .grad attribute of a Tensor",
    "ignore:Torchinductor does not support code generation for complex",
)

BACKEND = os.environ.get("BACKEND", "aot_eager")  # the slow tests say inductor
HERE = ("eager", "compile", "compile blocks", "checkpoint", "AMP", "export")
IN_GRAPHS = traces_gradient_hooks()  # torch 2.13; before it compiled code runs eagerly while a session is open


def data():
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


def model_in(setting):
    model = build(is_checkpointed=setting == "checkpoint")
    torch._dynamo.reset()
    if setting == "export":
        return torch.export.export(model, (data()[0],)).module()
    if setting == "compile":
        model.compile(backend=BACKEND, fullgraph=True)
    if setting == "compile blocks":
        for block in model.blocks:
            block.compile(backend=BACKEND, fullgraph=True)
    if setting.startswith("compile"):  # before gaff comes
        step(model, setting)
        model.zero_grad()
    return model


@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.slow) if "compile" in one else one for one in HERE])
def setting(request):
    yield request.param
    torch._dynamo.reset()


def step(model, setting):
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "AMP"):
        output = model(x)
    F.mse_loss(output.float(), y).backward()


def truth(setting):
    """By raw hooks on a bare copy of the model, in eager code."""
    model, found = build(), {}

    def keep(module, args, output):
        found["blocks.1"] = output.detach().clone()
        output.register_hook(lambda gradient: found.update({"blocks.1:grad_output": gradient.clone()}))

    model.blocks[1].register_forward_hook(keep)
    step(model, setting)
    found["blocks.1.fc.weight:grad"] = model.blocks[1].fc.weight.grad
    found["blocks.1.fc.weight:param"] = model.blocks[1].fc.weight.detach()
    return found


def same(one, other):
    assert one.dtype == other.dtype
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_capture_and_gradient(setting):
    true, model = truth(setting), model_in(setting)
    with gaff.capture(model, *true) as got:
        step(model, setting)
    for site, value in true.items():
        same(got[site], value)
    if setting.startswith("compile"):
        assert ("inside compiled code" if IN_GRAPHS else "ran eagerly") in got.receipt.notes[0]


def test_edit(setting):
    changes = {"blocks.0": gaff.edits.scale(0.5), "blocks.1:grad_output": gaff.edits.scale(2.0)}
    model, bare = model_in(setting), build()
    for one, kind in ((model, setting), (bare, "AMP" if setting == "AMP" else "eager")):
        with gaff.edit(one, changes) as changed:
            step(one, kind)
        assert [row.hits for row in changed.receipt.rows] == [1, 1]
    for one, other in zip(model.parameters(), bare.parameters(), strict=True):
        same(one.grad, other.grad)


def test_statistics(setting, tmp_path):
    true, model = truth(setting), model_in(setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        optimizer.zero_grad()
        step(model, setting)
        optimizer.step()
    record = gaff.load(tmp_path / "run")
    has_modules = IN_GRAPHS or not setting.startswith("compile")
    for site in ("blocks.1", "blocks.1:grad_output", "blocks.1.fc.weight:grad")[0 if has_modules else 2 :]:
        assert record.latest(site)["norm"] == pytest.approx(true[site].float().norm().item(), rel=1e-3)


def test_early_stop(setting):
    true, model = truth("AMP" if setting == "AMP" else "eager"), model_in(setting)
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "AMP"):
        same(gaff.take(model, "blocks.1")(data()[0])["blocks.1"].detach(), true["blocks.1"])


def test_ops(setting):
    model, bare = model_in(setting), build()
    found = []
    for one in (model, bare):
        with gaff.capture(one, "blocks.1/gelu") as got:
            step(one, setting)
        found.append(got["blocks.1/gelu"])
    same(*found)
    with gaff.capture(model, "blocks.1/gelu") as got:
        step(model, setting)
    assert setting == "AMP" or not setting.startswith("compile") or "ran eagerly" in got.receipt.notes[0]


def test_guard(setting):
    model = model_in(setting)
    with torch.no_grad():
        model.get_parameter("blocks.1.fc.weight")[0, 0] = math.inf
    with pytest.raises(gaff.NonFiniteError, match="blocks.1"), gaff.guard(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, setting)
        optimizer.step()


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.wave, self.count = torch.nn.Linear(4, 4), Waves(), Positive()

    def forward(self, x):
        waves = self.wave(self.fc(x))
        return (waves * waves.conj()).real.sum() + self.count(x).sum()


class Waves(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).conj()


class Positive(nn.Module):
    def forward(self, x):
        return (x > 0).long()


def test_complex_values_in_graphs_are_those_of_eager_code():
    x, found = data()[0][:, :4], []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Spectrum()
        if is_compiled:
            torch._dynamo.reset()
            model.compile(backend=BACKEND)
        with (
            gaff.edit(model, {"wave": gaff.edits.scale(2.0)}) as changed,
            gaff.capture(model, "wave", "wave:grad_output") as got,
        ):
            changed.strength(0.25)
            model(x).backward()
        found.append((got["wave"], got["wave:grad_output"], model.fc.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert found[0][0].is_complex()


class WithLoss(nn.Module):
    """A model whose loss is a module, so that a tensor without dimensions passes a site."""

    def __init__(self, dtype):
        super().__init__()
        self.fc, self.loss = nn.Linear(4, 4, dtype=dtype), nn.Identity()

    def forward(self, x):
        return self.loss(self.fc(x).square().mean())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "edit",
    [gaff.edits.scale(0.3), gaff.edits.add(0.1), [gaff.edits.scale(3), gaff.edits.add(1)]],
    ids=["scale", "add", "chain"],
)
def test_a_number_edits_a_tensor_without_dimensions_in_graphs_as_in_eager_code(edit, dtype):
    x, found = torch.randn(5, 4).to(dtype), []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = WithLoss(dtype)
        if is_compiled:
            torch._dynamo.reset()
            model.compile(backend=BACKEND)
        with gaff.edit(model, {"loss": edit, "loss:grad_output": edit}):
            loss = model(x)
            loss.backward()
        found.append((loss.detach(), model.fc.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_rounding_to_a_narrow_type_is_not_left_out_by_compiled_code():
    x, found = data()[0], []
    for is_compiled in (False, True):
        model = build()
        if is_compiled:
            torch._dynamo.reset()
            model.compile(backend=BACKEND)
        with gaff.edit(model, {"blocks.1": gaff.edits.quantize("bfloat16")}) as changed:
            found.append(model(x))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found[0], build()(x), rtol=1e-5, atol=1e-6)
    assert "rounds to a type" in changed.receipt.notes[0] or not IN_GRAPHS


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_cannot_be_mixed_is_refused_in_graphs_too(is_compiled):
    model = Spectrum()
    if is_compiled:
        torch._dynamo.reset()
        model.compile(backend=BACKEND)
    with (
        pytest.raises(gaff.PlanError, match=r"count: strength 0\.5 of an edit of torch\.int64"),
        gaff.edit(model, {"count": gaff.edits.scale(2)}) as changed,
    ):
        changed.strength(0.5)
        model(data()[0][:, :4])


@pytest.mark.slow
def test_no_compiled_code_is_made_for_opening_again():
    torch._dynamo.reset()
    model, frames = model_in("compile"), []

    def count():
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    for number in range(4):
        with gaff.edit(model, {"blocks.0": gaff.edits.scale(0.1 * number)}) as changed, gaff.capture(model, "blocks.1"):
            step(model, "compile")
            changed.off()
            step(model, "compile")
        count()
        step(model, "compile")
        count()
    assert len(set(frames)) == 1
    assert not any("forward" in vars(one) for one in model.modules())
    torch._dynamo.reset()


def test_the_page_of_limits_holds_the_table():
    text = settings.LIMITS.read_text()
    assert settings.page(text) == text


def test_every_cell_is_of_a_row_and_a_column():
    assert {asked for asked, _ in settings.CELLS} <= set(settings.ASKED)
    assert {where for _, where in settings.CELLS} <= set(settings.SETTINGS)


def _penalty(model, call, x):
    """The gradient of the first weight of a loss that holds a gradient (Gulrajani et al. 2017)."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return model[0].weight.grad.clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [gaff.edits.scale(1.0), gaff.edits.scale(2.0), gaff.edits.clamp(-0.1, 0.1), gaff.edits.project(torch.ones(8))],
    ids=str,
)
def test_an_edited_gradient_in_graphs_has_a_second_derivative(edit):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(3, 4)
    with gaff.edit(model, {"1:grad_output": edit}):
        truth = _penalty(model, model, x)
    compiled = torch.compile(model, backend="eager")
    with gaff.edit(compiled, {"1:grad_output": edit}):
        assert torch.equal(_penalty(model, compiled, x), truth)
    torch._dynamo.reset()


@pytest.mark.skipif(not traces_gradient_hooks(), reason="torch 2.13 has the setting")
def test_backward_passes_that_become_part_of_graphs_run_eagerly():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        with gaff.capture(model, "0.weight:grad") as got:
            compiled(x)
    assert torch.equal(got["0.weight:grad"], model[0].weight.grad)
    assert "backward passes become part of graphs" in str(got.receipt)
    torch._dynamo.reset()
