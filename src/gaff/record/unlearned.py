"""Causes of a loss that stays where it was or never comes down: labels, layout, targets, a schedule, overfitting."""

from __future__ import annotations

import math

from gaff.record.causes import Claim, cause
from gaff.record.finding import evidence_of, told_of
from gaff.record.run_case import RunCase

_EARLY = 50  # steps in which what targets do is seen
_BESIDE = ("padding_attended", "padding_in_loss")  # with which a loss falls all the same
_HARMLESS = ("sparse_gradient", *_BESIDE)
_VERY_FAR = 1e4  # one whose gradients are above any limit for them at any time
_FAR = 100.0  # a target of a regression in units of its own; chosen: a fresh layer returns numbers of about one
_HARDLY = 1e-5  # a learning rate by which a model hardly changes, whatever optimizer has it; chosen
_RESTLESS = 0.7  # how far single steps of a loss lie from their stretch, of it, beyond which a stretch says little


@cause
def nothing_learned(case: RunCase) -> Claim | None:
    """A loss within 5 % of what guessing gives after a hundred steps or more, in a run in which nothing else was found,
    and which has never been a fifth below, nor ends a fiftieth below and by four times what single steps differ by.

    Layers that are dead, steps that are too small or too large, gradients that do not arrive would have been: what is
    left are labels that do not belong to the inputs, or a task that is hard. With such labels weights shrink, and ReLUs
    fall silent for many examples. Not of several losses with an optimizer each: those of a GAN rest there.
    """
    if not _may_be_unlearned(case) or (case.optimizers > 1 and len(case.losses) > 1):
        return None
    assert case.loss is not None
    name, curve = case.loss
    guess = case.guess[name]
    if abs(curve.last - guess) > 0.05 * guess or min(curve.values) < 0.8 * guess:  # it has been lower
        return None
    if guess - curve.last > max(4 * curve.spread, 0.02 * guess):  # as of pairs that it begins to tell apart
        return None
    told = f"the loss {name!r} is {curve.last:.4g} at the end and was {curve.first:.4g} at the beginning; guessing " \
           f"gives {guess:.4g}; no rule found anything in activations, gradients and updates"  # fmt: skip
    how = "has just come down to" if curve.is_falling else "stays at"
    text = f"the loss {how} the level of guessing, and nothing was found in activations, gradients and updates: " \
           "labels may not belong to their inputs, the model may be too weak, or without activations between its " \
           "layers, or steps are too small or too large"  # fmt: skip
    return Claim("labels_do_not_belong", "possible", text, (told,), 0,
                 "compare a few inputs with their labels as they reach the loss, after loading and shuffling; gaff try "
                 "tells whether the input is used at all", (),
                 ("scramble", "blind", "one-batch", "lr=0.1x", "lr=10x"))  # fmt: skip


@cause
def laid_out_wrongly(case: RunCase) -> Claim | None:
    """A layer that runs along the batch, attention that sums along another dimension than it normalises, classes or
    examples that a view has made, or a model that sees the tokens which it is to tell.

    Likely: each may be meant, as where examples attend to one another.
    """
    layouts = ("batch_as_time", "attention_axis", "classes_viewed", "examples_viewed")
    finding = case.found(*layouts, "targets_skip_a_token", "sees_the_future")
    if finding is None:
        return None
    certainty = "possible" if finding.rule == "targets_skip_a_token" else "likely"
    return Claim(finding.rule, certainty, told_of(finding), (evidence_of(finding),), finding.since, finding.remedy,
                 ("output_constant", "attention_collapse", "nothing_learned", "update_small", "sees_the_future",
                  "learning_rate_too_high"))  # fmt: skip


@cause
def first_steps_too_large(case: RunCase) -> Claim | None:
    """First steps that changed most weights by a third of their size, and a loss that a hundred steps or more have not
    brought a tenth below what guessing gives, or below where it began if that is less. Not of a loss that goes below 0,
    of which a tenth says nothing, as a difference of two energies.

    Weights grow under such steps, so that later ones are no longer large beside them.
    """
    finding = case.single.large_at_first
    if finding is None or case.loss is None or case.steps < 100 or case.is_acting or case.optimizers != 1:
        return None
    name, curve = case.loss
    if curve.lowest[1] < 0 or curve.last < 0.9 * min(curve.began, case.guess.get(name, math.inf)):
        return None
    lr = finding.evidence.get("lr")
    told = (evidence_of(finding), f"the loss {name!r} is {curve.last:.4g} at the end")
    to = f"{lr / 30:.1g} in place of {lr:.3g}" if isinstance(lr, float) and lr > 0 else "a lower one"
    return Claim("learning_rate_too_high", "possible", "the first steps changed most weights by a third of their size "
                 "or more, and the loss has not fallen since: what they held at first, or were pretrained to, is gone",
                 told, 0, f"a learning rate of {to}, or a warm-up",
                 ("labels_do_not_belong", "loss_does_not_fall", "worse_than_guessing", "saturated", "dead_units",
                  "output_constant", "vanishing", "update_large"), ("lr=0.1x", "warmup"))  # fmt: skip


