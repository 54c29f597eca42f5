"""Causes of what is not finite: an op of the model, the loss, or inputs whose numbers are too large for it."""

from __future__ import annotations

from gaff.record.causes import Claim, cause, has_learned, told_rise
from gaff.record.finding import Finding, evidence_of, origin_of, told_of
from gaff.record.run_case import RunCase

_EARLY = 50  # steps in which what follows from inputs is seen


@cause
def not_finite(case: RunCase) -> Claim | None:
    """A NaN or inf whose place is known. Certain that it came; where the loss had risen before, or was far too large at
    first, only what it came from is told by another cause; so it is where the loss had jumped, by numbers that overflow
    as far as is known. Of outputs alone, in a run whose losses are finite and fall, it is possible: they may be left
    out on purpose."""
    finding = case.found("nonfinite")
    is_scale = _breaks_by_scale(case) if case.found("input_scale") is not None else case.begins_far_above
    is_risen = case.rise is not None and not (case.rise[3] < 1000 * case.rise[2] and _is_outside(finding))
    if finding is None or is_risen or is_scale or (case.jump is not None and _overflows(finding)):
        return None
    text, is_left_out = finding.message or told_of(finding), _is_left_out(finding, case)
    if is_left_out:
        text = f"{text}, while all losses are finite: what is not finite may be left out on purpose"
    follows = () if is_left_out else tuple(one.rule for one in case.findings if one is not finding)
    return Claim("nonfinite", "possible" if is_left_out else "certain", text, origin_of(finding), finding.since,
                 finding.remedy, follows)  # fmt: skip


def _is_outside(finding: Finding | None) -> bool:
    """Whether a loss was not finite of outputs that were."""
    return finding is not None and finding.cause.startswith("it began outside the model")


def _is_left_out(finding: Finding, case: RunCase) -> bool:
    """Whether outputs alone were not finite, while all losses were, and have fallen."""
    is_of_output = finding.site.rpartition(":")[2] not in ("grad", "param", "update", "grad_output", "grad_input")
    is_finite = all(curve.nonfinite_since is None for curve in case.losses.values())
    return bool(finding.site) and is_of_output and is_finite and has_learned(case)


def _breaks_by_scale(case: RunCase) -> bool:
    """Whether a loss begins far above guessing and is not finite soon, by numbers that overflow as far as is known."""
    finding = case.found("nonfinite")
    return (
        finding is not None and case.begins_far_above and finding.since <= case.began + _EARLY and _overflows(finding)
    )


def _overflows(finding: Finding) -> bool:
    """Whether what was first not finite is no op's doing, or that of one whose numbers overflow, as far as is known."""
    return "op" not in finding.evidence or "overflow" in finding.cause


@cause
def input_far_from_zero(case: RunCase) -> Claim | None:
    """Inputs in their own units, where something follows from them: saturated or dead units, steps or losses too large.

    Likely where that is so, the finding alone stands as a symptom. So is a loss that begins far above guessing and is
    not finite soon.
    """
    finding = case.found("input_scale")
    broken = case.found("nonfinite") if _breaks_by_scale(case) else None
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
