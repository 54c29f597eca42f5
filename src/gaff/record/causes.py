"""Causes: what is behind the symptoms that rules find, each a small function over a whole run. Needs no torch.

``@cause`` makes a function a cause. It is asked about a ``RunCase``, a run with findings and curves, and answers
with a ``Claim`` or with None. Of several claims the most certain one is told first; of equally certain ones that which
began first, since what comes later may follow from it, and of those which began together the one that explains others.
docs/verdict.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gaff.record.experiments import KINDS
from gaff.record.finding import Finding, evidence_of, is_of_all, told_of
from gaff.record.run_case import RunCase

CERTAINTIES = ("certain", "likely", "possible")
LEAST_GAIN = 0.2  # of what the best run gained over the first step, by which a change counts as what helps
# Below which part of its first stretch a loss has got over what these say.
_HARMLESS_BELOW = ((0.9, ("sparse_gradient",)), (0.5, ("saturated", "vanishing")),
                   (0.3, ("updates_round_away",)), (0.01, ("dead_units",)),
                   (0.02, ("initial_loss",)))  # fmt: skip
_LEAST_LR = 1e-6  # a weight of 1 changes by 6e-8 at the least, in float32
_FIRST = 5
_EARLY = 50  # steps in which a learning rate is warmed up, where it is


@dataclass(frozen=True, slots=True)
class Claim:
    """What one cause says of a run: that it may be so, and why.

    ``certainty``: "certain" for what the process has done or left out (read, not inferred), "likely" where what was
    seen, in its order in time, points to this cause alone, "possible" where other causes show the same. ``evidence``:
    sentences with numbers; ``since``: the first step that they reach back to; ``remedy``: what to do, with this run's
    numbers; ``explains``: rules whose findings follow from this; ``experiments``: what to change that would tell.
    """

    name: str
    certainty: str
    text: str
    evidence: tuple[str, ...]
    since: int | None
    remedy: str
    explains: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()


Ask = Callable[[RunCase], "Claim | None"]
_CAUSES: list[Ask] = []


def cause(ask: Ask) -> Ask:
    """Register a cause; its function is asked about every run."""
    _CAUSES.append(ask)
    return ask


def claims(case: RunCase) -> list[Claim]:
    """What every cause says, the most certain first; findings that none explains follow, each as its own claim.

    Weights that begin all alike do no harm where the loss falls all the same, as with heads side by side, unless there
    are three or more, and no others.
    """
    if has_learned(case) and not any(is_of_all(one, 3) for one in case.findings if one.rule == "symmetric_units"):
        case = case.without("symmetric_units")
    if case.is_range_test:
        return []
    if _has_rates(case) and not case.has_zero_rate_in_part:
        case = case.without("lr_zero")
    written = case.found("written_back")
    is_partly = written is not None and written.share <= 0.5  # as in an inner loop, or of slow weights (Lookahead)
    if is_partly and has_learned(case):
        case = case.without("written_back")
    fallen = case.loss[1].last / case.loss[1].first if case.loss is not None and case.loss[1].first > 0 else 1.0
    for below, rules in _HARMLESS_BELOW:  # seen while it had not fallen yet
        for rule in rules if 0 < fallen < below else ():
            case = case.without(rule)
    if case.loss is not None and 0 < case.loss[1].last < 0.2 * case.loss[1].first:  # what cannot be, had it been so
        case = case.without("written_back")
    if case.has_settled:  # updates that are nothing any more are what the schedule wants
        case = case.without("never_updated").without("update_small")
    if case.optimizers > 1 and not case.evaluated.losses:
        case = case.without("train_mode_in_eval")  # an adversary's samples
    found = [claim for ask in _CAUSES if (claim := ask(case)) is not None and not _is_refuted(claim, case)]
    found = [replace(one, since=case.began) if one.since == 0 else one for one in found]  # of a later training
    follow = {name for one in found for name in one.explains}
    found.sort(key=lambda one: (CERTAINTIES.index(one.certainty), math.inf if one.since is None else one.since,
                                one.name in follow))  # fmt: skip
    explained = {rule for one in found[:1] if one.certainty != "possible" for rule in one.explains}
    found = [one for at, one in enumerate(found) if not at or one.name not in explained]
    named = {rule for one in found for rule in (one.name, *one.explains)}
    symptoms = [_symptom(one, case) for one in case.findings if one.rule not in named]
    return found + [one for one in symptoms if not _is_refuted(one, case)]


def _is_refuted(claim: Claim, case: RunCase) -> bool:
    """Whether experiments were made that would have shown that it is so, and none has.

    What was read from the process stays so, though the loss falls without the parts that it is about.
    """
    if claim.name in FACTS:
        return False
    known = case.experiments
    tried = [one for one in map(known.get, claim.experiments) if one is not None] if known is not None else []
    has_remedies = any(KINDS[one.kind].is_remedy for one in tried)  # one that is without effect may be the wrong one
    is_open = claim.certainty == "possible" or (claim.certainty == "likely" and not has_remedies)
    if known is None or not is_open or len(tried) < len(claim.experiments) or not tried:
        return False
    return not any(known.gain(one) > LEAST_GAIN if KINDS[one.kind].is_remedy else not known.is_well(one)
                   for one in tried)  # fmt: skip


def _symptom(finding: Finding, case: RunCase) -> Claim:
    """A finding that no cause explains: what it usually comes from is no more than possible, unless it was read.

    A remedy that an experiment has tried, and that has changed nothing, is told with that.
    """
    text, known = f"{told_of(finding)} (often caused by {finding.cause})", case.experiments
    tried = [known.get(name) for name in _EXPERIMENTS.get(finding.rule, ())] if known is not None else []
    vain = [one.name for one in tried if one is not None and KINDS[one.kind].is_remedy and known is not None
            and known.gain(one) < LEAST_GAIN]  # fmt: skip
    remedy = f"{finding.remedy} (tried, without effect: {', '.join(vain)})" if vain else finding.remedy
    certainty = "certain" if finding.rule in READ and not _is_too_slow(finding) else "possible"
    return Claim(finding.rule, certainty, text, (evidence_of(finding),), finding.since, remedy,
                 experiments=_EXPERIMENTS.get(finding.rule, ()))  # fmt: skip


# What the process has done or left out: the finding is the cause itself.
READ = ("not_cleared", "double_softmax", "softmax_axis", "nll_of_scores", "loss_sign", "broadcast", "symmetric_units",
        "same_batch", "lr_zero", "updates_round_away", "scaler_stuck", "wrong_parameters", "cleared_before_step",
        "zero_at_the_step", "never_trained", "never_updated", "clipped_while_scaled", "targets_no_probabilities",
        "written_back", "gradients_lost", "clipped_too_early", "loss_holds_the_last", "stepped_again",
        "stepped_while_scaled", "one_class", "kl_of_probabilities", "made_in_forward", "nothing_loaded",
        "loss_gives_nothing", "examples_alike", "mask_inverted", "step_not_finite", "targets_no_signs",
        "set_for_nothing", "betas_swapped", "loads_itself", "schedule_not_finished", "sampler_weights",
        "kl_of_log_targets", "statistics_unfilled", "divided_for_nothing", "lr_negative")  # fmt: skip

# Read from the process, too; but whether it is meant, as frozen parameters may be, it cannot tell.
FACTS = ("not_owned", "no_gradient", "frozen_by_accident", "eval_mode_in_training", "labels_constant", "one_batch")

_NO_RATE = 1e-12  # as the rule ``lr_zero`` has it
_STOPS = ("not_cleared", "nll_of_scores", "lr_zero", "wrong_parameters", "cleared_before_step", "never_trained",
          "zero_at_the_step", "loss_gives_nothing", "clipped_while_scaled", "targets_no_probabilities",
          "stepped_while_scaled", "one_class", "step_not_finite")  # fmt: skip

# Which experiment tells more of a symptom.
_EXPERIMENTS = {
    "vanishing": ("lr=10x", "one-batch", "lr=0.1x", "warmup"),
    "exploding": ("clip", "lr=0.1x"),
    "dead_units": ("lr=0.1x", "one-batch"),
    "saturated": ("lr=0.1x", "one-batch"),
    "update_small": ("lr=10x",),
    "update_large": ("lr=0.1x", "warmup", "clip"),
    "loss_spike": ("clip", "lr=0.1x"),
    "input_scale": ("one-batch", "blind"),
    "output_constant": ("one-batch", "blind"),
    "attention_collapse": ("lr=0.1x", "warmup"),
    "half_range": ("fp32",),
    "not_owned": ("unfreeze",),
    "no_gradient": ("unfreeze",),
    "frozen_by_accident": ("unfreeze",),
    "eval_mode_in_training": ("train-mode",),
    "weight_decay_too_high": ("decay", "lr=0.1x"),
    "not_cleared": ("zero-grad",),
    "updates_round_away": ("lr=100x",),
}


@cause
def read_from_the_process(case: RunCase) -> Claim | None:
    """An error that was read from what the process does, such as gradients that are never cleared. Certain."""
    finding = case.found(*READ)
    if finding is None or _is_too_slow(finding):
        return None
    told = [evidence_of(finding)]
    rise = case.rise
    if rise is not None:
        told.append(told_rise(*rise))
    after = tuple(one.rule for one in case.findings if one is not finding and one.since >= finding.since)
    explains = after if finding.rule in _STOPS else ()
    text = told_of(finding)
    if finding.rule == "lr_zero" and case.lr is not None and case.lr.values and case.lr.values[0] < _NO_RATE:
        zeros = [rate < _NO_RATE for rate in case.lr.values]
        is_over = False in zeros and not any(zeros[zeros.index(False) :])
        text += f", up to about step {case.lr.steps[zeros.index(False)]}" if is_over else ""
    return Claim(finding.rule, "certain", text, tuple(told), finding.since, finding.remedy, explains,
                 _EXPERIMENTS.get(finding.rule, ()))  # fmt: skip


@cause
def zeros_that_nobody_trains(case: RunCase) -> Claim | None:
    """A parameter in no optimizer, and a gradient of zero for another one of its module: factors that begin at zero."""
    owned, zero = case.found("not_owned"), case.found("zero_gradient")
    if owned is None or zero is None or zero.since > owned.since or zero.is_over:
        return None
    modules = {one.rpartition(".")[0] for one in (owned.site, *owned.also)}
    if zero.site.rpartition(".")[0] not in modules:
        return None
    told = f"{told_of(owned)}; while it is zero, so is the gradient of what it is multiplied with, as of {zero.site}"
    return Claim(owned.rule, "likely", told, (evidence_of(owned), evidence_of(zero)), owned.since, owned.remedy,
                 (zero.rule, "nothing_learned"), _EXPERIMENTS[owned.rule])  # fmt: skip


@cause
def evaluated_in_training_mode(case: RunCase) -> Claim | None:
    """A model that is evaluated in training mode: certain where losses of such an evaluation were heard, likely where
    all that were heard followed runs in evaluation mode: an accuracy may be measured so.

    Without any, a run without gradients may be another thing: statistics that are taken anew, samples of a generator.
    """
    finding = case.found("train_mode_in_eval")
    if finding is None or not case.evaluated.losses:
        return None
    certainty = "likely" if case.evaluated.in_eval_mode else "certain"
    return Claim(finding.rule, certainty, told_of(finding), (evidence_of(finding),), finding.since, finding.remedy)


@cause
def sorted_by_label(case: RunCase) -> Claim | None:
    """Batches of one label each, and of another label later: the data comes in the order of its labels. Certain.

    Likely where many of them hold two or three of the labels, and the next batch the same ones.
    """
    finding = case.found("labels_constant")
    if (finding is None or finding.evidence.get("classes", 1) < 2) and case.order is not None:
        within, whole = (math.exp(one) for one in case.order)
        told = f"the labels of a batch are as varied as {within:.2g} equally frequent ones, of all looks as {whole:.2g}"
        return Claim("labels_constant", "likely", "the data comes in the order of its labels", (told,), 0,
                     "shuffle the data", ("learning_rate_too_high", "data_changes", "loss_spike", "gradient_spike",
                                          "update_large", "exploding", "dead_units"))  # fmt: skip
    if finding is None or finding.evidence.get("classes", 1) < 2:
        return None
    return Claim(finding.rule, "certain", told_of(finding), (evidence_of(finding),), finding.since, "shuffle the data",
                 (*{one.rule for one in case.findings if one is not finding}, "learning_rate_too_high", "data_changes")
                 )  # fmt: skip


@cause
def trained_by_nobody(case: RunCase) -> Claim | None:
    """An optimizer that never makes a step, or layers that are no part of their model.

    Certain where no optimizer makes a step; else it may be meant, for a while, or of a net that judges.
    """
    finding = case.found("never_stepped", "unregistered")
    if finding is None:
        return None
    is_alone = case.unstepped.backwards > 0 and finding.rule == "never_stepped"
    seen = (f"{case.unstepped.backwards} backward passes were seen, and no step of any optimizer",) if is_alone else ()
    return Claim(finding.rule, "certain" if is_alone else "likely", told_of(finding), (evidence_of(finding), *seen),
                 finding.since, finding.remedy,
                 tuple(one.rule for one in case.findings if one is not finding))  # fmt: skip


@cause
def set_up_wrongly(case: RunCase) -> Claim | None:
    """Weight decay that outweighs what is learned, or batch norm over one or two examples, and what follows from it.

    Likely where something else was found besides, a symptom where nothing was.
    """
    finding = case.found("weight_decay_too_high", "batch_norm_of_few")
    after = [one for one in case.findings if one is not finding]
    if finding is None or not (after or case.rise):
        return None
    return Claim(finding.rule, "likely", told_of(finding), (evidence_of(finding), *map(evidence_of, after[:2])), 0,
                 finding.remedy, (*{one.rule for one in after}, "learning_rate_too_high", "input_not_used"),
                 _EXPERIMENTS.get(finding.rule, ()))  # fmt: skip


@cause
def steps_too_large(case: RunCase) -> Claim | None:
    """A learning rate that is too high: the loss rises from its lowest, or a NaN comes, after updates that are large.

    Likely where both were seen, and the updates no later than the rise; possible where the loss rises alone. Without a
    warm-up where the learning rate of the first steps is the highest.
    """
    rise, large = case.rise, case.found("update_large")
    broken = case.found("nonfinite")
    jump = case.jump
    harm = case.found("diverging", "exploding", "dead_units", "saturated", "no_signal", "output_constant")
    is_lost = jump is not None and not has_learned(case, jump[1] / jump[2]) and _stays_up(case, *jump)
    if any(one.rule in ("no_signal", "output_constant") and one.since <= case.began for one in case.findings):
        return None  # no consequence of steps: it was there before the first one
    if broken is not None and broken.remedy.startswith("look at the batch") and large is None:
        return None  # it was in the data
    has_converged = case.loss is not None and case.loss[1].last < 0.1 * case.loss[1].start
    if rise is None and broken is None and (harm is None or has_converged) and not is_lost:
        return None  # large steps alone do no harm
    if (rise is None and large is None and jump is None) or case.single.is_search:
        return None
    began = min([one for one in (rise[1] if rise else None, large.since if large else None, jump and jump[0])
                 if one is not None])  # fmt: skip
    told = [told_rise(*rise)] if rise is not None else []
    if jump is not None:
        told.append(f"the loss was {jump[2]:.4g} at first, and rose to {jump[1]:.4g} at step {jump[0]}")
    if large is not None:
        told.append(evidence_of(large))
    rate, is_raised = _rate(case, began)
    early = rise is not None and rise[1] < case.began + _EARLY and not is_raised and rate is not None
    told += [f"the learning rate was {rate:.3g} from the first step on"] if early else []
    text = "the steps are too large" if rate is None else f"a learning rate of {rate:.3g} is too high"
    remedy = "divide the learning rate by 10" if rate is None else f"use a learning rate of {rate / 10:.2g} or less"
    remedy += ", or warm it up over the first hundred steps" if early else ", or clip gradients"
    is_likely = jump is not None or (rise is not None and large is not None)
    return Claim("learning_rate_too_high", "likely" if is_likely else "possible",
                 f"{text}{', and not warmed up' if early else ''}", tuple(told), began, remedy,
                 ("update_large", "diverging", "exploding", "loss_spike", "dead_units", "sparse_gradient", "saturated",
                  "attention_collapse", "nonfinite", "vanishing", "zero_gradient", "no_signal", "output_constant"),
                 ("lr=0.1x", "warmup", "clip"))  # fmt: skip


@cause
def falls_without_bound(case: RunCase) -> Claim | None:
    """A loss that falls to a thousand times its first magnitude below zero: nothing holds it there. Likely.

    A hundred times are enough where it falls ever faster: in the last third twice as far as in the first. A likelihood
    that may be as negative is learned ever more slowly.
    """
    if case.loss is None or len(case.losses) > 1 or case.optimizers > 1 or case.is_acting or case.single.is_search:
        return None
    name, curve = case.loss
    if curve.last > (-100 if curve.falls_ever_faster else -1000) * max(abs(curve.first), 1.0):
        return None
    since = next(step for step, value in zip(curve.steps, curve.values, strict=True) if value < 0)
    told = f"it was {curve.first:.4g} at first, and {curve.last:.4g} at the end"
    return Claim("falls_without_bound", "likely", f"the loss {name!r} falls below zero without bound", (told,), since,
                 "look at the sign of each term of the loss: one that is to become small is subtracted, or nothing "
                 "limits it; a smaller learning rate or clipping only puts it off",
                 ("diverging", "exploding", "gradient_spike", "loss_spike", "update_large", "learning_rate_too_high",
                  "half_range"))  # fmt: skip


@cause
def input_far_from_zero(case: RunCase) -> Claim | None:
    """Inputs in their own units, where something follows from them: saturated or dead units, steps or losses too large.

    Likely where that is so, the finding alone stands as a symptom. So is a loss that begins far above guessing and is
    not finite soon.
    """
    finding = case.found("input_scale")
    broken = case.found("nonfinite") if breaks_by_scale(case) else None
    after = broken or case.found("saturated", "dead_units", "initial_loss", "exploding", "vanishing", "update_large",
                                 "diverging", "loss_spike", "init_imbalance", "zero_gradient")  # fmt: skip
    rise = case.rise if case.rise is not None and case.rise[1] < case.began + _EARLY else None
    if finding is None or (after is None and rise is None):
        return None
    follows = evidence_of(after) if after is not None else told_rise(*rise) if rise is not None else ""
    return Claim("input_scale", "likely", told_of(finding), (evidence_of(finding), follows), finding.since,
                 finding.remedy,
                 ("saturated", "dead_units", "initial_loss", "exploding", "vanishing", "update_large", "diverging",
                  "loss_spike", "init_imbalance", "zero_gradient", "sparse_gradient", "learning_rate_too_high",
                  *(("nonfinite",) if broken is not None else ())),
                 ("lr=0.1x", "blind"))  # fmt: skip


def breaks_by_scale(case: RunCase) -> bool:
    """Whether a loss begins far above guessing and is not finite soon, by numbers that overflow as far as is known."""
    finding = case.found("nonfinite")
    return finding is not None and case.begins_far_above and finding.since <= case.began + _EARLY and overflows(finding)


def overflows(finding: Finding) -> bool:
    """Whether what was first not finite is no op's doing, or that of one whose numbers overflow, as far as is known."""
    return "op" not in finding.evidence or "overflow" in finding.cause


