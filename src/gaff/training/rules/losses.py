"""Rules about a loss: how it was computed, and what it is given, as its targets.

Written as those of ``gaff.training.rules.steps``. What is read from the loss's autograd graph, or heard of torch's own
loss functions, was found while the step ran (``sample.facts``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gaff.record.sample import Sample
from gaff.training.rules.registry import LEAST_TARGETS, Hit, Past, rule

_PAIRWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_SOME = 0.2  # of the targets of a step
_ALL = 0.95  # of the weight of all labels, for one class
_FITS, _UNEVEN = 0.8, 0.3  # a correlation; a standard deviation of logarithms: of two, one comes 1.8 times as often
_OF_TRUTHS = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_WITH_TARGETS = ("cross_entropy", "nll_loss", *_PAIRWISE)


@rule(
    "loss_sign",
    severity="error",
    means="the loss is turned around: training makes it worse",
    cause="an extra minus sign before the loss, a missing one before a log-likelihood, or maximize=True without one",
    remedy="turn the sign of the loss round, or set maximize=False",
    least=3,
    share=0.5,
    hides=("diverging", "exploding", "update_large", "dead_units", "saturated"),
)
def loss_sign(sample: Sample, past: Past) -> Iterator[Hit]:
    """A minus right before a cross entropy, a squared or an absolute error, read from the autograd graph, of which the
    optimizer lowers the negative; or none, and an optimizer with ``maximize=True``. Or no minus before the mean of
    log-probabilities that labels pick.

    In runs with one optimizer and one loss, which steps the model's own parameters, those of its last layer too:
    adversaries are trained so, as what is to fool a model that stays as it is.
    """
    found, is_raised = sample.facts.get("negated"), sample.facts.get("is_raised")
    is_own = any(one.optimizer is not None for one in sample.parameters.values())
    positive = sample.facts["classes"]["loss"] if "classes" in sample.facts else sample.facts.get("mean_of", "")
    if is_raised and positive and not found and is_own and _is_alone(sample):
        yield Hit(("", ""), f"the optimizer has maximize=True, and makes the loss {positive!r} as large as it can",
                  loss=sample.losses.get(positive, 0.0))  # fmt: skip
    if found and not is_raised and is_own and _is_alone(sample) and sample.losses.get(found["loss"], 0.0) < 0:
        yield Hit(
            ("", ""),
            f"the loss {found['loss']!r} is the negative of {found['of']}: training makes the model worse",
            loss=sample.losses[found["loss"]],
        )


@rule(
    "class_weights",
    severity="warning",
    means="weights of classes make the loss more one-sided than the labels are",
    cause="weights that are how often a class comes, in the place of one over that; a weight that is far too large",
    remedy="weight = labels.bincount().sum() / (classes * labels.bincount()), and "
    "pos_weight = how many are negative / how many are positive",
    least=3,
    share=0.9,
    hides=("loss_spike",),
)
def class_weights(sample: Sample, past: Past) -> Iterator[Hit]:
    """Of the labels that came so far, each counted by its class's weight, 95 % are of one class, which at most half of
    them are of. Or weights grow with how often their classes come (the slope of one logarithm over the other is at
    least a half, their correlation 0.8), where classes come unevenly. Classes of weight 0 are left out. Possible: a
    loss may be meant to care for one class alone."""
    for one in sample.facts.get("targets", ()):
        found = one.get("weighed", {})
        if found and found["share"] >= _ALL and found["own"] <= 0.5:
            told = f"class {int(found['heaviest'])} has {found['share']:.1%} of the weight of all labels, and is " \
                   f"{found['own']:.1%} of them"  # fmt: skip
            yield Hit(("", ""), f"{told}: the loss hears of nothing else", share=found["share"], labels=found["own"])
        elif found and found["slope"] >= 0.5 and found["fit"] >= _FITS and found["spread"] >= _UNEVEN:
            told = "the weights of a loss grow with how often their classes come"
            yield Hit(("", ""), f"{told}: rare classes count for even less than they are", slope=found["slope"])


@rule(
    "broadcast",
    severity="error",
    means="a loss compares each output with every target: one of the two was broadcast against the other",
    cause="outputs of shape [batch, 1] and targets of shape [batch], or the other way round",
    remedy="give both one shape: output.squeeze(1), or target.unsqueeze(1)",
    least=2,
    share=0.5,
)
def broadcast(sample: Sample, past: Past) -> Iterator[Hit]:
    """mse_loss, l1_loss, smooth_l1_loss or huber_loss that is given shapes which broadcast to a larger one, or a loss
    by hand that is the mean or sum of squares, absolute values or other functions of single elements, alone or with
    other terms and factors, of a difference of [batch, batch] which was made of [batch, 1] or [batch], or of a product
    with a number for each example, which are others in another batch (a grid is always the same). Not pairs within an
    example, as of quantiles or of points. Certain."""
    spread = sample.facts.get("spread")
    is_product = spread and "constant" in spread
    is_grid = is_product and len({one for one in past.norms.get(("", "constant"), ()) if not math.isnan(one)}) < 2
    if spread and not is_grid and spread["made"][0] == sample.facts.get("batch"):
        how = "product" if is_product else "difference"
        does = "multiplies numbers of the examples with" if is_product else "takes targets from"
        told = f"the loss {spread['loss']!r} {does} outputs of shape {list(spread['output'])}"
        yield Hit(("", ""), f"{told} and gets a {how} of shape {list(spread['made'])}: each output is compared with "
                  "every target", output=list(spread["output"]), made=list(spread["made"]))  # fmt: skip
        return
    for one in sample.facts.get("targets", ()):
        shapes = one["output"], one["shape"]
        is_joined = shapes[0] != shapes[1] and _joined_size(*shapes) > max(map(_size, shapes))
        if one["function"] in _PAIRWISE and is_joined and not _pairs_inside(*shapes):
            told = (
                f"{one['function']} is given outputs of shape {list(shapes[0])} and targets of shape {list(shapes[1])}"
            )
            yield Hit(("", ""), f"{told}: they broadcast, so that each output is compared with every target",
                      output=list(shapes[0]), target=list(shapes[1]))  # fmt: skip
            return


@rule(
    "bounded_output",
    severity="warning",
    means="the loss asks for outputs that the model's last activation cannot give",
    cause="an activation (ReLU, sigmoid, tanh) after the last layer of a classifier, or of a regression",
    remedy="no activation after the last layer; or targets that are scaled into its range",
    least=3,
    share=0.5,
    hides=("saturated", "dead_units", "sparse_gradient", "vanishing", "no_signal", "output_constant"),
)
def bounded_output(sample: Sample, past: Past) -> Iterator[Hit]:
    """Logits of a cross entropy that come from a ReLU, a sigmoid or tanh, read from the autograd graph; or targets of a
    squared or absolute error that lie outside of what such an activation can return, times a number that it is
    multiplied by, by more than a tenth."""
    found = sample.facts.get("bounded")
    if not found:
        return
    by = found["by"]
    if not found["is_pairwise"]:
        yield Hit(("", ""), f"the loss {found['loss']!r} gets logits from a {by}: no score can be "
                  f"{'negative' if by == 'relu' else 'far from zero'}", activation=by)  # fmt: skip
        return
    told = [one for one in sample.facts.get("targets", ()) if one["function"] in _PAIRWISE]
    low, high = min((one["low"] for one in told), default=0.0), max((one["high"] for one in told), default=0.0)
    ends = {"relu": (0.0, math.inf), "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}[by]
    least, most = sorted(0.0 if not one else one * found["times"] for one in ends)
    beyond = 0.1 * (max(abs(low), abs(high)) if by == "relu" else most - least)
    if len(told) == 1 and (low < least - beyond or high > most + beyond):
        span = (
            f"are never {'negative' if most else 'positive'}" if by == "relu" else f"lie between {least:g} and {most:g}"
        )
        yield Hit(("", ""), f"the outputs come from a {by} and {span}; the targets reach from {low:.4g} to {high:.4g}",
                  activation=by, low=low, high=high)  # fmt: skip


@rule(
    "labels_constant",
    severity="error",
    means="all targets of a batch are the same: there is nothing to tell apart",
    cause="labels that were overwritten or lost, data sorted by label and not shuffled, or a rare second class",
    remedy="print a batch's labels where the loss gets them; shuffle the training data",
    least=10,
    share=0.8,
)
def labels_constant(sample: Sample, past: Past) -> Iterator[Hit]:
    """Every target that a loss function of torch's was given in a step is the same number, of eight or more examples.

    In each look so far, or another number in another look, as where data is sorted by label. In runs with one optimizer
    and one loss. Left out are targets of a regression that are 0, 1 or -1, or stand beside further terms of the loss,
    as of one that is to be that everywhere, those
    of a binary cross entropy that are not all 0, as of differences of scores, losses against probabilities, and a cross
    entropy over scores of pairs that were put together, of which the right one may always be the first.
    """
    told = [one for one in sample.facts.get("targets", ()) if one["function"] in (*_WITH_TARGETS, *_OF_TRUTHS)]
    if (
        not told
        or not _is_alone(sample)
        or sample.facts.get("scores")
        or any(one["low"] != one["high"] or one["count"] < LEAST_TARGETS for one in told)
    ):
        return
    if len({one["low"] for one in told}) > 1:  # batches of one class each, over which a step goes
        return
    kinds = len(past.targets - {math.inf})
    if math.inf in past.targets and kinds < 2:
        return
    has_more = sample.facts.get("terms", 1) > len(told)  # such as those of an equation, by hand
    if any((abs(one["low"]) in (0, 1) or has_more) and one["function"] in _PAIRWISE for one in told):
        return
    if any(one["low"] != 0 and one["function"] in _OF_TRUTHS for one in told):
        return
    what = f"all {told[0]['count']} targets of a batch are {told[0]['low']:.4g}"
    if kinds > 1:
        what = f"all {told[0]['count']} targets of a batch are alike, and others in other batches ({kinds} were seen " \
               "alone): the data is in the order of its labels"  # fmt: skip
    yield Hit(("", ""), what, target=told[0]["low"], classes=kinds)


@rule(
    "one_class",
    severity="error",
    means="a softmax over a single class is 1 whatever the model returns: nothing is learned from it",
    cause="cross_entropy, or a softmax, with a model that returns one number for each example",
    remedy="binary_cross_entropy_with_logits for one number an example, or a last layer with two outputs",
    least=2,
    share=0.5,
    hides=("zero_gradient", "loss_gives_nothing", "no_gradient", "no_signal", "output_constant", "update_small",
           "never_updated", "labels_constant", "vanishing"),
)  # fmt: skip
def one_class(sample: Sample, past: Past) -> Iterator[Hit]:
    """cross_entropy is given scores of [batch, 1], or [batch, 1, ...], and no loss is above zero; or a loss is given a
    softmax over a dimension of one, read from the autograd graph. Certain."""
    alone = sample.facts.get("alone")
    if alone:
        yield Hit(("", ""), f"the loss {alone['loss']!r} is given a softmax of shape {alone['shape']}, over one class: "
                  "it is 1 whatever the model returns", output=alone["shape"])  # fmt: skip
        return
    told = [one for one in sample.facts.get("targets", ()) if one["function"] == "cross_entropy"]
    shapes = [list(one["output"]) for one in told if len(one["output"]) > 1 and one["output"][1] == 1]
    if shapes and len(shapes) == len(told) and all(value == 0 for value in sample.losses.values()):
        yield Hit(("", ""), f"cross_entropy is given scores of shape {shapes[0]}, of one class", output=shapes[0])


@rule(
    "kl_of_probabilities",
    severity="error",
    means="kl_div is given probabilities, or scores, where it expects their logarithms",
    cause="kl_div takes log-probabilities as its input; its targets are probabilities",
    remedy="kl_div(log_softmax(scores, dim=-1), targets)",
    least=2,
    share=0.5,
)
def kl_of_probabilities(sample: Sample, past: Past) -> Iterator[Hit]:
    """The largest element that kl_div is given as its input is above zero, which no logarithm of a probability is, by
    more than rounding, while the targets are probabilities: they add up to one. Certain."""
    for one in sample.facts.get("targets", ()):
        if one["function"] == "kl_div" and one.get("highest", 0.0) > 1e-3 and one.get("is_normal"):
            told = f"kl_div is given an input with elements up to {one['highest']:.4g}"
            yield Hit(("", ""), f"{told}: they are no logarithms of probabilities", highest=one["highest"])
            return


@rule(
    "kl_of_log_targets",
    severity="error",
    means="kl_div is given logarithms of probabilities as targets, and takes them for probabilities",
    cause="log_softmax of a teacher's scores as targets, without log_target=True",
    remedy="kl_div(log_softmax(scores, dim=-1), log_softmax(others, dim=-1), log_target=True)",
    least=1,
    share=0.0,
    hides=("nonfinite",),
)
def kl_of_log_targets(sample: Sample, past: Past) -> Iterator[Hit]:
    """No target that kl_div is given without log_target is above zero, and some are below. Certain."""
    for one in sample.facts.get("targets", ()):
        if one["function"] == "kl_div" and not one.get("log_target") and one["high"] <= 0 > one["low"]:
            yield Hit(("", ""), f"kl_div is given targets from {one['low']:.4g} to {one['high']:.4g}, and no "
                      "log_target=True: they are no probabilities", low=one["low"], high=one["high"])  # fmt: skip
            return


@rule(
    "term_drowned",
    severity="warning",
    means="the classes are not learned: of a sum of losses the cross entropy is a small part, and stays at guessing",
    cause="another term is far larger: a penalty with too large a weight, or an error in raw units",
    remedy="bring the terms to one size: weigh the other one down, or scale its targets to about one",
    least=6,
    share=0.8,
)
def term_drowned(sample: Sample, past: Past) -> Iterator[Hit]:
    """From step 50 on the mean cross entropy in a sum of losses is at 95 % of the logarithm of the number of classes or
    above; the whole began at ten times that, or is there now."""
    part = sample.facts.get("part")
    if not part or sample.age < 50:
        return
    guess, value, total = math.log(part["among"]), part["value"], sample.losses.get(part["loss"], 0.0)
    first = past.losses.get(part["loss"], [total])[0]
    if 0 < 0.95 * guess <= value and max(first, total) > 10 * guess:
        told = f"the cross entropy in {part['loss']!r} is {value:.4g} among {part['among']} classes, as in guessing"
        yield Hit(("", ""), f"{told}; the whole loss was {first:.4g} at first and is {total:.4g}", part=value,
                  among=part["among"], first=first, total=total)  # fmt: skip


@rule(
    "double_softmax",
    severity="error",
    means="the loss applies a softmax or sigmoid to what has been through one already: gradients are squashed",
    cause="cross_entropy and binary_cross_entropy_with_logits expect logits",
    remedy="remove it from the model, or keep it with nll_loss(torch.log(p)) or binary_cross_entropy",
    least=2,
    share=0.5,
)
def double_softmax(sample: Sample, past: Past) -> Iterator[Hit]:
    """Read from the loss's autograd graph. Certain."""
    found = sample.facts.get("doubled")
    if found:
        twice = f"{found['outer']} to what has been through a {found['inner']} already"
        yield Hit(("", ""), f"the loss {found['loss']!r} applies {twice}", outer=found["outer"], inner=found["inner"])


