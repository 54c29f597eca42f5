"""Rules about what large models have besides: half precision, attention, mixtures of experts, massive activations.

Each check's docstring tells when it hits; ``docs/rules.md`` repeats it word for word. Sources of thresholds: Zhai et
al. is "Stabilizing transformer training by preventing attention entropy collapse", 2023; Sun et al. is "Massive
activations in large language models", 2024; Fedus et al. is "Switch transformers", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gaff.record.sample import Load, Sample
from gaff.training.rules.registry import Hit, Past, rule
from gaff.training.rules.steps import has_fallen

_MASKED = 1e8  # scores that are hidden are -1e9, or the least number of the dtype
_LEAST_LOADS = 8
_LEAST_TOKENS = 64  # that each expert would have had in a balanced router, before it is called idle


@rule(
    "step_not_finite",
    severity="error",
    means="the optimizer's step made NaN or inf of a gradient that is finite",
    cause="a learning rate or weight decay that is no finite number, or far too high; eps=0; or numbers that the "
    "optimizer's own dtype does not hold: Adam's eps of 1e-8 is zero in float16, squares above 256 overflow there",
    remedy="keep weights in float32 and compute in float16 by torch.autocast; or eps=1e-4, and a lower learning rate",
    least=1,
    share=0.0,
)
def step_not_finite(sample: Sample, past: Past) -> Iterator[Hit]:
    """A parameter that was finite, with a gradient that was, has a NaN or inf in its update. Certain."""
    for key, one in sample.parameters.items():
        rows = [sample.rows.get(key), sample.of(key, "grad"), sample.of(key, "update")]
        weight, gradient, update = rows
        if weight is None or gradient is None or update is None or not gradient.count:
            continue
        if update.nonfinite and not weight.nonfinite and not gradient.nonfinite:
            told = "" if math.isfinite(one.lr) else f"the learning rate is {one.lr}"
            yield Hit(key, told, gradient_rms=gradient.rms, nonfinite=update.nonfinite, dtype=one.dtype, lr=one.lr)


@rule(
    "attention_collapse",
    severity="warning",
    means="nearly all attention is on one position: its entropy has collapsed",
    cause="logits that grow without bound, often by a learning rate that is too high",
    remedy="normalise queries and keys, lower the learning rate, or warm it up for longer",
    least=8,
    share=0.2,
)
def attention_collapse(sample: Sample, past: Past) -> Iterator[Hit]:
    """Mean entropy of all heads below 5 % of a uniform one's, and half of what it has been (Zhai et al., 2023)."""
    for (name, key), value in sample.shares.items():
        if name == "entropy" and value < 0.05 and value < 0.5 * past.entropy.get(key, 0.0):
            yield Hit(key, entropy_of_uniform=value, highest_entropy_of_uniform=past.entropy[key])


@rule(
    "scaler_stuck",
    severity="error",
    means="the GradScaler keeps skipping steps",
    cause="gradients are NaN or inf whatever the scale of the loss: the forward pass overflows, or an op gives NaN",
    remedy="look for the op with gaff nan SCRIPT; use bfloat16; check the loss itself",
    least=2,
    share=0.0,
)
def scaler_stuck(sample: Sample, past: Past) -> Iterator[Hit]:
    """More than 16 skipped steps and more than 5 % of all, or a scale below 1.

    From the initial 65,536, sixteen halvings lead to 1; a healthy run needs fewer.
    """
    scale = sample.facts.get("scale")
    skipped = sample.facts.get("skipped", 0)
    if (scale is not None and scale < 1) or (skipped > 16 and skipped > 0.05 * (skipped + sample.step)):
        yield Hit(("", ""), scale=scale, skipped=skipped, steps=sample.step)


@rule(
    "half_range",
    severity="warning",
    means="activations come close to the largest number of float16, or most gradients are too small for it",
    cause="activations that are too large, or gradients that are too small, for float16 (6e-8 to 65504)",
    remedy="bfloat16; for large activations normalise before sums, for small gradients use a GradScaler",
    share=0.2,
)
def half_range(sample: Sample, past: Past) -> Iterator[Hit]:
    """In runs that use float16: a magnitude above 65504 / 4, or more than half of a gradient's elements below 2^-25."""
    if sample.facts.get("precision") != "float16":
        return
    for key, row in sample.rows.items():
        is_gradient = key[1].endswith(":grad_output")
        if not is_gradient and key[1].partition(":")[2] in ("", "output") and row.largest > 16376:
            told = f"activations of {key[1]} reach {row.largest:.4g}; float16 overflows above 65504"
            yield Hit(key, told, largest=row.largest)
        elif is_gradient and row.underflow("float16") > 0.5:
            lost = row.underflow("float16")
            told = f"{lost:.0%} of the elements of {key[1]} are too small for float16, and become 0"
            yield Hit(key, told, underflow=lost, scale=sample.facts.get("scale"))


