"""What loss functions were given as targets in a sampled step, and what guessing gives for them.

Called on the thread that trains; what is found stays on its device, and is waited for by nobody here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.engine.process.functions import SIGNED
from gaff.training.watch.class_weights import weighed

OVER_CLASSES = ("cross_entropy", "nll_loss")
ERRORS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
NOTHING: Mapping[str, Any] = MappingProxyType({})
_MOST_COLUMNS = 4096  # of targets of which sums, or some rows, are kept
_LEAST_KEPT, _MOST_KEPT = 64, 1 << 16  # rows of targets, and their elements
_MOST_CLASSES = 64  # of which it is told how often each comes
_LEAST_ROWS = 8  # of a batch of targets whose variance says something
_BEYOND = 0.05  # by how much probabilities add up to more than one, beyond all rounding
_NORMAL = 1e-2  # by how much a sum of probabilities may be off, by rounding


def target_of(
    name: str, output: Any, target: Tensor, seen: dict[tuple[str, int], Tensor], known: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """What a loss function was given, for the rules: shapes, least and largest target as tensors on its device.

    ``seen``: by function and number of counts how often each class has come in all looks; this batch is added.
    ``known``: arguments of the call by name, of which weights, the label that is left out and smoothing are read.
    """
    plain = elements.comparable(target.detach())
    low, high = plain.aminmax() if plain.numel() and not plain.is_complex() else (0.0, 1.0)
    shape = tuple(getattr(output, "shape", ()))
    told: dict[str, Any] = {
        "function": name,
        "output": shape,
        "shape": tuple(target.shape),
        "count": plain.numel(),
        "wants_signs": name in SIGNED,
        "low": low,
        "high": high,
        "alike": not plain.dim() or (plain == plain[:1]).all(),
    }
    if name == "kl_div" and isinstance(output, Tensor) and output.numel() and elements.is_plain(output):
        told["highest"], told["log_target"] = output.detach().max(), bool(known.get("log_target"))
        told["is_normal"] = plain.is_floating_point() and plain.dim() > 0 and _are_probabilities(plain)
    if name == "cross_entropy" and plain.is_floating_point() and plain.dim():
        told["beyond"] = (plain.sum(min(1, plain.dim() - 1)) > 1 + _BEYOND).float().mean() * (plain >= 0).all()
    classes = shape[1:2] or shape  # of [batch, classes, ...], or of [classes] alone
    if name in OVER_CLASSES and not plain.is_floating_point() and plain.numel() > 1 and classes:
        counts = _counts(plain.flatten(), classes[0], known.get("ignore_index", -100))
        pooled = _pooled(seen, name, counts)
        told["is_uneven"] = known.get("weight") is not None or bool(known.get("label_smoothing"))
        told["entropy"] = _guess(pooled, known.get("weight"), known.get("label_smoothing", 0.0))
        told["weighed"] = weighed(pooled, known.get("weight"))
        if classes[0] <= _MOST_CLASSES:
            told["labels"] = counts
    each = known.get("pos_weight")
    if isinstance(each, Tensor) and (each.numel() == 1 or each.shape == plain.shape[-1:]):
        columns = plain.reshape(-1, each.numel())
        pooled = _pooled(seen, name, torch.stack([(columns == value).sum(0) for value in (0, 1)]).float())
        told["weighed"] = weighed(pooled, torch.stack([torch.ones_like(each), each]))
    is_even = known.get("weight") is None  # each target counts alike
    if name in _GUESSES and is_even and plain.is_floating_point() and plain.dim() and plain.shape[0] >= _LEAST_ROWS:
        told["spread"], told["is_pooled"] = _spread(name, plain.float(), known, seen)
    return told


def _spread(
    name: str, targets: Tensor, known: Mapping[str, Any], seen: dict[tuple[str, int], Tensor]
) -> tuple[Tensor, bool]:
    """What the mean of a loss is for a model that knows how its targets are spread, and nothing else; and whether that
    is of the targets of all looks so far, or, where these are too many to be kept, of this batch alone.

    Batches may be groups, that differ from one another by more than the targets in one of them do.
    """
    if not 0 < targets[0].numel() <= _MOST_COLUMNS:
        return _GUESSES[name](targets, known), False
    if name not in _POOLED:
        return _GUESSES[name](_rows(seen, name, targets), known), True
    wide = targets.to(elements.wide_type(targets))
    sums = torch.stack([torch.ones_like(wide[0]) * len(wide), wide.sum(0), wide.square().sum(0)])
    return _POOLED[name](targets, _pooled(seen, name, sums), known), True


def _rows(seen: dict[tuple[str, int], Tensor], name: str, targets: Tensor) -> Tensor:
    """The targets of all looks, ``[rows, columns]``; of more than can be kept every second row, every fourth, ..."""
    plain = targets.reshape(len(targets), -1)
    columns = plain.size(1)
    most = max(_LEAST_KEPT, _MOST_KEPT // columns)
    kept = seen.get((f"rows of {name}", columns), plain[:0])
    count = int(seen.get((f"number of {name}", columns), torch.zeros((), dtype=torch.int64, device="cpu")))
    kept, count = (kept, count) if kept.device == plain.device else (plain[:0], 0)
    before, stride = (1 << max(0, -(-one // most) - 1).bit_length() for one in (count, count + len(plain)))
    rows = torch.cat([kept[:: stride // before], plain[-count % stride :: stride]])
    seen[f"rows of {name}", columns] = rows
    seen[f"number of {name}", columns] = torch.tensor(count + len(plain), dtype=torch.int64, device="cpu")
    return rows


def _pooled(seen: dict[tuple[str, int], Tensor], name: str, counts: Tensor) -> Tensor:
    """``counts`` of a batch, and of those before that were counted on that device in as many numbers."""
    before = seen.get((name, counts.numel()))
    pooled = counts if before is None or before.device != counts.device else before + counts
    seen[name, counts.numel()] = pooled
    return pooled


def _are_probabilities(targets: Tensor) -> Tensor:
    """Whether targets, or what they are the logarithms of, add up to one along the last or the second dimension."""
    plain = targets.float()
    plain = torch.where((plain <= 0).all(), plain.exp(), plain)
    dims = {plain.dim() - 1, min(1, plain.dim() - 1)}
    return torch.stack([((plain.sum(dim) - 1).abs() < _NORMAL).all() for dim in dims]).any()


def _variance(targets: Tensor, sums: Tensor, known: Mapping[str, Any]) -> Tensor:
    """The mean squared error of a model that knows the mean of each column of its targets, by their ``sums`` over all
    looks: how many, of them, and of their squares."""
    count, total, squares = sums.unbind()
    return ((squares - total.square() / count) / (count - 1)).clamp(min=0).mean()


def _of_probabilities(targets: Tensor, sums: Tensor | None, known: Mapping[str, Any]) -> Tensor:
    """The binary cross entropy of a model that knows the mean of each column of its targets, and nothing else; of all
    looks, where their ``sums`` are known.

    Corrected for how few they are, as ``_entropy``, but never more than for a coin. Infinite where targets are between
    0 and 1: the loss then ends at their own entropy, which may be as much; and where all are alike, as a batch of a
    GAN's, which tells nothing of guessing. ``pos_weight`` of the call counts targets of 1 that often.
    """
    is_varied = (targets == targets[:1]).logical_not().any(0)  # what is the same in every row needs no correction
    each, total = (torch.full_like(targets[0], len(targets)), targets.sum(0)) if sums is None else (sums[0], sums[1])
    count, mean = each.flatten()[0], (total / each).clamp(0, 1).to(targets.dtype)
    positive, negative = mean * (1 if known.get("pos_weight") is None else known["pos_weight"]), 1 - mean
    whole = positive + negative
    found = (torch.xlogy(whole, whole) - torch.xlogy(positive, positive) - torch.xlogy(negative, negative)).mean()
    found = torch.minimum(found + is_varied.float().mean() * 0.5 / count, whole.mean() * math.log(2))
    return torch.where(((targets == 0) | (targets == 1)).all() & is_varied.any(), found, math.inf)


def _of_huber(targets: Tensor, edge: float) -> Tensor:
    """The Huber loss of a model that knows the median of each column of its targets, and nothing else."""
    away = (targets - targets.median(0).values).abs()
    return torch.where(away < edge, 0.5 * away.square(), edge * (away - 0.5 * edge)).mean()


def _of_smooth_l1(targets: Tensor, known: Mapping[str, Any]) -> Tensor:
    """The smooth L1 loss of such a model: the Huber loss over ``beta``, and the absolute error where that is 0."""
    beta = float(known.get("beta", 1.0))
    return _of_huber(targets, beta) / beta if beta else (targets - targets.median(0).values).abs().mean()


# What the mean of a loss is for a model that knows how its targets are spread, and nothing else.
_GUESSES: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "mse_loss": lambda targets, _: targets.var(0).mean(),
    "l1_loss": lambda targets, _: (targets - targets.median(0).values).abs().mean(),
    "smooth_l1_loss": _of_smooth_l1,
    "huber_loss": lambda targets, known: _of_huber(targets, float(known.get("delta", 1.0))),
    "binary_cross_entropy": lambda targets, known: _of_probabilities(targets, None, known),
    "binary_cross_entropy_with_logits": lambda targets, known: _of_probabilities(targets, None, known),
}
# Those of which sums tell it of all looks together; of the others rows are kept, for their median.
_POOLED: dict[str, Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]] = {
    "mse_loss": _variance,
    "binary_cross_entropy": _of_probabilities,
    "binary_cross_entropy_with_logits": _of_probabilities,
}


def _counts(labels: Tensor, classes: int, ignored: int) -> Tensor:
    """How often each class comes, ``[classes]``; labels that the loss passes over, or that are none, are left out."""
    inside = ((labels >= 0) & (labels < classes) & (labels != ignored)).float()
    counts = torch.zeros(classes, dtype=torch.float32, device=labels.device)
    return counts.scatter_add_(0, labels.long().clamp(0, classes - 1), inside)


def _guess(counts: Tensor, weight: Any, smoothing: float) -> Tensor:
    """The mean cross entropy of a model that knows how often each class comes, and nothing else; of dimension 0.

    With weights w and smoothing s the loss is -sum_c a_c log p_c / sum_c w_c n_c, of a_c = w_c ((1 - s) n_c + s n / K),
    n_c of n labels being of class c of K: it is least where p is a divided by its sum. Infinite as ``_entropy`` is.
    """
    is_plain = isinstance(weight, Tensor) and elements.is_plain(weight) and weight.device == counts.device
    if not smoothing and not is_plain:
        return _entropy(counts)
    each = weight.detach().float() if is_plain else torch.ones_like(counts)
    total = counts.sum()
    costs = each * ((1 - smoothing) * counts + smoothing * total / len(counts))
    found = (torch.xlogy(costs.sum(), costs.sum()) - torch.xlogy(costs, costs).sum()) / (each * counts).sum()
    is_seen = (counts == 1).sum() <= 0.5 * total
    return torch.where(is_seen & found.isfinite(), found, math.inf)


def _entropy(counts: Tensor) -> Tensor:
    """The entropy of labels in nats, of dimension 0, by the counts of some: classes that are rare have not come.

    That is the cross entropy of a model that knows how often each class comes, and nothing else. The estimate is that
    of Chao and Shen (2003), by the share of all labels whose class has been seen: one less that of classes seen once.
    Infinite where that share is below a half, and nothing can be said.
    """
    total = counts.sum().clamp(min=1)
    coverage = (1 - (counts == 1).sum() / total).clamp(min=0)
    shares = coverage * counts / total
    is_seen = 1 - (1 - shares).pow(total)  # how likely a class of this share is to be among them
    found = -(torch.xlogy(shares, shares) / torch.where(shares > 0, is_seen, 1)).sum()
    return torch.where(coverage < 0.5, math.inf, found)