@cause
def input_is_lost(case: RunCase) -> Claim | None:
    """A model that returns the same for every example from its first steps on, and nothing has broken it before."""
    finding = case.found("input_constant") or _lost_at_once(case) or case.found("output_constant")
    if finding is None or finding.since > case.began + _EARLY or "others" in finding.evidence:
        return None
    if case.found("weight_decay_too_high", "nonfinite") is not None:
        return None
    dead = case.found("dead_units")
    if dead is not None and finding.rule != "input_constant" and _called(finding) > _called(dead):
        return None  # the signal is there until units turn it into zeros
    if case.jump is not None or case.rise is not None:
        return None
    certainty = "possible" if any(map(_is_too_slow, case.findings)) else "likely"  # a last layer of zeros stays so
    return Claim("input_not_used", certainty, f"the model does not use its input: {told_of(finding)}",
                 (evidence_of(finding),), finding.since, finding.remedy,
                 ("output_constant", "input_constant", "no_signal", "dead_units", "sparse_gradient", "zero_gradient",
                  "input_scale", "nothing_learned"), ("blind", "one-batch"))  # fmt: skip


def _called(finding: Finding) -> float:
    """The place of a finding in the order in which tensors were seen in a step; the last where it is not known."""
    return float(finding.evidence.get("call_order", math.inf))


