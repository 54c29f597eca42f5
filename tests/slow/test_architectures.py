"""Bitwise no effect, and values that are true, over many architectures of transformers built from tiny random configs."""

import copy

import pytest
import torch

import gaff
from gaff.address.nested import children, iter_tensors
from zoo import loss_of

transformers = pytest.importorskip("transformers")

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37, "vocab_size": 99}
LLAMA = {
    **TEXT,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENCODER = {**TEXT, "max_position_embeddings": 64, "pad_token_id": 0}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 32,
    "patch_size": 8,
}


def tokens(batch=2, length=7):
    return {"input_ids": torch.randint(3, 90, (batch, length))}


def pair():
    return {**tokens(), "decoder_input_ids": torch.randint(3, 90, (2, 5))}


def image(size=32):
    return {"pixel_values": torch.randn(2, 3, size, size)}


# class of the model, options of its config, inputs
CASES = [
    ("Bert", ENCODER, tokens),
    ("Roberta", ENCODER, tokens),
    ("XLMRoberta", ENCODER, tokens),
    ("Electra", {**ENCODER, "embedding_size": 16}, tokens),
    ("Albert", {**ENCODER, "embedding_size": 16}, tokens),
    ("DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37, "vocab_size": 99}, tokens),
    ("MPNet", ENCODER, tokens),
    ("DebertaV2", ENCODER, tokens),
    ("ConvBert", {**ENCODER, "embedding_size": 32}, tokens),
    ("RoFormer", ENCODER, tokens),
    ("SqueezeBert", {**ENCODER, "embedding_size": 32, "q_groups": 1, "k_groups": 1, "v_groups": 1, "intermediate_groups": 1, "output_groups": 1, "post_attention_groups": 1}, tokens),
    ("ModernBert", {**ENCODER, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}, tokens),
    ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}, tokens),
    ("GPTNeo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}, tokens),
    ("GPTNeoX", {**TEXT, "max_position_embeddings": 64}, tokens),
    ("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "rotary_dim": 4, "n_positions": 64}, tokens),
    ("OPT", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 37, "vocab_size": 99, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, tokens),
    ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}, tokens),
    ("Llama", LLAMA, tokens),
    ("Mistral", LLAMA, tokens),
    ("Qwen2", LLAMA, tokens),
    ("Qwen3", LLAMA, tokens),
    ("Gemma", LLAMA, tokens),
    ("Gemma2", LLAMA, tokens),
    ("Phi", LLAMA, tokens),
    ("Phi3", {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}, tokens),
    ("StableLm", LLAMA, tokens),
    ("Cohere", LLAMA, tokens),
    ("Olmo", LLAMA, tokens),
    ("Olmo2", LLAMA, tokens),
    ("Granite", LLAMA, tokens),
    ("Starcoder2", LLAMA, tokens),
    ("Falcon", {**TEXT, "new_decoder_architecture": False, "alibi": False}, tokens),
    ("Mixtral", {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}, tokens),
    ("Qwen2Moe", {**LLAMA, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2}, tokens),
    ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 4}, tokens),
    ("Rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "attention_hidden_size": 32}, tokens),
    ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0}, pair),
    ("MT5", {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0}, pair),
    ("Bart", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": 99, "max_position_embeddings": 64}, pair),
    ("Whisper", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": 99, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "decoder_start_token_id": 1}, lambda: {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(3, 90, (2, 5))}),
    ("Wav2Vec2", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37, "conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "vocab_size": 32}, lambda: {"input_values": torch.randn(2, 256)}),
    ("ViT", IMAGE, image),
    ("DeiT", IMAGE, image),
    ("Dinov2", {**IMAGE, "mlp_ratio": 2}, image),
    ("BeitModel", IMAGE, image),
    ("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, image),
    ("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}, image),
    ("RegNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4}, image),
    ("Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}, image),
    ("Segformer", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 8}, image),
    ("PoolFormer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}, image),
    ("CLIPVisionModel", IMAGE, image),
    ("CLIPTextModel", {**ENCODER, "projection_dim": 16}, tokens),
    ("SiglipVisionModel", IMAGE, image),
    ("VideoMAE", {**IMAGE, "num_frames": 2, "tubelet_size": 1}, lambda: {"pixel_values": torch.randn(1, 2, 3, 32, 32)}),
]  # fmt: skip

# RWKV in evaluation mode writes into what its own backward needs, with hooks or without.
DIFFERENTIABLE = [case for case in CASES if case[0] != "Rwkv"]

EVERYTHING = [
    gaff.maybe(f"{head}:{port}")
    for port in ("output", "input", "grad_output", "input_grad", "grad_input")
    for head in ("", "**")
] + [gaff.maybe("**:grad")]


def build(name, options):
    torch.manual_seed(0)
    cls = getattr(transformers, name if name.endswith("Model") else f"{name}Model")
    config = cls.config_class(**options)
    return cls(config).train()


def step(model, inputs):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(**inputs)
    loss_of(output).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    outputs = [tensor.detach().clone() for _, tensor in iter_tensors(output)]
    return [*outputs, *grads, *model.state_dict().values(), torch.rand(3)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "inputs"), CASES, ids=[case[0] for case in CASES])
def test_everything_captured_has_the_bits_of_a_bare_step(name, options, inputs):
    model = build(name, options)
    given = inputs()
    bare = step(copy.deepcopy(model), given)
    with gaff.capture(model, *EVERYTHING) as got:
        watched = step(model, given)
    assert len(bare) == len(watched)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(bare, watched, strict=True))
    assert sum(row.fired for row in got.receipt.rows) > 50
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "inputs"), DIFFERENTIABLE, ids=[case[0] for case in DIFFERENTIABLE])
def test_captured_values_are_those_of_cloning_hooks(name, options, inputs):
    model = build(name, options).eval()
    given = inputs()
    values, gradients = cloned(model, given)
    with gaff.capture(model, gaff.maybe("**"), gaff.maybe("**:grad_output")) as got:
        loss_of(model(**given)).backward()
    compared = 0
    for path, calls in values.items():
        for call, seen in zip(calls, got.all(str(gaff.Site(path))), strict=True):
            for one, (_, other) in zip(call, iter_tensors(seen), strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), path
                compared += 1
    assert compared > 10
    for (path, call), gradient in gradients.items():
        address = str(gaff.Site(path, call=call, port="grad_output"))
        assert torch.equal(got[address], gradient), address


def cloned(model, given):
    """Values of every call and gradients of single outputs, by hooks that clone at once."""
    values, gradients = {}, {}

    def hook(path):
        def keep(module, args, output):
            found = [tensor for _, tensor in iter_tensors(output)]
            values.setdefault(path, []).append([tensor.detach().clone() for tensor in found])
            place = (path, len(values[path]) - 1)
            if len(found) == 1 and found[0].requires_grad and children(output) is None:
                found[0].register_hook(lambda gradient: gradients.__setitem__(place, gradient.clone()))

        return keep

    handles = [module.register_forward_hook(hook(path)) for path, module in model.named_modules() if path]
    loss_of(model(**given)).backward()
    for handle in handles:
        handle.remove()
    return values, gradients
