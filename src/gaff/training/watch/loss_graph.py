"""What the autograd graph just behind a loss tells of how the loss was computed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor

from gaff.compat.autograd import kept_by, nodes_behind, nodes_of
from gaff.training.watch.loss_terms import (
    BY_HAND,
    MEANS,
    both_ways,
    chain_of,
    factor_of,
    is_error,
    is_error_by_hand,
    is_logistic,
    is_of_differences,
    is_passed,
    is_view,
    name_of,
    part_over_classes,
    signed,
    source_of,
    taken_from,
    terms_of,
    without_smoothing,
)
from gaff.training.watch.models import Models

_MOST_NODES = 1000
_LAYERS = ("AddmmBackward", "MmBackward", "ConvolutionBackward")
_SUM = 2  # torch's number of that reduction
_OF_TARGETS = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "KlDiv")
_POSITIVE = {"NllLossBackward": "a cross entropy", "NllLoss2DBackward": "a cross entropy",
             "MseLossBackward": "a mean squared error", "SmoothL1LossBackward": "a smooth L1 error",
             "HuberLossBackward": "a Huber error", "BinaryCrossEntropyBackward": "a cross entropy",
             "BinaryCrossEntropyWithLogitsBackward": "a cross entropy"}  # fmt: skip
_TWICE = {("LogSoftmaxBackward", "SoftmaxBackward"): "softmax",
          ("BinaryCrossEntropyWithLogitsBackward", "SigmoidBackward"): "sigmoid"}  # fmt: skip
_SEVERAL = ("AddBackward", "DotBackward", "StackBackward", "CatBackward")  # of what they may make one
_PICKED = {"IndexBackward", "GatherBackward"}
_AROUND_PICKED = {*_PICKED, "NegBackward", "MeanBackward", "SumBackward", "DivBackward", "MulBackward", "LogBackward",
                  "AddBackward", "ClampBackward", "ClampMinBackward"}  # fmt: skip
_TURNS = {"TBackward", "TransposeBackward", "PermuteBackward", "NumpyTBackward", "MovedimBackward"}  # dimensions
_ENDS = ("NegBackward", "MeanBackward", "LogBackward", "ClampBackward", "ClampMinBackward", "ClampMaxBackward")
_REDUCED = ("MeanBackward", "SumBackward", "LinalgVectorNormBackward", "NormBackward")
_ONE_BY_ONE = (
    "PowBackward", "AbsBackward", "MulBackward", "DivBackward", "SqrtBackward", "AddBackward", "NegBackward",
    "SgnBackward", "LogBackward", "Log1PBackward", "ExpBackward", "CoshBackward", "SoftplusBackward", "MaximumBackward",
    "MinimumBackward", "ClampBackward", "ClampMinBackward", "ClampMaxBackward", "WhereBackward", "ReluBackward",
)  # functions of single elements, of which losses by hand are made  # fmt: skip
_ALONE = ("UnsqueezeBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "ExpandBackward")
_OF_TERMS = ("axis", "axis_dim", "doubled", "spread", "alone", "outside")
_MOST_ALONG = 64  # behind a loss, along the first input of each
_BOUNDS = {"ReluBackward": "relu", "SigmoidBackward": "sigmoid", "TanhBackward": "tanh"}


def facts_of_graph(loss: Tensor, name: str) -> dict[str, Any]:
    """What the autograd nodes just behind a loss tell the rules about how it was computed.

    Follows the first input of each node, ten nodes deep, past views. Reads no value that is on a device, so it waits
    for none.

    - ``classes``: how many classes a mean of the negative log-likelihood has that is the loss itself, no part of a sum;
      or each of the two that are all of it, of pairs with one another both ways
    - ``mean_of``: that a mean squared or absolute error, or a mean binary cross entropy, is it
    - ``logistic``: that it is the mean of a softplus, or of minus the logarithm of a sigmoid
    - ``nll``: that it, or a CTC loss, was not given log-probabilities
    - ``axis``: that its softmax or log_softmax ran over the batch
    - ``doubled``: that a softmax or a sigmoid was applied twice
    - ``negated``: that the loss is minus one that is never negative
    - ``bounded``: that a loss of torch's is given what an activation has cut off
    - ``spread``: that a loss by hand compares every output with every target
    - ``alone``: that it is given a softmax over a single class
    - ``picks``: that it is of some of the outputs, picked by their numbers
    - ``scores``: that a cross entropy is of scores of pairs, one of which is the right one, and not of classes
    - ``outside``: that a binary cross entropy is given targets outside of 0 to 1
    - ``factor``: by what it was multiplied at last, as where gradients are accumulated; ``weight``: without divisions,
      where that is below one, and of no sum of several losses, whose mean they make; ``scale``: all the rest, None of
      such a sum
    - ``terms``: how many are added up in it, where it is a sum; ``part``: the value of the cross entropy that it is the
      sum of with other terms, and among how many classes
    - ``summed``: that it is a sum of negative log-likelihoods, divided by a number: how many times their mean it is
    """
    found: dict[str, Any] = {}
    chain = chain_of(loss.grad_fn)
    factor = weight = 1.0
    while chain and (last := factor_of(chain[0])) is not None:
        weight *= last if chain[0].name().startswith("Mul") else 1.0
        factor, chain = factor * last, chain[1:]
    chain = without_smoothing(chain)
    names = list(map(name_of, chain))
    summed = _summed(chain, names)
    if summed is not None:
        at, ratio = summed
        chain, names = chain[at:], names[at:]
        found["summed"] = {"loss": name, "by": abs(factor) * ratio}
    elif factor not in (1.0, -1.0) and not _is_sum(chain, names):  # a sum that is divided is a mean
        inner = next((one for one in names if one != "MeanBackward" and not is_view(one)), "")
        is_several = inner in _SEVERAL
        faded = min(abs(weight), 1.0)  # what makes a loss larger is no weight by which it is faded in
        found["factor"] = {"loss": name, "by": abs(factor), "weight": 1.0 if is_several else faded,
                           "scale": None if is_several else abs(factor) / faded}  # fmt: skip
    _note_turned(chain, names, factor, name, found)
    if weight == 1.0:  # a policy's is multiplied by an advantage, or a cost, of any sign
        _note_likelihood(names, name, found)
    if names[:1] == ["RsubBackward"]:  # a number less the loss: of its value nothing can be said
        return found
    found |= dict.fromkeys(_guessed_by(chain, names, factor), name)
    for at in range(len(names)):
        _note_node(chain, names, at, name, found)
    spread = _spread(chain)
    if spread is not None:
        found["spread"] = {"loss": name, **spread}
    found |= both_ways(chain, names, name)
    if chain and factor > 0:
        found = _facts_of_terms(terms_of(chain[0]), taken_from(chain[0]), name) | found
    return found


def _guessed_by(chain: list[Any], names: list[str], factor: float) -> list[str]:
    """Those facts of a loss by which it is known what guessing gives, but for classes."""
    first = next((at for at, one in enumerate(names) if not is_view(one)), None)
    is_mean = first is not None and _is_mean(chain[first], names[first : first + 2])
    return ["mean_of"] * is_mean + ["logistic"] * (factor > 0 and is_logistic(chain))


def _facts_of_terms(terms: list[list[Any]], taken: list[list[Any]], name: str) -> dict[str, Any]:
    """Those facts of the summands of a loss that are wrong whatever they are added to, of the first that has them; and
    the value of the one that is a cross entropy.

    What compares all outputs with one another beside the mean of an error is no slip: it keeps them apart. Nor is what
    compares them with all targets where such pairs are ``taken`` from it, as in the distance of two distributions.
    """
    told = [_facts_of_term(term, name) for term in terms]
    has_error = any(is_error(term) for term, one in zip(terms, told, strict=True) if "spread" not in one)
    has_error = has_error or any(map(is_of_differences, taken))
    part = part_over_classes(terms)
    found: dict[str, Any] = {"part": {"loss": name, **part}} if part else {}
    if len(terms) > 1:
        found["terms"] = len(terms)
    for one in told:
        found = {kind: fact for kind, fact in one.items() if kind != "spread" or not has_error} | found
    return found


def _facts_of_term(chain: list[Any], name: str) -> dict[str, Any]:
    """Those facts of one summand of a loss that are wrong whatever it is added to."""
    found: dict[str, Any] = {}
    chain = without_smoothing(chain)
    names = list(map(name_of, chain))
    for at in range(len(names)):
        _note_node(chain, names, at, name, found)
    spread = _spread(chain, is_meant_by=_ALONE)
    if spread is not None:
        found["spread"] = {"loss": name, **spread}
    return {kind: told for kind, told in found.items() if kind in _OF_TERMS}


def teaches_targets(loss: Tensor) -> bool:
    """Whether two of torch's pairwise losses have in turn as their constant what the other one trains.

    So a codebook and the vectors that it stands for follow each other (van den Oord et al., 2017): going down the
    gradient of such a loss need not make it smaller. Known by memory, of losses that are among the first 1,000 nodes
    behind this one.
    """
    pairs = set[Any]()
    for node in islice(nodes_behind(nodes_of([loss])), _MOST_NODES):
        if name_of(node) in MEANS:
            ends = [kept_by(node, "self"), kept_by(node, "target")]
            known = [one for one in ends if type(one) is Tensor and one.numel() > 1]
            moved = [(one.device, one.data_ptr()) for one in known if one.requires_grad]
            held = [(one.device, one.data_ptr()) for one in known if not one.requires_grad]
            pairs |= {(moved[0], held[0])} if moved and held else set()
    return any((held, moved) in pairs for moved, held in pairs)


def _summed(chain: list[Any], names: list[str]) -> tuple[int, Tensor] | None:
    """Of a sum of negative log-likelihoods its place in the chain, and how many times the mean it is, on its device.

    Trainers add up those of a batch, and divide by the number of targets of all batches that are accumulated; such a
    division by a tensor may stand before it.
    """
    first = next((at for at, one in enumerate(names) if not is_view(one)), None)
    other = None
    if first is not None and names[first] == "DivBackward":
        other = kept_by(chain[first], "other")
        is_number = isinstance(other, Tensor) and other.numel() == 1 and not other.requires_grad
        first = (
            next((at for at, one in enumerate(names) if at > first and not is_view(one)), None) if is_number else None
        )
    if first is None or not names[first].startswith("NllLoss") or getattr(chain[first], "_saved_reduction", 1) != _SUM:
        return None
    targets = kept_by(chain[first], "target")
    if targets is None:
        return None
    count = (targets != signed(getattr(chain[first], "_saved_ignore_index", -100))).sum()
    return first, count if other is None else count / other.detach().to(count.device)


def _is_sum(chain: list[Any], names: list[str]) -> bool:
    """Whether the first node of a chain adds up what comes: a sum, or a loss of torch's that does."""
    return names[:1] == ["SumBackward"] or (bool(chain) and getattr(chain[0], "_saved_reduction", 0) == _SUM)


