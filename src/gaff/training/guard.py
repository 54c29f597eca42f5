"""Holds ``gaff.guard``: a cheap look at every module of every step; the origin is looked for only on a hit.

In each step every module's output adds one number to what is kept of the run (``guard_runs``), on the device, without
waiting for it. When an optimizer is about to step (or a run without gradients has ended) they are read, once for each
device, together with the norm of the gradients. Only where one is not finite is the kept batch run again, with every op
looked at (``guard_search``), which tells the op and its line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.nested import Arguments
from gaff.address.resolve import Found, called_modules, need_module, unwrap
from gaff.compat import distributed, foreach
from gaff.compat.autograd import at_backward_end, backward_task
from gaff.engine.process.calls import is_compiled, outermost_calls
from gaff.engine.process.optimizer import watch_steps
from gaff.engine.session import Session
from gaff.engine.taps import CallTap, Tap
from gaff.errors import NonFiniteError, PlanError
from gaff.inspection.nonfinite.provenance import FOLLOWED, SINCE, STEP
from gaff.inspection.nonfinite.ranges import has_nonfinite, numbers_of, range_of
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.op_log import iter_state
from gaff.sessions.unopened import Unopened
from gaff.training.guard_runs import KEPT, KeptRuns, Probe, are_finite
from gaff.training.guard_search import OPEN, OriginSearch
from gaff.views.text import counted

UNREAD = "no optimizer of the model made a step: gradients were not looked at"


class Guard(Unopened):
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
        self.notes: list[str] = []
        self._model = model
        self._action = action
        self._unstepped = 0  # runs since the last step
        self._waiting: bool | None = None  # for the end of a backward pass; whether gradients in it were bad
        self._replicated = model
        self._runs = KeptRuns(self._check_forward, sum(one.requires_grad for one in model.parameters()))
        self._search = OriginSearch(model, allow, self._runs, self.notes)
        root, has_graphs = unwrap(model), is_compiled(model)
        taps: list[Tap | CallTap] = []
        taps += [Tap(found, Probe(self._runs, found.site.path), is_exact=False) for found in called_modules(model)]
        # compiled code tells no true arguments, but what calls it has them
        self._compiled = (model, root) if has_graphs else ()
        if not has_graphs:
            taps.append(CallTap(Found(Site(), root), self._entered, self._end))  # after the root's own probe
        self._session = Session(model, taps, threads="own", is_traceable=has_graphs)
        self._closing = ExitStack()
        self._bad_before: frozenset[str] = frozenset()  # sites of parameters that were bad when it was opened
        self._forbidden: dict[str, int] = {}  # by site how many -inf a parameter held then, and nothing else

    @property
    def is_traced(self) -> bool:
        """Whether the sums are made inside compiled code."""
        return self._runs.is_traced

    def bad_state(self) -> frozenset[str]:
        """The sites of parameters and buffers of this process that are not finite now. Waits for the device."""
        return frozenset(str(site) for one, site in iter_state(self._model) if has_nonfinite(one))

    def __enter__(self) -> Guard:
        distributed.agree(distributed.processes_of(self._model), "guard")
        with ExitStack() as opening:
            opening.enter_context(self._session)
            opening.callback(self._runs.forget)
            self._runs.is_traced = self._session.is_traced
            self.notes += self._session.notes
            if self.notes and not self._compiled:
                self.notes.append("guard what torch.compile returned, not the module inside it, and it stays compiled")
            opening.enter_context(watch_steps(self._model.parameters, self._before_step, self._runs.forget))
            if self._compiled:
                opening.enter_context(outermost_calls(self._compiled, self._begin, self._end))
            OPEN.append(self._search)
            opening.callback(OPEN.remove, self._search)
            self._bad_before = _bad_parameters(self._model, self._search)
            state = iter_state(self._model) if self._bad_before else ()
            self._forbidden = {str(site): _forbidden(one) for one, site in state if str(site) in self._bad_before}
            opening.push(self._look_last)
            self._closing = opening.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._closing.__exit__(*exc)

    def __repr__(self) -> str:
        told = f"{counted(self.steps, 'step')} looked at, {counted(len(self.reports), 'report')}"
        told += f"; {UNREAD}" if UNREAD in self.notes else ""
        return f"<gaff guard of {type(self._model).__name__}: {told}>"

    def _look_last(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Look at what no step has looked at when the block ends, or explain the exception that ends it."""
        if error is None:
            if not self.steps and any(one.has_grad for one in self._runs.batches):
                self.notes.append(UNREAD)
            self._check_forward()
            self._check_parameters()
        elif isinstance(error, Exception) and not isinstance(error, NonFiniteError):
            self._explain(error)

    def _entered(self, given: Arguments, run: Any, call: int) -> None:
        """The model is called, as its hooks tell."""
        self._begin(given.args, given.kwargs, run)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None) -> None:
        """A run begins: what it is given is kept; a call of the model inside itself begins none.

        Where no step comes for long, what the runs have added up is read after every 16 of them, and after 16, 32, 64
        ... it is asked whether a GradScaler skips every step.
        """
        if _is_inner(run):
            return
        self._waiting = None  # torch forgets what was to come at the end of a pass that raised
        self._unstepped += 1
        if len(self._runs.batches) == KEPT:
            self._check_forward()
        if not self._search.meshes and self._unstepped >= KEPT and not self._unstepped & (self._unstepped - 1):
            self._tell(self._search.hidden())
        self._runs.begin(args, kwargs)

    def _end(self, output: Any, run: Any = None, call: int = 0) -> None:
        """A run has ended: its gradients are to come, or, of a run without gradients, look at once."""
        batch = self._runs.current
        if batch is None or _is_inner(run):
            return
        self._runs.end(batch, output)
        if not batch.has_grad:
            self._check_forward(is_last_alone=True)

    def _before_step(self, optimizer: Any) -> None:
        """Read what the runs have added up, and the gradients: the one place where the device is waited for.

        An optimizer is about to use the gradients, so raising here leaves weights and optimizer state as they were. A
        norm that is not finite may be an overflow of large gradients: then each gradient is read by itself.
        """
        if KeptRuns.is_examining:
            return
        self.steps += 1
        self._unstepped = 0
        if backward_task() >= 0 and not self._must_stop(optimizer):
            return
        try:
            self._check_step(optimizer)
        finally:  # also where it raises: a program that catches this goes on with other batches
            self._runs.forget(stepped=sum(len(group["params"]) for group in optimizer.param_groups))

    def _must_stop(self, optimizer: Any) -> bool:
        """Of an optimizer that steps within a backward pass: whether its gradients must not be used.

        All else waits for the end of the pass where to run a batch again now would write to buffers that the rest of
        the pass needs; then the step has spoilt the parameters, and what spoilt the gradients is not known any more.
        """
        is_bad = any(map(has_nonfinite, _gradients(optimizer)))
        is_alone = distributed.replicas_of(self._replicated) is None and not self._search.meshes
        writes = any(True for _ in self._model.buffers()) or any(
            getattr(one, "max_norm", 0) for one in self._model.modules()
        )
        if is_alone and (not writes or (is_bad and self._action == "raise")):
            return True
        if self._waiting is None:
            at_backward_end(self._pass_over)
        self._waiting = is_bad or bool(self._waiting)
        return False

    def _pass_over(self) -> None:
        """A backward pass within which an optimizer has stepped is over."""
        has_gradients, self._waiting = bool(self._waiting), None
        sums = self._runs.sums()
        try:
            self._judge(sums, has_gradients or not are_finite(sums), lambda: has_gradients)
        finally:
            self._runs.forget()

    def _check_step(self, optimizer: Any) -> None:
        gradients, sums = _gradients(optimizer), self._runs.sums()
        is_bad = not are_finite([*sums, *_norm(gradients)])
        self._judge(sums, is_bad, lambda: any(map(has_nonfinite, gradients)))

    def _judge(self, sums: list[Tensor], is_bad: bool, has_bad_gradients: Callable[[], bool]) -> None:
        """Alarm where any process has found something that is not finite; each asks the others, in one order."""
        is_bad_anywhere = _in_any_replica(self._replicated, is_bad)
        report, is_wrong = Report(False), True  # what raises here stops the others, too
        try:
            if self._search.anywhere(is_bad):
                has_gradients = self._search.anywhere(has_bad_gradients())  # large ones overflow as well
                if has_gradients or self._search.anywhere(not are_finite(sums)):
                    report = self._origin(has_gradients=has_gradients)
            is_wrong = bool(report)
        finally:  # the others wait for what this one finds: infinite values may be meant
            is_wrong_anywhere = is_bad_anywhere and _in_any_replica(self._replicated, is_wrong)
        if is_wrong_anywhere and not report:
            report = Report(True, STEP, direction="forward", cause="another process tells where")
        self._tell(report)

    def _check_forward(self, *, is_last_alone: bool = False) -> None:
        """Read what the runs since the last step have added up; forget them, or the last one. Waits for devices."""
        try:
            if self._search.anywhere(not are_finite(self._runs.sums())):
                self._tell(self._origin(has_gradients=False))
        finally:
            self._runs.forget(is_last_alone=is_last_alone)

    def _check_parameters(self) -> None:
        """Look at the parameters when the block ends: the last step may have spoiled what no run has used since."""
        if not self._search.anywhere(not are_finite(_norm(self._model.parameters()))) or self.reports:
            return
        bad = (
            Report(True, str(site), direction="update", cause=SINCE, output=range_of(one, "value"))
            for one, site in iter_state(self._model)
            if site.port == "param"
            and has_nonfinite(one)
            and not 0 < self._forbidden.get(str(site), 0) == _forbidden(one)
        )
        report = self._search.agreed(next(bad, Report(False)))
        if report.site in self._bad_before:
            report = replace(report, direction="before", cause="it was so before the guard was opened")
        self._tell(report)

    def _explain(self, error: Exception) -> None:
        """Add a note to an exception of the user's code where what the model did before was not finite.

        A check of the user's own is often what notices a NaN first; the exception itself goes on as it is. Not with a
        model that processes share: no other process is known to run the batch again.
        """
        if self._search.meshes or are_finite(self._runs.sums()):
            return
        report = self._search.first()
        if report:
            self.reports.append(report)
            if hasattr(error, "add_note"):
                error.add_note(f"gaff: before this was raised, {report}")

    def _origin(self, *, has_gradients: bool) -> Report:
        """Something is not finite: the origin of it, or what is known; False where none of it is wrong.

        Where none of it is wrong the sums of what the modules returned may have overflowed: these are looked at more
        closely from then on, and if that has happened already they are noted as meant, and asked for NaN only.
        """
        hits = self._runs.hits()
        report = self._search.origin(hits, has_gradients=has_gradients)
        for one in hits if not report else ():
            if one.is_exact:
                self.notes.append(f"{one.path or 'the model'} returns infinite values that are meant: only NaN is told")
            one.is_exact, one.has_meant = True, one.is_exact
        return report

    def _tell(self, report: Report) -> None:
        """Keep a report that has found something, then raise NonFiniteError with it, or warn once.

        A parameter that was bad before a step which is not the first, and was not when the guard was opened, was made
        so by the optimizer: the report then says that.
        """
        if not report:
            return
        is_updated = report.direction == "before" and report.site.endswith(":param") and self.steps > 1
        if is_updated and report.site not in self._bad_before:
            report = replace(report, direction="update", cause=FOLLOWED if self.reports else SINCE)
        self.reports.append(report)
        if self._action == "raise":
            raise NonFiniteError(f"{report}", report)
        if len(self.reports) == 1:
            warnings.warn(f"gaff: {report}", stacklevel=2)


