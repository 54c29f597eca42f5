"""Guards over compiled models, and what is reduced inside their graphs."""

import pytest
import torch
from torch import nn

import gaff

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))


class Conv(nn.Module):
    """In-place, channels last inside, and something that goes wrong once ``fault`` is set."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.fault = ""

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        if self.fault == "forward":
            y = (y - 1).log()
        if self.fault == "backward":
            y = (y - y.detach()).sqrt()
        return x + y


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "blocks"])
def test_a_guard_over_compiled_code_runs_the_batch_that_went_wrong(how, fault, monkeypatch):
    """Inductor uses the memory of a batch in another layout again: what is run again is what the caller gave."""
    from gaff.training import guard_search as guards

    net, x = nn.Sequential(Conv(), Conv()), torch.randn(8, 16, 32, 32)
    compiled = torch.compile(net) if how == "torch.compile" else net
    for one in {"model.compile": [net], "blocks": list(net)}.get(how, []):
        one.compile()
    ran = []
    monkeypatch.setattr(
        guards, "run_again", lambda model, batch, allow: ran.append(batch) or again(model, batch, allow)
    )
    from gaff.inspection.nonfinite.rerun import run_again as again

    call = type(compiled).__call__
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(gaff.NonFiniteError) as raised, gaff.guard(compiled) as guard:
        for step in range(2):
            net[1].fault = fault if step else ""
            compiled(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.is_traced
    assert raised.value.report.site == ("1/log#0" if fault == "forward" else "1/sqrt#0")
    assert raised.value.report.direction == fault
    assert all(torch.equal(batch.args[0], x) for batch in ran)
    assert type(compiled).__call__ is call


def test_a_session_between_compiling_and_the_first_call_has_its_hooks_in_the_graph():
    net, x = model(), torch.randn(2, 4)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with gaff.capture(net, "1") as got:
        compiled(x)
    assert "inside compiled code" in got.receipt.notes[0]
    assert torch.equal(got["1"], net[1](net[0](x)))


class Several(nn.Module):
    """Returns numbers of several kinds."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 6)

    def forward(self, x):
        y = self.lin(x)
        return {"y": y, "half": y.half(), "best": y.argmax(-1), "waves": torch.view_as_complex(y.unflatten(-1, (3, 2)))}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.several = Conv(), Several()

    def forward(self, x):
        found = self.several(self.conv(x).mean((2, 3))[:, :4])
        return found["y"].sum() + found["half"].float().sum() + found["waves"].abs().sum()


@pytest.mark.parametrize("reduce", [gaff.keep.norm(), gaff.keep.mean()])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_reduced_is_reduced_in_the_graph(reduce, backend, monkeypatch):
    from gaff.engine.compiled import hooks as inside

    told = []
    for name in ("told", "arrived"):
        original = getattr(inside.ExitHook, name)

        def spy(self, call, *given, original=original):
            told.extend(one for value in given if isinstance(value, list) for one in value)
            return original(self, call, *given)

        monkeypatch.setattr(inside.ExitHook, name, spy)
    net, x = Head(), torch.randn(4, 16, 8, 8)
    sites = (
        "conv",
        "conv.norm",
        "several[y]",
        "several[half]",
        "several[waves]",
        "conv:grad_output",
        "several.lin.weight:grad",
    )
    with gaff.capture(net, *sites, reduce=reduce) as eager:
        net(x).backward()
    net.zero_grad()
    compiled = torch.compile(net, backend=backend)
    with gaff.capture(compiled, *sites, reduce=reduce) as got:
        compiled(x).backward()
    assert "inside compiled code" in got.receipt.notes[0]
    for site in sites:
        torch.testing.assert_close(got[site], eager[site], rtol=2e-3, atol=1e-3)
    assert len(told) >= 5
    assert all(one.numel() == 1 for one in told if one.dtype in (torch.float32, torch.complex64))


