"""``gaff replay RUN --model MODEL``: a kept batch once more, with every op looked at."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gaff.api import trace
from gaff.cli.models import load_model
from gaff.cli.report import need_numpy
from gaff.errors import PlanError, RecordError
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.nonfinite.rerun import replayed, run_again
from gaff.inspection.trace import Trace
from gaff.record.run import load
from gaff.training.watch.saved_batches import SavedBatch, kept_of, read_kept


def run(options: Namespace) -> int:
    """Exit code 3 where a NaN or inf was found."""
    if options.html:
        need_numpy("--html")
    kept = _choose(options)
    model = load_model(options.model).model
    kept.restore(model)
    report, failure = run_again(model, kept.batch, assume_ones=True)
    if failure:
        raise PlanError(failure)
    told = None if report and not options.html else _trace(model, kept, has_pictures=bool(options.html))
    if options.html and told is not None:
        told.save(options.html)
    if options.json:
        print(json.dumps({"step": kept.step, "why": kept.why, "model": kept.model, **report.to_dict()}, indent=1))
        return 3 if report else 0
    print(f"step {kept.step} of {options.run}, kept for {kept.why}; {kept.model} with the weights of that step")
    if kept.was_changed:
        print("note: the run wrote into what it was given: this is of the batch as it was left")
    print(_text(report, told))
    return 3 if report else 0


def _choose(options: Namespace) -> SavedBatch:
    load(options.run)
    paths = kept_of(Path(options.run))
    if not paths:
        raise RecordError(
            f"{options.run!r} has kept no batch: expected gaff watch --keep-batch, and a step that went wrong"
        )
    all_kept = [read_kept(path) for path in paths]
    found = next((one for one in all_kept if options.step is None or one.step == options.step), None)
    if found is None:
        steps = ", ".join(f"{one.step} ({one.why})" for one in all_kept)
        raise RecordError(f"{options.run!r} has kept no batch of step {options.step}: expected one of {steps}")
    return found


def _trace(model: nn.Module, kept: SavedBatch, *, has_pictures: bool) -> Trace:
    with ExitStack() as stack:
        replayed(stack, kept.batch)
        stack.enter_context(torch.enable_grad())
        args, kwargs = kept.batch.args, kept.batch.kwargs
        is_trained = any(one.requires_grad for one in model.parameters())
        return trace(model, *args, backward=_ones if is_trained else None, ops=True, pictures=has_pictures, **kwargs)


def _ones(output: Any) -> Tensor:
    """A loss whose gradient is one at every floating output."""
    from gaff.address.nested import iter_tensors

    known = [tensor for _, tensor in iter_tensors(output) if tensor.requires_grad]
    if not known:
        raise PlanError("the model returned nothing that depends on its parameters")
    return torch.stack([tensor.sum().float() for tensor in known]).sum()


def _text(report: Report, told: Trace | None) -> str:
    if report:
        return str(report)
    text = f"every op is finite, forward and backward from ones ({report.ops} ops)"
    return text if told is None else f"{text}\n{told.table(None)}"