@rule(
    "softmax_axis",
    severity="error",
    means="the loss's softmax does not run over the classes",
    cause="dim=0, or a dimension of the image, where dim=1 is meant",
    remedy="log_softmax(x, dim=1), or cross_entropy, which does it",
    least=2,
    share=0.5,
)
def softmax_axis(sample: Sample, past: Past) -> Iterator[Hit]:
    """log_softmax over dimension 0 of a two-dimensional input of nll_loss, or of a likelihood that is written out and
    picks one number of each row; over another than dimension 1 of an input with more; over another than the last one
    of ctc_loss's. Read from the autograd graph. Certain."""
    ctc = sample.facts.get("ctc_axis")
    if ctc:
        yield Hit(("", ""), f"the log_softmax before ctc_loss, of shape {ctc['shape']}, runs over dimension "
                  f"{ctc['dim']}, and the classes are elsewhere", **ctc)  # fmt: skip
        return
    found, dim = sample.facts.get("axis"), sample.facts.get("axis_dim")
    if found and dim:
        yield Hit(
            ("", ""), f"the softmax of the loss {found!r} runs over {dim}: nll_loss has the classes in dimension 1"
        )
    elif found:
        yield Hit(("", ""), f"the loss {found!r} normalises over the batch: its softmax has dim=0")