def _is_mean(node: Any, names: list[str]) -> bool:
    """Whether a loss's own node takes the mean of an error, or of binary cross entropies, without weights."""
    if names[0] in MEANS or names[0].startswith("BinaryCrossEntropy"):
        is_plain = kept_by(node, "weight") is None and kept_by(node, "pos_weight") is None
        return is_plain and getattr(node, "_saved_reduction", 0) == 1
    return names == ["MeanBackward", "AbsBackward"]


def _note_node(chain: list[Any], names: list[str], at: int, name: str, found: dict[str, Any]) -> None:
    """Note what the node at a place of the chain tells."""
    one = names[at]
    if one in _PICKED:
        found["picks"] = name
    before = next((place for place in range(at - 1, -1, -1) if not is_view(names[place])), 0)
    if one == "LogSoftmaxBackward" and at and names[before].startswith("NllLoss"):
        _note_classes(chain, names, at, before, name, found)
        if _is_of_pairs(chain, names, at):
            found["scores"] = name
    is_picked = _is_picked(names[:at])
    if one == "LogSoftmaxBackward" and is_picked:
        _note_softmax(chain[at], name, found, is_end=False, is_of_nll=True)
    if one == "SoftmaxBackward":
        before = next((place for place in range(at - 1, -1, -1) if not is_passed(names[place])), 0)  # log(p + 1e-9)
        is_log_of_nll = names[before] == "LogBackward" and names[0].startswith("NllLoss")
        if is_log_of_nll and names[0][:9] == "NllLoss2D" and not any(map(is_view, names[:at])):
            _note_axis(chain[at], name, found)
        is_end = all(is_view(other) or other in _ENDS or other.startswith(_OF_TARGETS) for other in names[:at])
        is_of_nll = is_log_of_nll or (is_picked and "LogBackward" in names[:at])
        is_straight = _TURNS.isdisjoint(names[:at])
        _note_softmax(chain[at], name, found, is_end=is_end, is_of_nll=is_of_nll and is_straight)
    if one.startswith("BinaryCrossEntropy"):
        _note_targets(chain[at], name, found)
    is_whole = all(is_view(other) or other in ("MeanBackward", "SumBackward", "DivBackward") for other in names[:at])
    _note_behind(one, chain[at + 1 :], name, found, is_whole=is_whole)