@cause
def does_not_fall(case: RunCase) -> Claim | None:
    """A loss that a hundred steps or more have not lowered by a fiftieth, at half of what guessing gives or above.

    Asked where nothing else was found. What guessing gives is known of mean cross entropies, over
    classes or binary, and of mean squared and absolute errors. Not where single steps differ by nearly as much as the
    loss itself, as with a few targets far from all others: the median of a stretch says too little then.
    """
    if not _may_be_unlearned(case) or case.is_acting or case.optimizers != 1:
        return None
    assert case.loss is not None
    name, curve = case.loss
    if curve.last < 0.98 * curve.began or curve.last < 0.5 * case.guess[name]:
        return None
    if curve.spread > _RESTLESS * curve.first:
        return None
    told = f"the loss {name!r} is {curve.last:.4g} at the end and was {curve.first:.4g} at the beginning; guessing " \
           f"gives {case.guess[name]:.4g}"  # fmt: skip
    remedy = "gaff try runs it with other learning rates, on one batch, and with permuted inputs, and tells what helps"
    step, least = curve.lowest
    text = f"the loss does not fall in {case.steps} steps, and nothing that was found tells why"
    if least < 0.8 * min(curve.began, case.guess[name]):
        text = f"the loss fell to {least:.4g} by step {step}, and rose again: training is made harder since then, on " \
               "purpose or not, or steps are too large"  # fmt: skip
    return Claim("loss_does_not_fall", "possible", text, (told,), 0, remedy, (),
                 ("lr=10x", "lr=0.1x", "one-batch", "scramble"))  # fmt: skip


@cause
def worse_than_guessing(case: RunCase) -> Claim | None:
    """A loss that has fallen, and is still a tenth and more above what guessing gives after a hundred steps or more.

    Asked where nothing else was found, of one optimizer.
    """
    if not _may_be_unlearned(case) or case.is_acting or case.optimizers != 1:
        return None
    assert case.loss is not None
    name, curve = case.loss
    guess = case.guess[name]
    if curve.last < 1.1 * guess or curve.last >= 0.98 * curve.first:
        return None
    told = f"the loss {name!r} went from {curve.first:.4g} to {curve.last:.4g} in {case.steps} steps; guessing gives " \
           f"{guess:.4g}"  # fmt: skip
    return Claim("worse_than_guessing", "possible", "after all steps the loss is still above what one answer for all "
                 "examples gives: steps are too small for targets of this size, or too few", (told,), 0,
                 "scale targets (and inputs) to about one, begin the last bias at their mean, or take larger steps",
                 (), ("lr=10x", "lr=0.1x", "one-batch"))  # fmt: skip


@cause
def targets_far_from_zero(case: RunCase) -> Claim | None:
    """A regression with targets above a hundred, far from zero beside their spread, and a model that begins at zero.

    So says its first loss: it is above twice of what the spread alone makes of it, and about what the middle of the
    targets, or its square, is. Where something follows from it in fifty steps: gradients or steps that are too large
    (with targets above 10,000 whenever that is), a loss that rises or jumps, or one that does not fall and dead units;
    or a loss that is still ten times what guessing gives after a hundred steps.
    """
    harm = case.found("exploding", "diverging", "update_large")
    if harm is None and case.loss is not None and not case.loss[1].fell():
        harm = case.found("dead_units", "saturated", "output_constant", "no_signal")
    began = [one.since for one in (harm,) if one is not None] + [one[1] for one in (case.rise,) if one is not None]
    low, high = case.reach or (0.0, 0.0)
    farthest = max(abs(low), abs(high))
    latest = math.inf if farthest > _VERY_FAR and case.found("exploding") is not None else case.began + _EARLY
    is_harmed = case.jump is not None or any(step <= latest for step in began)
    if case.loss is not None and case.steps >= 100:
        is_harmed = is_harmed or case.loss[1].last > 10 * case.guess.get(case.loss[0], math.inf)
    if case.loss is None or farthest < _FAR or not is_harmed or case.is_acting:
        return None
    name, curve = case.loss
    middle = abs(low + high) / 2
    begins_at_zero = any(0.5 * one < curve.start < 4 * one for one in (middle, middle * middle))
    is_offset = begins_at_zero and 2 * case.guess.get(name, math.inf) < curve.start
    if case.found("input_scale") is not None or not is_offset:
        return None
    seen = () if harm is None else (evidence_of(harm),)
    told = (f"the targets of the loss lie between {low:.4g} and {high:.4g}, and the first loss is {curve.start:.4g}",
            *seen)  # fmt: skip
    return Claim("targets_far_from_zero", "likely", "the targets are not scaled: they are far from what the model "
                 "returns at first, and gradients are as large", told, 0,
                 "train on (target - mean) / standard deviation, of the training set, and put that back on what the "
                 "model returns", ("learning_rate_too_high", "nonfinite", "exploding", "diverging", "update_large",
                 "dead_units", "saturated", "sparse_gradient", "output_constant", "no_signal", "vanishing",
                 "zero_gradient"), ("lr=0.1x", "clip"))  # fmt: skip