@rule(
    "nll_of_scores",
    severity="error",
    means="nll_loss or ctc_loss is given what are no log-probabilities: the loss has no lower limit",
    cause="both expect log_softmax; cross_entropy contains it",
    remedy="use log_softmax before the loss, or cross_entropy instead of nll_loss",
    least=2,
    share=0.0,
)
def nll_of_scores(sample: Sample, past: Past) -> Iterator[Hit]:
    """No log_softmax before nll_loss or ctc_loss in the autograd graph, and a loss below -0.01, in two looks: that of
    log-probabilities which were made by hand may be a little below zero. Certain."""
    found = sample.facts.get("nll")
    if found and sample.losses.get(found, 0.0) < -0.01:
        told = f"the loss {found!r} is negative: it is given values that are no log-probabilities"
        yield Hit(("", ""), told, loss=sample.losses[found])


@rule(
    "targets_no_probabilities",
    severity="error",
    means="binary cross entropy is given targets outside of 0 to 1: the loss has no lower limit",
    cause="labels of -1 and 1, or values that were not scaled to 0 to 1",
    remedy="give it targets of 0 and 1, or between them: (y + 1) / 2 of -1 and 1, x / 255 of bytes",
    least=2,
    share=0.2,
    hides=("diverging",),
)
def targets_no_probabilities(sample: Sample, past: Past) -> Iterator[Hit]:
    """The targets of binary_cross_entropy, with logits or without, below 0 or above 1, where they lie on the CPU.

    Certain. Not labels with noise on them, from -0.3 to 1.3, where a discriminator has an optimizer and a loss of its
    own.
    """
    found = sample.facts.get("outside")
    is_game = sample.facts.get("optimizers", 1) > 1 and len(sample.losses) > 1
    is_noise = found and is_game and found["low"] >= -0.3 and found["high"] <= 1.3
    if found and not is_noise:
        yield Hit(("", ""), f"the loss {found['loss']!r} is a binary cross entropy, and its targets go from "
                  f"{found['low']:.4g} to {found['high']:.4g}", low=found["low"], high=found["high"])  # fmt: skip


