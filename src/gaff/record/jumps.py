"""Causes of a loss that jumps in one step: a learning rate that is raised, other data, gradients that had grown."""

from __future__ import annotations

import math

from gaff.record.causes import Claim, cause
from gaff.record.finding import Finding, evidence_of, told_of
from gaff.record.run_case import RunCase

_LEAST_NORMS = 20  # before a norm of gradients can be called unusual
_ODD = 20.0  # times as large as the median example of its batch
_AROUND = 5  # steps by which a rise may be dated before the jump that began it, since it is told of stretches
_LEAST_AFTER = 5  # losses from a jump on, before it can be called one that stays


@cause
def odd_examples(case: RunCase) -> Claim | None:
    """A loss that jumps at a batch with examples twenty times as large as the median one, before all that went wrong.

    Likely where something breaks afterwards, which comes from the step that these examples have made; else possible.
    """
    finding = case.found("loss_spike")
    times = finding.evidence.get("times_larger") if finding is not None else None
    if finding is None or not isinstance(times, float) or not times >= _ODD:
        return None
    at, broken, rise = finding.since, case.found("nonfinite", "diverging"), case.rise
    began = [*([rise[1]] if rise is not None else []), *([broken.since] if broken is not None else [])]
    if began and min(began) < at - _AROUND:
        return None
    text = f"the loss jumps at the batch of step {at}: its inputs at {finding.evidence.get('batch_indices')} are " \
           f"{times:.3g} times as large (rms) as the median one"  # fmt: skip
    return Claim("odd_examples", "likely" if began else "possible", text, (evidence_of(finding),), min([at, *began]),
                 "look at these examples (another unit, a missing value told by a large number, a damaged file): mend "
                 "them or leave them out; clip gradients, so that no batch moves the weights by so much",
                 ("loss_spike", "gradient_spike", "data_changes", "learning_rate_too_high", "diverging", "exploding",
                  "update_large", "nonfinite", "dead_units", "saturated", "output_constant", "no_signal",
                  "zero_gradient", "input_scale"), ("clip",))  # fmt: skip


@cause
def spiked(case: RunCase) -> Claim | None:
    """A loss that jumps at one step: gradients that had grown in the steps before, or else the batch of that step.

    Gradients have grown where a norm of the ten steps before is five times the median one of the hundred before these.
    """
    finding = case.found("loss_spike")
    if finding is None or case.rise is not None:
        return None
    at = finding.since
    before = [value for step, value in case.single.norms if at - 110 <= step < at - 10 and math.isfinite(value)]
    late = [(value, step) for step, value in case.single.norms if at - 10 <= step < at and math.isfinite(value)]
    usual = sorted(before)[len(before) // 2] if before else math.nan
    if claim := _raised(case, finding) or _stayed(case, finding):
        return claim
    largest, step = max(late, default=(math.nan, at))
    if len(before) >= _LEAST_NORMS and largest > 5 * usual > 0:
        text = f"gradients grew before the loss jumped: norm {largest:.4g} at step {step}, usually {usual:.3g}"
        return Claim("gradient_spike", "likely", text, (evidence_of(finding),), step,
                     f"clip gradients to a norm of about {2 * usual:.2g}, or lower the learning rate",
                     ("loss_spike", "exploding", "update_large"), ("clip", "lr=0.1x"))  # fmt: skip
    calm = f"; gradients were as usual before it (norm {usual:.3g})" if len(before) >= _LEAST_NORMS and late else ""
    return Claim("loss_spike", "possible", f"{told_of(finding)}{calm}", (evidence_of(finding),), at, finding.remedy, (),
                 ("clip", "lr=0.1x"))  # fmt: skip


def _raised(case: RunCase, finding: Finding) -> Claim | None:
    """A loss that jumps within ten steps after the learning rate was raised to twice of what it was, or more."""
    rates = case.single.rates
    if len(rates) < 2 or not 0 < 2 * min(rates) <= rates[-1]:
        return None
    text = f"the loss jumps after the learning rate was raised from {min(rates):.3g} to {rates[-1]:.3g}"
    return Claim("learning_rate_too_high", "likely", text, (evidence_of(finding),), finding.since,
                 f"use a learning rate below {rates[-1]:.2g} there, or warm it up",
                 ("loss_spike", "exploding", "update_large", "dead_units", "saturated", "zero_gradient"),
                 ("lr=0.1x", "clip"))  # fmt: skip


def _stayed(case: RunCase, finding: Finding) -> Claim | None:
    """A loss that jumps in one step and stays up: other batches come from there on, or one step was too large.

    It has stayed where the median of ten values from the jump on is above the middle between before and the jump.
    """
    before, jumped = finding.evidence.get("mean_before"), finding.evidence.get("loss")
    if len(case.single.losses) < _LEAST_AFTER or not isinstance(before, float) or not isinstance(jumped, float):
        return None
    middle = sorted(case.single.losses)[len(case.single.losses) // 2]
    if not middle > (before + jumped) / 2:
        return None
    told = f"the median loss of steps {finding.since} to {finding.since + len(case.single.losses) - 1} is {middle:.4g}"
    text = f"the loss jumps from {before:.4g} to {jumped:.4g} in one step and stays up: batches are of another kind " \
           "from there on (another task, data in the order of its classes), or the step was too large"  # fmt: skip
    return Claim("data_changes", "possible", text, (evidence_of(finding), told), finding.since,
                 "if another task begins there, it is meant; if not, shuffle the data, and look at what changes there: "
                 "preprocessing, the part of the data, the learning rate", ("loss_spike",))  # fmt: skip
