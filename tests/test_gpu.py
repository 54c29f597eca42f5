"""What holds on a GPU; skipped where there is none."""

import pytest
import torch
from torch import nn

import gaff

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))
    return model.cuda(), torch.randn(32, 64, device="cuda")


@pytest.fixture
def _no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
def test_no_hook_waits_for_the_device():
    model, x = model_and_batch()
    with (
        gaff.edit(model, {"0": gaff.edits.scale(0.5), "2:grad_output": gaff.edits.clip(norm=1.0)}),
        gaff.capture(model, "*", "*:grad_output", "0.weight:grad", to="cpu") as got,
    ):
        model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    assert got["0"].device.type == "cpu"


def test_offloaded_values_are_those_of_their_moment():
    model, x = model_and_batch()
    with gaff.capture(model, "2", to="cpu") as got:
        for _ in range(20):
            model(x)  # the ReLU writes into what the layer before it returned
    true = model[2](model[1](model[0](x))).cpu()
    assert got.run(0)["2"].is_pinned()
    for value in got.all("2"):
        assert torch.equal(value, true)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_models_tell_the_same_with_cuda_graphs(mode):
    model, x = model_and_batch()
    torch._dynamo.reset()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(3):
        compiled(x).sum().backward()
    for number in range(3):
        model.zero_grad()
        y = x * (number + 1)
        with gaff.capture(compiled, "0", "2:grad_output") as got:
            compiled(y).sum().backward()
        with torch.compiler.set_stance("force_eager"), gaff.capture(model, "0", "2:grad_output") as want:
            model(y).sum().backward()
        for site in ("0", "2:grad_output"):
            torch.testing.assert_close(got[site], want[site], rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


def test_a_watched_step_waits_for_nothing_but_the_loss():
    model, x = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with gaff.watch(model, optimizer, every=1) as watch:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert watch.findings is not None


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
