"""Where it began: the search that a guard starts when something in the runs that it kept is not finite.

Processes that share a model (FSDP2, tensor parallel) run a batch again together: whatever decides that is agreed first,
or one would wait for the others forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from gaff.compat import distributed
from gaff.inspection.nonfinite.examination import Examination
from gaff.inspection.nonfinite.provenance import STEP
from gaff.inspection.nonfinite.ranges import has_nonfinite
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.nonfinite.rerun import Batch, run_again
from gaff.training.guard_runs import KeptRuns, Probe

_UNSEEN_GRADIENT = (
    "a gradient is not finite, and running the model again does not show why: it began outside the model (a loss, a "
    "penalty, a hook), in a batch from before, on another thread, or something has changed since"
)
_AVERAGED = "gradients are averaged over processes here, so look first at what the guards of the others tell"
_NOT_AGAIN = (
    "the first module to return something that was not finite; when the same batch is run again it is finite, so that "
    "it depends on what has changed since: a buffer that the forward writes to, a counter, Python's random numbers"
)
_UNSEEN_CALL = (
    "the model was called inside compiled code, which tells no arguments to run it again with; call what torch.compile "
    "returned of the model itself, or repeat the step without compiling"
)
_OUTSIDE = "; gaff.find_nonfinite(step, model=model) of the whole step, or gaff nan --again, names the op of the loss"
OPEN: list[OriginSearch] = []  # of the guards that are open in this process


class OriginSearch:
    """Runs the kept batches of a model again, with every op looked at, until one tells where it began.

    ``meshes``: of the processes that share the model, and must search together; what is returned is the same on all of
    them. Why a batch could not be run again is added to ``notes``.
    """

    def __init__(self, model: nn.Module, allow: Iterable[str], runs: KeptRuns, notes: list[str]) -> None:
        """Raises PlanError for an ``allow`` that names nothing. ``notes``: the guard's own list."""
        self.meshes = distributed.meshes_of(model)
        self._allow = allow if isinstance(allow, str) or not isinstance(allow, Iterable) else tuple(allow)
        Examination(model, self._allow)  # tells a slip in ``allow`` at once
        # without DistributedDataParallel around it: the other processes do not run this batch again
        self._is_averaged = isinstance(model, nn.parallel.DistributedDataParallel)
        self._model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._runs = runs
        self._notes = notes
        self._failure = ""  # why a batch could not be run again

    def anywhere(self, flag: bool) -> bool:
        """Whether ``flag`` holds in any process that shares the model; all of them must ask together."""
        return distributed.any_process(flag, self.meshes)

    def origin(self, hits: dict[Probe, Tensor], *, has_gradients: bool) -> Report:
        """The origin of what is not finite, or what is known of it; False where none of it is wrong.

        ``hits``: what modules returned; ``has_gradients``: a gradient is among it. Nothing is wrong with infinite
        values that are healed again, as those of a mask. Gradients may come from another guarded model.
        """
        report = self.first()
        report = self._or_of_others(report, is_unknown=has_gradients and (not report or report.site == STEP))
        unknown = self._unknown(hits) if not report and self._failure else None
        if unknown is not None:
            first = unknown.path
            cause = f"what it returned is not finite, and where that began cannot be told: {self._failure}"
            report = Report(True, first or ":output", module=first, direction="forward", cause=cause)
        if not report and has_gradients:
            report = Report(True, STEP, direction="backward", cause=self._why_not_shown())
        return self.agreed(report)

    def _unknown(self, hits: dict[Probe, Tensor]) -> Probe | None:
        """The first of ``hits`` of which nobody knows whether it was meant, where no batch can be run again.

        Infinite sums from which finite gradients came back were healed. NaN are not meant.
        """
        has_healed = any(batch.gradients for batch in self._runs.batches) and not any(
            map(_is_overflow, self._runs.batches)
        )
        return next((one for one, value in hits.items() if not has_healed or math.isnan(value.item())), None)

    def first(self) -> Report:
        """The first origin that running the batches again shows, in the order in which they were given.

        Batches whose gradients overflowed come last: with a loss scale that is too high they say least.
        """
        self._failure = ""
        report = Report(False)
        batches = self._runs.to_run_again()
        last = {id(batch): self.anywhere(_is_overflow(batch)) for batch in batches}
        for batch in sorted(batches, key=lambda one: last[id(one)]):
            report = self.agreed(self._examine(batch))
            if report:
                break
        return report

    def hidden(self) -> Report:
        """What a GradScaler hides, which takes a NaN for overflow and skips every step for good.

        With gradients scaled down to size 1 there is no overflow: what is not finite then began in the model.
        """
        batch = next((one for one in reversed(self._runs.batches) if one.gradients), None)
        if batch is None or _is_overflow(batch):
            return Report(False)
        largest = max(float(gradient.abs().max()) for _, gradient in batch.gradients) or 1.0
        small = [(at, gradient / largest) for at, gradient in batch.gradients]
        return self._or_of_others(self._examine(replace(batch, gradients=small)))

    def _or_of_others(self, report: Report, *, is_unknown: bool = False) -> Report:
        """The report, or that of another guarded model, which may have made what this one was given.

        ``is_unknown``: of what was seen here nothing says where it began.
        """
        is_given = report.direction == "before" and ":input" in report.site
        if not is_unknown and not is_given:
            return report
        others = [other.first() for other in OPEN if other is not self]  # all of them: processes look together
        made = [one for one in others if one and one.site != STEP]
        return next((one for one in made if not is_given or one.direction != "before"), report)

    def agreed(self, report: Report) -> Report:
        """The report of the process in which it began first, the same on all that share the model.

        Those that found something are preferred.
        """
        if self.meshes and report and report.rank is None and report.site != STEP:  # which all tell
            report = replace(report, rank=torch.distributed.get_rank())
        first: Report = distributed.best_of(report, self.meshes, lambda one: (not one, one.position))
        return first

    def _examine(self, batch: Batch) -> Report:
        """Run one batch again with every op looked at, and return what was found; why it failed is noted.

        The modules' outputs are looked at again as the guard did: where what was not finite is finite now, the run was
        not repeated, and what it told of a backward pass is not what happened.
        """
        if batch.is_unseen:
            self._failure = _UNSEEN_CALL
            return Report(False)
        KeptRuns.is_examining = True
        again = self._runs.current = replace(batch, sums=[])
        try:
            report, failure = run_again(self._model, batch, self._allow)
        finally:
            KeptRuns.is_examining = False
            self._runs.current = None
        if failure:
            self._failure = failure
            self._notes.append(failure)
        elif not report or report.site == STEP:
            path = _not_again(batch, again)
            if path is not None:
                report = Report(True, path or ":output", module=path, direction="forward", cause=_NOT_AGAIN,
                                notes=report.notes)  # fmt: skip
        return replace(report, cause=f"{report.cause}{_OUTSIDE}") if report.site == STEP else report

    def _why_not_shown(self) -> str:
        """The cause to tell for a gradient that is not finite, when no batch tells why."""
        batches = self._runs.to_run_again()
        if any(batch.is_unseen for batch in batches):
            return f"a gradient is not finite, and where that began cannot be told: {_UNSEEN_CALL}"
        which = "the last batch" if len(batches) == 1 else f"the last {len(batches)} batches"
        tried = f"{which} that the model was given" if batches else "no batch: none was seen"
        others = f"; {_AVERAGED}" if self._is_averaged else ""
        return f"{_UNSEEN_GRADIENT}{others} (run again: {tried})"


def _not_again(batch: Batch, again: Batch) -> str | None:
    """The path of the first module whose output was not finite in a run, and is when it is run again; None: of none."""
    still = {one for one, value in again.sums if not math.isfinite(value.item())}
    made = {one for one, _ in again.sums} - still
    return next((one.path for one, value in batch.sums if one in made and not math.isfinite(value.item())), None)


def _is_overflow(batch: Batch) -> bool:
    """Whether a gradient was not finite already when it came to the batch's outputs, from outside the model."""
    return any(has_nonfinite(gradient) for _, gradient in batch.gradients)
