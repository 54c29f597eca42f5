"""A compiled model is seen and changed as an eager one, and is itself again afterwards; never a silent nothing."""

import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import gaff
from gaff.compat import compiler
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
        graphs = compiler.compile_counts()[0]
        session = gaff.edit(model, {"0.0": gaff.edits.scale(3.0)})
        session.__enter__()
        loss = model(x).sum()
        if is_compiled and compiler.compile_counts()[0] > graphs:
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


class Around(nn.Module):
    """Torch's own layers alone would not be compiled."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("how", ["model", "blocks"])
def test_inductor_tells_the_same_numbers_though_it_uses_memory_again(how, tmp_path):
    found = {}
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)
        run = net = nn.Sequential(*map(Around, layers)).train()
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
    from gaff.engine.compiled import tell as inside

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


def test_a_ninth_way_of_tapping_runs_eagerly_and_leaves_the_user_room_for_variants():
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(11))), torch.ones(2, 4)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    run(x)
    for number in range(11):
        with gaff.capture(run, f"{number}") as got:
            true = run(x)
        assert ("ran eagerly" in got.receipt.notes[0]) is (number >= 8)
    assert torch.allclose(got["10"], true)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        run(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count + 1


@pytest.mark.parametrize("make", [
    lambda number: gaff.edits.at(gaff.keep.channels(number), gaff.edits.zero()),
    lambda number: gaff.edits.at(gaff.keep.heads(number, 16), gaff.edits.scale(0.5)),
    lambda number: gaff.edits.at(gaff.keep.channels(slice(0, 1 + number)), gaff.edits.add(0.5)),
    lambda number: [gaff.edits.scale(0.9)] * (number + 1),
])  # fmt: skip
def test_a_ninth_place_of_an_edit_runs_eagerly_and_leaves_the_user_room_for_variants(make):
    net, x = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), torch.ones(2, 4)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    run(x)
    for number in range(11):
        with gaff.edit(net, {"1": make(number)}):
            true = net(x)
        with gaff.edit(run, {"1": make(number)}) as changed:
            torch.testing.assert_close(run(x), true)
        assert ("ran eagerly" in changed.receipt.notes[0]) is (number >= 8)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        run(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count + 1


@pytest.mark.parametrize("make", [gaff.edits.scale, gaff.edits.add, lambda number: gaff.edits.clip(1.0 + number)])
def test_another_strength_compiles_nothing(make):
    net, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.ones(2, 4)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    for number in (0.5, 2, 3.0, 4, 5.5, 6):
        with gaff.edit(run, {"1": make(number)}) as changed:
            run(x)
        assert "1 graph compiled" in changed.receipt.notes[0] or number > 1
        assert "ran eagerly" not in changed.receipt.notes[0]


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


@pytest.mark.parametrize("whole", [True, False])
def test_weights_of_fused_attention_are_seen_with_the_code_run_eagerly(whole):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(self.lin(x), x, x, is_causal=True)

    net, x = nn.Sequential(Attention(), nn.Linear(4, 4)), torch.randn(2, 5, 4)
    site = "0/scaled_dot_product_attention:weights"
    with gaff.capture(net, site) as wanted:
        bare = net(x)
    if whole:
        run = torch.compile(net, backend="aot_eager")
    else:
        net[0].compile(backend="aot_eager")
        run = net
    run(x)
    with gaff.capture(run, site) as got:
        assert torch.allclose(run(x), bare)
    assert torch.equal(got[site], wanted[site])
    assert "are seen by Python alone" in got.receipt.notes[0]
    with gaff.edit(run, {site: gaff.edits.zero()}) as changed:
        assert torch.allclose(run(x), net[1].bias.expand(2, 5, 4))
    assert len(changed.receipt.notes) == 2
    assert torch.allclose(run(x), bare)


def test_a_compiled_model_is_freed_while_it_is_watched(tmp_path):
    def train():
        net = model()
        compiled = torch.compile(net, backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
        return weakref.ref(net)

    with gaff.watch(out=tmp_path / "run"):
        gone = train()
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("who", ["watch", "guard"])
def test_a_compiled_step_of_an_optimizer_compiles_nothing_of_gaffs(who, tmp_path):
    def trained(opened):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
        with opened(net, optimizer):
            for _ in range(12):
                optimizer.zero_grad()
                net(torch.randn(2, 4)).square().mean().backward()
                step()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], [one.detach() for one in net.parameters()]

    opening = {
        "watch": lambda net, optimizer: gaff.watch(net, optimizer, out=tmp_path / "run"),
        "guard": lambda net, optimizer: gaff.guard(net),
    }
    graphs, bare = trained(lambda net, optimizer: nullcontext())
    ours, seen = trained(opening[who])
    assert ours <= graphs + 1
    if who != "guard":  # which runs all that is compiled eagerly where the model is not
        assert all(torch.equal(one, other) for one, other in zip(bare, seen, strict=True))


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_model_that_was_compiled_before_it_is_watched_is_watched_in_its_compiled_code(tmp_path, is_given, has_run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    run = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if has_run:
        run(torch.randn(3, 4)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of global hooks around what was compiled
        watch = gaff.watch(*[model] * is_given, out=tmp_path / "run", every=1)
        for _ in range(3):
            optimizer.zero_grad()
            run(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        watch.remove()
    assert len(gaff.load(tmp_path / "run").series("1:grad_output", "rms").values) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_edit_inside_a_checkpoint_is_over_with_its_backward_though_the_loss_is_held(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    block.compile(backend="aot_eager")
    x = torch.randn(3, 4, requires_grad=True)
    with gaff.edit(block, {"1": gaff.edits.scale(0.5)}):
        loss = checkpoint(block, x, use_reentrant=use_reentrant).sum()
        loss.backward()
    again = x.detach().requires_grad_()
    block[2](block[1](block[0](again)) * 0.5).sum().backward()
    assert torch.allclose(x.grad, again.grad)


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_function_that_was_compiled_before_the_watch_is_compiled_once(tmp_path, is_warm):
    x, y = torch.randn(64, 8), torch.randint(3, (64,))

    def trained(watching):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of = torch.compile(lambda x, y: nn.functional.cross_entropy(model(x), y), backend="aot_eager")
        if is_warm:
            loss_of(x, y)
        with watching(model):
            for _ in range(20):
                optimizer.zero_grad()
                loss_of(x, y).backward()
                optimizer.step()
        return list(model.parameters()), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    bare, graphs = trained(lambda model: nullcontext())
    watched, others = trained(lambda model: gaff.watch(model, out=tmp_path / "run"))
    assert graphs == others == 1
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    record = gaff.load(tmp_path / "run")
    assert any("a function was compiled" in one for one in record.notes)
    assert [one for one in record.scalars if one.startswith("loss")] == ["loss:loss"]


def test_a_reset_of_the_compiler_inside_a_watch_leaves_nothing_behind(tmp_path):
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    call = nn.Sequential.__call__
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        torch._dynamo.reset()
    assert nn.Sequential.__call__ is call


@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_on_recompile"])
def test_a_program_that_forbids_to_compile_anew_is_not_looked_into(stance, tmp_path):
    calls = []

    def backend(graph, inputs):
        return lambda *given: calls.append(1) or graph.forward(*given)

    net, x = Block(), torch.randn(3, 4)
    compiled = torch.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    compiled(x)
    with torch.compiler.set_stance(stance), gaff.watch(compiled, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            optimizer.step()
    assert len(calls) == 4
    record = gaff.load(tmp_path / "run")
    assert any(f"not looked at while the program's stance to compile was '{stance}'" in one for one in record.notes)
    assert "lin.weight:grad" in record.sites