@rule(
    "targets_no_signs",
    severity="error",
    means="a loss that wants targets of 1 and -1 is given 0 and 1: those of 0 count for nothing, or as another margin",
    cause="labels of 0 and 1, as binary cross entropy has them",
    remedy="give it 2 * y - 1 of labels of 0 and 1",
    least=2,
    share=0.2,
)
def targets_no_signs(sample: Sample, past: Past) -> Iterator[Hit]:
    """The least target of cosine_embedding_loss, margin_ranking_loss, hinge_embedding_loss or soft_margin_loss is 0.
    Not where some are -1, beside which those of 0 may be left out on purpose. Certain."""
    for one in sample.facts.get("targets", ()):
        if one.get("wants_signs") and one["low"] == 0:
            told = f"{one['function']} is given targets from 0 to {one['high']:.4g}, and wants 1 and -1"
            yield Hit(("", ""), told, high=one["high"])


@rule(
    "targets_add_up",
    severity="warning",
    means="cross entropy is given probabilities that add up to more than one",
    cause="rows with a 1 for each of several classes, or counts",
    remedy="binary_cross_entropy_with_logits where several classes may be right at once; else divide each row by its "
    "sum",
    least=2,
    share=0.5,
)
def targets_add_up(sample: Sample, past: Past) -> Iterator[Hit]:
    """A fifth of the targets of cross_entropy or more, given as a number for each class, none of them negative, add up
    to more than 1.05. Possible: they may be weighed on purpose."""
    for one in sample.facts.get("targets", ()):
        if one.get("beyond", 0.0) >= _SOME:
            yield Hit(
                ("", ""), f"{one['beyond']:.0%} of the targets of a batch add up to more than one (cross_entropy)"
            )


def _is_alone(sample: Sample) -> bool:
    """Whether one optimizer lowers one loss: with several, one may be trained against another."""
    return sample.facts.get("optimizers", 1) == 1 and len(sample.losses) == 1


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size


def _pairs_inside(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes have their first dimension, that of the examples, in common, and broadcast inside of it."""
    return len(one) == len(other) and one[:1] == other[:1] != (1,)


def _joined_size(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many elements two shapes have that are broadcast against each other (NumPy's rules)."""
    longest = max(len(one), len(other))
    pairs: list[Any] = [(1,) * (longest - len(shape)) + tuple(shape) for shape in (one, other)]
    return _size(tuple(max(a, b) for a, b in zip(*pairs, strict=True)))