@rule(
    "attention_logits",
    severity="warning",
    means="the scores of attention have grown so large that its softmax chooses one key, and hardly learns",
    cause="queries and keys whose norms grow without bound, often by a learning rate that is too high",
    remedy="normalise queries and keys, lower the learning rate, or warm it up for longer",
    least=5,
    share=0.3,
)
def attention_logits(sample: Sample, past: Past) -> Iterator[Hit]:
    """The largest score of a fused attention above 1,000 (chosen; scores of trained models are below 100), and no loss
    has fallen to half."""
    if any(has_fallen(past, name, 0.5) for name in past.losses):
        return
    for (name, key), value in sample.shares.items():
        if name == "logit" and value > 1000:
            yield Hit(key, largest_score=value, entropy_of_uniform=sample.shares.get(("entropy", key)))


@rule(
    "massive_activation",
    severity="info",
    means="a few activations are over 1,000 times the median: usual in trained transformers, but hard to quantise",
    cause="transformers learn such constants by themselves, mostly at the first token, where attention rests",
    remedy="keep them out of low-bit quantisation; see how much attention goes to the first token",
    least=5,
    share=0.5,
)
def massive_activation(sample: Sample, past: Past) -> Iterator[Hit]:
    """A magnitude above 100 and above 1,000 times the median one, in what a module returns (Sun et al., 2024). Not of
    1e8 and more, which are scores that a mask has hidden."""
    for key, row in sample.port("output").items():
        if 100 < row.largest < _MASKED and row.largest > 1000 * row.median_magnitude > 0:
            middle = row.median_magnitude  # the upper edge of its bucket
            yield Hit(key, largest=row.largest, median_at_most=middle)


@rule(
    "dead_experts",
    severity="warning",
    means="some experts get no token at all: they do not learn",
    cause="a router that came to prefer others early, without a loss that balances it, or with one that is too weak",
    remedy="add or raise the balancing loss, add noise to the router's scores, or lower its learning rate",
    least=5,
    share=0.5,
    hides=("no_gradient",),
)
def dead_experts(sample: Sample, past: Past) -> Iterator[Hit]:
    """An expert without a token in the latest eight to sixteen looks, where 64 tokens would have been an even share.

    Only where the router returns what it has chosen, or each expert is a module that is called with its tokens.
    """
    for key in sample.loads:
        recent = list(past.loads.get(key, ()))
        idle = _idle(recent)
        if idle:
            tokens = round(sum(one.tokens for one in recent))
            yield Hit(key, f"experts {', '.join(map(str, idle))} of {len(recent[-1].counts)} got none of {tokens} "
                      "tokens", idle=idle, experts=len(recent[-1].counts), tokens=tokens)  # fmt: skip


@rule(
    "router_collapse",
    severity="warning",
    means="the router sends nearly all tokens to one expert: the others are hardly used",
    cause="a router that is not balanced by a loss, or scores that have grown without bound",
    remedy="add or raise the balancing loss (Fedus et al., 2022), add noise to the scores, or lower the learning rate",
    least=5,
    share=0.5,
    hides=("dead_experts", "zero_gradient"),
)
def router_collapse(sample: Sample, past: Past) -> Iterator[Hit]:
    """One of four or more experts is chosen by more than 95 % of the tokens of the latest eight to sixteen looks."""
    for key in sample.loads:
        recent = list(past.loads.get(key, ()))
        tokens = sum(one.tokens for one in recent)
        if len(recent) < _LEAST_LOADS or len(recent[-1].counts) < 4 or tokens < 4 * _LEAST_TOKENS:
            continue
        counts = [sum(several) for several in zip(*(one.counts for one in recent), strict=True)]
        per_token = max(1.0, sum(counts) / tokens)  # experts of each token
        if per_token < 1.5 and max(counts) > 0.95 * sum(counts):
            yield Hit(key, expert=counts.index(max(counts)), token_fraction=max(counts) / sum(counts), tokens=tokens)


def _idle(recent: Sequence[Load]) -> list[int]:
    """The experts that got no token in these looks; none where that is not known, or too little was seen to say it."""
    if len(recent) < _LEAST_LOADS or not all(one.is_exact for one in recent):
        return []
    counts = [sum(several) for several in zip(*(one.counts for one in recent), strict=True)]
    return [at for at, count in enumerate(counts) if not count] if sum(counts) >= _LEAST_TOKENS * len(counts) else []
