"""What a run comes to: one state, its cause, what shows it, since when, and what else it may be. Needs no torch.

The findings of rules are symptoms. The causes (``gaff.record.causes``) say what follows from what, and what a whole run
shows that no single look does. Nothing of this is stored: it is computed from a record when it is asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gaff.record import broken, confirmed, jumps, unlearned  # noqa: F401  # their causes are registered by this
from gaff.record.causes import LEAST_GAIN, Claim, claims
from gaff.record.curve import Curve
from gaff.record.experiments import KINDS
from gaff.record.run_case import RunCase

STATES = ("failed", "wrong", "suspicious", "not enough", "healthy")  # worst first
_ILL = ("wrong", "suspicious")
_LEAST_STEPS = 20
LEAST_LOOKS = 5
_NO_FALL = 1.5  # times the first stretch of a loss that ends there; chosen
_FEW_STEPS = 100  # in which a loss may stay where it began; chosen
_STILL = 0.95  # of the first stretch, and of guessing, of a loss that has stayed there; chosen
_ABOVE = 1.02  # times what guessing gives: no part of it is learned yet
_NEAR_GUESSING = 0.8  # of that loss: what ends above it has learned little


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another cause that what was seen would fit: its name, a sentence, and the experiments that would tell.

    ``certainty``: as of a verdict; what is certain is wrong beside what the verdict tells, and not in its place.
    """

    name: str
    text: str
    experiments: tuple[str, ...]
    certainty: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run comes to. ``state`` is one of ``STATES``:

    *failed*: the command ended with an exception, a signal or an exit code; *wrong*: the cause is known; *suspicious*:
    something is not as it should be, and what was seen fits several causes; *not enough*: too little was seen to judge;
    *healthy*: what was judged is as it should be. ``cause`` is a sentence, ``name`` the cause's name as docs/verdict.md
    lists it. ``since`` is the first step that the evidence reaches back to, None where there is none. ``certainty`` is
    that of the cause: certain, likely or possible; empty where there is none.
    """

    state: str
    cause: str
    name: str = ""
    evidence: tuple[str, ...] = ()
    since: int | None = None
    remedy: str = ""
    alternatives: tuple[Alternative, ...] = ()
    experiments: tuple[str, ...] = ()
    certainty: str = ""

    @property
    def told_state(self) -> str:
        """The state in words, with how sure that is: ``healthy``, ``wrong``, ``wrong, probably`` ..."""
        return f"{self.state}{', probably' if self.certainty == 'likely' else ''}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return asdict(self)

    def __str__(self) -> str:
        since = f", since step {self.since}" if self.since is not None else ""
        return f"{self.told_state}: {self.cause}{since}"


STOPPED = "the run was stopped by Ctrl-C"


def judge_all(cases: Sequence[RunCase], failure: str | None = None) -> Verdict:
    """The verdict of a run with one training or more, one after the other: that of the worst, of these the first.

    What else is wrong, in other trainings, is told among its alternatives. ``failure``: as ``judge`` has it; what was
    seen before is then told of the last training.
    """
    if failure is not None or len(cases) == 1:
        return judge(cases[-1], failure)
    told = [judge(one) for one in cases]
    worst = min(told, key=lambda one: STATES.index(one.state) if one.state in _ILL else len(STATES))
    at = told.index(worst)
    if worst.state in _ILL:
        others = [one for place, one in enumerate(told) if one.state in _ILL and place != at]
        more = tuple(Alternative(one.name, one.cause, one.experiments, one.certainty) for one in others)
        return replace(worst, cause=f"{worst.cause}{_in_training(cases[at])}",
                       alternatives=(*worst.alternatives, *more))  # fmt: skip
    if all(one.state == "not enough" for one in told):
        return max(zip(cases, told, strict=True), key=lambda one: one[0].steps)[1]
    steps, looks = sum(one.steps for one in cases), sum(one.looks for one in cases)
    parts = [f"from step {case.began} on {_of_loss(case)}" if one.state == "healthy" else
             f"{one.cause}{_in_training(case)}" for case, one in zip(cases, told, strict=True)]  # fmt: skip
    seen = f"nothing wrong was found in {steps} steps, of which {looks} were looked at"
    return Verdict("healthy", "; ".join([seen, *parts]))


def _in_training(case: RunCase) -> str:
    """Of which training of a run a verdict is told, to be added to it."""
    loss = f", of the loss {case.loss[0]!r}" if case.loss is not None else ""
    return f" (in the training from step {case.began} on{loss})"


def judge(case: RunCase, failure: str | None = None) -> Verdict:
    """The verdict of a run. ``failure``: how its command ended, where that was not well."""
    found = claims(case)
    if failure is not None:
        before = tuple(f"what was seen before: {one.text}" for one in found[:1])
        return Verdict("failed", failure, "failed", before, alternatives=_others(found),
                       remedy="" if failure == STOPPED else "read what the command itself has printed")  # fmt: skip
    is_short = case.steps < _LEAST_STEPS and case.found("nonfinite") is None
    if found and (found[0].certainty == "certain" or not is_short):
        first = found[0]
        state = "suspicious" if first.certainty == "possible" else "wrong"
        return Verdict(state, first.text, first.name, first.evidence, first.since, first.remedy, _others(found[1:]),
                       first.experiments, first.certainty)  # fmt: skip
    missing = _missing(case)
    name = "no_steps" if case.unstepped.backwards > 1 or not case.steps else ""
    if missing:
        return Verdict("not enough", missing, name, alternatives=_others(found))
    return Verdict("healthy", _judged(case))


def _others(found: list[Claim]) -> tuple[Alternative, ...]:
    return tuple(Alternative(one.name, one.text, one.experiments, one.certainty) for one in found)


def _missing(case: RunCase) -> str:
    """What keeps a run in which nothing was found from being judged; empty where enough was seen."""
    if case.unstepped.broken and case.looks < LEAST_LOOKS:
        return f"watching has ended by an error of gaff's own, and nothing after it was seen: {case.unstepped.broken}"
    if not case.unstepped.has_modules:
        return "the patterns given (only=, --only, skip=) leave no module of the model: nothing inside it was looked at"
    if case.unstepped.others:
        made = f"{case.unstepped.others} steps were made by an optimizer that was not given to gaff.watch"
        return f"{made}, and none by one that was: give it the optimizer that trains the model, or none"
    if case.unstepped.backwards > 1:
        told = f"{case.unstepped.backwards} backward passes were seen, and no step of a torch.optim.Optimizer"
        return f"{told}: updates made by hand are not followed, so whether anything is learned cannot be told"
    if not case.steps:
        return "no step of a torch.optim.Optimizer was seen: whether anything is learned cannot be told"
    if case.steps < _LEAST_STEPS:
        return f"{case.steps} steps are too few to judge: expected {_LEAST_STEPS} or more"
    if case.looks < LEAST_LOOKS:
        more = "let it run for longer, or look more often (every=, --every)"
        seen = f"only {case.looks} of {case.steps} steps were looked at, which is too few to judge"
        return f"{seen}: expected {LEAST_LOOKS} or more; {more}"
    return _untold(case) if case.steps < _FEW_STEPS and len(case.losses) == 1 and not case.is_range_test else ""


def _untold(case: RunCase) -> str:
    """Of a short run whose only loss ends where guessing is, or above, that nothing tells whether it learns; else
    empty."""
    name, curve = case.loss or ("", None)
    guess = case.guess.get(name, 0.0)
    if curve is None or case.successors or not guess > 0:  # NaN: of no one scale
        return ""
    if curve.last <= _STILL * max(guess, curve.first) and curve.last <= _ABOVE * guess:
        return ""
    return (
        f"{case.steps} steps are too few to tell whether anything is learned: the loss {name!r} went from about "
        f"{curve.first:.4g} to {curve.last:.4g}, where guessing comes to {guess:.4g}"
    )


def _rises_since(at: int, pairs: Sequence[tuple[int, float]]) -> bool:
    """Whether values have risen since the step ``at`` of the lowest, by more than they scatter.

    Scatter is the median size of second differences, as a standard deviation, which no trend makes larger; without the
    first half of the way down. The least of n values lies below their mean by sqrt(2 ln n) of it, or less.
    """
    since = [value for step, value in pairs if step > at]
    values = [value for _, value in pairs][(len(pairs) - len(since)) // 2 :]
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    scatter = 1.4826 * statistics.median(bends) / math.sqrt(6) if bends else 0.0
    allowed = scatter * (math.sqrt(2 * math.log(len(pairs))) + 2.5 / math.sqrt(len(since)))
    return statistics.median(since) > min(values) + allowed


def _of_evaluations(case: RunCase, curve: Any) -> str:
    """How the loss of evaluations went, to be added.

    A single one that was heard is told with its step, for there may have been others, and only if it came late.
    """
    for function, pairs in list(case.evaluated.losses.items())[:1]:
        at, least = min(pairs, key=lambda pair: pair[1])
        if len(pairs) == 1:
            heard = f"; that of the one evaluation that was heard, {function} at step {at}, was {least:.4g}"
            return heard if 2 * at >= case.steps else ""
        told = f"; the loss of evaluations, {function}, went from {pairs[0][1]:.4g} to {pairs[-1][1]:.4g}"
        late = [value for step, value in pairs if step > at][-2:]
        if len(late) == 2 and min(late) > 1.1 * least > 0:
            until = min(value for step, value in zip(curve.steps, curve.values, strict=True) if step <= at)
            is_learning = len(case.losses) == 1 and curve.last < 0.9 * until and _rises_since(at, pairs)
            told += f", and was lowest at step {at} ({least:.4g}){': since then it overfits' if is_learning else ''}"
        return told
    return ""


def _of_successors(case: RunCase) -> str:
    """What became of the trainings that came after the first, of this or another model, as words to be added."""
    later = case.successors
    if not later:
        return ""
    ends = f"from about {later[-1].first:.4g} to {later[-1].last:.4g} for the last"
    return f", for the first of {len(later) + 1} trainings, one after the other, and {ends}"


def _end_of(curve: Curve) -> str:
    """Where a loss has come to: the median of its last steps, and their mean where few steps make most of it."""
    mean = f" in most steps, {curve.late_mean:.4g} on average" if curve.is_skewed else ""
    return f"{curve.last:.4g}{mean}"


def _judged(case: RunCase) -> str:
    """What a run was judged by in which nothing is wrong."""
    if case.is_range_test and case.lr is not None:
        span = f"from {case.lr.values[0]:.3g} to {case.lr.values[-1]:.3g}"
        return f"a search for a learning rate, which rises {span} all the way: a loss that breaks at its end is meant"
    seen = f"nothing wrong was found in {case.steps} steps, of which {case.looks} were looked at"
    return f"{seen}{_rest_unseen(case)}; {_of_loss(case)}"


def _rest_unseen(case: RunCase) -> str:
    """That no step of the second half was looked at, to be added; empty where one was."""
    last = case.single.last_look
    if last is None or last >= case.began + case.steps // 2:
        return ""
    return f", none after step {last} (more with every=, --every): later ones by their loss alone"


def _of_loss(case: RunCase) -> str:
    """What the loss of a training has come to in which nothing is wrong, and that of evaluations."""
    if case.loss is None:
        return "no loss was seen"
    name, curve = case.loss
    factor = case.factors.get(name, 1.0)
    without = f"without that {curve.last / factor:.4g} at the end"
    times = f" (multiplied by {factor:.3g} before its backward pass, {without})" if factor != 1.0 else ""
    if case.is_rescaled(name):
        times = " (multiplied by other numbers later than at first before its backward pass: no values to compare)"
    began = f"{curve.start:.4g}, and up to {curve.early_peak[1]:.4g} at step {curve.early_peak[0]}," \
        if curve.first > 2 * curve.start > 0 else f"about {curve.first:.4g}"  # fmt: skip
    told = f"the loss {name!r}{times} went from {began} to {_end_of(curve)}"
    if not case.successors and curve.last > _NO_FALL * curve.first > 0 and curve.spread > 0.5 * curve.first:
        told += f", which is no fall: single steps differ by {curve.spread:.3g} from the ones around them"
    if case.is_acting and curve.last > curve.first > 0:
        told += ", which says little: it follows what the model itself does"
    guess = case.guess.get(name, 0.0)
    if curve.last > _NEAR_GUESSING * guess > 0:
        told += f", where guessing comes to {guess:.4g}"
    told += _of_successors(case)
    told += _of_evaluations(case, curve)
    known = case.experiments
    if known is None:
        return told
    scrambled = known.get("scramble")
    uses = "it uses its inputs, and " if scrambled is not None and known.effect(scrambled) == "higher" else ""
    helping = [one for one in known.changed if one.kind in KINDS and KINDS[one.kind].is_remedy
               and known.gain(one) >= LEAST_GAIN]  # fmt: skip
    best = max(helping, key=known.gain, default=None)
    if best is None:
        return f"{told}; {uses}nothing that was changed helps"
    return f"{told}; {uses}with {best.name} it is lower ({best.loss:.4g}), so that may be worth a try"
