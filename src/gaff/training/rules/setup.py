"""Rules about how a training is set up: labels, losses, batches, modes, what is frozen, decay, precision of weights.

Written as those of ``gaff.training.rules.steps``: each check's docstring tells when it hits, and ``docs/rules.md``
repeats it word for word. What is read from the process itself (``sample.facts``) was found while the step ran.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from gaff.record.sample import Key, Sample
from gaff.training.rules.layers import clips_an_explosion
from gaff.training.rules.registry import LEAST_TARGETS, Hit, Past, rule
from gaff.training.rules.steps import has_fallen

_PAIRWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_WITH_TARGETS = ("cross_entropy", "nll_loss", *_PAIRWISE)
_HALF = ("bfloat16", "float16")

_USUAL_DECAY, _USUAL_ADAMW = 1e-3, 0.1  # weight decays that people train with; chosen


@rule(
    "loss_sign",
    severity="error",
    means="the loss is turned around: training makes it worse",
    cause="an extra minus sign before the loss, or maximize=True of an optimizer without one",
    remedy="remove the minus before the loss, or set maximize=False",
    least=3,
    share=0.5,
    hides=("diverging", "exploding", "update_large", "dead_units", "saturated"),
)
def loss_sign(sample: Sample, past: Past) -> Iterator[Hit]:
    """A minus right before a cross entropy, a squared or an absolute error, read from the autograd graph, of which the
    optimizer lowers the negative; or none, and an optimizer with ``maximize=True``.

    In runs with one optimizer and one loss, which steps the model's own parameters: adversaries are trained so, and
    inputs that are to fool a model.
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
    by hand that is the mean or sum of squares or absolute values of a difference of [batch, batch] which was made of
    [batch, 1] or [batch]. Certain."""
    spread = sample.facts.get("spread")
    if spread and spread["made"][0] == sample.facts.get("batch"):
        told = f"the loss {spread['loss']!r} takes targets from outputs of shape {list(spread['output'])}"
        yield Hit(("", ""), f"{told} and gets a difference of shape {list(spread['made'])}: each output is compared "
                  "with every target", output=list(spread["output"]), made=list(spread["made"]))  # fmt: skip
        return
    for one in sample.facts.get("targets", ()):
        shapes = one["output"], one["shape"]
        if one["function"] in _PAIRWISE and shapes[0] != shapes[1] and _joined_size(*shapes) > max(map(_size, shapes)):
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
    squared or absolute error that lie outside of what such an activation can return, by more than a tenth."""
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
    least, most = {"relu": (0.0, math.inf), "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}[by]
    beyond = 0.1 * (max(abs(low), abs(high)) if by == "relu" else most - least)
    if len(told) == 1 and (low < least - beyond or high > most + beyond):
        span = "are never negative" if by == "relu" else f"lie between {least:g} and {most:g}"
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
    """Every target that a loss function of torch's was given in a step is one number, of eight or more examples.

    In each look so far, or another number in another look, as where data is sorted by label. In runs with one optimizer
    and one loss; targets of zero of a regression are left out, and losses against probabilities, and a cross entropy
    over scores of pairs that were put together, of which the right one may always be the first.
    """
    told = [one for one in sample.facts.get("targets", ()) if one["function"] in _WITH_TARGETS]
    if (
        not told
        or not _is_alone(sample)
        or sample.facts.get("scores")
        or any(one["low"] != one["high"] or one["count"] < LEAST_TARGETS for one in told)
    ):
        return
    kinds = len(past.targets - {math.inf})
    if math.inf in past.targets and kinds < 2:
        return
    if any(one["low"] == 0 and one["function"] in _PAIRWISE for one in told):
        return
    what = f"all {told[0]['count']} targets of a batch are {told[0]['low']:.4g}"
    if kinds > 1:
        what += f", and others in other batches ({kinds} were seen alone): the data is in the order of its labels"
    yield Hit(("", ""), what, target=told[0]["low"], classes=kinds)


@rule(
    "same_batch",
    severity="error",
    means="every step is made on the same batch, though the DataLoader has others",
    cause="next(iter(loader)) in the loop begins the loader anew each time, and it does not shuffle",
    remedy="for batch in loader: ...; or keep the iterator, and make a new one when it ends",
    least=8,
    share=0.95,
)
def same_batch(sample: Sample, past: Past) -> Iterator[Hit]:
    """The checksum of what the model is given is that of the look before, while a DataLoader of two batches or more is
    begun anew in nearly every step."""
    batches = sample.facts.get("batches")
    if batches and sample.facts.get("is_repeated") and sample.step >= 3 and batches["begun"] > 0.9 * sample.step:
        yield Hit(("", ""), f"every step is made on the same batch; the DataLoader has {batches['count']} batches",
                  batches=batches["count"], begun=batches["begun"])  # fmt: skip


@rule(
    "eval_mode_in_training",
    severity="warning",
    means="the model is trained in eval mode: dropout is off, or BatchNorm's statistics are not updated",
    cause="model.train() is missing after an evaluation, or was never called on what from_pretrained returns",
    remedy="model.train() before training, and after each evaluation",
    least=5,
    share=0.9,
)
def eval_mode_in_training(sample: Sample, past: Past) -> Iterator[Hit]:
    """Steps are made whose only forwards with gradients were in eval mode, of a model with dropout or BatchNorm.

    Certain; where that is meant it does no harm.
    """
    for model in sample.facts.get("eval_mode", ()):
        yield Hit((model, ""))


@rule(
    "frozen_by_accident",
    severity="warning",
    means="no weight matrix of the model is trained, and the loss does not fall",
    cause="requires_grad was set to False for all, or for what is left after the head was replaced",
    remedy="set requires_grad=True for what is to learn, before the optimizer is made",
    least=8,
    share=0.9,
    hides=("not_owned", "no_gradient", "update_small"),
)
def frozen_by_accident(sample: Sample, past: Past) -> Iterator[Hit]:
    """Of two or more weights (of two dimensions or more) of a model that an optimizer steps, none requires grad, and no
    loss has fallen to six tenths."""
    by_model: dict[str, list[bool]] = {}
    for key, one in sample.parameters.items():
        if one.kind == "weight":
            by_model.setdefault(key[0], []).append(one.requires_grad)
    if any(has_fallen(past, name, 0.6) for name in past.losses):
        return
    for model, told in by_model.items():
        if len(told) >= 2 and not any(told):
            yield Hit((model, ""), weight_tensors=len(told))


@rule(
    "symmetric_units",
    severity="error",
    means="most weights begin as one constant: their units stay identical, or output and gradient are zero",
    cause="an initialisation with zeros or another constant",
    remedy="nn.init.kaiming_normal_ or another random one for weights; constants are for biases and norms",
    least=1,
    share=0.0,
    hides=("dead_units", "zero_gradient", "no_signal", "output_constant", "update_small", "sparse_gradient",
           "never_updated", "update_large"),
)  # fmt: skip
def symmetric_units(sample: Sample, past: Past) -> Iterator[Hit]:
    """At the first look most weights that are trained, two or more, have one number for all their elements."""
    if past.looks > 1 or sample.step > 1:
        return
    alike: dict[str, list[Key]] = {}
    count: dict[str, int] = {}
    for key, one in sample.parameters.items():
        row = sample.rows.get(key)
        if one.kind == "weight" and one.requires_grad and one.elements > 8 and row is not None and row.count:
            count[key[0]] = count.get(key[0], 0) + 1
            if row.std <= 1e-6 * row.rms:
                alike.setdefault(key[0], []).append(key)
    for model, keys in alike.items():
        if len(keys) >= 2 and len(keys) > count[model] / 2:
            yield Hit((model, keys[0][1]), weight_tensors=f"{len(keys)} of {count[model]}")


@rule(
    "weight_decay_too_high",
    severity="warning",
    means="weight decay changes the weights more than the gradients do, and the loss does not fall",
    cause="weight_decay is too high: Adam and SGD add it, times the weight, to the gradient; AdamW shrinks by lr * it",
    remedy="lower weight_decay: usual are about 1e-4 with SGD or Adam, and 0.01 to 0.1 with AdamW",
    least=8,
    share=0.5,
    hides=("no_signal", "output_constant", "dead_units", "vanishing", "update_small"),
)
def weight_decay_too_high(sample: Sample, past: Past) -> Iterator[Hit]:
    """The median over the weights of the share that decay has in an update is above a half, and no loss has fallen by a
    tenth. Weights without any gradient are left out, and a decay that is usual (up to 1e-3, of AdamW 0.1): where that
    is most of what they get, the gradient is too small, and the fault lies elsewhere.

    AdamW (Loshchilov & Hutter, 2019) takes lr * decay * weight off: its share of the update; others add decay * weight
    to the gradient: its share of the two.
    """
    if any(has_fallen(past, name) for name in past.losses):
        return
    shares: dict[str, list[float]] = {}
    for key, one in sample.parameters.items():
        weight, update, gradient = sample.rows.get(key), sample.of(key, "update"), sample.of(key, "grad")
        if one.kind != "weight" or not one.decay or not one.lr or weight is None or update is None or gradient is None:
            continue
        if not gradient.rms or one.decay <= (_USUAL_ADAMW if one.is_decoupled else _USUAL_DECAY):
            continue
        if one.is_decoupled:
            share = one.lr * one.decay * weight.rms / update.rms if update.rms else 0.0
        else:
            pull = one.decay * weight.rms
            share = pull / (pull + gradient.rms) if pull else 0.0
        shares.setdefault(key[0], []).append(share)
    for model, told in shares.items():
        middle = statistics.median(told)
        if middle > 0.5:
            decay = max(one.decay for key, one in sample.parameters.items() if key[0] == model)
            yield Hit((model, ""), decay_of_update=middle, weight_decay=decay)


@rule(
    "updates_round_away",
    severity="error",
    means="most of each step is lost to rounding: weights of half precision are too coarse for it",
    cause="weights in bfloat16 or float16 with a learning rate that changes them by less than their last digit",
    remedy="keep weights in float32 and compute under autocast, or raise the learning rate",
    least=5,
    share=0.5,
    hides=("never_updated", "update_small"),
)
def updates_round_away(sample: Sample, past: Past) -> Iterator[Hit]:
    """In more than half of the weights of 16 bits most elements stay as they are, though they have a gradient."""
    lost: dict[str, list[bool]] = {}
    for key, one in sample.parameters.items():
        update, gradient = sample.of(key, "update"), sample.of(key, "grad")
        if one.dtype in _HALF and one.kind == "weight" and update is not None and gradient is not None:
            lost.setdefault(key[0], []).append(bool(update.count) and update.zeros - gradient.zeros > 0.5)
    for model, told in lost.items():
        if sum(told) > len(told) / 2:
            yield Hit((model, ""), weight_tensors=f"{sum(told)} of {len(told)}")


@rule(
    "clipped_to_nothing",
    severity="warning",
    means="gradients are clipped to a small part of what they are, and the loss does not fall",
    cause="a max_norm that is far below the usual norm of the gradients",
    remedy="set max_norm near the usual norm of the gradients, which clip_grad_norm_ returns before it clips",
    least=8,
    share=0.8,
    hides=("update_small", "never_updated"),
)
def clipped_to_nothing(sample: Sample, past: Past) -> Iterator[Hit]:
    """clip_grad_norm_ leaves less than a hundredth of the norm, and no loss has fallen by a tenth; a norm above 1,000
    that is brought to a usual limit, 0.1 or more, is the fault itself: ``exploding`` tells of it."""
    found = sample.facts.get("clipped")
    if not found or found["most"] >= 0.01 * found["norm"] or any(has_fallen(past, name) for name in past.losses):
        return
    if not clips_an_explosion(sample):
        yield Hit(("", ""), f"gradients with a norm of {found['norm']:.4g} are clipped to {found['most']:.4g}",
                  norm=found["norm"], limit=found["most"])  # fmt: skip


@rule(
    "clipped_while_scaled",
    severity="error",
    means="gradients are clipped while a GradScaler's factor is on them: what is left is that much smaller",
    cause="clip_grad_norm_ is called before scaler.unscale_(optimizer)",
    remedy="call scaler.unscale_(optimizer) ahead of clip_grad_norm_",
    least=3,
    share=0.5,
    hides=("exploding", "clipped_to_nothing", "update_small", "never_updated"),
)
def clipped_while_scaled(sample: Sample, past: Past) -> Iterator[Hit]:
    """clip_grad_norm_ makes gradients smaller that are multiplied by a GradScaler's factor, above 1, which has not
    been taken off, and leaves less than a hundredth without it: a limit that was multiplied, too, is meant. Certain."""
    found = sample.facts.get("clipped")
    factor = found.get("factor", 1.0) if found else 1.0
    if found and factor > 1.0 and found["most"] < min(found["norm"], 0.01 * factor):
        yield Hit(("", ""), f"gradients are clipped to {found['most']:.4g} while they are {factor:.4g} times as large, "
                  f"by a GradScaler: {found['most'] / factor:.2g} is left",
                  norm=found["norm"], limit=found["most"], factor=factor)  # fmt: skip


@rule(
    "one_class",
    severity="error",
    means="a cross entropy over a single class is zero whatever the model returns: nothing is learned from it",
    cause="cross_entropy with a model that returns one number for each example",
    remedy="binary_cross_entropy_with_logits for one number an example, or a last layer with two outputs",
    least=2,
    share=0.5,
    hides=("zero_gradient", "no_gradient", "no_signal", "output_constant", "update_small", "never_updated",
           "labels_constant", "vanishing"),
)  # fmt: skip
def one_class(sample: Sample, past: Past) -> Iterator[Hit]:
    """cross_entropy is given scores of [batch, 1], or [batch, 1, ...], and no loss is above zero. Certain."""
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
    more than rounding. Certain."""
    for one in sample.facts.get("targets", ()):
        if one["function"] == "kl_div" and one.get("highest", 0.0) > 1e-3:
            told = f"kl_div is given an input with elements up to {one['highest']:.4g}"
            yield Hit(("", ""), f"{told}: they are no logarithms of probabilities", highest=one["highest"])
            return


@rule(
    "made_in_forward",
    severity="error",
    means="a layer is made anew in each forward: its weights are other random ones each time, and nobody trains them",
    cause="a layer that is made where it is called, in place of in __init__",
    remedy="make the layer once, in __init__, as an attribute of the model",
    least=3,
    share=0.9,
)
def made_in_forward(sample: Sample, past: Past) -> Iterator[Hit]:
    """A module whose trainable weights are no constant, and no copy of the model's own, was called with gradients while
    a model runs, is no part of it, and is gone when the step ends. Certain."""
    for model, kind in sample.facts.get("anew", {}).items():
        yield Hit((model, ""), f"a {kind} is made anew in each forward of {model!r}, and is gone after the step",
                  layer=kind)  # fmt: skip


@rule(
    "nothing_loaded",
    severity="error",
    means="load_state_dict(strict=False) has found none of a model's parameters: it trains from where it was",
    cause="the names in the file have another prefix, as 'module.' of DataParallel and '_orig_mod.' of torch.compile",
    remedy="take the prefix off the names, or load into the part that they belong to; strict=True tells of it",
    least=1,
    share=0.0,
)
def nothing_loaded(sample: Sample, past: Past) -> Iterator[Hit]:
    """The last load_state_dict of a model, or of a part of it, knew none of its parameters, but others. Certain."""
    for one in sample.facts.get("unmatched", ()):
        where = f"{one['model']!r}" + (f" ({one['path']})" if one["path"] else "")
        yield Hit((one["model"], one["path"]), f"load_state_dict has found none of the {one['parameters']} parameters "
                  f"of {where}: {one['missing']!r} is missing, and {one['given']!r} was given", missing=one["missing"],
                  given=one["given"])  # fmt: skip


@rule(
    "dropout_high",
    severity="warning",
    means="a dropout leaves next to nothing of what it is given, and the loss hardly falls",
    cause="p is the share that is set to zero, not the share that is kept",
    remedy="a p of 0.1 to 0.5",
    least=5,
    share=0.5,
    hides=(
        "zero_gradient",
        "sparse_gradient",
        "dead_units",
        "update_small",
        "vanishing",
        "output_constant",
        "no_signal",
    ),
)
def dropout_high(sample: Sample, past: Past) -> Iterator[Hit]:
    """A dropout module with a p of 0.9 or more in training mode, while no loss has fallen to a half."""
    if any(has_fallen(past, name, 0.5) for name in past.losses):
        return
    for (model, path), share in sample.facts.get("dropouts", {}).items():
        if share >= 0.9:
            yield Hit((model, path), f"a dropout sets a share of {share:.4g} of what it is given to zero", p=share)


@rule(
    "batch_norm_of_few",
    severity="warning",
    means="BatchNorm over batches of one or two examples: its statistics are too noisy",
    cause="a batch size for each process that is too small for BatchNorm",
    remedy="larger batches, SyncBatchNorm over processes, GroupNorm or LayerNorm",
    least=8,
    share=0.9,
)
def batch_norm_of_few(sample: Sample, past: Past) -> Iterator[Hit]:
    """The model is given one or two examples at a time, and has a BatchNorm in training mode."""
    for model in sample.facts.get("batch_norm", ()):
        if sample.facts.get("batch", 0) in (1, 2):
            yield Hit((model, ""), batch_size=sample.facts["batch"])


def _is_alone(sample: Sample) -> bool:
    """Whether one optimizer lowers one loss: with several, one may be trained against another."""
    return sample.facts.get("optimizers", 1) == 1 and len(sample.losses) == 1


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size


def _joined_size(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many elements two shapes have that are broadcast against each other (NumPy's rules)."""
    longest = max(len(one), len(other))
    pairs: list[Any] = [(1,) * (longest - len(shape)) + tuple(shape) for shape in (one, other)]
    return _size(tuple(max(a, b) for a, b in zip(*pairs, strict=True)))
