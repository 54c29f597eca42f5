"""Attention in a sampled step: where it looks, by its entropy, its largest score and the share of the first key.

Two sources: probabilities that a module shows (a softmax, the input of a dropout, the weights that MultiheadAttention
returns), and calls of torch's fused op, which shows none: there some rows are computed by the plain formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaff.compat import modes
from gaff.engine.ops.attention import Weights
from gaff.engine.process.functions import ATTENTION
from gaff.keep import Part
from gaff.record.sample import Key
from gaff.training.watch.accumulator import Accumulator, readable

_LEAST_ROWS = 2  # of an attention matrix that is looked at
_MOST_ROWS = 64  # queries of one example
_MOST_SCORES = 1 << 22
_MASKED = -1e9  # a score below it is masked, whichever way


def shown_by(kind: str, args: Any, output: Any) -> Tensor | None:
    """The probabilities of the first example that a module of a ``kind`` shows, as float32; None where it shows none.

    They are what a softmax returned, what a dropout was given (if its rows sum to one, which is waited for), or the
    weights that MultiheadAttention returns. Of the two former only tensors of four dimensions or more count, as
    attention's are.
    """
    found: Any = output if kind == "softmax" else args[0] if args else None
    if kind == "attention":
        found = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(found, Tensor) or found.dim() < (3 if kind == "attention" else 4):
        return None
    value = readable(found)
    if value is None or not value.numel() or value.shape[-1] < _LEAST_ROWS or value.shape[-2] < _LEAST_ROWS:
        return None
    with torch.no_grad():
        some = value[:1].float()
        return None if kind == "dropout" and not _are_probabilities(some) else some


def observe_shown(numbers: Accumulator, key: Key, kind: str, args: Any, output: Any) -> None:
    """Add the entropy of what ``shown_by`` finds to the numbers of ``key``."""
    shown = shown_by(kind, args, output)
    if shown is not None:
        numbers.add_share("entropy", key, entropy_of(shown), 1)


def entropy_of(probabilities: Tensor) -> Tensor:
    """Shannon's entropy of the rows of attention over that of uniform ones, which a causal mask makes smaller."""
    queries, keys = probabilities.shape[-2:]
    behind = torch.arange(keys - queries + 1, keys + 1, dtype=torch.float32, device=probabilities.device)
    is_causal = (probabilities.triu(keys - queries + 1) == 0).all()
    largest = torch.where(is_causal & (behind > 0), behind, float(keys)).log()
    rows = torch.special.entr(probabilities).sum(-1)
    mean: Tensor = rows.mean(tuple(range(rows.dim() - 1)))
    return mean.sum() / largest.sum().clamp(min=1e-9)


def observe_fused(numbers: Accumulator, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Add what a call of ``scaled_dot_product_attention`` does with the first example to the numbers of ``key``.

    All heads, and of the queries 64 at most, spread evenly, fewer where there are very many keys: their weights are
    computed once more, by torch's plain formula. ``entropy``: over that of a uniform look at the keys that are not
    masked; ``first_key``: the mean weight of the first key; ``logit``: the largest score. Waits for no device. Returns
    why nothing can be told, empty if it can.
    """
    weights = Weights(ATTENTION, torch._C._nn.scaled_dot_product_attention, *_of_first(args, kwargs))
    if weights.untold:
        return weights.untold
    queries, keys = weights.shape[-2:]
    heads = weights.shape[:-2].numel()
    if queries < _LEAST_ROWS or keys < _LEAST_ROWS or not heads:
        return ""
    if heads * keys > _MOST_SCORES:
        return f"attention of {heads} heads to {keys} keys is too much to be computed once more"
    rows = min(_MOST_ROWS, _MOST_SCORES // (heads * keys))
    stride = ((queries - 1) // rows + 1) | 1
    part = Part(slice(stride - 1, None, stride), -2) if stride > 1 else None
    with torch.no_grad(), modes.outside_modes():
        scores = weights.scores(part).float()
        some = scores.softmax(-1).nan_to_num(0.0)
        seen = (scores > _MASKED).sum(-1)
        spread = (seen > 1).float()
        entropy = (torch.special.entr(some).sum(-1) * spread).sum() / (seen.clamp(min=1).log().sum().clamp(min=1e-9))
        first = (some[..., 0] * spread).sum() / spread.sum().clamp(min=1)
        numbers.observe(key, some.contiguous())
        numbers.add_share("entropy", key, entropy, 1)
        numbers.add_share("first_key", key, first, 1)
        numbers.add_largest("logit", key, scores.amax())
    return ""


def _of_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of attention, of the first example alone: of tensors with a batch its first element."""
    query = args[0] if args else kwargs.get("query")
    batch = query.dim() if isinstance(query, Tensor) and query.dim() > 2 else 0

    def first(value: Any) -> Any:
        return value[:1] if batch and isinstance(value, Tensor) and value.dim() == batch else value

    return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


def _are_probabilities(value: Tensor) -> bool:
    """Whether the rows sum to one and nothing is negative. Waits for the device; only asked of inputs of a dropout."""
    return bool(((value.sum(-1) - 1).abs().max() < 1e-2) & (value.min() >= 0))
