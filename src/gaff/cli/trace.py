"""``gaff trace MODEL [INPUT...]``"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from typing import Any

from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.api import trace
from gaff.cli.inputs import load_inputs, need_input
from gaff.cli.models import load_model, load_name
from gaff.cli.report import need_numpy
from gaff.errors import PlanError


def run(options: Namespace) -> int:
    if options.html:
        need_numpy("--html")
    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.input, loaded)
    backward: Any = None
    if options.loss:
        backward = load_name(options.loss)[1]
    elif options.backward:
        backward = mean_of_first
    try:
        told = trace(
            loaded.model,
            *args,
            backward=backward,
            flops=not options.no_flops,
            ops=options.ops,
            pictures=bool(options.html),
            **kwargs,
        )
    except TypeError as error:
        raise need_input(options.input, error) from error
    for path in (options.save, options.html):
        if path:
            told.save(path)
    if options.json:
        print(told.to_json())
    elif options.tree:
        print(told.tree())
    else:
        print(told.table(terminal_width(), is_plain=options.plain))
    return 0


def mean_of_first(output: Any) -> Tensor:
    """The loss of ``--backward``: the mean of the first floating tensor of the output."""
    for _, tensor in iter_tensors(output):
        if tensor.is_floating_point():
            return tensor.mean()
    raise PlanError("the output holds no floating tensor to run backward from: expected --loss file.py:function")


def terminal_width() -> int | None:
    """Columns to fit into; None where the output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
