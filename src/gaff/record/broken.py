"""The cause of what is not finite: an op of the model, or the loss."""

from __future__ import annotations

from gaff.record.causes import Claim, breaks_by_scale, cause, has_learned, overflows
from gaff.record.finding import Finding, is_of_output, origin_of, told_of
from gaff.record.run_case import RunCase


@cause
def not_finite(case: RunCase) -> Claim | None:
    """A NaN or inf whose place is known. Certain that it came; where the loss had risen before, or was far too large at
    first, only what it came from is told by another cause; so it is where the loss had jumped, by numbers that overflow
    as far as is known. Of outputs alone, in a run whose losses are finite and fall, it is possible: they may be left
    out on purpose."""
    finding = case.found("nonfinite")
    is_scale = breaks_by_scale(case) if case.found("input_scale") is not None else case.begins_far_above
    is_risen = case.rise is not None and not (case.rise[3] < 1000 * case.rise[2] and _is_outside(finding))
    if finding is None or is_risen or is_scale or (case.jump is not None and overflows(finding)):
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
    """Whether outputs alone were not finite, and no gradient, while all losses were, and have fallen."""
    is_finite = all(curve.nonfinite_since is None for curve in case.losses.values())
    is_forward = is_of_output(finding.site) and finding.evidence.get("direction") != "backward"
    return is_forward and is_finite and has_learned(case)
