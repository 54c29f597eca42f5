"""Holds ``gaff.guard``: a cheap look at every module of every step; the origin is looked for only on a hit.

In each step every module's output adds one number to the run's ``Batch``, on the device, without waiting for it. When
an optimizer is about to step (or a run without gradients has ended) they are read, once for each device, together with
the norm of the gradients. Only where one is not finite is the kept batch run again, with every op looked at, by
``gaff.inspection.nonfinite``, which tells the op and its line.

Processes that share a model (FSDP2, tensor parallel) run a batch again together: whatever decides that is agreed first,
or one would wait for the others forever.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.nested import iter_tensors
from gaff.address.resolve import Found, called_modules, need_module, unwrap
from gaff.compat import autograd, distributed, foreach, modes
from gaff.compat.compiler import is_reduced
from gaff.engine.gradients.nodes import keep_gradient
from gaff.engine.process.calls import Outermost, is_compiled
from gaff.engine.process.optimizer import StepWatch
from gaff.engine.session import Session
from gaff.engine.streams import Stream
from gaff.engine.taps import CallTap, Tap
from gaff.errors import NonFiniteError, PlanError
from gaff.inspection.nonfinite.examination import Examination
from gaff.inspection.nonfinite.provenance import STEP, UPDATED
from gaff.inspection.nonfinite.ranges import can_hold, has_nonfinite, plain, probe, range_of
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.nonfinite.rerun import Batch, run_again
from gaff.views.text import counted

_MOST_SUMS = 4096  # of runs without a step
_KEPT = 16  # runs of one step whose inputs are kept, for gradients that come from several micro-batches


_UNSEEN_GRADIENT = (
    "a gradient is not finite, and running the model again does not show why: it began outside the model (a loss, a "
    "penalty, a hook), in a batch from before, on another thread, or something has changed since"
)
_UNSEEN_OUTPUT = (
    "the model returned NaN, and running it again on the same batch does not: something it depends on has changed since"
)


_UNSEEN_CALL = (
    "the model was called inside compiled code, which tells no arguments to run it again with; call what torch.compile "
    "returned of the model itself, or repeat the step without compiling"
)
ELSEWHERE = "another process tells where"
_OPEN: list[Guard] = []


class _State:
    """Whether some guard in this process runs a batch again: no other guard takes that for a run of its own."""

    is_examining = False


class Probe(Stream):
    """Adds one number for each output of one module to the run in progress: finite if the output is, but for overflow.

    A stream of the engine, called inside hooks; it reads nothing. ``has_meant``: infinite values there are meant, only
    NaN is looked for. ``in_graph``: what compiled code computes in its place, the largest magnitude, since only one
    number is to leave the compiled graph.
    """

    has_meant = False
    in_graph = staticmethod(lambda tensor: _largest(tensor))

    def __init__(self, guard: Guard, path: str) -> None:
        self.path = path
        self._guard = guard

    def add(self, value: Any, run: Any, call: int) -> None:
        """Take in what the module has returned: a tensor, or tensors nested in lists, tuples and dicts.

        Outside of a run of the model nothing is added, unless compiled code tells of one (``Guard.unseen``).
        """
        batch = self._guard.current or self._guard.unseen()
        if batch is None:
            return
        if type(value) is Tensor:
            self._add(value, batch)
        else:
            for _, tensor in iter_tensors(value):
                self._add(tensor, batch)

    def _add(self, tensor: Tensor, batch: Batch) -> None:
        """Add one tensor's number to the batch; compiled code may have computed that number already.

        What the last module did return just now is passed over: its own output was looked at a moment ago. Grad mode is
        set by hand, without a context manager's cost for each module of each step.
        """
        if is_reduced(tensor):
            batch.sums.append((self, _is_nan(tensor) if self.has_meant else tensor.clone()))
        elif tensor is not self._guard.latest and can_hold(tensor):
            if not self._guard.is_traced:  # compiled code uses a tensor again for other values
                self._guard.latest = tensor  # a container often returns what its last module did
            had_grad = autograd.is_grad_enabled()
            autograd.set_grad_enabled(False)
            try:
                with modes.outside_modes():  # a selective checkpoint counts operations
                    batch.sums.append((self, _is_nan(tensor) if self.has_meant else probe(plain(tensor))))
            finally:
                autograd.set_grad_enabled(had_grad)


class Guard:
    """A context that raises or warns at the first NaN or inf, with its origin; see ``gaff.guard``. Opens once.

    ``reports``: what was found; ``steps``: optimizer steps that were looked at; ``notes``: what could not be looked at,
    and which infinite values are meant. Between two steps it holds the inputs of the last 16 runs, by reference, and
    the gradients of their outputs, since a bad gradient may come from any of the batches that were accumulated.
    """

    def __init__(self, model: nn.Module, action: str, allow: Iterable[str]) -> None:
        """Check everything; nothing is installed before the ``with`` block begins.

        Raises PlanError for an action or a model that cannot be, and for an ``allow`` that names nothing.
        """
        need_module(model)
        if action not in ("raise", "warn"):
            raise PlanError(f"action={action!r}: expected 'raise' or 'warn'")
        self.reports: list[Report] = []
        self.steps = 0  # looked at
        self.current: Batch | None = None
        self.latest: Tensor | None = None
        self._model = model
        self._action = action
        self._allow = tuple(allow)
        self._batches: deque[Batch] = deque(maxlen=_KEPT)
        self.notes: list[str] = []
        self._unstepped = 0  # runs since the last step
        self._meshes = distributed.meshes_of(model)  # of processes that must run a batch again together
        self._replicas = distributed.replicas_of(model)
        self._failure = ""  # why a batch could not be run again
        taps: list[Tap | CallTap] = []
        has_graphs = is_compiled(model)
        Examination(model, self._allow)  # tells a slip in ``allow`` now
        taps += [Tap(found, Probe(self, found.site.path), is_exact=False) for found in called_modules(model)]
        # compiled code tells no true arguments, but what calls it has them
        self._outermost = Outermost((model, unwrap(model)), self._begin, self._end) if has_graphs else None
        if not has_graphs:
            taps.append(CallTap(Found(Site(), unwrap(model)), self._begin, self._end))  # after the root's own probe
        self._session = Session(model, taps, threads="own", is_traceable=has_graphs)
        self._watch = StepWatch(lambda: list(model.parameters()), self._before_step, self._forget)
        self._closing = ExitStack()

    @property
    def is_traced(self) -> bool:
        """Whether the sums are made inside compiled code."""
        return self._session.is_traced

    def __enter__(self) -> Guard:
        distributed.agree(distributed.processes_of(self._model), "guard")
        with ExitStack() as opening:
            opening.callback(self._session.close)
            self._session.open()
            self.notes += self._session.notes
            if self.notes and self._outermost is None:
                self.notes.append("guard what torch.compile returned, not the module inside it, and it stays compiled")
            opening.enter_context(self._watch)
            if self._outermost is not None:
                opening.enter_context(self._outermost)
            self._closing = opening.pop_all()
        _OPEN.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._check_forward()
                self._check_parameters()
            elif isinstance(error, Exception) and not isinstance(error, NonFiniteError):
                self._explain(error)
        finally:
            _OPEN.remove(self)
            self._closing.close()
            self._forget()

    def __repr__(self) -> str:
        told = f"{counted(self.steps, 'step')} looked at, {counted(len(self.reports), 'report')}"
        return f"<gaff guard of {type(self._model).__name__}: {told}>"

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None, call: int = 0) -> None:
        """A run begins: keep its inputs and state, so that it can be run again.

        A call of the model inside itself begins none. Where no step comes for long, what the runs have added up is read
        after every 16 of them, and after 16, 32, 64 ... it is asked whether a GradScaler skips every step.
        """
        if _State.is_examining or (run is not None and len(run.frames) > 1):
            return
        self._unstepped += 1
        if len(self._batches) == _KEPT:
            self._check_forward()
        if not self._meshes and self._unstepped >= _KEPT and not self._unstepped & (self._unstepped - 1):
            self._check_skipped()
        self.current = Batch.of(args, kwargs)
        self._batches.append(self.current)

    def _end(self, output: Any, run: Any = None, call: int = 0) -> None:
        """A run has ended: listen for the gradients of its outputs, or, of a run without gradients, look at once."""
        batch = self.current
        if _State.is_examining or batch is None or (run is not None and len(run.frames) > 1):
            return
        self.current = self.latest = None
        if not batch.has_grad:
            self._check_forward()
            return
        for at, (_, tensor) in enumerate(iter_tensors(output)):
            if tensor.requires_grad and not tensor.is_leaf:
                batch.handles.append(keep_gradient(tensor, partial(_note, batch.gradients, at)))

    def _before_step(self, optimizer: Any) -> None:
        """Read what the runs have added up, and the gradients: the one place where the device is waited for.

        An optimizer is about to use the gradients, so raising here leaves weights and optimizer state as they were. A
        norm that is not finite may be an overflow of large gradients: then each gradient is read by itself.
        """
        if _State.is_examining:
            return
        self.steps += 1
        self._unstepped = 0
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        gradients = [plain(one) for one in gradients if can_hold(one)]
        sums = [one for batch in self._batches for _, one in batch.sums]
        norms = [foreach.norms_of(gradients, 2.0)[1]] if gradients else []
        is_bad = not _are_finite([*sums, *norms])
        is_bad_elsewhere = self._is_bad_in_a_replica(is_bad) and not is_bad
        if self._any(is_bad):
            has_gradients = self._any(
                any(has_nonfinite(one) for one in gradients)
            )  # a norm of large ones overflows as well
            if has_gradients or self._any(not _are_finite(sums)):
                self._alarm(has_gradients=has_gradients)
        if is_bad_elsewhere:
            self._tell(Report(True, STEP, direction="forward", cause=ELSEWHERE))
        self._forget()

    def _check_forward(self) -> None:
        """Read what the runs since the last step have added up, and forget them. Waits for the device."""
        if self._any(not _are_finite([one for batch in self._batches for _, one in batch.sums])):
            self._alarm(has_gradients=False)
        self._forget()

    def _is_bad_in_a_replica(self, is_bad: bool) -> bool:
        """Whether any replica of DistributedDataParallel has found something; asked at steps only.

        All replicas make a step, while one alone may evaluate: asked elsewhere, the others would not answer.
        """
        if self._replicas is None:
            return False
        return distributed.any_of(is_bad, self._replicas, next(self._model.parameters()).device)

    def unseen(self) -> Batch | None:
        """The batch of a run of which only compiled code tells, no call of the model having been seen; else None.

        It has no inputs, so such a run can be told of, but not run again.
        """
        if _State.is_examining or not self.is_traced:
            return None
        if len(self._batches) and len(self._batches[-1].sums) > _MOST_SUMS:
            self._check_forward()
        if not self._batches or not self._batches[-1].is_unseen:
            self._batches.append(replace(Batch.of((), {}), is_unseen=True))
        return self._batches[-1]

    def _any(self, flag: bool) -> bool:
        """Whether ``flag`` holds in any process that shares the model; all of them must ask together."""
        return distributed.any_process(flag, self._meshes) if self._meshes else flag

    def _check_skipped(self) -> None:
        """Tell of a NaN that a GradScaler hides by skipping every step, after many runs without any.

        A GradScaler takes a NaN for overflow and skips for good. With gradients scaled down to size 1 there is no
        overflow: what is not finite then began in the model.
        """
        batch = next((one for one in reversed(self._batches) if one.gradients), None)
        if batch is None or any(has_nonfinite(gradient) for _, gradient in batch.gradients):
            return
        largest = max(float(gradient.abs().max()) for _, gradient in batch.gradients) or 1.0
        unscaled = replace(batch, gradients=[(at, gradient / largest) for at, gradient in batch.gradients])
        report = self._examine(unscaled)
        if report:
            self._tell(report)

    def _check_parameters(self) -> None:
        """Look at the parameters when the block ends: the last step may have spoiled what no run has used since."""
        parameters = [one for one in self._model.parameters() if can_hold(one)]
        is_fine = not parameters or _are_finite([foreach.norms_of([plain(one) for one in parameters], 2.0)[1]])
        if not self._any(not is_fine) or self.reports:
            return
        report = Report(False)
        for path, parameter in self._model.named_parameters():
            if has_nonfinite(parameter):
                cause = UPDATED if self.steps else "it was so before the guard was opened"
                site = str(Site(path, port="param"))
                report = Report(True, site, direction="update" if self.steps else "before", cause=cause,
                                output=range_of(parameter, "value"))  # fmt: skip
                break
        report = self._first_of_all(report)
        if report:
            self._tell(report)

    def _explain(self, error: Exception) -> None:
        """Add a note to an exception of the user's code where what the model did before was not finite.

        A check of the user's own is often what notices a NaN first; the exception itself goes on as it is. Not with a
        model that processes share: none of the others would run the batch again.
        """
        batches = list(self._batches)
        if self._meshes:
            return  # no other process is known to run the batch again
        if not _are_finite([one for batch in batches for _, one in batch.sums]):
            report = self._first_report(batches)
            if report:
                self.reports.append(report)
                if hasattr(error, "add_note"):
                    error.add_note(f"gaff: before this was raised, {report}")

    def _alarm(self, *, has_gradients: bool) -> None:
        """Something is not finite: run the batches again until one tells where it began, and raise or warn.

        Where the origin is not found the report says what is known. Where none of it is wrong (infinite values that are
        healed again, as those of a mask) the modules that returned it are noted as meant, and asked for NaN only from
        then on.
        """
        batches = list(self._batches)
        hits = {one: value for batch in batches for one, value in batch.sums if not math.isfinite(value.item())}
        self._failure = ""
        report = self._first_report(batches)
        if has_gradients and (not report or report.site == STEP):  # another guarded model may have made it
            # all of them: several processes may have to look together
            others = [other._first_report(list(other._batches)) for other in _OPEN if other is not self]
            report = next((one for one in others if one and one.site != STEP), report)
        if not report and hits and self._failure:  # then nobody knows whether it was meant
            first = next(iter(hits)).path
            cause = f"what it returned is not finite, and where that began cannot be told: {self._failure}"
            report = Report(True, first or ":output", module=first, direction="forward", cause=cause)
        if not report and has_gradients:
            report = Report(True, STEP, direction="backward", cause=_why_not_shown(batches))
        outputs = [one for one, value in hits.items() if not one.path and value.isnan().item()]
        if not report and outputs:
            report = Report(True, site=":output", direction="forward", cause=_UNSEEN_OUTPUT)
        report = self._first_of_all(report)
        if report:
            self._tell(report)
            return
        for one in hits:
            one.has_meant = True
            self.notes.append(f"{one.path or 'the model'} returns infinite values that are meant: only NaN is told")

    def _first_report(self, batches: list[Batch]) -> Report:
        """The first origin that running the batches again shows, in the order in which they were given.

        Batches whose gradients overflowed come last: with a loss scale that is too high they say least.
        """
        report = Report(False)
        last = {id(batch): self._any(_is_overflow(batch)) for batch in batches}
        for batch in sorted(batches, key=lambda one: last[id(one)]):  # those that a GradScaler made overflow say least
            report = self._first_of_all(self._examine(batch))
            if report:
                break
        return report

    def _first_of_all(self, report: Report) -> Report:
        """The report of the process in which it began first, the same on all that share the model."""
        if not self._meshes:
            return report
        if report and report.rank is None and report.site != STEP:  # which all tell
            report = replace(report, rank=torch.distributed.get_rank())
        first: Report = distributed.best_of(report, self._meshes, _rating)
        return first

    def _tell(self, report: Report) -> None:
        """Keep the report, then raise NonFiniteError with it, or warn once.

        A parameter that was bad before a step which is not the first was made so by the optimizer: the report then says
        that.
        """
        if report.direction == "before" and report.site.endswith(":param") and self.steps > 1:
            report = replace(report, direction="update", cause=UPDATED)
        self.reports.append(report)
        if self._action == "raise":
            raise NonFiniteError(f"{report}", report)
        if len(self.reports) == 1:
            warnings.warn(f"gaff: {report}", stacklevel=2)

    def _examine(self, batch: Batch) -> Report:
        """Run one batch again with every op looked at, and return what was found; why it failed is noted."""
        if batch.is_unseen:
            self._failure = _UNSEEN_CALL
            return Report(False)
        _State.is_examining = True
        try:
            report, failure = run_again(_alone(self._model), batch, self._allow)
        finally:
            _State.is_examining = False
        if failure:
            self._failure = failure
            self.notes.append(failure)
        return report

    def _forget(self) -> None:
        """Let the kept batches go, with the hooks that bring their gradients."""
        for batch in self._batches:
            for handle in batch.handles:
                handle.remove()
        self._batches.clear()
        self.current = self.latest = None


def _alone(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel around it: the other processes do not run this batch again."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _why_not_shown(batches: list[Batch]) -> str:
    """The cause to tell for a gradient that is not finite, when no batch tells why."""
    if any(batch.is_unseen for batch in batches):
        return f"a gradient is not finite, and where that began cannot be told: {_UNSEEN_CALL}"
    tried = f"the last {len(batches)} batches that the model was given" if batches else "no batch: none was seen"
    return f"{_UNSEEN_GRADIENT} (run again: {tried})"


def _rating(report: Report) -> tuple[bool, int]:
    """The order in which reports of several processes are preferred: those that found something, the earliest first."""
    return not report, report.position


def _is_overflow(batch: Batch) -> bool:
    """Whether a gradient was not finite already when it came to the batch's outputs, from outside the model."""
    return any(has_nonfinite(gradient) for _, gradient in batch.gradients)


def _note(gradients: list[tuple[int, Tensor]], at: int, gradient: Tensor) -> None:
    gradients.append((at, gradient))


def _are_finite(sums: list[Tensor]) -> bool:
    """Whether all these numbers are finite. Waits for each device once, by adding up what lies on it."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one.to(torch.float32) if one.dtype != torch.float32 else one)
    return all(math.isfinite(torch.stack(row).sum().item()) for row in by_device.values())


def _is_nan(tensor: Tensor) -> Tensor:
    """A number that is 0 where no element is NaN, else -inf: not finite, as the sums of other modules are on a hit."""
    return (~tensor.detach().isnan().any()).float().log()


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude of a tensor, NaN where there is one; in compiled code, where every tensor is plain."""
    value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return value.abs().amax() if value.numel() else torch.zeros((), device=tensor.device)
