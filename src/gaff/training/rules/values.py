"""Rules about activations, gradients by depth, inputs, outputs and losses.

Each check's docstring tells when it hits; ``docs/rules.md`` repeats it word for word. Facts that a check reads
(``sample.facts``: the classes of a loss, a doubled softmax, random numbers in evaluation) were found while the step
ran, since numbers alone do not tell them; what is missing there was not found, and the check is silent.

Sources of thresholds: AutoTrainer is Zhang et al., "AUTOTRAINER: an automatic DNN training problem detection and repair
system", 2021; DeepFD is Cao et al., "DeepFD: automated fault diagnosis and localization for deep learning programs",
2022; TheDeepChecker and SageMaker Debugger are told in ``steps``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from gaff.record.sample import Key, Sample, path_of, port_of
from gaff.record.statistics import Numbers
from gaff.training.rules.layers import (
    clips_an_explosion,
    in_branches,
    is_far_from_standard,
    is_normalised,
    weights_by_depth,
    zeros_behind,
    zeros_of_input,
)
from gaff.training.rules.registry import Hit, Past, rule
from gaff.training.rules.steps import has_fallen


@rule(
    "dead_units",
    severity="warning",
    means="most units of an activation are zero on every input seen: they neither pass anything on nor learn",
    cause="a step that was too large, a bias that is too negative, or inputs that are far from zero",
    remedy="lower the learning rate, reset the bias, normalise the input, or use LeakyReLU or GELU",
    least=3,
    hides=("zero_gradient", "sparse_gradient", "vanishing", "output_constant"),
)
def dead_units(sample: Sample, past: Past) -> Iterator[Hit]:
    """More than half of the units below 1e-5 in magnitude (TheDeepChecker) on at least 256 inputs, the latest ones.

    A model that returns nothing but zeros is one that returns the same for all.
    """
    order = {key: at for at, key in enumerate(sample.rows)}
    first = next((at for key, at in order.items() if path_of(key[1]) and port_of(key[1]) == "output"), 0)
    for key in sample.units:
        if order.get(key, -1) < first:  # what the first layer is given has no units of the model's
            continue
        known, row = past.active.get(key), sample.rows.get(key)
        if known is None or row is None or known.seen < 256 or past.looks < 3 or row.zeros <= 0.4:
            continue
        count = sample.units[key].count
        dead = count - known.active.bit_count()
        is_constant = not path_of(key[1]) and dead == count  # a model that returns zeros: ``output_constant``
        if dead > count / 2 and not is_constant:
            is_nothing = dead == count and port_of(key[1]) == "input"
            told = (
                "what this layer is given is all zeros: something ahead of it multiplies by zero, or masks everything"
            )
            numbers = {"dead": dead, "units": count, "values_per_unit": known.seen, "call_order": order[key]}
            yield Hit(key, told if is_nothing else "", **numbers)


@rule(
    "saturated",
    severity="warning",
    means="most values of a tanh or sigmoid are at its ends, where its slope is almost zero",
    cause="inputs to it that are too large: weights, learning rate, or data that is not normalised",
    remedy="normalise before it, use smaller initial weights, or another activation",
    hides=("vanishing", "zero_gradient"),
)
def saturated(sample: Sample, past: Past) -> Iterator[Hit]:
    """More than half of the values where the slope is below 6 % of its largest: |tanh| > 0.97 (Karpathy, "makemore 3").

    Gates are meant to be at their ends: a sigmoid counts from 0.8 on. Not where a loss has fallen to half, nor of what
    acts, whose loss follows what it meets, nor of what a model returns where several optimizers train: a generator of
    black and white is to end there, and no loss falls.
    """
    if past.is_acting or any(has_fallen(past, name, 0.5) for name in past.losses):
        return
    several = sample.facts.get("optimizers", 1) > 1
    for (name, key), share in sample.shares.items():
        row = sample.rows.get(key)
        if name == "saturated" and row is not None and not (several and _is_returned(sample, key)):
            is_sigmoid = row.min >= 0
            if share > (0.8 if is_sigmoid else 0.5):
                yield Hit(key, saturated_fraction=share)


def _is_returned(sample: Sample, key: Key) -> bool:
    """Whether what passes there is what the model returns, by its numbers."""
    row, whole = sample.rows.get(key), sample.rows.get((key[0], ":output"))
    return row is not None and whole is not None and (row.count, row.mean, row.std, row.min, row.max) == (
        whole.count, whole.mean, whole.std, whole.min, whole.max)  # fmt: skip


def _has_zero_weight(sample: Sample, gradients: Sequence[tuple[Key, Numbers]]) -> bool:
    """Whether one of these weights is smaller by ten thousand times than they are in the median."""
    sizes = [row.rms for key, _ in gradients if (row := sample.of(key, "param")) is not None]
    return bool(sizes) and min(sizes) < 1e-4 * statistics.median(sizes)


@rule(
    "vanishing",
    severity="warning",
    means="gradients shrink from the output towards the input: the first layers hardly learn",
    cause="many layers without residual connections or normalisation, saturating activations, or small weights",
    remedy="add residual connections or normalisation, or initialise for the activation (He, Xavier)",
    least=5,
    share=0.3,
    hides=("never_updated", "update_small"),
)
def vanishing(sample: Sample, past: Past) -> Iterator[Hit]:
    """norm(first weight's gradient) < 1e-3 norm(last's) and < 1e-4 (AutoTrainer, beta 1 and 2). In 30 % of looks.

    So it must be of each in the first quarter of the weights: those of queries and keys get little in a healthy
    attention, too. Not where a loss has fallen to half of what it was: it learns all the same; nor where one step from
    a part of another name makes nearly all of the difference: of two branches neither comes before the other; nor where
    a weight lies at zero, by which what is before it gets nothing, as low-rank factors begin.
    """
    if any(has_fallen(past, name, 0.5) for name in past.losses):
        return
    for gradients in weights_by_depth(sample).values():
        if len(gradients) < 3:
            continue
        (first, row), last = gradients[0], gradients[-1][1]
        largest = max(one.norm for _, one in gradients[: (len(gradients) + 3) // 4])
        is_small = last.norm > 0 and largest < 1e-3 * last.norm and largest < 1e-4
        if is_small and not in_branches(gradients) and not _has_zero_weight(sample, gradients):
            yield Hit(first, first_norm=row.norm, last_norm=last.norm, ratio=row.norm / last.norm)


@rule(
    "exploding",
    severity="warning",
    means="gradients are very large, or grow from the output towards the input",
    cause="weights that are too large for the depth, a recurrent net without clipping, or too high a learning rate",
    remedy="torch.nn.utils.clip_grad_norm_(parameters, 1.0), smaller initial weights, or normalisation",
    least=5,
    share=0.1,
)
def exploding(sample: Sample, past: Past) -> Iterator[Hit]:
    """norm(first weight's gradient) > 70 norm(last's) (AutoTrainer, beta 3) and > 10, or a gradient's rms > 1e6.

    The latter, from SageMaker Debugger, stands for itself; the former also asks for a norm that clipping would act on,
    and is not asked where nearly all of it lies between two parts of other names, as ``vanishing`` has it.
    Also a norm above 1,000 that ``clip_grad_norm_`` brings to a usual limit, of 0.1 or more, where the loss does not
    fall by a tenth.
    """
    if clips_an_explosion(sample) and not any(has_fallen(past, name) for name in past.losses):
        clipped = sample.facts["clipped"]
        yield Hit(("", ""), f"gradients that are clipped to {clipped['most']:.4g} have a norm of {clipped['norm']:.4g} "
                  "before", norm=clipped["norm"], limit=clipped["most"])  # fmt: skip
    for gradients in weights_by_depth(sample).values():
        if (
            len(gradients) >= 3
            and gradients[0][1].norm > max(70 * gradients[-1][1].norm, 10)
            and not in_branches(gradients[::-1])
        ):
            first, row = gradients[0]
            last = gradients[-1][1].norm
            told = f"the norm of the gradient grows from {last:.4g} at the last weight to {row.norm:.4g} at the first"
            yield Hit(first, told, first_norm=row.norm, last_norm=last)
            continue
        for key, row in gradients:
            if row.rms > 1e6:
                yield Hit(key, f"{key[1]} has an rms of {row.rms:.4g}", gradient_rms=row.rms)
                break


@rule(
    "sparse_gradient",
    severity="warning",
    means="most elements of a weight's gradient are exactly zero: most of its units do not learn",
    cause="ReLU units after it that are zero for almost every input, or a loss that depends on few of its outputs",
    remedy="look at what follows it: where a ReLU is off, lower the learning rate, reset the bias, or use LeakyReLU",
    share=0.5,
)
def sparse_gradient(sample: Sample, past: Past) -> Iterator[Hit]:
    """At least 70 % exact zeros (AutoTrainer's gamma; DeepFD), where the layer's own input is not mostly zero.

    Embeddings are left out: rows that were not asked for get no gradient. So are layers most of whose bias gets one:
    then it is the input of which much is always zero. Not where a loss has fallen by a tenth: enough units learn; nor
    of a model's last layer where the loss picks some of its outputs, as the values of the actions that were taken.
    """
    if any(has_fallen(past, name) for name in past.losses):
        return
    last = {rows[-1][0] for rows in weights_by_depth(sample).values()} if sample.facts.get("picks") else ()
    for key, row in sample.port("grad").items():
        known = sample.parameters.get((key[0], f"{key[1].removesuffix(':grad')}:param"))
        if known is None or known.kind != "weight" or key in last or not 0.7 <= row.zeros < 1.0:
            continue
        bias = sample.rows.get((key[0], f"{path_of(key[1]).rpartition('.')[0]}.bias:grad"))
        if bias is not None and bias.count and bias.zeros < 0.5:
            continue
        if zeros_of_input(sample, key) < 0.5:
            behind = zeros_behind(sample, key)
            why = "" if behind is None else f"; the module after it, {behind[0]!r}, returns {behind[1]:.0%} zeros"
            yield Hit(key, f"{row.zeros:.0%} of {key[1]} is exactly zero{why}", zero_fraction=row.zeros)


@rule(
    "no_signal",
    severity="warning",
    means="what a layer returns does not depend on its input: the signal is lost there",
    cause="weights that are all alike or zero, or a signal that shrinks from layer to layer",
    remedy="look at how the layer before it is initialised",
    share=0.5,
)
def no_signal(sample: Sample, past: Past) -> Iterator[Hit]:
    """Standard deviation below 1e-6 of the rms, in a layer's output of more than eight elements; the first such layer.

    Zeros everywhere count where the layer has a weight that is not zero: a rectifier may return them, and what follows
    is not asked. An activation counts also where each of its units returns one number for all examples of a batch, and
    so does what the very first layer is given. Not where the model returns other numbers for other examples: then the
    signal gets by, and the layer is beside it, as one that makes a condition of the batch into shifts and scales.
    """
    batch = sample.facts.get("batch", 0)
    reached = {key[0] for key, units in sample.units.items() if key[1].startswith(":output") and not units.is_constant}
    for key, row in sample.port("output").items():
        if key[1].startswith(":output") and row.count == batch and row.std > 1e-6 * row.rms:  # one an example
            reached.add(key[0])
    has_begun = False  # a module has returned something
    for at, (key, row) in enumerate(sample.rows.items()):
        if row.count <= 8 or not path_of(key[1]) or key[0] in reached:
            continue
        port, units = port_of(key[1]), sample.units.get(key)
        is_one = row.std <= 1e-6 * row.rms
        if port == "input" and not has_begun and is_one and not _varies(sample, key[0]):
            told = f"the first layer is given the same number everywhere ({key[1]})"
            yield Hit(key, told, mean=row.mean, std=row.std, call_order=at)
            return
        if units is not None and row.zeros == 1.0:
            return
        if port != "output":
            continue
        has_begun = True
        is_alike = units is not None and units.is_constant and batch >= 2
        weight = sample.rows.get((key[0], f"{key[1]}.weight:param"))
        if (is_one or is_alike) and (row.rms > 0 or (weight is not None and weight.rms > 0)):
            what = "all elements of its output are one number" if is_one else "it returns the same for every example"
            yield Hit(key, f"what {key[1]} returns does not depend on its input: {what}", mean=row.mean, std=row.std,
                      call_order=at)  # fmt: skip
            return


@rule(
    "output_constant",
    severity="warning",
    means="the model returns the same for every example of a batch",
    cause="dead units, a cut connection, weights of zero, or an input that does not reach the output",
    remedy="follow the batch through the model with gaff.trace(model, x): where do rows become alike?",
    share=0.5,
)
def output_constant(sample: Sample, past: Past) -> Iterator[Hit]:
    """Each unit of the output spreads less over two or more examples than 3e-6 of its magnitude, or of the median's.

    Not where the examples are all the same."""
    batch = sample.facts.get("batch", 0)
    if sample.facts.get("alike"):
        return
    outputs = {key: units for key, units in sample.units.items() if key[1].startswith(":output")}
    for key, units in outputs.items():
        if batch >= 2 and units.is_constant:
            row, others = sample.rows.get(key), [other[0] for other, one in outputs.items() if not one.is_constant]
            what = "zero" if row is not None and row.zeros == 1.0 else "the same"
            told = f"{key[1]} is {what} for every example of a batch, and other outputs are not"
            beside = {"others": others.count(key[0])} if key[0] in others else {}
            yield Hit(key, told if beside else "", units=units.count, batch=batch, **beside)


@rule(
    "input_constant",
    severity="warning",
    means="every element of the model's input is the same number",
    cause="an input that was never filled, was multiplied by zero, or normalised element by element",
    remedy="print a batch where the model gets it",
    share=0.9,
)
def input_constant(sample: Sample, past: Past) -> Iterator[Hit]:
    """The first tensor that the model is given has no two different elements, of more than 16, nor has any other: one
    number for a whole batch may be given beside the data, as the time of a flow is. Not of ones, one for each example,
    as nodes of a graph have that have no features."""
    batch = sample.facts.get("batch", 0)
    for key, row in sample.port("input").items():
        if key[1] == ":input" and row.count > 16 and row.std == 0 and not _varies(sample, key[0]):
            if row.mean == 1 and row.count == batch:
                continue
            yield Hit(key, mean=row.mean)


def _varies(sample: Sample, model: str) -> bool:
    """Whether something that a model is given varies, or cannot be looked at: numbers of tokens."""
    given = [row for key, row in sample.port("input").items() if key[0] == model and not path_of(key[1])]
    return bool(sample.facts.get("given_others")) or any(row.std > 0 for row in given)


@rule(
    "input_scale",
    severity="warning",
    means="the input is far from zero mean and unit standard deviation",
    cause="raw pixels from 0 to 255, or features that were not standardised",
    remedy="subtract the mean and divide by the standard deviation of the training set",
    share=0.9,
)
def input_scale(sample: Sample, past: Past) -> Iterator[Hit]:
    """|mean| above 5 or a standard deviation outside [0.01, 10]; the published [-1, 1] rejects standardised data.

    Asked of the first floating tensor that a model is given, by position or by name; of a model whose parts are called
    one by one, that the first part is given; not of what another model has made, nor of one without parameters, which
    may be there to normalise it. Where most of it is 0, as of counts of words, 0.01 is less by the root of how much is
    not. A model that normalises it itself is left out: its first layer is a norm, is given what is not far, or returns
    a tenth or less of what its initial weights make of such an input.
    """
    asked, learning = set[str](), {owner for owner, _ in sample.parameters}
    given = sample.facts.get("given", {})
    for key, row in sample.port("input").items():
        site = given.get(key[0], ":input")
        if not site or path_of(key[1]) != path_of(site) or key[0] in asked or "mask" in key[1]:
            continue
        asked.add(key[0])
        is_asked = row.count > 16 and key[0] in learning
        if is_asked and is_far_from_standard(row) and not is_normalised(sample, key):
            yield Hit(key, mean=row.mean, std=row.std, min=row.min, max=row.max)


@rule(
    "init_imbalance",
    severity="warning",
    means="with the initial weights the signal grows or shrinks by a large factor through the model",
    cause="an initialisation that does not suit the activation, or layers without normalisation",
    remedy="nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh; or add normalisation",
    least=1,
    share=0.0,
    hides=("update_small",),
)
def init_imbalance(sample: Sample, past: Past) -> Iterator[Hit]:
    """At the first look, what some layer returns is 1e3 times larger or smaller than what the first one returns.

    Of one whose bias is most of what it returns the spread counts: last layers may begin at their targets' mean. A last
    layer whose weights are a hundredth of the first one's (rms) begins near 0 on purpose.
    """
    if past.looks > 1 or sample.age > 1:
        return
    scales: dict[str, float] = {}
    sizes: dict[str, list[float]] = {}  # of weights, by model, in the order of their layers
    found: dict[str, tuple[int, Hit]] = {}
    for key, row in sample.port("output").items():
        known = sample.parameters.get((key[0], f"{key[1]}.weight:param"))
        if known is None or known.kind != "weight" or not row.count or not row.rms:
            continue
        bias = sample.of((key[0], f"{key[1]}.bias:param"), "param")
        is_moved = bias is not None and bias.count and bias.rms > 0.5 * row.rms  # by a bias at the targets' mean
        scale = row.std if is_moved else row.rms
        first = scales.setdefault(key[0], scale)
        weight = sample.rows.get((key[0], f"{key[1]}.weight:param"))
        sizes.setdefault(key[0], []).append(weight.rms if weight is not None else 1.0)
        if first and scale and not 1e-3 < scale / first < 1e3:
            what = "standard deviation" if is_moved else "rms"
            told = f"with the initial weights the {what} of what layers return goes from {first:.4g} to {scale:.4g}"
            found.setdefault(key[0], (len(sizes[key[0]]), Hit(key, told, scale=scale, first_scale=first)))
    for model, (at, hit) in found.items():
        is_last = at == len(sizes[model]) and hit.evidence["scale"] < hit.evidence["first_scale"]
        if not (is_last and sizes[model][-1] < 0.01 * sizes[model][0]):
            yield hit
            return


@rule(
    "initial_loss",
    severity="warning",
    means="the first loss is far above that of guessing: the model begins by being sure of wrong answers",
    cause="a last layer with weights that are too large, or inputs that are not normalised",
    remedy="make the last layer's initial weights smaller; a fresh classifier should begin at ln(classes)",
    least=1,
    share=0.0,
)
def initial_loss(sample: Sample, past: Past) -> Iterator[Hit]:
    """Cross entropy above twice ln(classes) + 1 at step 0 (TheDeepChecker); fine-tuned models begin below it."""
    classes = sample.facts.get("classes")
    if past.looks > 1 or sample.age or not classes:
        return
    name, expected = classes["loss"], classes.get("times", 1.0) * math.log(classes["count"])
    factor = sample.facts.get("factor", {})
    value = sample.losses.get(name)
    if value is not None and factor.get("loss") == name and factor["by"]:  # 0 of an empty batch
        value /= factor["by"]
    if value is not None and value > 2 * expected + 1:
        times = f"{classes['times']:.4g} " if classes.get("times", 1.0) != 1 else ""
        yield Hit(("", ""),
                  f"the first loss is {value:.4g}; guessing gives {times}ln({classes['count']}) = {expected:.4g}",
                  loss=value, expected=expected, classes=classes["count"])  # fmt: skip


@rule(
    "diverging",
    severity="error",
    means="the loss grows instead of falling",
    cause="a learning rate that is too high, a flipped sign, or gradients that are not cleared",
    remedy="divide the learning rate by 10; check the sign of the loss; clip gradients",
    least=8,
    share=0.2,
    hides=("update_large",),
)
def diverging(sample: Sample, past: Past) -> Iterator[Hit]:
    """The median of the last ten looks' losses above twice the first five's, in runs with one optimizer, and most of
    them above each of these: what batches of a few examples make of a loss is no rise.

    A negative loss that keeps falling beyond a hundred times its first magnitude, and beyond -100, diverges as well.
    Not where it acts (``Sample.is_acting``) in a quarter of the looks: an agent's loss follows its returns; nor in many
    short trainings, each with a new optimizer and weights that were written anew (Reptile): each task has its own; nor
    of a loss that is divided by another number later on than at first.
    """
    if sample.facts.get("optimizers", 1) != 1 or past.is_acting or sample.facts.get("is_task"):
        return
    for name, first in past.losses.items():
        recent = past.recent.get(name)
        if recent is None or len(first) < 5 or len(recent) < 10 or past.scales.has_changed(name):
            continue
        start, now = statistics.median(first), statistics.median(recent)
        least = sorted(recent)[len(recent) // 4]
        grew = start > 0 and now > 2 * start and now > start + 0.05 and least > max(first[:5])
        fell = now < 0 and now < -100 * max(abs(start), 1.0)
        if grew or fell:
            yield Hit(("", ""), f"the loss {name!r} went from {start:.4g} to {now:.4g}", first=start, now=now)
