"""Weights of classes in a loss: what they make of how often each class comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements

_LEAST_SEEN = 5  # labels of a class from which on it is known how often it comes


def weighed(counts: Tensor, weight: Any) -> dict[str, Tensor]:
    """What ``weight`` makes of ``counts``, how often each class came, both ``[classes]``: tensors of dimension 0.

    Of the class that has most of the weight: ``heaviest``, its number, its ``share`` of the weight of all labels, and
    its ``own`` share of the labels. Over the classes that came often enough the ``slope`` of the logarithm of weights
    over that of counts, by least squares: -1 where weights are one over the counts, 1 where they are the counts; how
    well it fits, ``fit``, their correlation; and the ``spread`` of that of counts, a standard deviation. Classes of
    weight 0 are left out of all. Empty where there are no weights, or they cannot be read here.
    """
    if not isinstance(weight, Tensor) or not elements.is_plain(weight) or weight.device != counts.device:
        return {}
    with torch.no_grad():
        each = weight.detach().float()
        total = each * counts
        heaviest = total.argmax()
        is_known = (counts >= _LEAST_SEEN) & (each > 0)
        among = is_known.sum().clamp(min=1)
        heavy, often = (torch.where(is_known, one, 1.0).log() for one in (each, counts))
        heavy, often = (torch.where(is_known, one - one.sum() / among, 0.0) for one in (heavy, often))
        common, of_counts, of_weights = (heavy * often).mean(), often.square().mean(), heavy.square().mean()
        return {
            "heaviest": heaviest,
            "share": total[heaviest] / total.sum(),
            "own": counts[heaviest] / torch.where(each > 0, counts, 0.0).sum(),
            "slope": common / of_counts,
            "fit": common / (of_counts * of_weights).sqrt(),
            "spread": (often.square().sum() / among).sqrt(),
        }
