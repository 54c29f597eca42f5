"""``gaff apply PLAN MODEL [INPUT...]``: run a model under a saved plan of edits, and beside it as it is."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import print_key
from gaff.address.nested import iter_tensors
from gaff.api import edit
from gaff.cli.inputs import load_inputs, need_input
from gaff.cli.models import load_model, load_name
from gaff.cli.take import save_tensors
from gaff.cli.trace import mean_of_first, terminal_width
from gaff.errors import NeverFiredError, PlanError
from gaff.inspection.call_log import shape_text
from gaff.inspection.untouched import untouched
from gaff.sessions.plan import Plan
from gaff.sessions.receipt import Receipt
from gaff.views.text import table


def run(options: Namespace) -> int:
    if options.out is not None and not options.out.endswith(".safetensors"):
        raise PlanError(f"--out {options.out!r} has another ending: expected a file name ending in .safetensors")
    plan = Plan.load(options.plan)
    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.input, loaded)
    backward = load_name(options.loss)[1] if options.loss else mean_of_first if options.backward else None
    tensors = [tensor for _, tensor in iter_tensors((args, kwargs))]

    def output() -> Any:
        with untouched(loaded.model, tensors), torch.no_grad() if backward is None else nullcontext():
            found = loaded.model(*args, **kwargs)
            if backward is not None:
                backward(found).backward()
            return found

    try:
        bare = _flat(output())
    except TypeError as error:
        raise need_input(options.input, error) from error
    try:
        with edit(loaded.model, plan) as changed:
            edited = _flat(output())
    except NeverFiredError as error:
        if backward is None and any(":grad" in row.site for row in error.receipt.rows if not row.hits):
            raise PlanError(f"{error}; the plan edits gradients: add --backward or --loss") from error
        raise
    if options.out is not None:
        save_tensors(edited, options.out, options.model)
    rows = [(name, shape_text(edited[name]), *_difference(edited[name], bare.get(name))) for name in edited]
    _tell(options, plan, changed.receipt, rows)
    return 0


def _tell(options: Namespace, plan: Plan, receipt: Receipt, rows: list[tuple[str, str, str, str]]) -> None:
    head = ("output", "shape", "changed", "delta")
    if options.json:
        told = {
            "digest": plan.digest,
            "receipt": [asdict(row) for row in receipt.rows],
            "outputs": [dict(zip(head, row, strict=True)) for row in rows],
        }
        print(json.dumps(told, indent=1))
    elif options.plain:
        print("\n".join("\t".join(row) for row in rows))
    else:
        print(f"plan {plan.digest[:12]}\n{receipt}\n")
        print(table(head, rows, width=terminal_width(), right=("changed", "delta")))
        if options.out is not None:
            print(f"written to {options.out}")


def _flat(output: Any) -> dict[str, Tensor]:
    return {f":output{print_key(key)}": tensor.detach() for key, tensor in iter_tensors(output)}


def _difference(edited: Tensor, bare: Tensor | None) -> tuple[str, str]:
    """How many elements differ from the bare run's, and the norm of the difference relative to the bare output's."""
    if bare is None or bare.shape != edited.shape:
        return "another shape", ""
    changed = int((edited != bare).sum())
    difference = torch.linalg.vector_norm(edited.double() - bare.double())
    return f"{changed}/{edited.numel()}", f"{float(difference / torch.linalg.vector_norm(bare.double())):.3g}"