@cause
def begins_too_large(case: RunCase) -> Claim | None:
    """A model that returns far too much at first, as a recurrence does that grows from step to step, of inputs that are
    not far from zero.

    Where something follows from it: gradients or updates that are too large, a loss that rises, jumps or becomes NaN,
    or one that has not come down to a tenth above guessing in a hundred steps or more.
    """
    harm = case.found("nonfinite", "exploding", "diverging", "update_large", "half_range")
    if case.loss is None or not case.begins_far_above or case.found("input_scale") is not None:
        return None
    name, curve = case.loss
    reach = "" if case.reach is None else f", and no target is above {max(map(abs, case.reach)):.4g} in magnitude"
    is_above = case.steps >= 100 and curve.last > 1.1 * case.guess[name]
    if harm is None and case.jump is None and case.rise is None and not is_above:
        return None
    told = (f"the first loss is {curve.start:.4g}, where guessing comes to {case.guess[name]:.4g}{reach}",
            *(() if harm is None else (evidence_of(harm),)))  # fmt: skip
    return Claim("begins_too_large", "likely", "what the model returns at first is far too large: values grow from "
                 "layer to layer, or from step to step", told, 0,
                 "smaller initial weights, orthogonal ones for a recurrence; normalise between layers, and what values "
                 "are multiplied with, as an adjacency; gaff.trace tells where values grow",
                 ("learning_rate_too_high", "nonfinite", "exploding", "diverging", "update_large", "loss_spike",
                  "dead_units", "sparse_gradient", "half_range", "initial_loss", "worse_than_guessing",
                  "loss_does_not_fall"),
                 ("lr=0.1x", "clip"))  # fmt: skip


@cause
def learning_rate_is_gone(case: RunCase) -> Claim | None:
    """A learning rate below a hundredth of its highest for more than half of the run: its schedule is too fast.

    Certain below a ten-thousandth: no schedule is meant to spend most of a run there. Likely where updates are next to
    nothing. Not where it began to fall when the loss had fallen to half, and did not fall any more, as a schedule that
    waits for that does; nor of one value after another, as of two phases with optimizers of their own, unless updates
    are next to nothing, or the second is below 1e-6.
    """
    if case.single.is_search or case.lr is None or case.steps < 50 or len(case.lr.values) < 8 or case.optimizers != 1:
        return None
    highest, values = max(case.lr.values), case.lr.values
    gone = [step for step, value in zip(case.lr.steps, values, strict=True) if value < 1e-2 * highest]
    if not gone or 2 * len(gone) <= len(values) or values[0] < 1e-2 * highest or values[-1] >= 1e-2 * highest:
        return None
    is_harmed = case.found("update_small", "never_updated") is not None
    if case.has_settled or (len(set(values)) == 2 and values[-1] >= 1e-6 and not is_harmed):
        return None
    is_certain = 2 * sum(value < 1e-4 * highest for value in values) > len(values)
    told = f"the learning rate fell from {max(highest, case.lr.start):.3g} to about {values[-1]:.3g}, and was below " \
           f"a hundredth of that by step {gone[0]}"  # fmt: skip
    return Claim("learning_rate_is_gone", "certain" if is_certain else "likely" if is_harmed else "possible",
                 "the learning rate is next to nothing for most of the run", (told,), gone[0],
                 "step the scheduler once an epoch, or count its steps in batches; a ReduceLROnPlateau of a loss wants "
                 "mode='min'",
                 ("never_updated", "lr_zero", "update_small", "learning_rate_too_low"))  # fmt: skip


