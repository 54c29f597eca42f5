"""``gaff.integrations.transformer_lens`` beside the library itself: the same names, shapes and numbers, and the same edits.

Run by ``make compare`` in the environment of TransformerLens.
"""

import copy
import sys
import tempfile
import warnings

import torch
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge.sources.transformers.source import boot
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from gaff.integrations.transformer_lens import run_with_cache, run_with_hooks

WORDS, EAGER = 61, {"attn_implementation": "eager"}
LLAMA = {
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_size": 32,
}
MODELS = {
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, **EAGER)
    ),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(intermediate_size=64, num_key_value_heads=2, **LLAMA, **EAGER)),
    "GPT-NeoX": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(intermediate_size=64, **LLAMA, **EAGER)),
}
OF_ONE_ROW = {"hook_pos_embed"}  # the model makes one row for all samples, TransformerLens repeats it


def bridge(model, folder):
    """The model as TransformerLens wraps it, from files of this machine."""
    words = {f"w{number}": number for number in range(WORDS - 1)}
    made = Tokenizer(models.WordLevel({**words, "<eos>": WORDS - 1}, unk_token="<eos>"))
    end = dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), "<eos>")
    PreTrainedTokenizerFast(tokenizer_object=made, **end).save_pretrained(folder)
    model.save_pretrained(folder)
    return boot(folder, hf_model=copy.deepcopy(model), tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")


def compare(name):
    """How many names hold the same numbers. Raises AssertionError for one that does not."""
    torch.manual_seed(0)
    model, ids = MODELS[name]().eval(), torch.randint(0, WORDS - 1, (2, 7))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        theirs = bridge(model, folder)
        logits, cache = run_with_cache(model, ids)
        true_logits, true_cache = theirs.run_with_cache(ids)
        torch.testing.assert_close(logits.logits, true_logits)
        for key in cache:
            one, other = cache[key], true_cache[key]
            torch.testing.assert_close(one.expand_as(other) if key in OF_ONE_ROW else one, other)

        def silence(value, hook):
            value[..., 1, :] = 0
            return value

        hooks = [("blocks.1.attn.hook_z", silence)]
        edited = run_with_hooks(model, ids, fwd_hooks=hooks)
        torch.testing.assert_close(edited.logits, theirs.run_with_hooks(ids, fwd_hooks=hooks))
        assert not torch.equal(edited.logits, logits.logits), "the edit changed nothing"
    return len(cache)


def main():
    warnings.simplefilter("ignore")
    for name in MODELS:
        print(f"{name}: {compare(name)} hook names hold the numbers of TransformerLens, and an edited head, too")
    return 0


if __name__ == "__main__":
    sys.exit(main())