def test_sites_that_are_kept_differently_are_told_whole():
    net, x = model(), torch.randn(2, 4)
    compiled = torch.compile(net, backend="aot_eager")
    with gaff.capture(compiled, "0", reduce=gaff.keep.norm(-1)) as got, gaff.capture(compiled, "1") as whole:
        compiled(x)
    assert torch.allclose(got["0"], net[0](x).norm(dim=-1))
    assert torch.equal(whole["1"], net[1](net[0](x)))


def test_a_guard_says_that_it_makes_the_model_run_eagerly():
    net = model()
    compiled = torch.compile(net, backend="aot_eager")
    for given, is_traced in ((net, False), (compiled, True)):
        with gaff.guard(given) as guard:
            compiled(torch.randn(2, 4)).sum().backward()
            assert guard.is_traced == is_traced
        assert any("guard what torch.compile returned" in note for note in guard.notes) != is_traced


class Logs(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return torch.log(-h.abs()), self.b(h)

    def loss(self, x):
        return self(x)[0].sum()


FORMS = {
    "the module inside": lambda net, compiled: net.loss,
    "a method": lambda net, compiled: compiled.loss,
    "forward": lambda net, compiled: lambda x: compiled.forward(x)[0].sum(),
    "a compiled function": lambda net, compiled: torch.compile(lambda x: compiled(x)[0].sum(), backend="aot_eager"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_guard_over_compiled_code_raises_however_it_is_called(form, has_grad):
    net = Logs()
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = FORMS[form](net, compiled)
    with pytest.raises(gaff.NonFiniteError) as raised, torch.set_grad_enabled(has_grad), gaff.guard(compiled):
        loss = step(torch.ones(3, 4))
        if has_grad:
            loss.backward()
            optimizer.step()
    if form in ("the module inside", "a method"):
        assert raised.value.report.site == "/log#0"
    else:
        assert "called inside compiled code" in raised.value.report.cause


def test_overflow_of_half_precision_is_in_its_mean():
    """Inductor leaves out the rounding between, and with it what overflows."""
    net = nn.Sequential(nn.Identity(), nn.Identity())
    net[0].forward = lambda x: x * x
    x = torch.full((3, 4), 300.0).half()
    compiled = torch.compile(net)
    with gaff.capture(compiled, "0", reduce=gaff.keep.mean()) as got:
        compiled(x)
    assert got["0"].isinf()


def test_infinities_of_both_signs_that_are_meant_are_looked_into_once():
    class Meant(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.both = nn.Linear(4, 4), nn.Identity()

        def forward(self, x):
            h = self.lin(x)
            return self.both(h.masked_fill(h > 0, float("inf")).masked_fill(h < 0, float("-inf"))).clamp(-1, 1)

    net, x = Meant(), torch.randn(30, 4)
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with gaff.guard(compiled) as guard:
        for _ in range(4):
            compiled(x).sum().backward()
            optimizer.step()
    assert len(guard.notes) == 1


@pytest.mark.parametrize("limits", [{"norm": 0.05}, {"value": 1e-3}, {"norm": 0.05, "nonfinite": "skip"}])
def test_a_compiled_step_is_clipped_and_never_compiled_again(limits):
    def train(is_clipped, is_compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = torch.compile(lambda: optimizer.step(), backend="eager") if is_compiled else optimizer.step
        handle = gaff.clip_gradients(optimizer, model=model, **limits) if is_clipped else None
        torch._dynamo.utils.counters.clear()
        for at in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(at))).square().mean().backward()
            with torch.compiler.set_stance("fail_on_recompile" if is_compiled and at > 4 else "default"):
                step()
        if handle is not None:
            assert handle.audit.steps == 10
            handle.remove()
        return model.weight, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    eager, _ = train(True, False)
    compiled, graphs = train(True, True)
    _, bare = train(False, True)
    torch.testing.assert_close(eager, compiled)  # torch's compiled step rounds otherwise
    assert graphs == bare
