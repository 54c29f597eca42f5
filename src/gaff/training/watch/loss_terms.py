"""The autograd nodes just behind a loss, as chains: what a loss is the sum of, and by what each part is multiplied."""

from __future__ import annotations

import math
from collections import deque
from itertools import takewhile
from typing import Any

import torch
from torch.nn.functional import nll_loss

from gaff.compat.autograd import kept_by

_DEPTH = 10
_MOST_TERMS = 32
_LITTLE = 2.0  # times what a softmax or sigmoid may be multiplied and still count as what it is
_VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "TransposeBackward",
          "PermuteBackward", "UnsqueezeBackward", "ToCopyBackward", "CloneBackward", "IndexBackward", "SelectBackward",
          "SliceBackward", "IndexSelectBackward", "MaskedSelectBackward", "AliasBackward", "ExpandBackward",
          "AsStridedBackward", "SplitBackward", "SplitWithSizesBackward", "UnbindBackward")  # fmt: skip
MEANS = ("MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward")  # that reduce by themselves
BY_HAND = (
    ("MeanBackward", "SumBackward"),
    ("PowBackward", "AbsBackward", "MulBackward"),
    ("SubBackward", "RsubBackward"),
)  # the nodes of a loss by hand, from its end


def chain_of(node: Any) -> list[Any]:
    """A node and those behind it, along the first input of each, ten at the most."""
    chain: list[Any] = []
    while node is not None and len(chain) < _DEPTH:
        chain.append(node)
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return chain


def both_ways(chain: list[Any], names: list[str], name: str) -> dict[str, Any]:
    """What is known of a sum of two mean cross entropies of pairs with one another, by rows and by columns (CLIP).

    Each is over as many classes as there are examples; ``times``: how many times the mean of the two their sum is.
    """
    if names[:1] != ["AddBackward"]:
        return {}
    counts, times = set[int](), 0.0
    for one, _ in chain[0].next_functions:
        behind, factor = chain_of(one), 1.0
        while behind and (last := factor_of(behind[0])) is not None:
            factor, behind = factor * last, behind[1:]
        plain = [one for one in behind if not is_view(name_of(one))][:2]
        told = [name_of(one) for one in plain]
        shape: Any = getattr(kept_by(plain[1], "result"), "shape", ()) if len(plain) == 2 else ()
        is_mean = told == ["NllLossBackward", "LogSoftmaxBackward"] and getattr(plain[0], "_saved_reduction", 0) == 1
        if not is_mean or len(shape) != 2 or shape[0] != shape[1] or factor <= 0:
            return {}
        counts.add(int(shape[0]))
        times += factor
    if len(counts) != 1:
        return {}
    return {"classes": {"loss": name, "count": counts.pop(), "times": times}, "scores": name}


def terms_of(node: Any) -> list[list[Any]]:
    """The chains of a loss's summands, 32 at the most, each without the numbers above 0 that it is multiplied by.

    What is taken away, as the entropy of a policy is, is none of them. Empty of what is neither sum nor difference.
    """
    found: list[list[Any]] = []
    is_one = True
    waiting = deque([node])  # the outer ones first: a loop that adds up thousands makes as many sums, each in the next
    while waiting and len(found) < _MOST_TERMS:
        node = waiting.popleft()
        while (factor := factor_of(node)) is not None and factor > 0:
            node = node.next_functions[0][0]
        inner = _summed_by(node)
        waiting += inner
        is_one = is_one and not inner
        if not inner:
            found.append(chain_of(node))
    return [] if is_one else found


def part_over_classes(terms: list[list[Any]]) -> dict[str, Any]:
    """Of the one summand of a loss that is a mean cross entropy: its value, and among how many classes it is.

    Worked out once more from what torch keeps of it for the backward pass. Empty where there is none, or several.
    """
    told = [[one for one in term if not is_view(name_of(one))][:2] for term in map(without_smoothing, terms)]
    kinds = [(name_of(term[0]).replace("2D", ""), *map(name_of, term[1:])) for term in told if term]
    if kinds.count(("NllLossBackward", "LogSoftmaxBackward")) != 1:
        return {}
    node = told[kinds.index(("NllLossBackward", "LogSoftmaxBackward"))][0]
    scores, target, weight = (kept_by(node, name) for name in ("self", "target", "weight"))
    if scores is None or target is None or scores.dim() < 2 or getattr(node, "_saved_reduction", 0) != 1:
        return {}
    ignored = int(node._saved_ignore_index)  # which torch tells without its sign
    with torch.no_grad():
        value = nll_loss(scores, target, weight, ignore_index=ignored - (ignored >= 1 << 63) * (1 << 64))
    return {"value": value, "among": int(scores.shape[1])}


