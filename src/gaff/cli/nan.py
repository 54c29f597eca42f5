"""``gaff nan SCRIPT-OR-MODEL``: where the first NaN or inf of a model's step, or of a training script, began."""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from gaff.api import find_nonfinite, guard
from gaff.cli.inputs import load_inputs, need_input
from gaff.cli.models import load_model, load_name
from gaff.cli.trace import mean_of_first
from gaff.engine.process.models import RootWatch
from gaff.errors import NonFiniteError, PlanError
from gaff.inspection.nonfinite.examination import Examination
from gaff.inspection.nonfinite.provenance import STEP
from gaff.inspection.nonfinite.report import Report
from gaff.training.guard import Guard
from gaff.views.text import counted


def run(options: Namespace) -> int:
    """Exit code 3 where something was found."""
    if options.model.endswith(".py"):
        if options.loss:
            raise PlanError("--loss goes with a model: a script has a loss of its own")
        return _run_script(options)
    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.rest, loaded)
    loss = load_name(options.loss)[1] if options.loss else mean_of_first

    def step() -> Any:
        output = loaded.model(*args, **kwargs)
        found = loss(output)
        if found.requires_grad:
            found.backward()
        return output

    try:
        return _tell(find_nonfinite(step, model=loaded.model, allow=options.allow), options)
    except TypeError as error:
        raise need_input(options.rest, error) from error


def _run_script(options: Namespace) -> int:
    """Run it as ``python SCRIPT`` would, with a guard on every model that it calls."""
    script = Path(options.model)
    if not script.is_file():
        raise PlanError(f"{options.model!r} is no file: expected a training script, or a model as file.py:name")
    guards: list[Guard] = []
    code: Any = 0
    try:
        with (
            _as_script(options),
            ExitStack() as stack,
            RootWatch(lambda module: guards.append(_open(stack, module, options))),
        ):
            runpy.run_path(options.model, run_name="__main__")
    except NonFiniteError as error:
        if error.report is None:
            raise
    except SystemExit as stop:
        code = stop.code
    except Exception:  # noqa: BLE001  # of the script itself, told as python would
        traceback.print_exc()
        code = 1
    found = next((report for one in guards for report in one.reports), None)
    if found is not None and found.site == STEP and not options.again:
        hint = "gaff nan --again runs the script once more and looks at every op of that step, its loss included"
        return _tell(replace(found, notes=(*found.notes, hint)), options)
    if found is not None:
        return _tell(_look_again(options, guards) or found if found.site == STEP else found, options)
    if code not in (None, 0):
        sys.exit(code)
    if not guards:
        raise PlanError(f"{options.model}: called no module of torch: there was nothing to look at")
    steps = sum(one.steps for one in guards)
    return _tell(
        Report(False, notes=(f"looked at {counted(len(guards), 'model')}, {counted(steps, 'optimizer step')}",)),
        options,
    )


def _look_again(options: Namespace, guards: list[Guard]) -> Report | None:
    """Run the script a second time, with every op outside its models looked at in the step that was bad."""
    examination = Examination(None, (), from_step=max(one.steps for one in guards))
    try:
        with _as_script(options):
            examination.run(lambda: runpy.run_path(options.model, run_name="__main__"))
    except NonFiniteError as error:
        return error.report  # type: ignore[no-any-return]
    return None


@contextmanager
def _as_script(options: Namespace) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as ``python SCRIPT`` has them."""
    argv, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [options.model, *options.rest], str(Path(options.model).resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = argv, path


def _open(stack: ExitStack, module: nn.Module, options: Namespace) -> Guard:
    return stack.enter_context(guard(module, allow=options.allow))


def _tell(report: Report, options: Namespace) -> int:
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
    elif options.plain:
        print("\t".join((report.direction, report.site, report.op, report.line, report.cause)))
    elif not report and not report.ops:
        print("\n".join(["no NaN or inf", *report.notes]))
    else:
        print(report)
    return 3 if report else 0
