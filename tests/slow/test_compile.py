"""A compiled model is seen and changed as an eager one, and is itself again afterwards; never a silent nothing."""

import pytest
import torch
from torch import nn

import gaff
from gaff import dynamo
from gaff.errors import ExactnessError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.lin(x)) + x


def model():
    return nn.Sequential(Block(), Block(), Block())


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_model_compiled_before_the_session():
    net, x = model(), torch.randn(2, 4)
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x).sum().backward()
    with gaff.capture(compiled, "1", "1.lin:grad_output", "0.lin.weight:grad") as got:
        compiled(x).sum().backward()
        compiled(x)
    assert len(got.all("1")) == 2
    assert torch.allclose(got.run(1)["1"], net[1](net[0](x)))
    assert got["1.lin:grad_output"].shape == (2, 4)
    assert "inside compiled code" in got.receipt.notes[0]
    before = torch._dynamo.convert_frame.FRAME_COUNTER
    assert torch.allclose(compiled(x), net(x))
    assert before == torch._dynamo.convert_frame.FRAME_COUNTER


def test_blocks_compiled_one_by_one_and_a_sibling_instance():
    net, other, x = model(), model(), torch.randn(2, 4)
    for block in net:
        block.compile(backend="aot_eager")
    net(x)
    torch.compile(other, backend="aot_eager")(x)
    with gaff.capture(net, "1.lin") as got:
        net(x)
    assert torch.equal(got["1.lin"], net[1].lin(net[0](x)))
    watched = torch.compile(other, backend="aot_eager")
    with gaff.capture(other, "2.lin:input") as got:
        watched(x)
    assert torch.equal(got["2.lin:input"], other[1](other[0](x)))


def test_a_compiled_function_around_the_model():
    net, x = model(), torch.randn(2, 4)
    step = torch.compile(lambda x: net(x) * 2, backend="aot_eager")
    step(x)
    with gaff.capture(net, "1") as got:
        step(x)
    assert torch.equal(got["1"], net[1](net[0](x)))


def test_compiled_inside_the_session():
    net, x = model(), torch.randn(2, 4)
    with gaff.capture(net, "1", "1:grad_output") as got:
        compiled = torch.compile(net, backend="aot_eager")
        for _ in range(2):
            compiled(x).sum().backward()
    assert len(got.all("1")) == 2
    assert torch.equal(got.run(0)["1"], net[1](net[0](x)))


def test_take_and_trace_of_a_compiled_model():
    net, x = model(), torch.randn(2, 4)
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x)
    assert torch.equal(gaff.take(compiled, "0.lin")(x)["0.lin"], net[0].lin(x))
    assert [row.path for row in gaff.trace(compiled, x).rows][:3] == ["", "0", "0.lin"]


def test_inductor_goes_on_with_its_old_graph():
    net, x = model(), torch.randn(2, 4)
    compiled = torch.compile(net)
    true = compiled(x)
    with gaff.capture(net, "**") as got:
        compiled(x)
    count = torch._dynamo.convert_frame.FRAME_COUNTER
    assert torch.equal(compiled(x), true)
    assert count == torch._dynamo.convert_frame.FRAME_COUNTER
    assert got["0"].shape == (2, 4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_compiled_region_is_recomputed_with_its_edits_after_the_session_or_closing_raises(use_reentrant):
    """Versions of torch differ in whether they compile a region under a checkpoint."""
    import gc

    from torch.utils.checkpoint import checkpoint

    norms = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Tanh())
        model = nn.Sequential(block)
        model.forward = lambda x, block=block: checkpoint(block, x, use_reentrant=use_reentrant)
        x = (torch.arange(6.0).view(2, 3) / 5).requires_grad_()
        if is_compiled:
            block.compile(backend="eager")
            model(x).sum().backward()
            block.zero_grad()
        graphs = dynamo.compile_counts()[0]
        session = gaff.edit(model, {"0.0": gaff.edits.scale(3.0)})
        session.__enter__()
        loss = model(x).sum()
        if is_compiled and dynamo.compile_counts()[0] > graphs:
            with pytest.raises(ExactnessError, match="whose backward has not run"):
                session.__exit__(None, None, None)
            break
        session.__exit__(None, None, None)
        loss.backward()
        norms.append(block[0].weight.grad.norm())
        del loss
        gc.collect()
    assert len(set(map(float, norms))) == 1
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_is_skipped_too(fused):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip") as handle:
        for number in range(4):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)).square().sum() * (float("nan") if number == 2 else 1.0)).backward()
            step()
    assert model.weight.isfinite().all()
    assert handle.audit.skipped == 1


