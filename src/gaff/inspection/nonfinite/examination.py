"""The first op that made a NaN or inf: one run of a step with every op and every autograd node looked at.

A tensor that holds something non-finite is marked with the op that began it, and the mark travels with what is
computed from it; so an infinite value that is healed again (a mask before a softmax) is no finding, and one that
reaches a loss, an output or a gradient is told with where it began, not with where it was seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.nested import Arguments, iter_tensors, shape_text
from gaff.address.resolve import called_modules, need_module, resolve
from gaff.compat.autograd import maker_of
from gaff.engine.ops.calls import OpCall
from gaff.engine.process.optimizer import watch_steps
from gaff.engine.raised import tell_where
from gaff.engine.session import Session
from gaff.engine.taps import CallTap, OpTap
from gaff.errors import NonFiniteError, PlanError
from gaff.inspection.nonfinite.attribution import (
    Begun,
    Now,
    before,
    is_mask,
    is_scaling,
    judge,
    meant_by,
    only_written,
    ranges_of,
)
from gaff.inspection.nonfinite.backward import Trail
from gaff.inspection.nonfinite.backward_causes import is_steep
from gaff.inspection.nonfinite.bad_state import BadState
from gaff.inspection.nonfinite.provenance import (
    NOWHERE,
    RETURNED,
    RUNNING,
    Made,
    Marks,
    Ran,
    shown,
    users_place,
)
from gaff.inspection.nonfinite.ranges import can_hold, has_nan, has_nonfinite, range_of
from gaff.inspection.nonfinite.report import BEFORE, Report
from gaff.inspection.op_log import Producers


class Step(nn.Module):
    """What is examined, as a module around the model: its own ops are those outside the model.

    A session needs a root whose run the step is. The model has the path ``model`` in it; ``provenance.shown`` turns
    such addresses into those of the model itself.
    """

    def __init__(self, run: Callable[[], Any], model: nn.Module | None) -> None:
        super().__init__()
        self._run = run
        if model is not None:
            self.model = model

    def forward(self) -> Any:
        """Call the step, as it is, and return what it returns."""
        return self._run()


class Examination:
    """Looks at one step. ``allow``: patterns of sites whose non-finite values are meant.

    With ``from_step`` it looks at a whole training run, step by step, from the optimizer's step with this number on,
    and raises NonFiniteError at the first that is bad. ``is_again``: the step has run before. Made for one ``run``. A
    tensor is looked at when it is first met, and marked (``_look``); an op that returned something bad is judged by the
    marks of what it was given (``judge``); what reached a loss, an output or a leaf's gradient is told at the end
    (``_report``), by the earliest mark.
    """

    def __init__(
        self,
        model: nn.Module | None,
        allow: Iterable[str] = (),
        from_step: int | None = None,
        *,
        is_again: bool = False,
    ) -> None:
        self._from_step, self._is_again = from_step, is_again
        self._asleep = max((from_step or 0) - 1, 0)  # for how many steps of the optimizer nothing is looked at
        if model is not None:
            need_module(model)
        self._model = model
        self._allow = meant_by(allow)
        for pattern in self._allow:
            if model is not None:
                resolve(model, replace(pattern, op=None, op_index=None))  # a slip in the path is told
        self._marks = Marks()
        self._open: list[Begun] = []
        self._trail = Trail()
        self._sinks: list[Made] = []
        self._before: deque[str] = deque(maxlen=BEFORE)  # the last ops that ran
        self._now = Now()
        self._state = BadState()
        self._first = Report(False)  # what was found before an optimizer's step: what comes after may follow from it
        self.notes: list[str] = []

    def meet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark what the model will be given as there before the step, whatever autograd graph lies behind it."""
        for key, tensor in iter_tensors(Arguments(args, kwargs)):
            if can_hold(tensor) and has_nonfinite(tensor):
                self._marks.put(tensor, before(tensor, Site("model", port="input", key=key), is_meant=is_mask(tensor)))

    def run(self, step: Callable[[], Any]) -> Report:
        """Call ``step`` once, as it is, and tell what was found; its exceptions pass through, perhaps with a note."""
        around = Step(step, self._model)
        self._producers = Producers(around)
        session = Session(around, list(self._taps(around)))
        self._state.note_before(around, self._marks, self._now, is_again=self._is_again)
        with ExitStack() as closing:
            closing.callback(lambda: self._trail.nodes.close())
            closing.callback(self._now.anomaly.put_back)
            self._now.anomaly.leave_out()
            if not self._is_again:  # that may be in the middle of a step, of whose hooks none may come or go then
                closing.enter_context(
                    watch_steps(None, self._before_step, ended=lambda one: self._state.note_made(one, self._marks))
                )
            session.open()
            try:
                output = around()
            except Exception as error:
                self._explain(error)
                raise
            finally:
                session.close()
            if isinstance(output, (Generator, Coroutine)):
                raise PlanError("step returned a generator or coroutine: nothing of it has run; expected a function")
            self.notes += session.notes
            self._sink(output)
            if (
                not any(can_hold(tensor) for _, tensor in iter_tensors(output))
                and not len(self._trail)
                and self._now.outside is not None
            ):
                self._sinks.append(self._now.outside)  # read out: the step neither returned it nor sent it backward
            report = self._first or self._report()
            return report if report else self._look_after(around, report)

    def _before_step(self, optimizer: Any) -> None:
        """Ahead of each optimizer's step: note what led to it that was bad, and what it is about to use.

        With ``from_step`` instead raise NonFiniteError if what led to it was bad, else forget it.
        """
        if self._from_step is None:
            self._first = self._first or self._report()
            self._state.note_used(optimizer, self._marks)
            return
        if self._asleep:
            self._asleep -= 1
            return
        report = self._report()
        if not report and (made := self._state.note_used(optimizer, self._marks)) is not None:
            report = made.tell(self.notes, self._now.ops)
        if report:
            raise NonFiniteError(f"{report}", report)
        self._trail.nodes.close()
        self._trail, self._marks, self._sinks = Trail(), Marks(), []

    def _explain(self, error: Exception) -> None:
        """Add to an exception of the step where it was raised, and what was not finite before: often that is why."""
        tell_where(error, self._model)
        bad = [made for made in self._marks if not made.is_meant]
        if bad and hasattr(error, "add_note") and not isinstance(error, NonFiniteError):
            first = min(bad, key=lambda made: made.number)
            error.add_note(f"gaff: before this was raised, {first.tell(self.notes, self._now.ops)}")

    def _look_after(self, around: nn.Module, report: Report) -> Report:
        """The report of state that is bad after a step in which nothing was found; else ``report`` itself."""
        is_scaled = self._trail.scale is not None
        made = self._state.after(around, self._marks, is_scaled=is_scaled, is_again=self._is_again)
        return report if made is None else made.tell(self.notes, report.ops)

    def _taps(self, around: nn.Module) -> Iterable[OpTap | CallTap]:
        """Taps for the ops of every module, in recomputations too, and for the calls of all but the step itself."""
        for found in called_modules(around):
            path = found.site.path
            self._now.modules[path] = found.module
            yield OpTap(found, self._enter, self._leave, is_again=True)
            if path:
                yield CallTap(found, partial(self._called, path), self._returned(path))

    def _look(self, tensor: Tensor, site: Site = NOWHERE) -> Made | None:
        """The mark of a tensor that comes in; one that is not known, or whose memory was spoiled, is looked at."""
        if self._marks.knows(tensor):
            made = self._marks.of(tensor)
            if made is not None or self._marks.of_memory(tensor) is None:  # .data writes past the version counter
                return made
        if not can_hold(tensor):
            return None
        made = None
        if has_nonfinite(tensor):
            made = self._marks.of_memory(tensor) or self._now.made_of(tensor, self._trail, self._producers, site)
        self._marks.put(tensor, made)
        return made

    def _called(self, path: str, given: Arguments, run: Any, call: int) -> None:
        """A module is called: what it is given belongs to the module around it, and is looked at."""
        if self._asleep:
            return
        around = Ran(Site(self._now.inside[-1]), None, ())
        self._now.inside.append(path)
        for key, tensor in iter_tensors(given):
            self._look(tensor, Site(path, port="input", key=key))
        self._trail.nodes.follow((tensor for _, tensor in iter_tensors(given)), around)

    def _returned(self, path: str) -> Callable[[Any, Any, int], None]:
        """The tap for when the module at ``path`` returns: it has passed on what is bad, but did not make it."""

        def returned(output: Any, run: Any, call: int) -> None:
            tensors = [tensor for _, tensor in iter_tensors(output)] if not self._asleep else []
            ran = Ran(Site(path), None, ())
            while len(self._now.inside) > 1 and self._now.inside.pop() != path:
                pass
            for tensor in tensors:
                made = self._look(tensor, Site(path))
                if made is not None:
                    made.passed[path], maker = None, maker_of(tensor)
                    ran.bad[maker, tensor.output_nr] = made
            self._trail.nodes.follow(tensors, ran)
            self._producers.note_all(output, Site(path))
            if path == "model":
                self._sink(output)

        return returned

    def _enter(self, call: OpCall) -> None:
        """An op begins: look at what it is given; keep the ranges of what it overwrites or backward may ask for."""
        if self._asleep:
            return
        self._now.anomaly.leave_out()
        given = [tensor for _, tensor in iter_tensors((call.args, call.kwargs)) if can_hold(tensor)]
        self._state.meet_all(call, given)
        came = [(tensor, self._look(tensor)) for tensor in given]
        ranges = ranges_of(given, self._producers) if call.writes or is_steep(call.site.op or "", call.args) else None
        if is_scaling(call):
            self._trail.note_scale(call)
        self._trail.nodes.follow(given, Ran(Site(call.site.path), users_place(call.place), ()))
        self._open.append(Begun(call, came, ranges, self._now.scalars))

    def _leave(self, call: OpCall, output: Any) -> None:
        """An op returned: mark its outputs with where they became bad, and note that for the backward pass."""
        if self._asleep or not any(one.call is call for one in self._open):
            return
        while self._open[-1].call is not call:
            self._open.pop()
        begun = self._open.pop()
        self._now.ops += 1
        tensors = [tensor for _, tensor in iter_tensors(output)]
        came = next((made for _, made in begun.came if made is not None and not made.is_meant), None)
        ran = Ran(call.site, users_place(call.place), begun.ranges or (), came=came)
        for tensor in only_written(call):
            self._judge_written(begun, tensor)
        for tensor in tensors:
            made = self._marks.of(tensor)  # by an op inside a composite one
            if made is None and has_nonfinite(tensor):
                made = judge(begun, tensor, self._producers, self._now.ops - 1, self._allow)
                made.before = tuple(self._before) if made.before is None else made.before
            ran.made = ran.made or made
            if made is not None and (maker := maker_of(tensor)) is not None:
                ran.bad[maker, tensor.output_nr] = made
            self._marks.put(tensor, made)
            if made is not None and tensor.numel() == 1 and not made.is_meant:
                self._now.scalars.append((range_of(tensor, ""), made))
        shapes = ", ".join(shape_text(tensor) for tensor in tensors[:2])
        self._before.append(f"{shown(str(call.site))} -> {shapes}" if shapes else shown(str(call.site)))
        self._now.latest = ran.made
        if not call.site.path:
            self._now.outside = ran.made if ran.made is None or not ran.made.is_meant else None
        self._producers.note_op(call, output)
        self._trail.nodes.follow(tensors, ran)

    def _judge_written(self, begun: Begun, tensor: Any) -> None:
        """Mark running statistics that are bad after an op that has written to them; what it returned may be finite."""
        if not isinstance(tensor, Tensor) or not has_nonfinite(tensor):
            return
        known = [made for one, made in begun.came if one is tensor and made is not None]
        made = known[0] if known else judge(begun, tensor, self._producers, self._now.ops - 1, self._allow)
        is_own = not known and made.site == begun.call.site
        self._marks.put(tensor, replace(made, cause=RUNNING) if is_own else made)

    def _sink(self, output: Any) -> None:
        """Note what is bad in what the step or the model returned: here it matters, if it was not meant.

        Of what was meant a NaN matters, and a loss that is infinite, unless a GradScaler made it so.
        """
        for _, tensor in iter_tensors(output):
            made = self._look(tensor, RETURNED)
            if made is not None and (not made.is_meant or has_nan(tensor)):
                self._sinks.append(made)
            elif made is not None and tensor.numel() == 1 and tensor.requires_grad and not made.is_scaling:
                self._sinks.append(made)  # a loss

    def _report(self) -> Report:
        """What was found: the earliest origin in the forward pass, else that of the backward pass."""
        ops = self._now.ops + self._trail.ops
        self._sinks += self._trail.lost
        origin = self._trail.origin()
        if origin is not None:  # then a returned gradient is no input
            self._sinks = [made for made in self._sinks if made.site != RETURNED]
        if self._sinks:
            return min(self._sinks, key=lambda made: made.number).tell(self.notes, ops)
        if origin is not None and not origin.is_overflow_of_scale:
            return self._trail.tell(origin, self._producers, self.notes, ops)
        if origin is not None and (told := self._trail.overflow()) not in self.notes:
            self.notes.append(told)
        return Report(False, notes=tuple(self.notes), ops=ops)


def find_nonfinite(step: Callable[[], Any], model: nn.Module | None, allow: Iterable[str]) -> Report:
    """Run ``step`` once and tell where the first NaN or inf of it began; the work behind ``gaff.find_nonfinite``.

    Raises PlanError where ``step`` cannot be called or ``model`` is no module, SiteError for a pattern that names
    nothing.
    """
    if not callable(step):
        raise PlanError(
            f"step is a {type(step).__name__}, which cannot be called: expected a function, such as "
            "lambda: loss(model(x), y).backward()"
        )
    return Examination(model, allow).run(step)
