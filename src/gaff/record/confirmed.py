"""Causes that experiments have told: what became better when one thing was changed, and what stayed the same.

Needs no torch. Figures are those of ``Experiments``: a change helps if it gains a fifth or more of what the best run
has gained over the first step, beyond twice the noise between runs that mean the same.
"""

from __future__ import annotations

import math

from gaff.record.causes import FACTS, LEAST_GAIN, READ, Claim, cause
from gaff.record.experiments import KINDS, Experiment, Experiments, Outcome
from gaff.record.run_case import RunCase

_ALIKE = 0.75  # of the best gain: what reaches that much does as well
_TOO_LOW = 0.75  # of all that was gained: with less a higher learning rate is merely faster
_LEAST_STEPS = 50  # before "no difference" says anything
_SAME = 1e-5  # relative: losses of the first steps that are the same but for rounding
# With these every input is as good as another, and no more follows from it.
_HIDES_INPUTS = ("labels_constant", "batch_norm_of_few", "broadcast")
# In this order: a remedy for one fault comes before those that soften many.
_SPECIFIC = ("zero-grad", "train-mode", "unfreeze", "fp32", "decay")
_NAMES = {
    "zero-grad": ("not_cleared", "gradients are not cleared between steps"),
    "train-mode": ("eval_mode_in_training", "the model is trained in evaluation mode"),
    "unfreeze": ("frozen_by_accident", "parameters that the model needs are frozen or missing in the optimizer"),
    "fp32": ("half_range", "half precision spoils the training"),
    "decay": ("weight_decay_too_high", "the optimizer's weight decay is too high"),
}
_REMEDIES = {
    "zero-grad": "call optimizer.zero_grad() in every step",
    "train-mode": "call model.train() before training, and again after every evaluation",
    "unfreeze": "let what is to be trained require grad before the optimizer is made, and give it all parameters",
    "fp32": "keep what overflows or rounds away in float32, or use bfloat16",
    "decay": "lower weight_decay: usual are about 1e-4 with SGD or Adam, and 0.01 to 0.1 with AdamW",
}
_AFTER_LARGE_STEPS = ("update_large", "diverging", "exploding", "loss_spike", "dead_units", "sparse_gradient",
                      "saturated", "attention_collapse", "nonfinite", "vanishing", "zero_gradient", "half_range",
                      "learning_rate_too_high", "labels_do_not_belong")  # fmt: skip


@cause
def told_by_what_helps(case: RunCase) -> Claim | None:
    """What was wrong, by the change with which the loss is lower. Certain: it was tried."""
    known = case.experiments
    if known is None or not _is_alone(case):
        return None
    remedies = [one for one in known.changed if one.kind in KINDS and KINDS[one.kind].is_remedy]
    best = max(map(known.gain, remedies), default=0.0)
    alike = [one for one in remedies if known.gain(one) >= max(LEAST_GAIN, _ALIKE * best)]
    told = tuple(_line(known, one) for one in sorted(remedies, key=known.gain, reverse=True))
    first = next((one for kind in _SPECIFIC for one in alike if one.kind == kind), None)
    if first is not None:
        name, text = _NAMES[first.kind]
        seen = case.found(*FACTS) if first.kind == "unfreeze" else None
        name = name if seen is None else seen.rule
        return Claim(name, "certain", f"{text}: {_compared(known, first)}", told, _began(case), _REMEDIES[first.kind],
                     _AFTER_LARGE_STEPS)  # fmt: skip
    raised = [one for one in alike if one.kind == "lr" and _is_raised(one)]
    softer = [one for one in alike if one not in raised]
    if softer:
        return _too_large(case, known, softer, told)
    is_right_loss = case.found(*READ) is None  # else larger steps do well in the wrong one
    if raised and is_right_loss and known.gain(raised[0]) >= _TOO_LOW:
        rate = case.lr.told if case.lr is not None and case.lr.values else None
        text = "the learning rate is too low" if rate is None else f"a learning rate of {rate} is too low"
        return Claim("learning_rate_too_low", "certain", f"{text}: {_compared(known, raised[0])}", told, 0,
                     f"raise it, as was tried ({raised[0].name})",
                     ("update_small", "vanishing", "labels_do_not_belong"))  # fmt: skip
    return None


def _is_alone(case: RunCase) -> bool:
    """Whether there is one loss and one optimizer: of several, one loss may rise because another is lowered."""
    return case.optimizers == 1 and len(case.losses) < 2


def _too_large(case: RunCase, known: Experiments, helping: list[Outcome], told: tuple[str, ...]) -> Claim:
    """Steps that are too large, in the words of what makes them smaller: at the beginning, at spikes, or always."""
    at = f" of {case.lr.told}" if case.lr is not None and case.lr.values else ""
    kinds = {one.kind: one for one in helping}
    if "warmup" in kinds:
        text, remedy = f"a learning rate{at} is too high for the first steps", "warm it up, as was tried"
    elif "lr" in kinds:
        text, remedy = f"a learning rate{at} is too high", f"lower it, as was tried ({kinds['lr'].name})"
    else:
        text, remedy = "some gradients are far too large", f"clip gradients, as was tried ({kinds['clip'].name})"
    if "clip" in kinds and "lr" in kinds:
        remedy += "; clipping gradients does as well"
    first = max(helping, key=known.gain)
    return Claim("learning_rate_too_high", "certain", f"{text}: {_compared(known, first)}", told, _began(case), remedy,
                 _AFTER_LARGE_STEPS)  # fmt: skip