def taken_from(node: Any) -> list[list[Any]]:
    """The chains of what is subtracted in a loss, at most 32, each without the numbers that it is multiplied by."""
    found: list[list[Any]] = []
    waiting = deque([node])
    while waiting and len(found) < _MOST_TERMS:
        node = waiting.popleft()
        while factor_of(node) is not None:
            node = node.next_functions[0][0]
        if name_of(node) == "SubBackward":
            taken = node.next_functions[1][0] if len(node.next_functions) > 1 else None
            while taken is not None and factor_of(taken) is not None:
                taken = taken.next_functions[0][0]
            found += [chain_of(taken)] if taken is not None else []
        waiting += _summed_by(node)
    return found


def _summed_by(node: Any) -> list[Any]:
    """The nodes of what one adds up: two terms, or a list of them (``torch.stack(losses).sum()``); of a difference
    the one of which something is taken."""
    behind = [one for one, _ in node.next_functions if one is not None]
    if name_of(node) in ("SumBackward", "MeanBackward") and len(behind) == 1 and name_of(behind[0]) == "StackBackward":
        return [one for one, _ in behind[0].next_functions if one is not None]
    if name_of(node) == "SubBackward":
        return [one for one, _ in node.next_functions[:1] if one is not None]
    return behind if name_of(node) == "AddBackward" and len(behind) > 1 else []


def without_smoothing(chain: list[Any]) -> list[Any]:
    """The chain of a cross entropy with smoothed labels from its negative log-likelihood on; any other as it is.

    torch makes such a loss of two terms, of one log_softmax: the likelihood, and the mean over all classes.
    """
    terms = terms_of(chain[0]) if chain and name_of(chain[0]) == "AddBackward" else []
    if len(terms) != 2 or [name_of(one) for one in terms[0][:1]] not in (["NllLossBackward"], ["NllLoss2DBackward"]):
        return chain
    first, second = (next((one for one in term if name_of(one) == "LogSoftmaxBackward"), None) for term in terms)
    is_mean = "SumBackward" in map(name_of, terms[1]) and "NllLossBackward" not in map(name_of, terms[1])
    return terms[0] if first is not None and first is second and is_mean else chain


def _without_average(chain: list[Any]) -> list[Any]:
    """The chain of the first of several softmaxes or sigmoids of which something is the sum or the mean, as that of an
    ensemble is, or the mean by what another softmax weights them with; any other as it is."""
    terms = terms_of(chain[0]) if chain else []
    kinds = {next((name for one in term if not is_view(name := name_of(one))), "") for term in terms}
    if len(terms) > 1 and kinds in ({"SoftmaxBackward"}, {"SigmoidBackward"}):
        return terms[0]
    plain = [one for one in chain if not is_view(name_of(one))][:2]
    if list(map(name_of, plain)) != ["SumBackward", "MulBackward"]:
        return chain
    behind = [one for one, _ in plain[1].next_functions if one is not None]
    ends = [next((one for one in chain_of(first) if not is_view(name_of(one))), first) for first in behind]
    whole = [one for one in behind if name_of(one) == "SoftmaxBackward" and _axis(one) not in _axes(plain[0])]
    is_mixture = len(ends) == 2 and all(name_of(one) == "SoftmaxBackward" for one in ends)
    return chain_of(whole[0]) if is_mixture and whole else chain


def _axis(softmax: Any) -> int:
    return signed(softmax._saved_dim) % max(1, len(softmax._input_metadata[0].shape))


def _axes(total: Any) -> list[int]:
    """The dimensions over which a sum runs; all that there are where it is of everything."""
    rank = len(total._saved_self_sym_sizes)
    return [signed(one) % max(1, rank) for one in getattr(total, "_saved_dim", None) or range(rank)]


def signed(number: int) -> int:
    """A number of 64 bits that autograd's nodes tell without its sign."""
    return number - ((number >> 63) << 64)


