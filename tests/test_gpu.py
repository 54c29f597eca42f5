"""What holds on a GPU; skipped where there is none."""

import contextlib
import traceback
import warnings

import pytest
import torch
from torch import nn

import gaff
from gaff.record.run import Record
from gaff.record.statistics import EMPTY, Numbers
from gaff.training.statistics import on_gpu, plain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))
    return model.cuda(), torch.randn(32, 64, device="cuda")


@contextlib.contextmanager
def waits():
    """Where code inside, on any thread but the watch's own, waits for the device: a list of places that fills."""
    found = []

    def note(message, *rest, **more):
        frames = [(one.filename, one.lineno) for one in traceback.extract_stack()[:-1]]
        if not any(name.endswith("worker.py") for name, _ in frames) and "called a synchronizing" in str(message):
            found.append([f"{name}:{line}" for name, line in frames if "gaff" in name][-4:])

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        yield found
        torch.cuda.set_sync_debug_mode("default")


def test_no_hook_waits_for_the_device():
    model, x = model_and_batch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(gaff.edit(model, {"0": gaff.edits.scale(0.5), "2:grad_output": gaff.edits.clip(norm=1.0)}))
        got = stack.enter_context(gaff.capture(model, "*", "*:grad_output", "0.weight:grad", to="cpu"))
        model(x).sum().backward()
        with waits() as found:
            model(x).sum().backward()
    assert not found
    assert got.run(1)["0"].device.type == "cpu"