def _is_picked(names: list[str]) -> bool:
    """Whether one number of each row is picked by its place, as a likelihood that is written out does with labels."""
    return not _PICKED.isdisjoint(names) and all(is_view(one) or one in _AROUND_PICKED for one in names)


def _note_softmax(node: Any, name: str, found: dict[str, Any], *, is_end: bool, is_of_nll: bool) -> None:
    """Note a softmax over one class, or over the batch where its logarithm is a negative log-likelihood's.

    ``is_end``: it is what the loss is given, and no weight of something else.
    """
    shape: Any = getattr(kept_by(node, "result"), "shape", ())
    dim = signed(node._saved_dim)
    if is_end and shape and shape[dim] == 1:
        found["alone"] = {"loss": name, "shape": list(shape)}
    elif is_of_nll and len(shape) == 2 and shape[0] != shape[1] and dim == 0:
        found["axis"] = name


def _note_axis(node: Any, name: str, found: dict[str, Any]) -> None:
    """Note a softmax of images over another dimension than the second, in which the loss looks for the classes."""
    shape: Any = getattr(kept_by(node, "result"), "shape", ())
    dim = signed(node._saved_dim) % max(1, len(shape))
    if len(shape) > 2 and dim != 1:
        found["axis"], found["axis_dim"] = name, f"dimension {dim} of {list(shape)}"


