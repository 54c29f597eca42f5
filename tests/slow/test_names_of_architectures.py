"""Standard names over many architectures: their identities, and what the models tell of themselves."""

import pytest
import torch

import gaff
from slow.test_architectures import CASES

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LEAST_NAMES, LEAST_FAMILIES = 20, 35
HEADS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageClassification", "Model", "")
# no list of blocks with attention and an MLP, or an input that fits another class
WITHOUT = {"SqueezeBert", "Mamba", "ConvNext", "ResNet", "RegNet", "PoolFormer", "Whisper"}


def built(name, options):
    torch.manual_seed(0)
    kind = next(kind for head in HEADS if (kind := getattr(transformers, name + head, None)) is not None)
    return kind(kind.config_class(**options)).eval()


def test_most_families_have_twenty_names_that_hold():
    held = {}
    for name, options, inputs in CASES:
        if name in WITHOUT:
            continue
        named = gaff.sites(built(name, options), names=True, **inputs())
        held[name] = sum(bool(row.identity) for row in named.rows)
    enough = [name for name, count in held.items() if count >= LEAST_NAMES]
    assert len(enough) >= LEAST_FAMILIES, held


@pytest.mark.parametrize(
    "name", ["Bert", "Roberta", "GPT2", "GPTNeoX", "Llama", "Qwen3", "Gemma2", "Olmo2", "OPT", "ViT"]
)
def test_the_residual_stream_is_what_the_model_calls_hidden_states(name):
    options, inputs = next((options, inputs) for one, options, inputs in CASES if one == name)
    model, given = built(name, options), inputs()
    with torch.no_grad(), gaff.capture(model, "names:resid_pre.*") as got:
        told = model(**given, output_hidden_states=True).hidden_states
    for one, other in zip(got.all("names:resid_pre.*"), told, strict=False):
        torch.testing.assert_close(one.reshape(other.shape), other)


@pytest.mark.parametrize("name", sorted(WITHOUT - {"Whisper"}))
def test_what_is_not_recognised_is_told(name):
    options = next(options for one, options, _ in CASES if one == name)
    with pytest.raises(gaff.errors.PlanError, match="has no standard names"):
        gaff.sites(built(name, options), names=True)