def _lost_at_once(case: RunCase) -> Finding | None:
    """A layer that returns one number for all at the very first looks."""
    finding = case.found("no_signal")
    return finding if finding is not None and finding.since <= case.began + _FIRST else None


@cause
def steps_too_small(case: RunCase) -> Claim | None:
    """Updates that are tiny beside the weights, and a loss that does not fall: a learning rate that is too low.

    Possible only where a loss begins below two thirds of guessing: the model was trained before, and may have arrived.
    """
    finding = case.found("update_small", "never_updated")
    if (
        finding is None
        or case.single.is_search
        or (finding.rule == "never_updated" and not _is_too_slow(finding))
        or case.found("clipped_to_nothing", "vanishing", "zero_gradient") is not None
        or (case.lr is not None and case.lr.is_rising_to_the_end)
    ):
        return None
    if (case.loss is not None and case.loss[1].fell()) or _has_vanished(case):
        return None
    told = finding.evidence.get("lr")
    rate = case.lr.told if case.lr is not None and case.lr.values else ""
    if isinstance(told, float) and told > 0 and not rate.startswith("up to"):  # that of the group which is too low
        rate = f"{told:.3g}"
    text = f"a learning rate of {rate} is too low" if rate else "the learning rate is too low"
    name, curve = case.loss if case.loss is not None else ("", None)
    was_trained = curve is not None and 0 < curve.start < 2 / 3 * case.guess.get(name, 0.0)
    text += ", or the model had learned before what there is to learn" if was_trained else ""
    return Claim("learning_rate_too_low", "possible" if was_trained else "likely", text, (evidence_of(finding),),
                 finding.since,
                 "raise the learning rate until an update is about a thousandth of its weight", ("nothing_learned",
                 "update_small", "never_updated"), ("lr=10x", f"lr={_factor(finding):g}x"))  # fmt: skip