def _began(case: RunCase) -> int:
    """The first step at which watching has seen anything of what an experiment has told the cause of; else 0."""
    seen = [one.since for one in case.findings if one.rule in _AFTER_LARGE_STEPS]
    return min([*seen, *([case.rise[1]] if case.rise is not None else [])], default=0)


def _is_raised(one: Outcome) -> bool:
    """Whether an experiment has raised the learning rate: by a factor; one that was set is taken for lowered."""
    experiment = Experiment.parse(one.name)
    return experiment.is_factor and (experiment.value or 0.0) > 1


@cause
def told_by_what_changes_nothing(case: RunCase) -> Claim | None:
    """Inputs that do not matter: with rows permuted against the labels the loss is the same.

    If one batch can be learned the input arrives, and does not belong to the labels; else it is not used at all. Where
    each row's target is computed inside the model, permuting changes nothing but the rounding: then it tells nothing,
    unless inputs of zeros change as little.
    """
    known = case.experiments
    scrambled = known.get("scramble") if known is not None else None
    if known is None or scrambled is None or scrambled.loss is None or known.bare.loss is None:
        return None
    if not _is_alone(case) or known.bare.steps < _LEAST_STEPS or case.found(*_HIDES_INPUTS) is not None:
        return None
    if known.effect(scrambled) != "same":
        return _hardly_matters(known, scrambled)
    blind, one_batch = known.get("blind"), known.get("one-batch")
    told = [_line(known, one) for one in (scrambled, blind, one_batch) if one is not None]
    is_exact = _is_exactly(known, scrambled)
    if is_exact and (blind is None or not _is_exactly(known, blind)):
        return None
    if is_exact:
        text = "what the model returns does not depend on its input"
        return Claim("input_not_used", "certain", text, tuple(told), 0,
                     "look where the input is lost: gaff trace follows a batch through the model",
                     ("labels_do_not_belong",))  # fmt: skip
    if one_batch is None or one_batch.loss is None:
        text = "the loss is the same with rows of the input permuted against the labels"
        return Claim("labels_do_not_belong", "possible", text, tuple(told), 0,
                     "compare a few inputs with their labels, after all that loads and shuffles them",
                     ("labels_do_not_belong",), ("one-batch",))  # fmt: skip
    if known.is_well(one_batch) and one_batch.loss < known.bare.loss - max(2 * known.noise, 0.2 * abs(known.bare.loss)):
        text = "inputs and labels do not belong together: permuting one against the other changes nothing, while one " \
               "batch can be learned"  # fmt: skip
        return Claim("labels_do_not_belong", "certain", text, tuple(told), 0,
                     "compare a few inputs with their labels, after all that loads and shuffles them: is one shuffled, "
                     "sorted or cut without the other?", ("labels_do_not_belong", "output_constant"))  # fmt: skip
    text = "not even one batch can be learned, and the input makes no difference"
    return Claim("nothing_learned", "possible", text, tuple(told), 0,
                 "look where the input or the gradients are lost: gaff trace --backward shows both",
                 ("labels_do_not_belong",), ("lr=10x", "lr=0.1x", "unfreeze", "train-mode"))  # fmt: skip


def _hardly_matters(known: Experiments, scrambled: Outcome) -> Claim | None:
    """Inputs that matter little after all these steps, while one batch is soon learned: maybe all is learned by heart.

    So it is where labels were shuffled, after some rounds through the data, and where a task is hard.
    """
    one_batch = known.get("one-batch")
    if one_batch is None or one_batch.loss is None or not known.is_well(one_batch):
        return None
    start, reached, mixed = known.bare.start, known.bare.loss or 0.0, scrambled.loss or 0.0
    if start - reached > 0.1 * abs(start) or mixed - reached > 0.1 * (start - one_batch.loss):
        return None
    text = "inputs and labels may not belong together: permuting one against the other changes little, while one " \
           "batch is soon learned"  # fmt: skip
    return Claim("labels_do_not_belong", "possible", text, (_line(known, scrambled), _line(known, one_batch)), 0,
                 "compare a few inputs with their labels; if they do, the task is hard: train for longer",
                 ("labels_do_not_belong",))  # fmt: skip


def _is_exactly(known: Experiments, one: Outcome) -> bool:
    """Whether the losses of the first steps are those of the run as it is, but for rounding."""
    pairs = list(zip(known.bare.first, one.first, strict=False))
    return bool(pairs) and all(math.isclose(a, b, rel_tol=_SAME, abs_tol=1e-7) for a, b in pairs)


def _compared(known: Experiments, one: Outcome) -> str:
    """The loss as it is and with a change, in words that go on after a colon."""
    return f"after {known.bare.steps} steps the loss is {_number(known.bare.loss)}, with {one.name} it is " \
           f"{_number(one.loss)}"  # fmt: skip


def _line(known: Experiments, one: Outcome) -> str:
    """An outcome as a line of evidence."""
    return f"{one.name}: loss {_number(one.loss)} ({known.effect(one)}); as it is {_number(known.bare.loss)}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}" if math.isfinite(value) else "not finite"
