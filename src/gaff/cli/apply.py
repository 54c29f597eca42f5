"""``gaff apply PLAN MODEL [INPUT...]``: run a model under a saved plan of edits, and beside it as it is.

Both runs get the same inputs and start from the same random state, so what differs was changed by the plan; a third
run, as it is again, tells whether the model keeps something of its own between runs. None leaves anything on the model.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from gaff.cli.options import add_backward, add_inputs, add_model, add_table, add_tensor_file, check_tensor_file
from gaff.errors import NeverFiredError, PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from gaff.sessions.plan import Plan
    from gaff.sessions.receipt import Receipt

_KEEPS = (
    "gaff: the model gives another output each time that it runs as it is: it keeps something that is no buffer, or "
    "draws from a generator of its own. What differs is not by the plan alone"
)
SUMMARY = "run a model under a saved plan of edits, and tell what it changed"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the plan, the model and its inputs, whether backward runs, and where the edited outputs go."""
    parser.add_argument("plan", metavar="PLAN", help="a file that plan.save('plan.json') wrote")
    add_model(parser)
    add_inputs(parser)
    add_backward(parser)
    add_tensor_file(parser, "edited outputs")
    add_table(parser)
    parser.epilog = "example: gaff apply half.json net.py:model randn:1x3x224x224"


def run(options: argparse.Namespace) -> int:
    """Run the model bare and under the plan, and print what differs and what each edit did."""
    check_tensor_file(options.out)
    from gaff.address.nested import shape_text
    from gaff.api import edit
    from gaff.cli.inputs import load_inputs, refuse_call
    from gaff.cli.models import load_model
    from gaff.cli.tensors import loss_of, save_values
    from gaff.sessions.plan import Plan

    plan = Plan.load(options.plan)
    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.input, loaded)
    backward = loss_of(options)
    try:
        bare = _output(loaded.model, args, kwargs, backward)
    except TypeError as error:
        refuse_call(loaded.model, options.input, error)
        raise
    try:
        with edit(loaded.model, plan) as changed:
            edited = _output(loaded.model, args, kwargs, backward)
    except NeverFiredError as error:
        if backward is None and any(":grad" in row.site for row in error.receipt.rows if not row.hits):
            raise PlanError(f"{error}; the plan edits gradients: add --backward or --loss") from error
        raise
    again = _output(loaded.model, args, kwargs, backward)
    if {name: _difference(again[name], bare.get(name)) for name in again} != {
        name: _difference(bare[name], bare[name]) for name in bare
    }:
        print(_KEEPS, file=sys.stderr)
    if options.out is not None:
        save_values(edited, changed.receipt, options.out, options.model)
    rows = [(name, shape_text(edited[name]), *_difference(edited[name], bare.get(name))) for name in edited]
    _print(options, plan, changed.receipt, rows)
    return 0


def _output(model: Any, args: Any, kwargs: Any, backward: Any) -> dict[str, Tensor]:
    """Copies of what one run returns, by their keys; the model and its arguments are left as they were.

    The model may write into what it is given, and return memory of its own that its next run writes to.
    """
    from contextlib import nullcontext

    import torch

    from gaff.address.grammar import print_key
    from gaff.address.nested import iter_tensors, map_tensors
    from gaff.inspection.untouched import untouched

    with untouched(model), torch.no_grad() if backward is None else nullcontext():
        args, kwargs = map_tensors((args, kwargs), _copy)
        found = model(*args, **kwargs)
        if backward is not None:
            backward(found).backward()
        return {f":output{print_key(key)}": tensor.detach().clone() for key, tensor in iter_tensors(found)}


def _copy(tensor: Tensor) -> Tensor:
    """A copy that asks for a gradient where the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _print(options: argparse.Namespace, plan: Plan, receipt: Receipt, rows: list[tuple[str, str, str, str]]) -> None:
    """Tell what each edit has done, its receipt, and how each tensor of the output differs, a row each."""
    from dataclasses import asdict

    from gaff.cli.printing import print_cells, print_data, show
    from gaff.views.text import table

    head = ("output", "shape", "changed", "delta")
    if options.json:
        outputs = [dict(zip(head, row, strict=True)) for row in rows]
        print_data({"digest": plan.digest, "receipt": [asdict(row) for row in receipt.rows], "outputs": outputs})
    elif options.plain:
        print_cells(rows)
    else:
        print(f"plan {plan.digest[:12]}\n{receipt}\n")
        show(table(head, rows, right=("changed", "delta")))
        if options.out is not None:
            print(f"written to {options.out}")


def _difference(edited: Tensor, bare: Tensor | None) -> tuple[str, str]:
    """How many elements differ from the bare run's, and the norm of the difference relative to the bare output's.

    A NaN is the same as one in its place; the norm of the bare output is that of its finite elements.
    """
    import torch
    from torch.linalg import vector_norm

    if bare is None or _sizes(bare) != _sizes(edited):
        return "another shape", ""
    edited, bare = _numbers(edited), _numbers(bare)
    is_same = (edited == bare) | (edited.isnan() & bare.isnan())
    wide = torch.complex128 if edited.is_complex() or bare.is_complex() else torch.float64
    before, after = (one.to(wide) for one in (bare, edited))
    difference = float(vector_norm(torch.where(is_same, 0, after - before)))
    size = float(vector_norm(torch.where(before.isfinite(), before, 0)))
    delta = difference / size if size else math.inf if difference else 0.0
    return f"{edited.numel() - int(is_same.sum())}/{edited.numel()}", f"{delta:.3g}"


def _sizes(tensor: Tensor) -> list[tuple[int, ...]]:
    """The shape of a tensor; of a nested one those of its parts."""
    return [tuple(one.shape) for one in tensor.unbind()] if tensor.is_nested else [tuple(tensor.shape)]


def _numbers(tensor: Tensor) -> Tensor:
    """All numbers of a tensor, of a kind with which torch computes."""
    import torch

    from gaff.compat import elements

    if tensor.is_nested:
        return torch.cat([one.flatten() for one in tensor.unbind()])
    dense = elements.dequantized(tensor if tensor.layout == torch.strided else tensor.to_dense())
    return dense.float() if elements.is_small_float(dense) else dense