def bad_target(loss: Tensor) -> str:
    """What is wrong with the targets of a loss that is not finite, in words; empty where nothing of it is.

    Reads what the nodes of torch's losses among the first 1,000 behind it have kept; waits for the device.
    """
    behind: Iterable[Any] = nodes_behind(nodes_of([loss]))
    for node in islice(behind, _MOST_NODES):
        name = name_of(node)
        if not name.startswith(_OF_TARGETS):
            continue
        targets = kept_by(node, "target")
        told = _bad(node, name, targets) if type(targets) is Tensor else ""
        if told:
            return told
    return ""


def _bad(node: Any, name: str, targets: Tensor) -> str:
    """What is wrong with the targets of one loss, if they are; not of what the model returned, in the wrong place."""
    if targets.requires_grad:
        return ""
    if not targets.numel():
        return "the loss was given an empty batch"
    if name.startswith("NllLoss"):
        ignored = signed(getattr(node, "_saved_ignore_index", 0))
        is_mean = getattr(node, "_saved_reduction", 0) == 1
        is_empty = is_mean and bool((targets == ignored).all())
        return f"all {targets.numel()} targets of the cross entropy are {ignored}, which it ignores: a mean over none" \
            if is_empty else ""  # fmt: skip
    count = int((~targets.isfinite()).sum())
    return f"{count} of {targets.numel()} targets are not finite" if count else ""


def leaves_behind(loss: Tensor) -> tuple[list[Tensor], bool]:
    """The parameters that a loss depends on, as far as the first 1,000 nodes behind it tell; whether that is all."""
    nodes = list(islice(nodes_behind(nodes_of([loss])), _MOST_NODES))
    variables: list[Tensor | None] = [getattr(node, "variable", None) for node in nodes]
    return [one for one in variables if one is not None], len(nodes) < _MOST_NODES


def is_of_others(loss: Tensor, models: Models) -> bool:
    """Whether a loss depends on parameters of other models than ours, and on none of ours, as 1,000 nodes tell."""
    is_any = False
    for at, node in enumerate(nodes_behind(nodes_of([loss]))):
        leaf = getattr(node, "variable", None)
        if at == _MOST_NODES or (leaf is not None and models.owner_of(leaf)):
            return False
        is_any = is_any or (leaf is not None and models.is_of_another(leaf))
    return is_any


