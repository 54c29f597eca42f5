"""``:weights`` of ``flex_attention``, eagerly and compiled: its functions and its mask made into numbers."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import gaff
from gaff import edits, keep
from gaff.errors import PlanError

SITE = "attn/flex_attention:weights"
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),  # of transformers
]


def causal(batch, head, query, key):
    return query >= key


def window(batch, head, query, key):
    return (query - key).abs() <= head


def distance(score, batch, head, query, key):
    return score - SLOPES[head] * (query - key).abs()


def capped(score, batch, head, query, key):
    return 2 * torch.tanh(score / 2)


def blocks(mask):
    return None if mask is None else create_block_mask(mask, 2, 4, 128, 128, device="cpu")


CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"block_mask": causal},
    "window": {"block_mask": window},
    "distance": {"score_mod": distance},
    "both": {"score_mod": capped, "block_mask": causal},
    "groups": {"enable_gqa": True, "score_mod": distance},
}


class Attn(nn.Module):
    def __init__(self, function=flex_attention, **options):
        super().__init__()
        self.options = {**options, "block_mask": blocks(options.get("block_mask"))}
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v, **self.options)


class Model(nn.Module):
    def __init__(self, *args, **options):
        super().__init__()
        self.attn = Attn(*args, **options)

    def forward(self, q, k, v):
        return self.attn(q, k, v)


def inputs(name):
    torch.manual_seed(0)
    heads = 2 if name == "groups" else 4
    return torch.randn(2, 4, 128, 16), torch.randn(2, heads, 128, 16), torch.randn(2, heads, 128, 16)


def by_hand(q, k, score_mod=None, block_mask=None, scale=None, enable_gqa=False):
    """The weights, element by element of the functions' definition."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    sizes = scores.shape
    at = [torch.arange(size).view([-1 if one == dim else 1 for one in range(4)]) for dim, size in enumerate(sizes)]
    scores = score_mod(scores, *at) if score_mod else scores
    return (scores.masked_fill(~block_mask(*at).expand(sizes), -torch.inf) if block_mask else scores).softmax(-1)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_functions(name, is_compiled):
    q, k, v = inputs(name)
    function = torch.compile(flex_attention, backend="aot_eager") if is_compiled else flex_attention
    model = Model(function, **CASES[name])
    wanted = by_hand(q, k, **CASES[name])
    with torch.no_grad():
        bare = model(q, k, v)
        with gaff.capture(model, SITE) as got:
            torch.testing.assert_close(model(q, k, v), bare)
        torch.testing.assert_close(got[SITE], wanted)
        for part in (keep.rows([5, 100], dim=-2), keep.channels([3, 1]), keep.rows(1)):
            with gaff.capture(model, {SITE: part}) as got:
                model(q, k, v)
            torch.testing.assert_close(got[SITE], part(wanted))
        with gaff.edit(model, {SITE: edits.scale(0.5)}) as changed:
            torch.testing.assert_close(model(q, k, v), bare / 2)
        with gaff.edit(model, {SITE: lambda w: w.flip(-1)}):
            values = v.repeat_interleave(4 // v.shape[1], 1)
            torch.testing.assert_close(model(q, k, v), wanted.flip(-1) @ values)
    assert any("not by torch's fused op" in note for note in changed.receipt.notes)


def test_what_else_it_returns_stays():
    q, k, v = inputs("plain")
    model = Model(return_aux=AuxRequest(lse=True))
    with torch.no_grad():
        _, bare = model(q, k, v)
        with gaff.edit(model, {SITE: edits.zero()}):
            out, aux = model(q, k, v)
    assert not out.any()
    assert torch.equal(aux.lse, bare.lse)


def test_it_is_listed_and_its_other_ports_are_no_weights():
    q, k, v = inputs("plain")
    with torch.no_grad():
        listed = gaff.sites(Model(), q, k, v, ops=True)
    (row,) = [row for row in listed if row.site == "attn/flex_attention#0:weights"]
    assert row.output == "2x4x128x128"
    with pytest.raises(PlanError, match="/where has no :weights"):
        gaff.capture(Model(), "attn/where:weights")


def test_transformers_with_flex_attention_attend_as_eager_ones():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 256, "pad_token_id": 0}  # fmt: skip
    x = torch.randint(3, 90, (1, 128))
    found = {}
    for way in ("flex_attention", "eager"):
        torch.manual_seed(0)
        model = transformers.LlamaModel._from_config(transformers.LlamaConfig(**options), attn_implementation=way)
        model.eval().requires_grad_(False)
        op = "flex_attention:weights" if way == "flex_attention" else "softmax"
        pattern = f"layers.*.self_attn/{op}"
        with torch.no_grad(), gaff.capture(model, pattern) as got:
            model(x)
        found[way] = [got[f"layers.{layer}.self_attn/{op}"] for layer in range(2)]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other)
