"""Rules about what lies where in a batch: examples, positions of sequences, padding, what attention sums over.

Written as those of ``gaff.training.rules.steps``. Shapes are what layers and loss functions were given while the step
ran; padding is read from the tokens (``sample.facts``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gaff.record.sample import Sample
from gaff.training.rules.registry import Hit, Past, rule

_MOSTLY = 0.9  # of the targets that are the tokens beside them
_MUCH = 0.1  # of the targets of a loss, or of the positions of a batch


@rule(
    "examples_alike",
    severity="error",
    means="the model is given the same example again and again, with different targets",
    cause="a data set that returns one item whatever it is asked for, or a batch that is made of one example",
    remedy="print two rows of a batch where the model gets it, and dataset[0] beside dataset[1]",
    least=5,
    share=0.95,
    hides=("output_constant",),
)
def examples_alike(sample: Sample, past: Past) -> Iterator[Hit]:
    """All examples of what the model is given in all of its runs are the same, four or more and not of one number,
    while targets of a loss function of torch's, one row for each of them, are not. Certain; but not of a model whose
    parameters have three dimensions, of which the first is as long: as many models at once, each with its targets."""
    batch = sample.facts.get("batch", 0)
    targets = [one for one in sample.facts.get("targets", ()) if one["shape"][:1] == (batch,)]
    shapes = [one.shape for one in sample.parameters.values()]
    if any(len(shape) == 3 and shape[0] == batch for shape in shapes):
        return
    if sample.facts.get("alike") and any(not one["alike"] for one in targets):
        yield Hit(("", ""), f"the examples of a batch of {batch} are the same, and their targets are not", batch=batch)


@rule(
    "batch_as_time",
    severity="error",
    means="a layer over sequences takes the examples of the batch for the positions of a sequence",
    cause="batch_first: LSTM, GRU, MultiheadAttention and TransformerEncoderLayer expect [positions, batch, features] "
    "without it",
    remedy="batch_first=True where the layer is made; or x.transpose(0, 1) before it, and after it",
    least=2,
    share=0.5,
)
def batch_as_time(sample: Sample, past: Past) -> Iterator[Hit]:
    """A recurrent layer or attention of torch's runs along a dimension that is as long as the batch, by the first
    dimension of what the model is given and of all targets of loss functions, where each example has one target,
    and not along the other one, of two or more and no multiple of it. Or targets are the next tokens along one
    dimension, and the layer runs along the other."""
    for key, one in sample.facts.get("sequences", {}).items():
        shape = one["shape"]
        along, other = (shape[1], shape[0]) if one["batch_first"] else (shape[0], shape[1])
        # many short sequences, a few of each example, may happen to be as long as the batch
        if (
            along != other > 1
            and other % along
            and (_is_batch(sample, along, other) or _is_across(sample, along, other))
        ):
            told = f"the layer is given {list(shape)} with batch_first={one['batch_first']}"
            yield Hit(key, f"{told}, and runs along the {along} examples of the batch, not along the {other} positions",
                      shape=list(shape), batch=along)  # fmt: skip
            return


def _is_batch(sample: Sample, along: int, other: int) -> bool:
    """Whether examples are as many as that, and have a target each."""
    shapes = [one["shape"] for one in sample.facts.get("targets", ())]
    is_each = all(shape[:1] == (along,) and other not in shape[1:] for shape in shapes)
    return bool(shapes) and is_each and sample.facts.get("batch") == along


def _is_across(sample: Sample, along: int, other: int) -> bool:
    """Whether targets are the next tokens in the other direction."""
    tokens: dict[str, Any] = sample.facts.get("tokens", {"shape": ()})
    if len(tokens["shape"]) != 2:
        return False
    rows, columns = tokens["shape"]
    if tokens.get("next", 0.0) >= _MOSTLY:
        return along == rows and other in (columns, columns - 1)
    return tokens["next_row"] >= _MOSTLY and along == columns and other in (rows, rows - 1)


@rule(
    "attention_axis",
    severity="error",
    means="the weights of attention do not add up to one over what they are summed over",
    cause="a softmax with the wrong dim: over queries, heads or the batch, where keys are meant",
    remedy="softmax(dim=-1) of scores [batch, heads, queries, keys], or scaled_dot_product_attention",
    least=2,
    share=0.0,
)
def attention_axis(sample: Sample, past: Past) -> Iterator[Hit]:
    """Attention by hand, a softmax of the product of two tensors whose result is multiplied by a third, of which the
    last product sums over its last dimension, and the softmax runs along another one; read from the autograd graph.
    Where it is turned around in between, as where positions are dealt out to slots, that is meant."""
    found = sample.facts.get("mixing")
    if found:
        yield Hit(("", ""), f"a softmax of attention, of shape {found['shape']}, runs along dimension {found['dim']}, "
                  f"and what it returns is summed along dimension {found['over']}", **found)  # fmt: skip


@rule(
    "classes_viewed",
    severity="error",
    means="a view has made the classes of a cross entropy out of something else, such as positions",
    cause="view or reshape, which keep the order of numbers in memory, in the place of permute or transpose",
    remedy="logits.transpose(1, 2) makes [batch, classes, positions] of [batch, positions, classes]; images: permute",
    least=2,
    share=0.0,
)
def classes_viewed(sample: Sample, past: Past) -> Iterator[Hit]:
    """What a cross entropy is given is a view of scores whose last dimension has the size of the classes, which the
    view has second; or of which the second one has it, and the view has it last; read from the autograd graph."""
    found = sample.facts.get("viewed")
    if found:
        yield Hit(("", ""), f"scores of shape {found['given']} are viewed as {found['shape']} for a cross entropy: its "
                  "classes are made of others and of positions", **found)  # fmt: skip


@rule(
    "examples_viewed",
    severity="error",
    means="a view has made the examples of a batch out of parts of several",
    cause="view or reshape, which keep the order of numbers in memory, of a tensor whose batch is its second dimension",
    remedy="transpose first: h_n.transpose(0, 1).flatten(1) of a recurrent layer's [layers, batch, width]",
    least=2,
    share=0.0,
)
def examples_viewed(sample: Sample, past: Past) -> Iterator[Hit]:
    """A view behind a loss has as many rows as the batch has examples, and views a tensor of three dimensions or more
    whose second one is the batch, while its first is neither one nor a multiple of it; read from the autograd graph."""
    for found in sample.facts.get("viewed_batches", ()):
        if found["shape"][0] == sample.facts.get("batch"):
            yield Hit(("", ""), f"a tensor of shape {found['given']} is viewed as {found['shape']}: the batch is its "
                      "second dimension, and each row is made of several examples", **found)  # fmt: skip
            return


@rule(
    "mask_inverted",
    severity="error",
    means="attention sees no token but padding: the mask hides what it should show",
    cause="MultiheadAttention's masks are True for what is hidden; scaled_dot_product_attention's, and most "
    "attention_mask, for what is seen",
    remedy="turn the mask around: ~mask",
    least=3,
    share=0.5,
    hides=("padding_attended", "attention_collapse"),
)
def mask_inverted(sample: Sample, past: Past) -> Iterator[Hit]:
    """Of keys that are as many as the tokens of a batch no position that is a token itself sees one that is a token, in
    all calls of torch's attention; or the model is given an attention_mask of ones where there is padding, and nowhere
    else. Padding is read from the tokens: one number with which sequences end, or begin, some of them with more of it,
    and which is nowhere else. Certain."""
    told = sample.facts.get("padding_seen", ())
    if any(one["nothing_else"] for one in told):
        yield Hit(("", ""), f"attention sees no token that is not padding ({100 * told[0]['share']:.0f} % are): its "
                  "mask is the wrong way round", padding=told[0]["share"])  # fmt: skip


@rule(
    "padding_attended",
    severity="warning",
    means="attention sees padding as if it were data: what the model returns depends on how long a batch is",
    cause="a mask that was not given, as attention_mask, key_padding_mask, or memory_key_padding_mask of a decoder",
    remedy="give the mask that the tokenizer makes, or src_key_padding_mask=(tokens == padding)",
    least=3,
    share=0.5,
)
def padding_attended(sample: Sample, past: Past) -> Iterator[Hit]:
    """Padding is a tenth or more of the tokens of a batch, and all of it is seen by torch's attention: in sequences
    that attend to themselves by positions that are none. Under a causal mask what comes before sees no padding at the
    end."""
    for one in sample.facts.get("padding_seen", ()):
        if one["all"] and one["share"] >= _MUCH and not one["nothing_else"]:
            mask = "its mask lets" if one["masked"] else "without a mask it lets"
            yield Hit(("", ""), f"attention sees the padding, {100 * one['share']:.0f} % of the tokens: {mask} every "
                      "position through", padding=one["share"])  # fmt: skip
            return


@rule(
    "padding_in_loss",
    severity="warning",
    means="padding counts in the loss: a part of what is learned is to return padding, and the loss is lower for it",
    cause="targets that were not set to -100 where there is padding, or an ignore_index that was not given",
    remedy="labels[mask == 0] = -100, or ignore_index= the number of the padding",
    least=3,
    share=0.5,
)
def padding_in_loss(sample: Sample, past: Past) -> Iterator[Hit]:
    """A cross entropy without weights for its classes takes the mean or sum over targets of which a tenth or more stand
    where the tokens are padding, all of them one class, and none of them ignored."""
    found = sample.facts.get("padding_in_loss")
    if found and found["is_counted"] and found["share"] >= _MUCH:
        yield Hit(("", ""), f"{100 * found['share']:.0f} % of the targets stand at padding, and are {found['target']:g}"
                  ": they count in the loss", share=found["share"])  # fmt: skip