def _in_any_replica(model: nn.Module, flag: bool) -> bool:
    """Whether a flag holds in any replica of a model of DistributedDataParallel; asked at steps only, in one order.

    All replicas make a step, while one alone may evaluate: asked elsewhere, the others would not answer. Nor would
    those whose batches are used up, in ``DistributedDataParallel.join``: there each tells of its own.
    """
    group = distributed.replicas_of(model)
    return group is not None and distributed.any_of(flag, group, next(model.parameters()).device)


def _bad_parameters(model: nn.Module, search: OriginSearch) -> frozenset[str]:
    """The sites of parameters that are not finite in any process that shares the model. Waits for the device."""
    if not search.anywhere(not are_finite(_norm(model.parameters()))):
        return frozenset()
    bad = [(str(site), has_nonfinite(one)) for one, site in iter_state(model) if site.port == "param"]
    return frozenset(site for site, is_bad in bad if search.anywhere(is_bad))


def _gradients(optimizer: Any) -> list[Tensor]:
    return [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]


def _is_inner(run: Any) -> bool:
    """Whether a call is no run of its own: the model calls itself in ``run``, or a guard runs a batch again."""
    return KeptRuns.is_examining or (run is not None and len(run.frames) > 1)


def _forbidden(parameter: Tensor) -> int:
    """How many -inf a parameter holds (transitions that are never to be taken), -1 with a NaN or +inf. Waits."""
    found = range_of(parameter, "value")
    return -1 if found.nan or found.positive_inf else found.negative_inf


def _norm(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The norm of all tensors together that could hold a NaN, on their device; empty where there are none."""
    read = [value for one in tensors if (value := numbers_of(one)) is not None]
    return [foreach.norms_of(read, 2.0)[1]] if read else []