def _stays_up(case: RunCase, step: int, peak: float, start: float) -> bool:
    """Whether the steps around an early peak are above the beginning, too: not one hard batch that comes by."""
    return case.loss is not None and case.loss[1].at(step) > 1.2 * start


def _has_vanished(case: RunCase) -> bool:
    """Whether the gradients of a run have become less than a hundredth of what they were: steps are small for that."""
    known = [value for _, value in case.single.norms if math.isfinite(value)]
    quarter = len(known) // 4
    if quarter < _FIRST:
        return False
    first, last = (sorted(one)[quarter // 2] for one in (known[:quarter], known[-quarter:]))
    return last < 0.01 * first


def has_learned(case: RunCase, jump: float = 1.0) -> bool:
    """Whether the loss that was found first ends a fifth or more below its first value, and below guessing.

    After a ``jump`` to a hundred times its first value, and more, only below a third: that costs most of a run.
    """
    if case.loss is None:
        return False
    name, curve = case.loss
    return bool(curve.values) and curve.last < (0.8 if jump < 100 else 0.3) * min(
        curve.start, case.guess.get(name, math.inf)
    )


def _has_rates(case: RunCase) -> bool:
    """Whether the learning rate was above zero at most steps: looks may have fallen on the zeros of a cycle."""
    rates = case.lr.values if case.lr is not None else ()
    return 2 * sum(one > 1e-12 for one in rates) > len(rates)


def _is_too_slow(finding: Finding) -> bool:
    """Whether parameters of full precision do not change since the learning rate is below what it can tell."""
    lr = finding.evidence.get("lr")
    is_full = finding.evidence.get("dtype") == "float32"
    return finding.rule == "never_updated" and is_full and isinstance(lr, float) and lr < _LEAST_LR


def _factor(finding: Finding) -> float:
    """The power of ten by which an update comes near a thousandth of its weight; a hundred or more."""
    ratio = finding.evidence.get("median_update_ratio")
    known = ratio if isinstance(ratio, float) and ratio > 0 else 1e-5
    return float(10 ** min(12, max(2, round(-3 - math.log10(known)))))


def _rate(case: RunCase, step: int) -> tuple[float | None, bool]:
    """The learning rate about a step, where it was raised in the run or for a few steps there, else the first one; and
    whether it was raised."""
    if case.lr is None or not case.lr.values:
        return None, False
    there = case.lr.highest_from(step)
    is_raised = max(case.lr.values) > 1.5 * case.lr.start or there > 2 * case.lr.start
    return there if is_raised else case.lr.start, is_raised


def told_rise(name: str, since: int, lowest: float, last: float) -> str:
    """A rise of a loss in words, as ``RunCase.rise`` has it."""
    return f"the loss {name!r} rose from {lowest:.4g}, about where it was at step {since}, to {last:.4g}"