def name_of(node: Any) -> str:
    """The kind of a node, without the number that torch adds: ``AddBackward``."""
    return str(node.name()).rstrip("0123456789")


def factor_of(node: Any) -> float | None:
    """The number by which a node multiplies, or divides, what comes; None where it does something else."""
    kind = name_of(node)
    if kind not in ("MulBackward", "DivBackward"):
        return None
    value = getattr(node, "_saved_other", None) if node.name().endswith("1") else None  # a number, of torch's own code
    if not isinstance(value, float):
        other = kept_by(node, "other")
        if other is None or other.numel() != 1 or other.device.type != "cpu" or other.requires_grad:
            return None
        if other.is_complex():
            return None
        value = float(other)
    factor = 1 / value if value and kind == "DivBackward" else value
    return factor if factor and math.isfinite(factor) else None


def is_view(name: str) -> bool:
    """Whether an autograd node of this name only passes values on, in another shape, order or type."""
    return name in _VIEWS


def is_logistic(chain: list[Any]) -> bool:
    """Whether a loss is a mean of ``log(1 + exp(-score))``, as of pairs of which one is to have the higher score: by
    softplus, or as minus a log_sigmoid or the logarithm of a sigmoid."""
    kinds = [name for one in chain if not is_view(name := name_of(one))]
    outer = list(takewhile(lambda kind: kind in ("MeanBackward", "NegBackward"), kinds))
    inner = [kind for kind in kinds[len(outer) :] if kind not in ("AddBackward", "ClampBackward", "ClampMinBackward")]
    ends = ["SoftplusBackward"], ["LogSigmoidBackward"], ["LogBackward", "SigmoidBackward"]
    is_minus = outer.count("NegBackward") == 1
    return outer.count("MeanBackward") == 1 and any(
        inner[: len(end)] == end and is_minus == (end is not ends[0]) for end in ends
    )


def source_of(chain: list[Any]) -> str:
    """The kind of the node that made what a chain hands on: past those that leave it about as it is, and past the mean
    of several."""
    kept = next((at for at, one in enumerate(chain) if not _is_kept(one)), len(chain))
    return next((name for one in _without_average(chain[kept:]) if not is_view(name := name_of(one))), "")


def _is_kept(node: Any) -> bool:
    """Whether a node leaves what a softmax or sigmoid returns about as it is; not one that joins it with something
    else, as a gate does, or makes it much larger, as scores that are to be bounded are."""
    is_mixed = not is_view(name_of(node)) and sum(one is not None for one, _ in node.next_functions) > 1
    return is_passed(name_of(node)) and not is_mixed and abs(factor_of(node) or 1.0) <= _LITTLE


def is_passed(name: str) -> bool:
    """Whether a node also passes a softmax on as what it is: clamped, scaled or shifted by little."""
    return is_view(name) or name in ("ClampBackward", "ClampMinBackward", "ClampMaxBackward", "MulBackward",
                                      "DivBackward", "AddBackward")  # fmt: skip


def is_of_differences(chain: list[Any]) -> bool:
    """Whether a chain is a mean or sum by hand of squares or absolute values of differences."""
    names = [
        name for one in chain if not is_view(name := name_of(one)) and name not in ("SqrtBackward", "NormBackward")
    ]
    return len(names) > 2 and all(name in kinds for name, kinds in zip(names, BY_HAND, strict=False))


def is_error(chain: list[Any]) -> bool:
    """Whether a summand is the mean of an error: one of torch's losses, or of differences by hand."""
    first = next((name for one in chain if not is_view(name := name_of(one))), "")
    return first in MEANS or is_of_differences(chain)


def is_error_by_hand(chain: list[Any], names: list[str]) -> bool:
    """Whether a chain is a mean or sum of even powers, or absolute values, of a difference from something constant."""
    plain = [at for at, one in enumerate(names) if not is_view(one)][:3]
    told = [names[at] for at in plain]
    if len(told) < 3 or any(one not in known for one, known in zip(told, BY_HAND, strict=True)):
        return False
    power = getattr(chain[plain[1]], "_saved_exponent", 2) if told[1] == "PowBackward" else 2
    is_even = told[1] != "MulBackward" and power % 2 == 0
    return is_even and sum(one is not None for one, _ in chain[plain[2]].next_functions) == 1
