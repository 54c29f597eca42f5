"""Tiny random models of every architecture of transformers, with fused attention and with attention written out.

``compare(kind)`` builds the base model of one ``model_type`` twice and puts the weights that gaff tells of the fused
one beside those that the other computes. Configurations are shrunk by the names of their fields; what cannot be built
so is told, and counted. ``python -m attention_of_transformers [KIND ...]`` prints the table.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from inspect import signature

import torch

import gaff
from gaff.address.grammar import Site, parse_site
from gaff.address.nested import iter_tensors

FUSED = "scaled_dot_product_attention"
TOLERANCE = 1e-5
MOST_PARAMETERS = 10_000_000

# Fields of configurations by name, as they are made small.
SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "hidden_dim": 32, "model_dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_depth": 2, "decoder_depth": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4,
    "head_dim": 8, "kv_channels": 8, "d_kv": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16,
    "intermediate_size": 40, "ffn_dim": 40, "d_ff": 40, "n_inner": 40, "ffn_hidden_size": 40, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_num_experts": 4,
    "vocab_size": 99, "max_position_embeddings": 64, "n_positions": 64, "max_source_positions": 32,
    "max_target_positions": 32, "type_vocab_size": 2, "embedding_size": 32, "projection_dim": 16,
    "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "out_hidden_size": 32, "encoder_hidden_size": 32,
    "sliding_window": 32, "mlp_ratio": 2, "first_k_dense_replace": 1, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_channels": 3, "word_embed_proj_dim": 32, "rotary_dim": 4,
    "num_feat_extract_layers": 2, "output_hidden_size": 32, "bottleneck_size": 16, "global_attn_every_n_layers": 2,
}  # fmt: skip
LISTS = {"conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2),
         "attention_types": [[["global", "local"], 1]]}  # fmt: skip
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")


def shrink(config):
    """The configuration made small, those inside of it, too; special tokens go where the vocabulary still is."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value)
        elif not isinstance(value, bool) and value is not None:
            set_field(config, name, small(name, value))
    kinds = [name for name in KINDS_OF_LAYERS if isinstance(getattr(config, name, None), list)]
    for name in kinds:  # one layer of each kind
        kept = list(dict.fromkeys(getattr(config, name)))
        set_field(config, name, (kept * 2)[: max(2, len(kept))])
        set_field(config, "num_hidden_layers", max(2, len(kept)))
    for name in kinds:
        set_field(config, name, (getattr(config, name) * 8)[: config.num_hidden_layers])
    if getattr(config, "kv_lora_rank", None) is not None:
        set_field(config, "num_key_value_heads", config.num_attention_heads)
    return config


def small(name, value):
    """The value of one field made small."""
    is_many = isinstance(value, (list, tuple))
    if name in SMALL and not is_many and isinstance(value, (int, float)):
        return type(value)(SMALL[name])
    if name in ("image_size", "patch_size") and is_many:
        return type(value)([SMALL[name]] * len(value))
    if name in LISTS and is_many:
        return LISTS[name]
    if name.endswith("token_id"):
        return value if isinstance(value, int) and value < 90 else 1
    if "dropout" in name and isinstance(value, float):
        return 0.0
    if name == "rope_parameters" and "mrope_section" in value:
        return {**value, "mrope_section": [1, 1, 2]}
    return value


def set_field(config, name, value):
    """Set a field of a configuration; one that does not take the small value keeps its own."""
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # read-only, or checked: its own value stays
        return


def inputs_of(model, config):
    """What the model is called with, by the name of its main input."""
    torch.manual_seed(1)
    name = model.main_input_name
    tokens = torch.randint(3, 90, (2, 7))
    if name == "input_ids":
        given = {"input_ids": tokens}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = torch.randint(3, 90, (2, 5))
        return given
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        tall, wide = (size, size) if isinstance(size, int) else tuple(size)[:2]
        given = {"pixel_values": torch.randn(2, getattr(vision, "num_channels", 3) or 3, tall, wide)}
        if hasattr(config, "text_config"):
            given["input_ids"] = tokens
        return given
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", 16)
        length = 2 * getattr(config, "max_source_positions", 32)
        given = {"input_features": torch.randn(2, bins, length)}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = torch.randint(3, 90, (2, 5))
        return given
    if name == "input_values":
        return {"input_values": torch.randn(2, 512)}
    raise NotImplementedError(f"main input {name}")  # counted as "not built" by ``compare``, with this text as reason


