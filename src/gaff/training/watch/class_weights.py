"""Weights of classes in a loss: what they make of how often each class comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements

_LEAST_SEEN = 5  # labels of a class from which on it is known how often it comes


def weighed(counts: Tensor, weight: Any) -> dict[str, Tensor]:
    """What ``weight`` makes of ``counts``, how often each class came: tensors of dimension 0.

    Both are ``[classes]``, or ``[classes, columns]`` of as many questions with the same classes, such as no and yes. Of
    the class that has most of the weight: ``heaviest``, its number, its ``share`` of the weight of all labels, and its
    ``own`` share of the labels. Over the classes that came often enough, in each column by themselves, the ``slope`` of
    the logarithm of weights over that of counts, by least squares: -1 where weights are one over the counts, 1 where
    they are the counts; how well it fits, ``fit``, their correlation; and the ``spread`` of that of counts, a standard
    deviation. Classes of weight 0 are left out of all. Empty where there are no weights, or they cannot be read here.
    """
    if not isinstance(weight, Tensor) or not elements.is_plain(weight) or weight.device != counts.device:
        return {}
    with torch.no_grad():
        counts = counts.reshape(len(counts), -1)
        each = weight.detach().float().reshape(counts.shape)
        known = torch.where(each > 0, counts, 0.0)
        share = (each * known).sum(1) / (each * known).sum()
        heaviest = share.argmax()
        is_known = known >= _LEAST_SEEN
        among = is_known.sum(0).clamp(min=1)
        logs = (torch.where(is_known, one, 1.0).log() for one in (each, counts))
        heavy, often = (torch.where(is_known, one - one.sum(0) / among, 0.0) for one in logs)
        common, of_counts, of_weights = (heavy * often).sum(), often.square().sum(), heavy.square().sum()
        return {
            "heaviest": heaviest,
            "share": share[heaviest],
            "own": known[heaviest].sum() / known.sum(),
            "slope": common / of_counts,
            "fit": common / (of_counts * of_weights).sqrt(),
            "spread": (of_counts / is_known.sum()).sqrt(),
        }