def _spread(chain: list[Any], *, is_meant_by: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """The shapes of what a difference was made of, and of the difference, where one broadcast both to a square.

    Or of a product with a constant that has a number for each example. Of a loss that is one mean, sum or norm of it,
    with functions of single elements before and after, also of several tensors, as where an error is divided by a
    variance. ``is_meant_by``: nodes that give a further dimension, as where all are compared with all on purpose.
    """
    waiting = [(one, 0, True) for one in chain[:1]]  # with how many reductions were passed, and whether in the chain
    for _ in range(_MOST_ALONG):
        if not waiting:
            break
        node, reduced, is_first = waiting.pop()
        kind = name_of(node)
        constant = _one_for_each(node) if kind == "MulBackward" else None
        is_made = kind in BY_HAND[2] or constant is not None
        if reduced == 1 and is_made and (told := _squared(node, is_meant_by if is_first else _ALONE)):
            return told if constant is None else {**told, "constant": constant.detach().double().sum()}
        behind = [one for one, _ in node.next_functions if one is not None]
        if is_view(kind) or kind in (*_REDUCED, *_ONE_BY_ONE) or (reduced and kind in BY_HAND[2]):
            inner = behind if reduced else behind[:1]  # of terms that are added up later each is asked by itself
            waiting += [(one, reduced + (kind in _REDUCED), is_first and not at) for at, one in enumerate(inner)][::-1]
    return None


def _one_for_each(product: Any) -> Tensor | None:
    """The constant that a tensor is multiplied with, where it may have a number for each example."""
    constant = next((one for one in (kept_by(product, "other"), kept_by(product, "self")) if one is not None), None)
    return constant if constant is not None and constant.numel() == max(constant.shape, default=0) > 1 else None


def _squared(node: Any, is_meant_by: tuple[str, ...]) -> dict[str, Any] | None:
    """The shapes of one difference, as above."""
    made = tuple(node._input_metadata[0].shape)
    given = [tuple(one._input_metadata[at].shape) for one, at in node.next_functions if one is not None]
    if any(one is not None and name_of(one) in is_meant_by for one, _ in node.next_functions):
        return None
    is_square = len(made) == 2 and made[0] == made[1] > 1
    if not is_square or len(given) != 1 or given[0] not in ((made[0], 1), (1, made[0]), (made[0],)):
        return None
    return {"output": given[0], "made": made}


def _note_classes(chain: list[Any], names: list[str], at: int, before: int, name: str, found: dict[str, Any]) -> None:
    """Note over how many classes the log_softmax at a place of the chain runs, and whether it is over something else.

    ``before``: the place of the loss that takes the mean of it. Of inputs with more than two dimensions that loss
    finds the classes in the second one, as long as no dimensions were exchanged in between.
    """
    shape: Any = getattr(kept_by(chain[at], "result"), "shape", ())
    is_mean = getattr(chain[before], "_saved_reduction", 1) == 1 or "summed" in found
    if len(shape) == 2 and chain[at]._saved_dim == 0:
        if shape[0] != shape[1] and not _TURNS.intersection(names[before + 1 : at]):  # of pairs both ways are meant
            found["axis"] = name
        return
    taken: Any = getattr(kept_by(chain[before], "self"), "shape", ())
    is_as_it_was = all(one.startswith(_SAME_ORDER) for one in names[before + 1 : at]) and taken[:2] == shape[:2]
    if names[before].startswith("NllLoss2D") and is_as_it_was:
        _note_axis(chain[at], name, found)
    if "axis" not in found and len(shape) and is_mean and all(map(is_view, names[:before])):
        found["classes"] = {"loss": name, "count": int(shape[1 if len(shape) > 1 else 0])}


_SAME_ORDER = ("View", "UnsafeView", "Reshape", "Unsqueeze")  # what torch itself puts between, for one dimension more


def _is_of_pairs(chain: list[Any], names: list[str], at: int) -> bool:
    """Whether the log_softmax at a place runs over scores that were made one by one, or put together: of a right answer
    among wrong ones, which may always be the first."""
    inner = next((place for place in range(at + 1, len(names)) if not is_passed(names[place])), None)
    if inner is None:
        return False
    made = chain[inner]._input_metadata
    shape = made[0].shape if made else ()
    return names[inner] in ("CatBackward", "StackBackward", "SumBackward", "BmmBackward") or tuple(shape[-1:]) == (1,)


def _note_targets(node: Any, name: str, found: dict[str, Any]) -> None:
    """Note targets of a binary cross entropy that are no probabilities; those on a device are not read."""
    targets = kept_by(node, "target")
    is_masked = getattr(node, "_saved_reduction", 0) == 0 or kept_by(node, "weight") is not None
    if is_masked:  # of what is left out a target may be anything
        return
    if targets is not None and targets.device.type == "cpu" and targets.numel():
        low, high = (float(one) for one in targets.detach().aminmax())
        if low < -1e-3 or high > 1 + 1e-3:  # not by rounding
            found["outside"] = {"loss": name, "low": low, "high": high}


def _note_behind(one: str, chain: list[Any], name: str, found: dict[str, Any], *, is_whole: bool) -> None:
    """Note what a loss function is given that it does not expect; ``chain``: the nodes behind that of the function;
    ``is_whole``: the loss is what it returns, or a mean of it, so that its sign is that of the loss."""
    others = list(map(name_of, chain))
    behind, times = next((other for other in others if not is_view(other)), ""), 1.0
    for node, other in zip(chain, others, strict=True) if one in MEANS else ():
        if not is_view(other):
            behind = other
            if (factor := factor_of(node)) is None:
                break
            times *= factor
    if one.startswith(("NllLoss", "CtcLoss")) and behind != "LogSoftmaxBackward" and is_whole:
        found["nll"] = name
    if behind in _BOUNDS and one in ("LogSoftmaxBackward", "BinaryCrossEntropyWithLogitsBackward", *MEANS):
        found["bounded"] = {"loss": name, "by": _BOUNDS[behind], "is_pairwise": one in MEANS, "times": times}
    inner = source_of(chain)
    first, then = [*(other for other in others if not is_view(other)), "", ""][:2]
    if (one, inner) in _TWICE:
        outer = "a log_softmax" if one == "LogSoftmaxBackward" else "a sigmoid"
        found["doubled"] = {"loss": name, "outer": outer, "inner": _TWICE[one, inner]}
    elif one == "BinaryCrossEntropyBackward" and first == then == "SigmoidBackward":
        found["doubled"] = {"loss": name, "outer": "a sigmoid", "inner": "sigmoid"}


def _is_judged(chain: list[Any], names: list[str]) -> bool:
    """Whether the last layer before the loss is not trained: it judges what another model has made."""
    layer = next((one for one, name in zip(chain, names, strict=True) if name in _LAYERS), None)
    if layer is None:
        return False
    given = [one for one, _ in layer.next_functions if one is not None]
    given += [inner for one in given for inner, _ in one.next_functions if inner is not None]  # of weights, turned
    return not any("AccumulateGrad" in one.name() for one in given)


def _note_turned(chain: list[Any], names: list[str], factor: float, name: str, found: dict[str, Any]) -> None:
    """Note that the loss is minus, or a number less, one that is never negative, of torch's or by hand.

    ``factor``: what it was multiplied by after that.
    """
    if names[:1] == ["RsubBackward"]:
        names = ["NegBackward", *names[1:]]
    if not _is_judged(chain, names):
        _note_sign(["NegBackward", *names] if factor < 0 else names, name, found)
    is_turned = factor < 0 or names[:1] == ["NegBackward"]
    at = names[:1].count("NegBackward") if factor > 0 else 0
    if is_turned and is_error_by_hand(chain[at:], names[at:]):
        found["negated"] = {"loss": name, "of": "a mean or sum of squared or absolute differences"}


def _note_likelihood(names: list[str], name: str, found: dict[str, Any]) -> None:
    """Note that the loss is a mean or sum of log-probabilities that labels pick, without a minus, and not weighted."""
    behind = names[: names.index("LogSoftmaxBackward")] if "LogSoftmaxBackward" in names else []
    if _is_picked(behind) and "MulBackward" not in behind and not behind.count("NegBackward") % 2:
        found["negated"] = {"loss": name, "of": "a negative log-likelihood"}


def _note_sign(names: list[str], name: str, found: dict[str, Any]) -> None:
    """Note that the loss is minus one of those that are never negative."""
    known = next((_POSITIVE[one] for one in names[1:4] if one in _POSITIVE), None)
    if names and names[0] == "NegBackward" and known is not None:
        found["negated"] = {"loss": name, "of": known}