@pytest.mark.parametrize("how", ["model", "blocks"])
def test_inductor_tells_the_same_numbers_though_it_uses_memory_again(how, tmp_path):
    found = {}
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
        net.train()
        run = net
        if is_compiled and how == "model":
            run = torch.compile(net, fullgraph=True)
        for block in net if is_compiled and how == "blocks" else ():
            block.compile(fullgraph=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.randn(16, 8)
        with gaff.watch(run, optimizer, out=tmp_path / f"{is_compiled}", every=1):
            for _ in range(2):
                optimizer.zero_grad()
                run(x).square().mean().backward()
                optimizer.step()
        record = gaff.load(tmp_path / f"{is_compiled}")
        found[is_compiled] = {
            (site, stat): record.series(site, stat).values
            for site in record.sites
            for stat in ("count", "norm", "min", "zeros")
        }
    assert set(found[True]) == set(found[False])
    for key, values in found[False].items():
        assert found[True][key] == pytest.approx(values, rel=1e-4, abs=1e-6), key


def test_a_transformer_has_one_more_graph_and_no_break_over_a_hundred_steps():
    from benchmarks.compiled import transformer

    torch.manual_seed(0)
    model, x = transformer(width=32)
    x = x[:, :16]
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    graphs = []
    with gaff.watch(compiled, optimizer, every=10):
        for step in range(100):
            optimizer.zero_grad()
            if step < 50:
                compiled(x).square().mean().backward()
            else:
                with gaff.edit(compiled, {"3": gaff.edits.scale(0.01 * step)}) as changed:
                    changed.strength(0.5 + 0.01 * (step % 10))
                    if step % 3 == 0:
                        changed.off()
                        compiled(x)
                        changed.on()
                    compiled(x).square().mean().backward()
            optimizer.step()
            graphs.append(counters["stats"]["unique_graphs"])
    assert sum(counters["graph_break"].values()) == 0
    assert graphs[49] == 2  # one, and one of the steps that are looked at
    assert graphs[-1] == graphs[60] == 4  # the same with an edit


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x, count):
        for _ in range(count):
            x = self.cell(x)
        return x


def test_every_call_of_a_compiled_block_gets_its_gradient_however_many_there_are():
    loop = Loop()
    loop.cell.compile(backend="aot_eager")
    with gaff.capture(loop, "cell.0:grad_output") as got:
        loop(torch.ones(2, 4), 200).sum().backward()
    assert sum(value is not None for value in got.all("cell.0:grad_output")) == 200


def test_what_no_graph_holds_any_more_is_let_go():
    from gaff.engine import compiled as inside

    net = model()
    run = torch.compile(net, backend="aot_eager")
    with gaff.capture(run, "**:grad_output", last=1):
        for _ in range(300):
            run(torch.ones(2, 4)).sum().backward()
        assert len(inside._RECEIVERS) < 150 * 7
    assert not inside._RECEIVERS


def test_a_gradient_edit_whose_backward_is_still_to_come_is_refused_at_closing():
    net, x = model(), torch.randn(2, 4)
    run = torch.compile(net, backend="aot_eager")
    with pytest.raises(gaff.ExactnessError, match="backward has not run"):
        with gaff.edit(run, {"2:grad_output": gaff.edits.scale(0.0)}):
            kept = run(x)
            run(x).sum().backward()
    assert kept is not None


def test_a_fifth_way_of_tapping_runs_eagerly_and_leaves_the_user_room_for_variants():
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.ones(2, 4)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    run(x)
    for number in range(8):
        with gaff.capture(run, f"{number}") as got:
            true = run(x)
        assert "ran eagerly" in got.receipt.notes[0] or number < 4
    assert torch.allclose(got["7"], true)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        run(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count + 1


def test_the_gradient_of_a_view_is_refused_and_backward_may_run_on_another_thread():
    import threading

    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
    run = torch.compile(net, backend="aot_eager")
    with gaff.capture(run, "0:grad_output", "1:grad_output") as got:
        loss = run(torch.ones(2, 3, 4)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert torch.equal(got["0:grad_output"], torch.ones(2, 3, 4))
    with pytest.raises(gaff.ExactnessError, match="compiled code does not tell the gradient of a view"):
        got["1:grad_output"]


def test_a_compiled_function_that_calls_a_part_of_the_model():
    net, x = model(), torch.randn(2, 4)
    part = torch.compile(lambda x: net[1].lin(x).relu(), backend="aot_eager")
    part(x)
    with gaff.capture(net, "1.lin") as got:
        part(x)
        part(x)
    assert got.receipt.runs == 2
    assert torch.allclose(got.run(1)["1.lin"], net[1].lin(x))


def test_directions_that_are_written_to_are_refused():
    net, x, directions = model(), torch.randn(2, 4), torch.randn(2, 4)
    run = torch.compile(net, backend="aot_eager")
    with pytest.raises(gaff.ExactnessError, match="directions to project on were written to"):
        with gaff.edit(run, {"1": gaff.edits.project(directions)}):
            run(x)
            directions.mul_(2)
            run(x)


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
    from gaff.health import guard as guards

    net, x = nn.Sequential(Conv(), Conv()), torch.randn(8, 16, 32, 32)
    compiled = torch.compile(net) if how == "torch.compile" else net
    for one in {"model.compile": [net], "blocks": list(net)}.get(how, []):
        one.compile()
    ran = []
    monkeypatch.setattr(
        guards, "run_again", lambda model, batch, allow: ran.append(batch) or again(model, batch, allow)
    )
    from gaff.health.rerun import run_again as again

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
    from gaff.engine import compiled as inside

    told = []
    for name in ("told", "arrived"):
        original = getattr(inside.Exit, name)

        def spy(self, call, *given, original=original):
            told.extend(one for value in given if isinstance(value, list) for one in value)
            return original(self, call, *given)

        monkeypatch.setattr(inside.Exit, name, spy)
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
