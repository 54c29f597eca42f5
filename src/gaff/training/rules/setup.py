"""Rules about how a training is set up: batches, modes, what is frozen or loaded, decay, clipping, precision.

Written as those of ``gaff.training.rules.steps``: each check's docstring tells when it hits, and ``docs/rules.md``
repeats it word for word. What is read from the process itself (``sample.facts``) was found while the step ran.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from gaff.record.sample import Key, Parameter, Sample, path_of
from gaff.training.rules.layers import clips_an_explosion
from gaff.training.rules.registry import Hit, Past, rule
from gaff.training.rules.steps import has_fallen, ratios_of_updates

_HALF = ("bfloat16", "float16")

_NEWEST, _BEGAN, _SEVERAL = 0.9, 0.3, 30  # shares of running statistics; batches
_FEW_VALUES = 64  # of a channel: their mean is off by an eighth of their spread
_MOST_GIVEN = 8  # batches of a step of which checksums are known
_TINY = 1e-3  # what gradients are clipped to by value, where that is next to nothing
_USUAL_DECAY, _USUAL_ADAMW = 1e-3, 0.1  # weight decays that people train with; chosen


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
    begun anew in nearly every step; not where a step is given as many batches as that has, or eight."""
    batches = sample.facts.get("batches")
    if batches and len({*batches["given"]}) >= min(batches["count"], _MOST_GIVEN):
        return
    if batches and sample.facts.get("repeats") and sample.step >= 3 and batches["begun"] > 0.9 * sample.step:
        yield Hit(("", ""), f"every step is made on the same batch; the DataLoader has {batches['count']} batches",
                  batches=batches["count"], begun=batches["begun"])  # fmt: skip


@rule(
    "one_batch",
    severity="warning",
    means="every step is made on one batch, though the DataLoader has others",
    cause="a batch that was taken before the loop is given to the model in it, or the loop's own goes by another name",
    remedy="give the model what the loop takes from the DataLoader; to overfit one batch on purpose is no fault",
    least=2,
    share=0.95,
)
def one_batch(sample: Sample, past: Past) -> Iterator[Hit]:
    """The checksums of all that models are given have been the same at nine looks in a row, after twenty steps and as
    many as the DataLoader has batches, two or more, while it is not begun anew in each; so have those of targets that
    are fewer or more. Not of one that has more rows than a batch of the DataLoader, as all examples at once."""
    batches, repeats = sample.facts.get("batches"), sample.facts.get("repeats", 0)
    if not batches or repeats < 8 or batches["begun"] > 0.9 * sample.step:
        return
    if batches["rows"] > batches["most"] > 0:
        return
    if sample.step >= max(20, batches["count"]):
        yield Hit(("", ""), f"the model is given the same batch at each of {repeats + 1} looks in a row; the "
                  f"DataLoader has {batches['count']} batches",
                  batches=batches["count"], begun=batches["begun"])  # fmt: skip


@rule(
    "eval_mode_in_training",
    severity="warning",
    means="the model is trained in eval mode: dropout is off, or BatchNorm's statistics are not updated",
    cause="model.train() is missing after an evaluation, or was never called on what from_pretrained returns",
    remedy="model.train() before training, and after each evaluation",
    least=5,
    share=0.3,
)
def eval_mode_in_training(sample: Sample, past: Past) -> Iterator[Hit]:
    """Steps are made whose only forwards with gradients were in eval mode, of a model with dropout or BatchNorm, none
    of which is in training mode; a BatchNorm that is frozen does not count.

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


def _weights(sample: Sample) -> list[tuple[Key, Parameter]]:
    """The weights of a step; of models that have none but embeddings, as those that factor a matrix, these, but for
    single numbers."""
    layered = {key[0] for key, one in sample.parameters.items() if one.kind == "weight"}
    return [
        (key, one)
        for key, one in sample.parameters.items()
        if one.kind == "weight" or (key[0] not in layered and one.kind == "embedding" and one.shape[-1] > 1)
    ]


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
    """In the first two steps most weights, two or more, have one number for all their elements; those that are frozen
    count among the others, and tell units apart. Embeddings count in models without any other weight. Not layers of
    which none can stand behind another, by their numbers of inputs and units, such as heads side by side, or such that
    have one unit each; nor tables of one shape that are no layer's, whose rows are picked and added up."""
    if sample.age > 1:  # of a model that runs inside of the step alone nothing is known in the first
        return
    alike: dict[str, list[Key]] = {}
    count: dict[str, int] = {}
    for key, one in _weights(sample):
        row = sample.rows.get(key)
        if one.elements > 8 and (not one.requires_grad or (row is not None and row.count)):
            count[key[0]] = count.get(key[0], 0) + 1
            if one.requires_grad and row is not None and row.std <= 1e-6 * row.rms:
                alike.setdefault(key[0], []).append(key)
    for model, keys in alike.items():
        if (
            len(keys) >= 2
            and len(keys) > count[model] / 2
            and not _are_tables(sample, keys)
            and _may_be_chained([sample.parameters[key] for key in keys])
        ):
            yield Hit((model, keys[0][1]), weight_tensors=f"{len(keys)} of {count[model]}")


