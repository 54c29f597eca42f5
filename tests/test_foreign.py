"""What other libraries do to models: offload, adapters, small floating types, quantised weights, stacks that compile."""

import pytest
import torch
from torch import nn

import gaff

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_offloaded_weights_are_told_truly_and_edits_of_them_refused():
    accelerate = pytest.importorskip("accelerate")
    bare, model, x = build(), build(), torch.randn(3, 4)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model[0].weight.is_meta
    with gaff.capture(model, "0", "2.weight:param") as got:
        model(x)
    assert torch.equal(got["0"], bare[0](x))
    assert torch.equal(got["2.weight:param"], bare[2].weight)
    with pytest.raises(gaff.PlanError, match="2.weight:param: the parameter lies on the meta device"):
        with gaff.edit(model, {"2.weight:param": gaff.edits.scale(2.0)}):
            model(x)
    assert gaff.trace(model, x).rows[0].path == ""


def test_a_module_that_is_replaced_while_a_capture_is_open_is_refused_from_the_next_run_on():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) + 1

    model, x = build(), torch.randn(3, 4)
    with gaff.capture(model, "0") as got:
        model(x)
        model[0] = Adapter(model[0])
        model(x)
    assert got.run(0)["0"].shape == (3, 4)
    with pytest.raises(gaff.ExactnessError, match="the module was replaced while the session was open"):
        got.run(1)["0"]


def test_float8_is_captured_as_it_is_reduced_and_edited_in_float32():
    class Small(nn.Module):
        def forward(self, x):
            return x.to(torch.float8_e4m3fn)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = Small()

        def forward(self, x):
            return self.small(x).float()

    model, x = Net(), torch.randn(3, 4)
    with gaff.capture(model, "small") as got, gaff.edit(model, {"small": gaff.edits.scale(2.0)}):
        y = model(x)
    true = (x.to(torch.float8_e4m3fn).float() * 2).to(torch.float8_e4m3fn)
    assert torch.equal(y, true.float())
    assert got["small"].dtype == torch.float8_e4m3fn
    with gaff.capture(model, "small", reduce=gaff.keep.norm()) as got:
        model(x)
    assert got["small"] == pytest.approx(x.to(torch.float8_e4m3fn).float().norm().item())
    with gaff.guard(model), torch.no_grad():
        model(x)


def test_each_step_of_generate_is_a_run():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
                         num_key_value_heads=1, bos_token_id=0, eos_token_id=63, pad_token_id=0)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    with gaff.capture(model, "model.layers.0", "lm_head") as got, torch.no_grad():
        made = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert got.receipt.runs == 4
    for step in range(4):
        logits = got.run(step)["lm_head"][0, -1]
        allowed = logits.clone()
        allowed[63] = -float("inf")
        assert int(allowed.argmax()) == int(made[0, 3 + step])
    with gaff.edit(model, {"model.layers.0": gaff.edits.scale(0.0)}), torch.no_grad():
        steered = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert steered.shape == made.shape


def test_what_is_compiled_inside_a_session_runs_eagerly_and_is_told():
    torch._dynamo.reset()
    model, x = build(), torch.randn(3, 4)
    with gaff.capture(model, "0", "2:grad_output") as got:
        torch.compile(model, backend="eager", fullgraph=True)(x).sum().backward()
    assert torch.equal(got["0"], model[0](x))
    assert "ran eagerly" in got.receipt.notes[0]
    torch._dynamo.reset()
