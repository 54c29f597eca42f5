"""``gaff nan SCRIPT-OR-MODEL``: where the first NaN or inf of a model's step, or of a training script, began.

Of a model one step is run, forward and backward, with every op looked at. A script is run as it is, with a guard on
every model that it calls; a bad step stops it, and is looked at op by op.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaff.cli.options import MODEL_HELP, add_table
from gaff.errors import PlanError

if TYPE_CHECKING:
    from gaff.inspection.nonfinite.report import Report

SUMMARY = "find the op in which the first NaN or inf of a step or of a training script began"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare a script with its arguments, or a model with its inputs, and what is allowed to be infinite."""
    parser.description = f"{SUMMARY}; exit code 3 where there is one"
    parser.add_argument("model", metavar="SCRIPT-OR-MODEL", help=f"a training script ending in .py; or {MODEL_HELP}")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="of a model its INPUT; of a script its arguments"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does: gaff nan -m package.train"
    )
    parser.add_argument("--loss", metavar="FILE:NAME", help="of a model: a function from the output to a scalar loss")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="SITE", help="an op whose infinite values are meant; repeatable"
    )
    parser.add_argument(
        "--again", action="store_true", help="of a script: where it began outside its models, run it once more and look"
    )
    add_table(parser)
    parser.epilog = "example: gaff nan --again train.py --epochs 3; with --json, what a script prints goes to stderr"


def run(options: argparse.Namespace) -> int:
    """Look at one step of the model, or at the whole script; exit code 3 where something was found."""
    _leave_out_python(options)
    if not options.model.endswith(".py") and not options.is_module:
        if options.again:
            raise PlanError(
                "--again runs a script once more: expected none with a model, whose step is seen as a whole"
            )
        return _print(_in_model(options), options)
    if options.loss:
        raise PlanError(f"--loss goes with a model: expected no {options.loss!r}, since a script has a loss of its own")
    from gaff.cli.script import examine

    report = examine(options.model, options.rest, allow=options.allow, again=options.again, is_module=options.is_module)
    return _print(report, options)


def _leave_out_python(options: argparse.Namespace) -> None:
    """Read ``python train.py`` as ``train.py`` and ``python -m package.train`` as ``-m package.train``.

    The script runs inside gaff's own process. Raises PlanError for another Python than the one that runs gaff, and for
    options of Python's, which cannot be given to a process that runs already.
    """
    is_python = re.fullmatch(r"python[\d.]*", Path(options.model).name)
    is_module = options.rest[:1] == ["-m"]
    words = options.rest[is_module:]
    if is_python and words and words[0].startswith("-"):
        raise PlanError(
            f"option {words[0]!r} of Python comes too late for the process that runs gaff, and the script in it: "
            "expected gaff nan train.py, or gaff nan -m package.train"
        )
    if not is_python or not words or not (is_module or words[0].endswith(".py")):
        return
    found = shutil.which(options.model)
    if found is None or not Path(found).samefile(sys.executable):
        raise PlanError(
            f"{options.model!r} is another Python than the one that runs gaff, which runs the script in its own "
            f"process: expected gaff nan {' '.join(options.rest)}, with gaff installed there"
        )
    options.is_module = options.is_module or is_module
    options.model, options.rest = words[0], words[1:]


def _in_model(options: argparse.Namespace) -> Report:
    """What one step of a model shows: forward, the loss, backward."""
    from gaff.api import find_nonfinite
    from gaff.cli.inputs import load_inputs, refuse_call
    from gaff.cli.models import load_model, load_name
    from gaff.cli.tensors import mean_of_first

    late = next((word for word in options.rest if word.startswith("--")), None)
    if late is not None:
        raise PlanError(
            f"{late!r} comes too late: expected options, with what is given to them, before the model: gaff nan {late} "
            f"... {options.model}"
        )
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
        return find_nonfinite(step, model=loaded.model, allow=options.allow)
    except TypeError as error:
        refuse_call(loaded.model, options.rest, error)
        raise


def _print(report: Report, options: argparse.Namespace) -> int:
    """Tell the report in the form that was asked for; returns the exit code, 3 where it has found something."""
    from gaff.cli.printing import print_cells, print_data, show

    if options.json:
        print_data(report.to_dict())
    elif options.plain:
        print_cells([(report.direction, report.site, report.op, report.line, report.cause)] if report else [])
        if not report and report.notes:
            print("\n".join(report.notes), file=sys.stderr)
    elif not report and not report.ops:
        print("\n".join(["no NaN or inf", *report.notes]))
    else:
        show(str(report))
    return 3 if report else 0