def _are_tables(sample: Sample, keys: Sequence[Key]) -> bool:
    """Whether parameters, none of which is called a weight, are of one shape, [m, n], by which none can be multiplied
    with another."""
    shapes = {sample.parameters[key].shape for key in keys}
    is_named = any("weight" in path_of(key[1]).rpartition(".")[2] for key in keys)
    return not is_named and all(len(shape) == len({*shape}) == 2 for shape in shapes) and len(shapes) == 1


def _may_be_chained(weights: list[Parameter]) -> bool:
    """Whether what one layer returns may be what another one is given; true where that cannot be told."""
    shapes = [one.shape for one in weights if one.kind == "weight" and len(one.shape) == 2]
    is_known = len(shapes) == len(weights)
    if is_known and all(units == 1 < inputs for units, inputs in shapes):
        return False
    if not is_known or len({inputs for _, inputs in shapes}) > 1:
        return True
    are_alike = len({*shapes}) == 1  # side by side, unless one may be given all that another returns
    return any(
        units % inputs == 0 or (inputs % max(2, units) == 0 and not are_alike)  # a number of them, as a GRU's gates
        for at, (_, inputs) in enumerate(shapes)
        for units, _ in shapes[:at] + shapes[at + 1 :]
    )


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
    """The median over the weights of the share that decay has in an update is above 51 %, and no loss has fallen by a
    tenth. Weights without any gradient are left out (and embeddings beside other weights), and a decay that is usual
    (up to 1e-3, of AdamW 0.1): where that is most of what they get, the gradient is too small, and the fault lies
    elsewhere.

    AdamW (Loshchilov & Hutter, 2019) takes lr * decay * weight off: its share of the update; others add decay * weight
    to the gradient: its share of the two.
    """
    if any(has_fallen(past, name) for name in past.losses):
        return
    shares: dict[str, list[float]] = {}
    for key, one in _weights(sample):
        weight, update, gradient = sample.rows.get(key), sample.of(key, "update"), sample.of(key, "grad")
        if not one.decay or not one.lr or weight is None or update is None or gradient is None:
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
        if middle > 0.51:
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
    cause="a limit (max_norm, clip_value) that is far below what gradients usually are",
    remedy="set the limit near the usual norm of the gradients, which clip_grad_norm_ returns before it clips; that of "
    "clip_grad_value_ near their usual elements",
    least=8,
    share=0.8,
    hides=("update_small", "never_updated"),
)
def clipped_to_nothing(sample: Sample, past: Past) -> Iterator[Hit]:
    """clip_grad_norm_ leaves less than a hundredth of the norm, and no loss has fallen by a tenth; a norm above 1,000
    that is brought to a usual limit, 0.1 or more, is the fault itself: ``exploding`` tells of it. Or
    clip_grad_value_ leaves most elements of the gradients at one number below a thousandth, or at its negative.
    Not where steps change the median weight by more than 1e-4 of its size all the same: Adam and the like divide the
    size of gradients out."""
    ratios = [ratio for some in ratios_of_updates(sample).values() for ratio in some.values()]
    if (ratios and statistics.median(ratios) > 1e-4) or any(has_fallen(past, name) for name in past.losses):
        return
    found, value = sample.facts.get("clipped"), sample.facts.get("clipped_by_value", 0.0)
    if not found and (most := _value_of_all(sample, value)):
        yield Hit(("", ""), f"most elements of the gradients are {most:.4g} or -{most:.4g}: they are clipped by value",
                  limit=most)  # fmt: skip
    if found and found["most"] < 0.01 * found["norm"] and not clips_an_explosion(sample):
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
    """A dropout, a module or a function, with a p of 0.9 or more in training, while no loss has fallen to a half."""
    if any(has_fallen(past, name, 0.5) for name in past.losses):
        return
    for (model, path), share in {**sample.facts.get("dropouts", {}), **sample.facts.get("dropped", {})}.items():
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
    """The model is given one or two examples at a time, and has a BatchNorm in training mode. Not where that sees 64
    values of a channel or more, and the model returns as many for each example, as where it makes images of images."""
    for model, norms in sample.facts.get("batch_norm", {}).items():
        rows = [(sample.rows.get((model, path or ":output")), channels) for path, channels in norms]
        least = min((row.count / channels for row, channels in rows if row is not None), default=0)
        batch, made = sample.facts.get("batch", 0), sample.rows.get((model, ":output"))
        is_dense = made is not None and batch and made.count / batch >= _FEW_VALUES
        if batch in (1, 2) and not (is_dense and least >= _FEW_VALUES):
            yield Hit((model, ""), batch_size=batch)


