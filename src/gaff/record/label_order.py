"""Whether the data comes in the order of its labels, as the labels of the looked-at batches tell it. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

_LEAST_PAIRS = 8  # of looks at steps one after the other
_MOST = 64  # looks that are compared with one another
_MOST_WITHIN = 0.4  # of the entropy of all labels, that those of one batch have; both chosen


class LabelOrder(NamedTuple):
    """Mean entropy of the labels of one batch, and that of all labels, in nats."""

    within: float
    whole: float


def label_order(looks: list[tuple[int, dict[str, Any]]]) -> LabelOrder | None:
    """How far the labels of a batch are alike, where that is for the order of the data; else None.

    A batch then has few of the labels that there are, and the batch of the next step has the same ones, or their
    neighbours: batches that are drawn to hold few classes each are no more like the next one than like any other.
    ``looks``: steps and what they told, in the order of steps.
    """
    told = [
        (step, _counts(one), str(one.get("guess_of"))) for step, one in looks if isinstance(one.get("labels"), list)
    ]
    told = [(step, counts, name) for step, counts, name in told if counts.total() >= 2 * len(counts) and counts]
    if len({name for _, _, name in told}) != 1:
        return None
    beside = [_likeness(one, other) for (step, one, _), (then, other, _) in pairwise(told) if then == step + 1]
    every = [one for _, one, _ in told]
    some = every[:: math.ceil(len(every) / _MOST) or 1]
    apart = [_likeness(one, other) for at, one in enumerate(some) for other in some[at + 2 :]]
    whole = _entropy(sum(every, Counter()))
    if len(beside) < _LEAST_PAIRS or not apart or not whole:
        return None
    within = statistics.fmean(map(_entropy, every))
    is_ordered = within < _MOST_WITHIN * whole and statistics.fmean(beside) > 2 * statistics.fmean(apart) + 0.1
    return LabelOrder(within, whole) if is_ordered else None


def _counts(look: dict[str, Any]) -> Counter[int]:
    return Counter({at: int(count) for at, count in enumerate(look["labels"]) if count})


def _entropy(counts: Counter[int]) -> float:
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def _likeness(one: Counter[int], other: Counter[int]) -> float:
    """The cosine of the angle between two counts of labels."""
    product = sum(count * other[label] for label, count in one.items())
    return product / math.sqrt(sum(c * c for c in one.values()) * sum(c * c for c in other.values()))
