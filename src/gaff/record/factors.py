"""By what a loss was multiplied before its backward pass, and what guessing gives, as looks tell it. No torch."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any

Look = tuple[int, dict[str, Any]]  # the step of a look, and what its event tells

_USUAL = 0.75  # the share of looks at which a loss must be of one scale
_FADED, _STEPS = 1.5, 3  # the largest weight over the smallest, and how many there are, of a loss that is faded in


def at_first_scale(name: str, values: Iterable[tuple[int, float]], looks: list[Look]) -> list[tuple[int, float]]:
    """Values of a loss, by step, divided by how many times its weight is what it was at the first look.

    Of one that is faded in or out; values of others stay as they are. The weight of a step is that of the look before.
    """
    weights = _told("weight", name, looks)
    if not _is_faded(weights):
        return list(values)
    steps = [step for step, _ in looks]
    return [(step, value * weights[0] / weights[max(0, bisect_right(steps, step) - 1)]) for step, value in values]


def short_groups(passes: Iterable[tuple[int, float]]) -> set[int]:
    """The steps that had fewer backward ``passes``, of which there is a number by step, than the steps around them.

    At the end of an epoch fewer batches may be left than gradients are accumulated over. What divides a loss is then
    another number, and its value is not of the scale of the others.
    """
    counts = list(passes)
    edges = counts[1:2] + counts + counts[-2:-1]  # the first and the last have one neighbour, on both sides of them
    around = zip(edges, counts, edges[2:], strict=False)
    return {step for (_, before), (step, count), (_, after) in around if count < min(before, after)}


def factor_of(name: str, looks: list[Look]) -> float:
    """The factor of a loss that ``at_first_scale`` has left on its values; 1 where there is none.

    NaN where it is another at more than a quarter of the looks, as where the number of accumulated batches changes, or
    a loss is a sum over batches of all sizes: values are of no one scale. Single looks may have others, as that at a
    last batch of an epoch.
    """
    told = [
        (one["scale"], one["factor"]) if one.get("factor_of") == name else (1.0, 1.0)
        for _, one in looks
        if one.get("factor_of", name) == name and ("factor_of" not in one or isinstance(one.get("scale"), float))
    ]
    factors = _told("factor", name, looks)
    if told:
        usual = statistics.median_low(scale for scale, _ in told[len(told) // 2 :])
        alike = [factor for scale, factor in told if math.isclose(scale, usual, rel_tol=1e-3)]
        if len(alike) < _USUAL * len(told):
            return math.nan
        factors = [factors[0], *alike]
    return factors[0 if _is_faded(_told("weight", name, looks)) else -1] if factors else 1.0


def guesses(looks: list[Look]) -> dict[str, float]:
    """What guessing gives, by the name of a loss: the mean over the looks.

    Of a loss over few classes it is the entropy of the labels of all looks together, since batches of a few have less;
    of one over many, or with weights or smoothing, and of errors and truths the last look has it, which was told by all
    targets so far. Each is told without the factor of its look, and then with that of the run.
    """
    found: dict[str, list[float]] = {}
    pooled: dict[str, float] = {}
    labels: dict[str, list[Counter[int]]] = {}
    for _, one in looks:
        if not isinstance(one.get("guess"), float):
            continue
        name = str(one["guess_of"])
        by = one["factor"] if one.get("factor_of") == name else 1.0
        if by:
            found.setdefault(name, []).append(one["guess"] / by)
            pooled |= {name: one["guess"] / by} if one.get("is_pooled") else {}
            if isinstance(one.get("labels"), list):
                labels.setdefault(name, []).append(Counter(dict(enumerate(map(int, one["labels"])))))
    guess = {name: statistics.fmean(values) for name, values in found.items()} | pooled
    for name, counts in labels.items():
        total = sum(counts, Counter())
        if name not in pooled and len(counts) == len(found[name]) and total:
            shares = [count / total.total() for count in total.values()]
            guess[name] = -sum(one * math.log(one) for one in shares)
    return {name: factor_of(name, looks) * value for name, value in guess.items()}


def _told(what: str, name: str, looks: list[Look]) -> list[float]:
    return [float(one.get(what, 1.0)) if one.get("factor_of") == name else 1.0 for _, one in looks]


def _is_faded(weights: list[float]) -> bool:
    """Whether a weight is at most one and goes one way, in steps: a single other one may be that of a look whose passes
    disagree."""
    pairs = list(itertools.pairwise(weights))
    goes_one_way = all(one <= other for one, other in pairs) or all(one >= other for one, other in pairs)
    is_weight = goes_one_way and min(weights, default=0.0) > 0 and max(weights) <= 1
    return is_weight and len(set(weights)) > _STEPS and max(weights) > _FADED * min(weights)
