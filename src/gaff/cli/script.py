"""A training script, run as ``python SCRIPT`` would, with a guard against NaN and inf on every model that it calls."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gaff.api import guard
from gaff.compat import distributed
from gaff.engine.process.models import new_roots
from gaff.engine.process.training_loop import Outer, Told
from gaff.errors import NonFiniteError, PlanError, SiteError
from gaff.inspection.nonfinite.examination import Examination
from gaff.inspection.nonfinite.provenance import STEP
from gaff.inspection.nonfinite.ranges import range_of
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.nonfinite.unsafe_ops import unsafe_op
from gaff.training.guard import Guard
from gaff.training.watch.settings import to_stderr
from gaff.views.text import counted

_FINE = "what the models returned and the gradients of the step after it are"
_FOR_EVER = 20  # steps that a GradScaler leaves out one after the other, with a loss that was bad before it was scaled


def examine(
    path: str, arguments: Sequence[str], *, allow: Sequence[str], again: bool, is_module: bool = False
) -> Report:
    """Run the script at ``path`` with ``arguments``, and return what its guards found.

    With ``is_module`` it is the name of a module, run as ``python -m`` does.
    ``allow``: sites whose infinite values are meant. ``again``: where it began outside of every model, run the script
    once more and look at every op of that step. Raises SystemExit with the script's own code where it failed, and
    PlanError where there was nothing to look at.
    """
    script = _Script(path, arguments, is_module)
    guards: list[Guard] = []
    losses = _Losses(guards)
    code: Any = 0
    try:
        with ExitStack() as stack, new_roots(partial(_guard, guards, stack, allow)), losses:
            script.run()
    except NonFiniteError as error:
        if error.report is None:
            raise
    except SiteError:  # of what --allow names
        raise
    except SystemExit as stop:
        code = stop.code
    except Exception as error:  # noqa: BLE001  # of the script itself, told as python would
        traceback.print_exception(error.with_traceback(_within(error.__traceback__)))
        code = 1
    found = losses.first(next((report for one in guards for report in one.reports), None))
    if found is not None:
        is_of_loss = found is losses.report  # whose step was let through
        step, made = (losses.step, losses.before) if is_of_loss else (max(one.steps for one in guards), losses.made)
        seen = _finished(found, script, step, again=again)
        return replace(seen, notes=(f"seen after {counted(made, 'optimizer step')}", *seen.notes))
    if code is not None and not (isinstance(code, int) and code == 0):
        told = code if isinstance(code, int) else 1
        to_stderr(f"gaff: the script ended with exit code {told}, and no NaN or inf was found before")
        sys.exit(code)
    if not guards:
        raise PlanError(
            f"{path!r} called no module of torch on its main thread: expected a training script; nothing was looked at"
        )
    steps = sum(one.steps for one in guards)
    return Report(False, notes=(f"looked at {counted(len(guards), 'model')}, {counted(steps, 'optimizer step')}",))


def _guard(guards: list[Guard], stack: ExitStack, allow: Sequence[str], module: nn.Module) -> None:
    """Guard a model that the script is about to call, as long as ``stack`` is open; tell of one that cannot be."""
    try:
        guards.append(stack.enter_context(guard(module, allow=allow)))
    except PlanError as error:
        to_stderr(f"gaff: {type(module).__name__} is not looked at: {error}")


def _within(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the frame of the script on; none where the script did not come to run."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    return trace


class _Losses:
    """Stops a script after a step whose loss was NaN or infinite, where its guards have found nothing wrong.

    Such a loss may have finite gradients, as that of a batch in which no target counts. A loss that a GradScaler has
    multiplied is looked at as it was before. ``report``: what was seen; ``state``: the sites of parameters and buffers
    that were not finite by then; ``step``: how many steps were made before;
    ``before``: how many by any optimizer; ``made``: how many of these were made in all.
    """

    def __init__(self, guards: list[Guard]) -> None:
        self.report: Report | None = None
        self.state: frozenset[str] = frozenset()
        self.step = self.before = self.made = self._skips = 0
        self._guards = guards
        self._scaled: tuple[Any, Any] = (None, None)  # what a GradScaler has made, and of what
        nothing = lambda *given: None  # noqa: E731
        self._outer = Outer(Told(self._begins, nothing, self._ended, self._skipped, self._note_scaled, nothing))

    def __enter__(self) -> None:
        self._outer.open()

    def __exit__(self, *error: object) -> None:
        self._outer.close()

    def _note_scaled(self, loss: Any, scaled: Any, scaler: Any) -> None:
        self._scaled = scaled, loss

    def _begins(self, losses: Any) -> None:
        """A backward pass is about to begin: look at the losses that are one number each."""
        scaled, loss = self._scaled
        for one in losses if isinstance(losses, (list, tuple)) else [losses]:
            told = loss if one is scaled else one
            is_number = isinstance(told, Tensor) and told.numel() == 1 and told.is_floating_point()
            if is_number and self.report is None and not told.isfinite().item():
                cause = f"the loss is not finite; {_FINE}"
                behind = unsafe_op(told) if told.grad_fn is not None else ""
                cause += f"; between the two, {behind}" if behind else ""
                self.report = Report(True, STEP, direction="forward", cause=cause, output=range_of(told, "loss"))
                self.step = max((guard.steps for guard in self._guards), default=0)
                self.before = self.made
                self.state = frozenset().union(*(guard.bad_state() for guard in self._guards))

    def first(self, guarded: Report | None) -> Report | None:
        """What came first of what a guard and the loss have shown.

        Of a loss that was not finite before its backward pass that, and not what the pass has made of it, in gradients
        or, with a closure, in the weights; but an input, and weights and buffers that were bad by then, came before it.
        """
        if guarded is None or self.report is None:
            return guarded or self.report
        is_of_pass = guarded.direction == "backward" or (
            guarded.direction == "before" and ":input" not in guarded.site and guarded.site not in self.state
        )
        if not is_of_pass:
            return guarded
        return replace(self.report, cause=self.report.cause.replace(_FINE, "what the models returned is"))

    def _skipped(self, optimizer: Any) -> None:
        """A GradScaler has left the step out: what overflowed did no harm, unless it leaves out one after the other."""
        self._skips = self._skips + 1 if self.report is not None else 0
        if self._skips == _FOR_EVER and self.report is not None:
            cause = (
                f"the loss is not finite in {_FOR_EVER} steps after one another, all of which a GradScaler leaves out"
            )
            self.report = replace(self.report, cause=cause)
            raise NonFiniteError(str(self.report), self.report)
        self.report = None

    def _ended(self, optimizer: Any) -> None:
        """The guards have looked at this step before it was made: what they have found would have been raised."""
        self._skips = 0
        self.made += 1
        if self.report is not None:
            raise NonFiniteError(str(self.report), self.report)


def _finished(found: Report, script: _Script, step: int, *, again: bool) -> Report:
    """A report that ends outside of every model, in the loss perhaps, is followed up, or says how it can be.

    ``step``: how many steps were made before.
    """
    # seen in the step after the one that did it, which code may have done, too
    is_update = found.direction == "update" or (found.direction == "before" and found.site.endswith(":param"))
    if not is_update and found.site != STEP and found.direction != "before":
        return found
    if not again and distributed.has_others():
        return found  # its processes cannot find each other twice
    if not again:
        hint = "gaff nan --again runs the script once more and looks at every op of that step, its loss included"
        return replace(found, notes=(*found.notes, hint))
    seen, failure = _look_again(script, max(step - is_update, 0))
    if failure:
        return replace(found, notes=(*found.notes, failure))
    if seen is None or seen.direction == "before" or (is_update and seen.direction == "update"):
        return found  # it tells no more
    return seen


def _look_again(script: _Script, step: int) -> tuple[Report | None, str]:
    """Run the script a second time, with every op outside its models looked at in the step that was bad.

    The second part says why it could not be run, if it could not.
    """
    examination = Examination(None, (), from_step=step)
    try:
        return examination.run(script.run) or None, ""
    except NonFiniteError as error:
        return error.report, ""
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of a script that cannot run twice in one process
        return None, f"the script could not be run once more: {type(error).__name__}: {error}".partition("\n")[0]


@dataclass(frozen=True, slots=True)
class _Script:
    """A file, or with ``is_module`` the name of a module as of ``python -m``, and its arguments; run in one folder."""

    path: str
    arguments: Sequence[str]
    is_module: bool = False
    folder: str = field(default_factory=os.getcwd)

    def __post_init__(self) -> None:
        """Raises PlanError where there is no such file."""
        if not self.is_module and not Path(self.path).is_file():
            raise PlanError(f"{self.path!r} is no file: expected a training script, or a model as file.py:name")

    def run(self) -> None:
        """Run it as ``__main__``; ``sys.argv`` and ``sys.path`` are put back afterwards."""
        with self._as_command():
            if self.is_module:
                runpy.run_module(self.path, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(Path(self.path).absolute()), run_name="__main__")

    @contextmanager
    def _as_command(self) -> Iterator[None]:
        """``sys.argv``, ``sys.path`` and the folder as ``python SCRIPT`` has them, each time that it runs.

        Where it puts other streams in place of its outputs, what comes after it is not written there.
        """
        os.chdir(self.folder)
        argv, path, streams = sys.argv, sys.path[0], (sys.stdout, sys.stderr)
        first = self.folder if self.is_module else str(Path(self.path).resolve().parent)
        sys.argv, sys.path[0] = [self.path, *self.arguments], first
        try:
            yield
        finally:
            sys.argv, sys.path[0] = argv, path
            for mine, before in zip((sys.stdout, sys.stderr), streams, strict=True):
                with suppress(AttributeError, OSError, ValueError):  # it is none, full, or closed
                    if mine is not before:
                        mine.flush()
            sys.stdout, sys.stderr = streams
