"""Real stacks around torch: adapters, int8 weights, offloaded modules, generation with a static cache, compiled."""

import pytest
import torch
from torch import nn

import gaff

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


TOKENS = torch.tensor([[3, 7, 11, 5], [2, 9, 4, 8]])


def generated(model, **options):
    return model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=5, do_sample=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_generate_with_a_static_cache(is_compiled):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, alone = llama(), llama()
    options = {"cache_implementation": "static"}
    if is_compiled:
        options["compile_config"] = transformers.CompileConfig(backend="aot_eager", fullgraph=False)
        options["compile_config"]._compile_all_devices = True  # also on the CPU
        options["disable_compile"] = False
    else:
        options["disable_compile"] = True
    truth = generated(alone, **options)
    values = []
    hook = alone.model.layers[0].register_forward_hook(lambda module, given, out: values.append(out.clone()))
    generated(alone, **{**options, "disable_compile": True, "compile_config": None})
    hook.remove()
    if is_compiled:
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    with gaff.capture(model, "model.layers.0") as got:
        told = generated(model, **options)
    assert torch.equal(told, truth)
    seen = [one for run in range(len(values)) for one in got.run(run).all("model.layers.0")]
    assert len(seen) == len(values) == 5
    for one, value in zip(seen, values, strict=True):
        torch.testing.assert_close(one, value)
    with gaff.edit(model, {"model.layers.0": gaff.edits.scale(-3.0)}):
        changed = generated(model, **options)
    assert not torch.equal(changed, truth)
    assert torch.equal(generated(model, **options), truth)


def test_lora_adapters_are_captured_edited_and_watched(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        llama().train(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=4)
    )
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_()
    with gaff.capture(model, f"{path}.lora_A.*", f"{path}.lora_B.*", path, f"{path}.lora_A.default.weight:grad") as got:
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
    layer = model.get_submodule(path)
    weight = layer.lora_A["default"].weight
    assert torch.equal(got[f"{path}.lora_A.default.weight:grad"], weight.grad)
    base, low = got[path], got[f"{path}.lora_B.default"]
    assert torch.equal(low, layer.lora_B["default"](got[f"{path}.lora_A.default"]))
    with gaff.edit(model, {"**.lora_B.*": gaff.edits.zero()}), gaff.capture(model, path) as without:
        model(TOKENS)
    torch.testing.assert_close(base - without[path], low * layer.scaling["default"])
    with model.disable_adapter(), gaff.capture(model, path) as bare:
        model(TOKENS)
    torch.testing.assert_close(bare[path], without[path])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    with (
        gaff.watch(model, optimizer, out=tmp_path / "run", every=1),
        gaff.clip_gradients(optimizer, norm=0.1) as clipping,
    ):
        for _ in range(3):
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert clipping.audit.steps == 3
    trained = [site for site in gaff.load(tmp_path / "run").sites if site.endswith(":update")]
    assert trained
    assert all("lora_" in site for site in trained)


def test_int8_weights_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    x = torch.randn(4, 64)
    bare = model(x)
    with gaff.capture(model, "0", "1", "0.weight:param") as got:
        assert torch.equal(model(x), bare)
    assert torch.equal(model[2](got["1"]), bare)
    assert type(got["0.weight:param"]) is type(model[0].weight.data) or got["0.weight:param"].shape == (64, 64)
    with gaff.edit(model, {"1": gaff.edits.scale(0.5)}):
        edited = model(x)
    torch.testing.assert_close(edited, model[2](got["1"] * 0.5))
    assert gaff.find_nonfinite(lambda: model(x), model=model).found is False


def test_a_model_that_accelerate_has_spread_over_devices(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    alone, model = llama(), llama()
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    with torch.no_grad(), gaff.capture(alone, "model.layers.*") as truth:
        alone(TOKENS)
    with torch.no_grad(), gaff.capture(model, "model.layers.*", "model.layers.1.mlp.up_proj.weight:param") as got:
        model(TOKENS)
    for site in ("model.layers.0", "model.layers.1"):
        assert torch.equal(got[site], truth[site])
    weight = got["model.layers.1.mlp.up_proj.weight:param"]
    assert torch.equal(weight, alone.model.layers[1].mlp.up_proj.weight)
    with torch.no_grad(), gaff.edit(model, {"model.layers.1": gaff.edits.scale(0.5)}):
        edited = model(TOKENS).logits
    with torch.no_grad(), gaff.edit(alone, {"model.layers.1": gaff.edits.scale(0.5)}):
        assert torch.equal(edited, alone(TOKENS).logits)