def test_offloaded_values_are_those_of_their_moment():
    model, x = model_and_batch()
    with gaff.capture(model, "2", to="cpu") as got:
        for _ in range(20):
            model(x)  # the ReLU writes into what the layer before it returned
    true = model[2](model[1](model[0](x))).cpu()
    assert next(got._iter_streams()).records[0][2].value.is_pinned()
    for value in got.all("2"):
        assert torch.equal(value, true)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_models_tell_the_same_with_cuda_graphs(mode):
    model, x = model_and_batch()
    torch._dynamo.reset()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(3):
        model.zero_grad()  # a gradient lies in memory that the next run of the graph writes to
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).sum().backward()
    for number in range(3):
        model.zero_grad()
        y = x * (number + 1)
        torch.compiler.cudagraph_mark_step_begin()
        with gaff.capture(compiled, "0", "2:grad_output") as got:
            compiled(y).sum().backward()
        with torch.compiler.set_stance("force_eager"), gaff.capture(model, "0", "2:grad_output") as want:
            model(y).sum().backward()
        for site in ("0", "2:grad_output"):
            torch.testing.assert_close(got[site], want[site], rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


@pytest.fixture
def graphed():
    """A model with CUDA graphs, and a step of it with the loss times a number, after those that record the graphs."""
    model, x = model_and_batch()
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def step(factor, run=compiled):
        model.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        (factor * run(x * factor).square().mean()).backward()

    for _ in range(3):
        step(1.0)
    yield model, compiled, step
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_graphs_that_are_replayed_tell_each_step(graphed):
    model, compiled, step = graphed
    sites = ["0", "1", "3", "1:grad_output", "3:grad_output", "2.weight:grad", "4.bias:grad"]
    with gaff.capture(compiled, *sites) as got:
        for number in range(1, 8):
            step(float(number))
    with torch.compiler.set_stance("force_eager"), gaff.capture(model, *sites) as want:
        for number in range(1, 8):
            step(float(number), model)
    for site in sites:
        assert len(got.all(site)) == 7
        for one, other in zip(got.all(site), want.all(site), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_graphs_that_are_replayed_are_edited_at_each_step(graphed):
    model, compiled, step = graphed
    changes = {"1": gaff.edits.scale(0.5), "3:grad_output": gaff.edits.scale(2.0), "2.weight:grad": gaff.edits.scale(3)}

    def gradients(run):
        made = []
        for number in range(1, 8):
            step(float(number), run)
            made += [one.grad.clone() for one in model.parameters()]
        return made

    with gaff.edit(compiled, changes) as changed:
        got = gradients(compiled)
    with torch.compiler.set_stance("force_eager"), gaff.edit(model, changes):
        want = gradients(model)
    assert [row.hits for row in changed.receipt.rows] == [7, 7, 7]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_watch_and_a_guard_see_what_graphs_replay(graphed, tmp_path):
    model, compiled, step = graphed
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for name, run in (("replayed", compiled), ("eager", model)):
        stance = "default" if run is compiled else "force_eager"
        with torch.compiler.set_stance(stance), gaff.watch(run, optimizer, every=1, out=tmp_path / name):
            for number in range(1, 9):
                step(float(number), run)
                optimizer.step()
                with torch.no_grad():
                    [one.sub_(one.grad, alpha=-1e-3) for one in model.parameters()]  # back to where it was
    replayed, eager = (Record(tmp_path / name) for name in ("replayed", "eager"))
    for site in ("1", "3:grad_output", "2.weight:grad"):
        one, other = (dict(record.series(site, "rms")) for record in (replayed, eager))
        assert len(one) == 8
        assert one == pytest.approx(other, rel=1e-2)
    with gaff.guard(compiled):
        for factor in (1.0, 1.0, 1.0, 1.0, float("nan")):
            step(factor)
            with pytest.raises(gaff.NonFiniteError) if factor != factor else contextlib.nullcontext():
                optimizer.step()


@pytest.mark.filterwarnings("ignore")  # a wait of the watch's own thread may be told after ``waits`` is over
@pytest.mark.parametrize("kind", ["fused", "foreach", "scaled", "clipped"])
def test_a_watched_step_waits_for_nothing(kind, tmp_path):
    model, x = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=kind == "fused")
    scaler = torch.amp.GradScaler("cuda") if kind == "scaled" else None

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer) if scaler else optimizer.step()
        scaler.update() if scaler else None

    with waits() as bare:
        step()
        step()
    with gaff.watch(model, optimizer, every=1, out=tmp_path / "run"):
        step()  # makes the kernels
        step()
        with waits() as found:
            step()
            step()
    assert len(found) == len(bare), found  # a GradScaler waits to see whether it may step
    run = Record(tmp_path / "run")
    assert run.notes == []
    assert len(run.looks) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_both_kernels_count_the_same(dtype):
    from test_statistics import EXACT, tensors

    fused, why = on_gpu.load(torch.device("cuda", 0))
    assert fused is not None, why
    several = [*(one.cuda().to(dtype) for one in tensors().values())]
    several += [
        torch.randn(3_000_000, device="cuda").to(dtype) * 1e3 + 7,
        torch.randn(1001, device="cuda").to(dtype)[1:],
    ]
    several.append(torch.view_as_complex(torch.randn(50, 2, device="cuda") + 3).conj().imag.to(dtype))
    rows, again, known = (torch.tensor(EMPTY, dtype=torch.float64).repeat(len(several), 1).cuda() for _ in range(3))
    fused.observe_many_(several, rows, True)
    fused.observe_many_(several, again, True)
    plain.observe_many_(several, known, True)
    assert torch.equal(rows, again)  # the same bits each time
    alone = torch.tensor(EMPTY, dtype=torch.float64).repeat(len(several), 1).cuda()
    for one, row in zip(several, alone, strict=True):
        fused.observe_(one, row, True)
    for found in (rows.cpu(), alone.cpu()):
        torch.testing.assert_close(found[:, EXACT], known.cpu()[:, EXACT], rtol=0, atol=0, equal_nan=True)
        for row, other in zip(found.tolist(), known.cpu().tolist(), strict=True):
            one, right = Numbers(row), Numbers(other)
            if right.count:
                assert one.mean == pytest.approx(right.mean, rel=1e-12, abs=1e-6 * right.std)
                assert one.std == pytest.approx(right.std, rel=2e-6)


def test_more_elements_than_an_int_counts():
    fused, _ = on_gpu.load(torch.device("cuda", 0))
    x = torch.ones(2**31 + 4099, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    row = torch.tensor(EMPTY, dtype=torch.float64).cuda()
    fused.observe_(x, row, True)
    found = Numbers(row.tolist())
    assert (found.count, found.min, found.max) == (x.numel(), 1, 3)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 7, 9), (16, 1024), (1, 70, 4000), (2, 2, 40_000)])
def test_units_are_counted_the_same(shape):
    fused, _ = on_gpu.load(torch.device("cuda", 0))
    x = torch.randn(shape, device="cuda")
    inner = x[0, 0].numel()
    one = torch.tensor([[-torch.inf], [torch.inf], [0.0]], dtype=torch.float64).repeat(1, shape[1]).cuda()
    other = one.clone()
    fused.observe_units_(x, one, inner)
    plain.observe_units_(x, other, inner)
    assert torch.equal(one[:2], other[:2])
    torch.testing.assert_close(one[2], other[2], rtol=1e-5, atol=0)