@rule(
    "batch_norm_momentum",
    severity="warning",
    means="what BatchNorm normalises by in evaluation is not what it has seen in training",
    cause="a momentum of BatchNorm that was meant another way round: torch's is the weight of the newest batch; or one "
    "that is too small for so few batches",
    remedy="the default momentum=0.1; what other libraries call 0.99 is 0.01 here; momentum=None averages over all",
    phase="eval",
    least=2,
    share=0.5,
    hides=("eval_drift",),
)
def batch_norm_momentum(sample: Sample, past: Past) -> Iterator[Hit]:
    """A BatchNorm in evaluation mode whose momentum is 0.9 or more, so that its running statistics are about those of
    the last batch; or of whose running statistics 30 % or more, after 30 batches or more, are the 0 and 1 that they
    began with, (1 - momentum) to the power of the batches. Not where a variance is smaller than that allows, as of one
    that was loaded."""
    for model, norms in sample.facts.get("running", {}).items():
        for path, momentum, batches, variance in norms:
            began = (1 - momentum) ** batches if 0 < momentum <= 1 else 0.0
            told = f"a BatchNorm of momentum {momentum:g} has seen {int(batches)} batches in training"
            if momentum >= _NEWEST and batches >= _SEVERAL:
                told = f"{told}, and normalises by {momentum:.0%} of the last one in evaluation"
                yield Hit((model, path), told, momentum=momentum)
            elif began >= _BEGAN and batches >= _SEVERAL and variance >= 0.99 * began:
                told = f"{told}: {began:.0%} of its running statistics are still the 0 and 1 that they began with"
                yield Hit((model, path), told, momentum=momentum)


@rule(
    "statistics_unfilled",
    severity="error",
    means="BatchNorm of an averaged copy normalises by the 0 and 1 that it was made with: it has never seen a batch",
    cause="the copy follows parameters() alone; running_mean and running_var are buffers, which are not among them",
    remedy="copy the buffers, too: for a, b in zip(copy.buffers(), model.buffers()): a.copy_(b); "
    "torch.optim.swa_utils: AveragedModel(use_buffers=True), or update_bn(loader, averaged) before it is evaluated",
    phase="eval",
    least=1,
    share=0.0,
    hides=("eval_drift",),
)
def statistics_unfilled(sample: Sample, past: Past) -> Iterator[Hit]:
    """A model is evaluated whose weights have changed, and all of whose running statistics are 0 and 1 after no batch,
    while a model of its class has trained with some. Certain."""
    for model, one in (sample.facts.get("unfilled") or {}).items():
        told = f"{model} is evaluated by a mean of 0 and a variance of 1 in all of its {one['norms']} BatchNorm; "
        yield Hit((model, ""), f"{told}those of {one['like']} have seen {one['batches']} batches", **one)


def _value_of_all(sample: Sample, limit: float) -> float:
    """A limit below a thousandth, where it is what most elements of most gradients are, of three or more; else 0."""
    rows = [row for row in sample.port("grad").values() if row.count and row.rms > 0]
    largest = [max(abs(row.min), abs(row.max)) for row in rows]
    flat = [row for row, one in zip(rows, largest, strict=True) if one > 0.999 * limit and row.rms > 0.7 * one]
    return limit if 0 < limit < _TINY and len(rows) > 2 and 2 * len(flat) > len(rows) else 0.0
