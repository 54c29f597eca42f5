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