def test_the_numbers_of_a_watched_training_are_those_of_its_tensors(tmp_path):
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gaff.watch(model, optimizer, every=1, out=tmp_path / "run"):
        for _ in range(3):
            optimizer.zero_grad()
            weight = model[0].weight.detach().clone()
            with gaff.capture(model, "1", "2:grad_output", clone=True) as got:
                model(x).square().mean().backward()
            gradient = model[0].weight.grad.clone()
            optimizer.step()
    run = Record(tmp_path / "run")
    for site, value in (
        ("0.weight:param", weight),
        ("0.weight:grad", gradient),
        ("1", got["1"]),
        ("2:grad_output", got["2:grad_output"]),
        ("0.weight:update", model[0].weight.detach() - weight),
    ):
        found = run.latest(site)
        assert found["std"] == pytest.approx(value.std(correction=0).item(), rel=1e-5), site
        assert found["max"] == pytest.approx(value.max().item(), rel=1e-6), site
        assert found["norm"] == pytest.approx(value.norm().item(), rel=1e-5), site


def test_what_a_gradscaler_and_a_fused_step_write_past_the_counter_is_not_seen():
    model, x = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with gaff.capture(model, "0.weight:grad", "0.weight:param") as got:
        scaler.scale(model(x).sum()).backward()
        gradient, weight = model[0].weight.grad.clone(), model[0].weight.detach().clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(got["0.weight:grad"], gradient)
    assert not torch.equal(model[0].weight.grad, gradient)
    assert torch.equal(got["0.weight:param"], weight)


def test_values_of_a_model_that_works_in_place_are_copied():
    model, x = model_and_batch()
    with gaff.capture(model, "2") as got:
        model(x)
    assert torch.equal(got["2"], model[2](model[1](model[0](x))))


def test_a_write_that_is_not_expected_is_told():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).mul_(2)

    model = Writes().cuda()
    with gaff.capture(model, "fc") as got:
        model(torch.randn(2, 4, device="cuda"))
    with pytest.raises(gaff.ExactnessError, match="on cuda:0 values are kept by reference"):
        got["fc"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("mask", [None, "causal", "truth", "added"])
def test_weights_of_attention_are_those_that_each_kernel_uses(dtype, backend, heads, mask):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, **options)

    torch.manual_seed(0)
    seen = torch.rand(64, 48, device="cuda") > 0.3
    seen[3] = False
    options = {"is_causal": mask == "causal", "enable_gqa": heads != 4}
    if mask in ("truth", "added"):
        options["attn_mask"] = (
            seen if mask == "truth" else torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
        )
    q, k = (torch.randn(2, one, size, 64, device="cuda", dtype=dtype) for one, size in ((4, 64), (heads, 48)))
    v = torch.eye(48, 64, device="cuda", dtype=dtype).expand(2, heads, 48, 64).contiguous()
    model, site = Attention(), "/scaled_dot_product_attention:weights"
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            bare = model(q, k, v)
        except RuntimeError:
            pytest.skip("this kernel does not take such a call")
        with gaff.capture(model, site) as got:
            assert torch.equal(model(q, k, v), bare)
        with gaff.edit(model, {site: gaff.edits.scale(0.5)}):
            half = model(q, k, v)
    at = {"atol": 2e-2 if dtype is torch.bfloat16 else 2e-3, "rtol": 2e-2}
    rows = slice(4, None)  # some kernels leave a query that may see nothing as NaN
    torch.testing.assert_close(got[site][:, :, rows], bare[:, :, rows, :48], **at)
    torch.testing.assert_close(half[:, :, rows] * 2, bare[:, :, rows], **at)


@pytest.mark.parametrize("is_kept", [True, False])
def test_batches_on_a_device_are_told_apart(tmp_path, is_kept):
    model, _ = model_and_batch()
    data = torch.utils.data.TensorDataset(torch.randn(256, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kept = next(iter(loader))[0].cuda()
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for _ in range(3):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(kept if is_kept else batch.cuda()).square().mean().backward()
                optimizer.step()
    record = Record(tmp_path / "run")
    looks = [one for _, one in record.events("look", record.ranks[0])]
    assert len({one["fingerprint"] for one in looks}) == (1 if is_kept else len(looks))
    assert ("one_batch" in [one.rule for one in gaff.load(tmp_path / "run").findings]) == is_kept
