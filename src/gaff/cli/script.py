"""A training script, run as ``python SCRIPT`` would, with a guard against NaN and inf on every model that it calls."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from gaff.api import guard
from gaff.engine.process.models import RootWatch
from gaff.errors import NonFiniteError, PlanError
from gaff.inspection.nonfinite.examination import Examination
from gaff.inspection.nonfinite.provenance import STEP
from gaff.inspection.nonfinite.report import Report
from gaff.training.guard import Guard
from gaff.views.text import counted


def examine(path: str, arguments: Sequence[str], *, allow: Sequence[str], again: bool) -> Report:
    """Run the script at ``path`` with ``arguments``, and return what its guards found.

    ``allow``: sites whose infinite values are meant. ``again``: where it began outside of every model, run the script
    once more and look at every op of that step. Raises SystemExit with the script's own code where it failed, and
    PlanError where there was nothing to look at.
    """
    script = _Script(path, arguments)
    guards: list[Guard] = []

    def open_guard(stack: ExitStack, module: nn.Module) -> None:
        guards.append(stack.enter_context(guard(module, allow=allow)))

    code: Any = 0
    try:
        with ExitStack() as stack, RootWatch(lambda module: open_guard(stack, module)):
            script.run()
    except NonFiniteError as error:
        if error.report is None:
            raise
    except SystemExit as stop:
        code = stop.code
    except Exception:  # noqa: BLE001  # of the script itself, told as python would
        traceback.print_exc()
        code = 1
    found = next((report for one in guards for report in one.reports), None)
    if found is not None:
        return _finished(found, script, guards, again=again)
    if code not in (None, 0):
        sys.exit(code)
    if not guards:
        raise PlanError(f"{path!r} called no module of torch: expected a training script; there was nothing to look at")
    steps = sum(one.steps for one in guards)
    return Report(False, notes=(f"looked at {counted(len(guards), 'model')}, {counted(steps, 'optimizer step')}",))


def _finished(found: Report, script: _Script, guards: list[Guard], *, again: bool) -> Report:
    """A report that ends outside of every model, in the loss perhaps, is followed up, or says how it can be."""
    if not again and found.site == STEP:
        hint = "gaff nan --again runs the script once more and looks at every op of that step, its loss included"
        return replace(found, notes=(*found.notes, hint))
    if again and found.site == STEP:
        return _look_again(script, guards) or found
    return found


def _look_again(script: _Script, guards: list[Guard]) -> Report | None:
    """Run the script a second time, with every op outside its models looked at in the step that was bad."""
    examination = Examination(None, (), from_step=max(one.steps for one in guards))
    try:
        examination.run(script.run)
    except NonFiniteError as error:
        return error.report  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True, slots=True)
class _Script:
    """A file and its arguments."""

    path: str
    arguments: Sequence[str]

    def __post_init__(self) -> None:
        """Raises PlanError where there is no such file."""
        if not Path(self.path).is_file():
            raise PlanError(f"{self.path!r} is no file: expected a training script, or a model as file.py:name")

    def run(self) -> None:
        """Run it as ``__main__``; ``sys.argv`` and ``sys.path`` are put back afterwards."""
        with self._as_command():
            runpy.run_path(str(Path(self.path).absolute()), run_name="__main__")

    @contextmanager
    def _as_command(self) -> Iterator[None]:
        """``sys.argv`` and ``sys.path`` as ``python SCRIPT`` has them."""
        argv, path = sys.argv, sys.path[0]
        sys.argv, sys.path[0] = [self.path, *self.arguments], str(Path(self.path).resolve().parent)
        try:
            yield
        finally:
            sys.argv, sys.path[0] = argv, path