@cause
def still_warmed_up(case: RunCase) -> Claim | None:
    """A learning rate that rises to the end of a run whose loss has not fallen: its warm-up is longer than the run.

    Asked of schedules that are no search for a learning rate and have not come above 1e-5, where the loss does not rise
    either.
    """
    if case.lr is None or case.loss is None or case.single.is_search or case.is_range_test or case.optimizers != 1:
        return None
    if (
        max(case.lr.highs, default=1.0) > _HARDLY
        or not case.lr.is_rising_to_the_end
        or case.loss[1].fell()
        or case.rise is not None
        or case.jump is not None
    ):
        return None
    told = f"the learning rate was {case.lr.start:.3g} at first, {max(case.lr.highs):.3g} at the end, and still rising"
    return Claim("learning_rate_too_low", "possible", "the learning rate was still being warmed up when the run ended",
                 (told,), 0, "a shorter warm-up, or more steps", ("labels_do_not_belong", "update_small",
                 "never_updated", "loss_does_not_fall"), ("lr=10x",))  # fmt: skip


@cause
def learned_by_heart(case: RunCase) -> Claim | None:
    """A classifier whose training loss falls below guessing, while that of every evaluation stays above it.

    What it learns then holds for the training examples alone. Asked where nothing else was found in a hundred steps,
    and both are cross entropies over the same classes; a twentieth below at best counts as above, where it ends a tenth
    above. What training comes to is the mean of its last quarter, as an evaluation is a mean: with a rare class the
    median of single steps is far below. No experiment can tell that it is otherwise: wrong labels are learned, too.
    """
    if case.loss is None or case.steps < 100 or not case.evaluated.is_alike:
        return None
    if any(one.rule not in _BESIDE for one in case.findings):
        return None
    name, curve = case.loss
    guess = case.guess.get(name, math.nan) / case.factors.get(name, 1.0)
    known = case.evaluated.losses
    told = next((known[one] for one in ("cross_entropy", "nll_loss") if known.get(one)), ())
    values = [value for _, value in told]
    trained = curve.late_mean / case.factors.get(name, 1.0)
    above = 0.95 if values and values[-1] > 1.1 * guess else 0.99  # it was hardly below at best, and is far above
    if len(values) < 2 or not trained < 0.99 * guess or min(values) < above * guess:
        return None
    numbers = f"the loss {name!r} went down to {trained:.4g}, that of evaluations was {min(values):.4g} at best, and " \
              f"guessing gives {guess:.4g}"  # fmt: skip
    text = "the model memorises the training examples and does not generalise: labels may not belong to their " \
           "inputs, or it overfits; or other data, or another copy of the model, is evaluated"  # fmt: skip
    return Claim(
        "labels_do_not_belong",
        "possible",
        text,
        (numbers,),
        0,
        "compare a few inputs with their labels, after loading and shuffling; if they match, it overfits: "
        "more data, regularisation, or a smaller model",
    )


@cause
def evaluated_to_nothing(case: RunCase) -> Claim | None:
    """The latest evaluation of a kind came to a NaN or inf, and nothing in training did. Certain."""
    for function, pairs in case.evaluated.losses.items():
        if math.isfinite(pairs[-1][1]) or case.found("nonfinite") is not None:
            continue
        finite = [at for at, (_, value) in enumerate(pairs) if math.isfinite(value)]
        since = pairs[finite[-1] + 1 if finite else 0][0]
        return Claim("evaluation_not_finite", "certain", f"the loss of the latest evaluation, {function}, is "
                     f"{pairs[-1][1]} at step {pairs[-1][0]}, while that of training is finite",
                     (f"{function} of evaluations is not finite since step {since}",), since,
                     "look at a batch of the evaluation (an empty one has no mean), or at what only evaluation does: "
                     "gaff.find_nonfinite(lambda: loss(model(x), y), model=model)")  # fmt: skip
    return None


def _may_be_unlearned(case: RunCase) -> bool:
    """Whether a run is long enough, nothing was found in it, and what guessing gives is known of its first loss.

    Where a further loss has fallen, as of a model that is trained after the first, there is something to be learned; so
    is there where copies of one model, each trained for a few steps, begin lower and lower, and where what evaluations
    come to is below what guessing gives, however little.
    """
    if case.loss is None or case.steps < 100 or any(one.rule not in _HARMLESS for one in case.findings):
        return False
    others = [(name, curve) for name, curve in case.losses.items() if name != case.loss[0] and curve.values]
    has_other = any(curve.last < 0.9 * min(curve.start, case.guess.get(name, math.inf)) for name, curve in others)
    has_other |= any(curve.last < 0.9 * case.loss[1].start for curve in case.successors) or case.single.is_followed
    has_other |= _generalises(case, case.guess.get(case.loss[0], 0.0))
    return case.guess.get(case.loss[0], 0.0) > 0 and not has_other


def _generalises(case: RunCase, guess: float) -> bool:
    """Whether the last two of the evaluations lie a fiftieth below what guessing gives, and below the first."""
    if len(case.evaluated.losses) != 1 or not guess > 0:
        return False
    (pairs,) = case.evaluated.losses.values()
    values = [value for _, value in pairs]
    return len(values) > 2 and max(values[-2:]) < min(0.98 * guess, values[0])
