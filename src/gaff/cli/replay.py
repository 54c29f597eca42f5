"""``gaff replay RUN --model MODEL``: a kept batch once more, with every op looked at.

A run of ``gaff watch --keep-batch`` keeps the batch of a step that went wrong, with weights and random state. The model
is built anew, gets these weights, and is run forward and backward.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gaff.cli.options import MODEL_HELP, add_debug, add_json
from gaff.cli.parser import whole
from gaff.errors import PlanError, RecordError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gaff.inspection.nonfinite.report import Report
    from gaff.inspection.trace import Trace
    from gaff.training.watch.saved_batches import SavedBatch

SUMMARY = "run a batch that a watched run has kept once more, and look at every op"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the run, the model that its weights are put into, and which of its batches is run."""
    parser.description = f"{SUMMARY}; exit code 3 where it finds a NaN or inf"
    parser.add_argument("run", metavar="RUN", help="a run of gaff watch --keep-batch")
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--step", type=whole, metavar="N", help="whose batch (default: the first that was kept)")
    parser.add_argument("--html", metavar="FILE", help="also write a page of the run: ops, graph, pictures")
    add_json(parser)
    add_debug(parser)
    parser.epilog = "example: gaff replay runs/a --model train.py:build_model --html step.html"


def run(options: argparse.Namespace) -> int:
    """Run the batch with the weights of its step, and tell what was found; exit code 3 where that is a NaN or inf."""
    from gaff.cli.models import load_model
    from gaff.cli.printing import print_data
    from gaff.cli.report import need_page
    from gaff.inspection.nonfinite.rerun import run_again

    if options.html:
        need_page("--html", options.html)
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
        print_data({"step": kept.step, "why": kept.why, "model": kept.model, **report.to_dict()})
        return 3 if report else 0
    print(f"step {kept.step} of {options.run}, kept for {kept.why}; {kept.model} with the weights of that step")
    if kept.was_changed:
        print("note: the run wrote into what it was given: this is of the batch as it was left")
    print(_text(report, told))
    for found in () if report else _told_of(options.run, kept):
        print(f"note: what the run told of this step lies outside of the model, or is no NaN: {found}")
    return 3 if report else 0


def _told_of(run: str, kept: SavedBatch) -> list[str]:
    """The findings for which a batch was kept, as the record of the run has them."""
    from gaff.inspection.saved import load

    return [one.message or one.rule for one in load(run, "run").findings if one.rule == kept.why and
            one.since == kept.step]  # fmt: skip


def _choose(options: argparse.Namespace) -> SavedBatch:
    """The batch of the step that was asked for, or the first that the run has kept."""
    from pathlib import Path

    from gaff.inspection.saved import load
    from gaff.training.watch.saved_batches import kept_of, read_kept

    load(options.run, "run")
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
    """The trace of the batch, with gradients where the model has anything that is trained."""
    from contextlib import ExitStack

    import torch

    from gaff.api import trace
    from gaff.inspection.nonfinite.rerun import replayed

    with ExitStack() as stack:
        replayed(stack, kept.batch)
        stack.enter_context(torch.enable_grad())
        args, kwargs = kept.batch.args, kept.batch.kwargs
        is_trained = any(one.requires_grad for one in model.parameters())
        return trace(model, *args, backward=_ones if is_trained else None, ops=True, pictures=has_pictures, **kwargs)


def _ones(output: Any) -> Tensor:
    """A loss whose gradient is one at every floating output."""
    import torch

    from gaff.address.nested import iter_tensors

    known = [tensor for _, tensor in iter_tensors(output) if tensor.requires_grad]
    if not known:
        raise PlanError("the model returned nothing that depends on its parameters: expected a tensor with a gradient")
    return torch.stack([tensor.sum().float() for tensor in known]).sum()


def _text(report: Report, told: Trace | None) -> str:
    """What was found, or that everything is finite, with the table of the trace."""
    if report:
        return str(report)
    text = f"every op is finite, forward and backward from ones ({report.ops} ops)"
    return text if told is None else f"{text}\n{told.table(None)}"