def build(kind, way):
    """The base model of a ``model_type`` and its configuration, with attention computed in this ``way``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    cls = MODEL_MAPPING[CONFIG_MAPPING[kind]]
    cls = cls[0] if isinstance(cls, (list, tuple)) else cls
    config = shrink(cls.config_class())
    if not getattr(cls, "_supports_sdpa", False):
        raise Unfused("no fused attention")
    with torch.device("meta"):
        count = sum(
            one.numel() for one in cls._from_config(copy.deepcopy(config), attn_implementation=way).parameters()
        )
    if count > MOST_PARAMETERS:
        raise MemoryError(f"{count:,} parameters after shrinking")
    torch.manual_seed(0)
    return cls._from_config(copy.deepcopy(config), attn_implementation=way).eval().float(), config


def call(model, given):
    """Why the model cannot be called so; empty if it can."""
    try:
        with torch.no_grad():
            torch.manual_seed(2)
            model(**given)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
    return ""


def run(model, given, *patterns):
    """The capture of patterns over one forward, and the tensors that the model returned."""
    torch.manual_seed(2)
    asked = [gaff.maybe(pattern) for pattern in (*patterns, "**:output[1]")]
    with torch.no_grad(), gaff.capture(model, *asked, budget="2GB") as got:
        output = model(**given)
    return got, [tensor for _, tensor in iter_tensors(output) if tensor.is_floating_point()]


def stays(model, given, bare):
    """Whether the model returns the same where attention is computed by the weights that gaff tells."""
    torch.manual_seed(2)
    with torch.no_grad(), gaff.edit(model, {gaff.maybe(f"**/{FUSED}:weights"): gaff.edits.scale(1.0)}):
        output = model(**given)
    found = [tensor for _, tensor in iter_tensors(output) if tensor.is_floating_point()]
    return all(torch.allclose(one, two, atol=1e-4, equal_nan=True) for one, two in zip(bare, found, strict=True))


def written_out(got, path, like):
    """The weights that the model with attention written out computed at a module: its softmax, or what it returned.

    ``like``: those of fused attention, whose number and sizes theirs should have.
    """
    asked = (f"{path}/softmax", str(Site(path, port="output", key=(1,))))
    found = [[one for one in read(got, address) if isinstance(one, torch.Tensor)] for address in asked]
    sizes = [one.numel() for one in like]
    return next((kept for kept in found if [one.numel() for one in kept] == sizes), found[0] or found[1])


def read(got, address):
    try:
        return got.all(address)
    except gaff.GaffError:
        return []


class Unfused(Exception):
    """The architecture has no fused attention in transformers."""


class Unbuilt(Exception):
    """The architecture could not be built or called from fields made small."""


def pair(kind):
    """The same model with fused attention and with attention written out, and what both can be called with.

    Several inputs where the model takes a mask: with padding, too. Raises Unfused, and Unbuilt with the reason.
    """
    try:
        fused, config = build(kind, "sdpa")
        eager, _ = build(kind, "eager")
        eager.load_state_dict(fused.state_dict())
        given = inputs_of(fused, config)
    except Unfused:
        raise
    except Exception as error:
        raise Unbuilt(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}") from None
    failed = call(fused, given) or call(eager, given)
    if failed and "input_ids" in given and hasattr(config, "vision_config"):  # compares texts with images
        given = {**given, "pixel_values": torch.randn(2, 3, 32, 32)}
        failed = (call(fused, given) or call(eager, given)) and failed
    if failed:
        raise Unbuilt(f"called: {failed}")
    several = [given]
    if "input_ids" in given and "attention_mask" in signature(fused.forward).parameters:
        padded = {**given, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long()}
        several += [] if call(fused, padded) or call(eager, padded) else [padded]
    return fused, eager, several


def compare(kind):
    """``(state, count, reason)``: whether an architecture is "equal" or "differs", and of how many tensors."""
    try:
        fused, eager, several = pair(kind)
    except Unfused as error:
        return "no fused attention", 0, str(error)
    except Unbuilt as error:
        return "not built", 0, str(error)
    count, notes = 0, []
    for given in several:
        more, found = beside(fused, eager, given)
        count += more
        notes += found
    if not count and not notes:
        return "no fused call", 0, f"its attention never calls {FUSED}"
    return ("differs" if notes else "equal"), count, "; ".join(dict.fromkeys(notes))[:200]


def beside(fused, eager, given):
    """How many weights were compared, and what is different."""
    got, bare = run(fused, given, f"**/{FUSED}:weights")
    by_path = {}
    for key in (key for key in got if key.endswith(":weights")):
        by_path.setdefault(parse_site(key).path, []).extend(got.all(key))
    notes = (
        []
        if stays(fused, given, bare) or not by_path
        else ["attention by these weights is not what the fused op returns"]
    )
    other, wanted = run(eager, given, "**/softmax", f"**/{FUSED}")
    worst, count = 0.0, 0
    for path, weights in by_path.items():
        truth = written_out(other, path, weights)
        if [one.numel() for one in truth] != [one.numel() for one in weights]:
            is_fused = read(other, f"{path}/{FUSED}")
            why = "calls the fused op either way" if is_fused else f"{len(weights)} calls, {len(truth)} written out"
            notes.append(f"{path}: {why}")
            continue
        count += len(weights)
        pairs = zip(weights, truth, strict=True)
        worst = max(worst, *(float((one.float() - two.reshape(one.shape).float()).abs().max()) for one, two in pairs))
    if worst > TOLERANCE:
        pairs = zip(bare, wanted, strict=False)
        apart = max(float((one - two).abs().max()) for one, two in pairs if one.shape == two.shape)
        notes.insert(0, f"weights by {worst:.2g}, what the models return by {apart:.2g}")
    return count, notes


def kinds():
    """Every ``model_type`` with a base model, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def main(wanted):
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    states, compared = Counter(), 0
    for kind in wanted or kinds():
        try:
            state, count, reason = compare(kind)
        except gaff.GaffError as error:
            state, count, reason = "refused", 0, str(error)
        states[state] += 1
        compared += count
        print(f"{kind:32} {state:20} {count:4}  {reason}", flush=True)
    print(dict(states), f"{compared} tensors compared")


if __name__ == "__main__":
    main(sys.argv[1:])
