"""What is found out at the moment that something goes wrong, while the batch and the weights are still there.

Health rules judge numbers, later and on another thread. The three functions ``of_...`` here run on the thread that
trains, at the event itself, and make a finding at once: of a NaN or inf, of a GradScaler that skips every step, of a
loss that jumps. They look at copies and change nothing of the user's.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import iter_tensors
from gaff.compat import distributed, replicas
from gaff.engine.process.alone import alone
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.nonfinite.rerun import Batch, run_again
from gaff.record.finding import Finding
from gaff.record.sample import Key
from gaff.training.rules.registry import RULES
from gaff.training.watch import step_facts
from gaff.training.watch.accumulator import readable
from gaff.training.watch.losses import Spike
from gaff.training.watch.models import Model

_ODD = 5.0  # times the median over the batch: a sample that stands out
_MOST_SAMPLES = 8
_MOST_TOLD = 200  # characters of an error in a finding
_GIVEN = (
    "look at the batch, whose first NaN or inf is in the evidence, or, where a parameter held it, at the step before"
)
_MADE = "make that op safe for its input (clamp it, add an eps); where values had grown before, lower the learning rate"
_TARGETS = "look at the batch that this step was given: what makes its targets, cuts, pads or masks them?"
Batches = Sequence[tuple[Model, Batch]]


def of_nonfinite(
    what: str,
    step: int,
    batches: Batches,
    *,
    has_gradients: bool,
    seen: Key | None = None,
    targets: str = "",
    ops: str = "",
) -> tuple[Finding, Batches]:
    """Where a NaN or inf began: run the batches of the step again, with every op looked at, until one tells.

    ``what`` names what was not finite, ``has_gradients`` whether a backward pass has run, which is then looked into,
    too. The batches are tried from the latest back. One that was given a NaN tells little: one that made it is looked
    for among those before. Returns the finding, and the batch that it is about: none, where every op of the model is
    fine, or none could be run: then ``targets`` is told, what was wrong with those of the loss, or ``ops``, which op
    between the model and its loss is not safe, or ``seen``, the first of the step's tensors in which a NaN was counted.

    A copy of the model is run, without the user's hooks, and what it prints is not shown: the model itself, its
    autograd graph and its counters notice nothing. The copy takes the memory of the model once more; devices are waited
    for.
    """
    known = RULES["nonfinite"]
    failed = ""
    given: tuple[Finding, Batches] | None = None
    for model, batch in reversed(batches):
        path, called = batch.part or ("", model.root)
        root = called()
        if root is None:
            continue
        report, why = _examine(root, batch, assume_ones=False)
        if not report and has_gradients:
            report, why = _examine(root, batch, assume_ones=True)
        failed = failed or why
        if report:
            report = replace(report, site=_within(path, report.site))
            found = Finding(
                rule="nonfinite",
                site=report.site,
                model=model.name,
                since=step,
                severity=known.severity,
                message=f"{what} is not finite: {_first_line(report)}",
                cause=report.cause,
                remedy=_GIVEN if report.direction in ("before", "kept") else _MADE,
                evidence=_evidence(report),
                last=step,
            )
            if report.direction != "before":
                return found, [(model, batch)]
            given = found, [(model, batch)]  # the earliest that was given one
    if given is not None:
        return given
    if targets or (ops and seen is None):
        cause = targets or f"{'near' if failed else 'between the model and'} its loss, {ops}"
        told, remedy = f"{what} is not finite: {cause}", _TARGETS if targets else _MADE
        return Finding("nonfinite", "", "", step, known.severity, told, cause, remedy, last=step), []
    if failed or seen is not None:
        return _of_unknown(what, step, failed, seen), []
    sound = "the outputs of all ops of the model are finite"
    others = (
        "; or in another process, whose gradients are averaged with this one's" if distributed.place()[1] > 1 else ""
    )
    unknown = "no call of the model in training mode was seen in this step, so its ops could not be looked at"
    outside = Finding(
        rule="nonfinite",
        site="",
        model="",
        since=step,
        severity=known.severity,
        message=f"{what} is not finite, {f'but {sound}' if batches else f'and {unknown}'}",
        cause=f"it began outside the model: in the loss, in how targets are prepared, or in a batch from before{others}"
        if batches
        else "not known",
        remedy="gaff.find_nonfinite(step) on a step like this one looks at the ops outside the model, too",
        last=step,
    )
    return outside, []


def _of_unknown(what: str, step: int, failed: str, seen: Key | None) -> Finding:
    """The finding about a NaN or inf of which running the batch again does not show the op.

    ``failed``: why it could not be run again; empty where it could, and every op of that run was fine.
    """
    known = RULES["nonfinite"]
    model, site = seen or ("", "")
    why = failed.removeprefix("the batch could not be run again: ")
    again = f"the batch could not be run again ({why})" if failed else "run again, all ops of the model are finite"
    place = f"; the first NaN of the step is at {site}" if seen is not None else ""
    return Finding(
        rule="nonfinite",
        site=site,
        model=model,
        since=step,
        severity=known.severity,
        message=f"{what} is not finite{place}; {again}",
        cause=known.cause,
        remedy=f"gaff.guard(model) around the step names the op and its line; {_MADE}",
        last=step,
    )


def of_held_evaluation(model: str, step: int) -> Finding:
    """The finding about the graphs of an evaluation that came after all training, which no look can tell any more."""
    return of_rule("eval_graphs_held", step, model=model)


def of_rule(name: str, step: int, message: str = "", *, model: str = "", **evidence: Any) -> Finding:
    """The finding of a rule about what no look can tell; ``message``: what the rule means, where it is empty."""
    known = RULES[name]
    return Finding(
        rule=known.name,
        site="",
        model=model,
        since=step,
        severity=known.severity,
        message=message or known.means,
        cause=known.cause,
        remedy=known.remedy,
        evidence=evidence,
        last=step,
    )


def of_stuck_scaler(step: int, scale: float | Tensor | None, skipped: int) -> Finding:
    """The finding about a GradScaler that has left out ``skipped`` steps in a row, whose factor by now is ``scale``.

    Waits for its device, as the GradScaler has just done.
    """
    known = RULES["scaler_stuck"]
    scale = None if scale is None else float(scale)
    return Finding(
        rule=known.name,
        site="",
        model="",
        since=step,
        severity=known.severity,
        message=f"{known.means}: {skipped} in a row" + (f", its scale is {scale:.4g}" if scale is not None else ""),
        cause=known.cause,
        remedy=known.remedy,
        evidence={"scale": scale, "skipped": skipped},
        last=step,
    )


def of_spike(spike: Spike, step: int, batches: Sequence[tuple[Model, Batch]]) -> list[Finding]:
    """The finding about a loss far above those before it, with a checksum of its batch and the samples that stand out.

    Of ``batches`` the one counts in which a sample stands out most; where none does, the last. None for an early spike
    in whose batches nothing stands out. Waits for the device of their inputs.
    """
    evidence: dict[str, Any] = {"loss": spike.value, "mean_before": spike.mean, "std_before": spike.deviation}
    samples: list[int] = []
    told = [(*odd_samples(batch.args, batch.kwargs), at, model, batch) for at, (model, batch) in enumerate(batches)]
    if told:
        samples, times, at, model, batch = max(told, key=lambda one: (bool(one[0]), one[1] if one[0] else 0, one[2]))
        evidence["model"] = model.name
        if checksum := step_facts.fingerprint(batch.args, batch.kwargs):
            evidence["batch_checksum"] = checksum
        if samples:
            evidence |= {"batch_indices": samples, "times_larger": times}
            evidence |= {"call": at + 1, "calls": len(told)} if len(told) > 1 else {}
    if spike.is_early and not samples:
        return []
    which = f"of call {evidence['call']} of {evidence['calls']} in the step" if "call" in evidence else "of the batch"
    rows = f"the inputs at {samples} {which} are far larger (rms) than the others"
    who = rows if samples else "no input of the batch is far larger (rms) than the others"
    found = Finding(
        rule="loss_spike",
        site="",
        model="",
        since=step,
        severity="warning",
        message=f"the loss {spike.name!r} jumped to {spike.value:.4g} from about {spike.mean:.4g}; {who}",
        cause="an example that is wrong or rare, or a learning rate at the edge of what is stable",
        remedy="look at that batch; clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        evidence=evidence,
        last=step,
    )
    return [found]


def _within(path: str, site: str) -> str:
    """The address in a model of what has ``site`` in a part of it; what lies outside of the part stays as it is."""
    if not path or not site or site.startswith("("):
        return site
    return f"{path}{site}" if site[0] in ":/" else f"{path}.{site}"


def _examine(model: nn.Module, batch: Batch, *, assume_ones: bool) -> tuple[Report, str]:
    """Run a batch once more on a copy of ``model``; what that shows, and why it could not be run, if it could not.

    It runs on a thread of its own, which is waited for: there no line of the user's code that is running now is on the
    stack, and could be taken for one of the model's. ``assume_ones``: backward begins with ones, since what the loss
    sent back is not known any more.
    """
    found: list[tuple[Report, str]] = []

    def job() -> None:
        try:
            with _muted(), alone():  # other processes know nothing of this
                found.append(run_again(_copy(model), batch, assume_ones=assume_ones))
        except Exception as error:  # noqa: BLE001  # what a model may raise when it is copied, or run once more
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            found.append((Report(False), told if len(told) < _MOST_TOLD else told[:_MOST_TOLD] + "~"))

    thread = threading.Thread(target=job, name="gaff-origin")
    thread.start()
    thread.join()
    report, why = found[0] if found else (Report(False), "its thread ended")
    is_ours = report.line.startswith("threading.py")  # no code of the user's calls this module: torch's containers do
    return (replace(report, line="", code="") if is_ours else report), why


def _copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that runs without the original noticing, and without hooks of others, which may do anything.

    Of a replicated model (DistributedDataParallel) what it replicates, which alone averages nothing. Hooks of torch's
    own stay: a weight that is normalised or pruned is made by one. Raises what ``deepcopy`` raises, and RuntimeError
    for a model that FSDP2 has sharded, which torch does not copy.
    """
    if distributed.is_sharded(model):
        raise RuntimeError("fully_shard has its weights in parts, and torch copies no such model")
    held = (one for module in model.modules() for _, one in iter_tensors(list(vars(module).values())))
    known = {id(one): one.detach().clone() for one in held if one.grad_fn is not None}  # deepcopy refuses these
    copied: nn.Module = replicas.unreplicated(copy.deepcopy(model, known))
    for module in copied.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
                      module._backward_pre_hooks):  # fmt: skip
            for key, hook in list(table.items()):
                if not getattr(type(hook), "__module__", "").startswith("torch."):
                    del table[key]
    return copied


class _Muted:
    """Stands in for standard output and swallows what the thread that made it writes; other threads write as ever."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._thread = threading.get_ident()

    def write(self, text: str) -> Any:
        return len(text) if threading.get_ident() == self._thread else self._real.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def _muted() -> Iterator[None]:
    """Show nothing of what this thread prints inside the block; other threads print as ever.

    Where somebody has replaced ``sys.stdout`` in the meantime, theirs stays.
    """
    real = sys.stdout
    ours = sys.stdout = _Muted(real)
    try:
        yield
    finally:
        if sys.stdout is ours:
            sys.stdout = real


def odd_samples(args: Any, kwargs: Any) -> tuple[list[int], float]:
    """Positions in the batch, at most eight, of samples whose rms is five times the median or not finite.

    Also how many times the median the largest finite one is. Of floating inputs with more than two samples along their
    first dimension that in which one stands out most; empty without one. Waits for the inputs' devices.
    """
    floating = [tensor for _, tensor in iter_tensors((args, kwargs)) if tensor.is_floating_point()]
    values = [value for one in floating if (value := readable(one)) is not None and value.dim() and len(value) > 2]
    return max(map(_odd_rows, values), key=lambda one: (bool(one[0]), one[1]), default=([], 1.0))


def _odd_rows(value: Tensor) -> tuple[list[int], float]:
    """Which rows of ``value`` stand out, see ``odd_samples``; a NaN counts as odd; beside zeros nothing else does."""
    with torch.no_grad():
        sizes = value.reshape(value.shape[0], -1).float().square().mean(1).sqrt()
        usual = sizes.nanmedian()
        largest = torch.where(sizes.isfinite(), sizes, 0.0).max()
        is_odd = ~((sizes <= _ODD * usual) | ((usual == 0) & sizes.isfinite()))
        return [int(at) for at in is_odd.nonzero()[:_MOST_SAMPLES, 0]], float(largest / usual) if usual > 0 else 1.0


def _first_line(report: Report) -> str:
    return str(report).partition("\n")[0]


def _evidence(report: Report) -> dict[str, Any]:
    """What a report tells, as JSON takes it, with what is empty left out."""
    told: dict[str, Any] = {"op": report.op, "direction": report.direction, "line": report.line, "code": report.code}
    told["inputs"] = [f"{one.name}: {one}" for one in report.inputs]
    if report.output is not None:
        told["output"] = f"{report.output.name}: {report.output}"
    if report.before:
        told["chain"] = list(report.before)
    if report.notes:
        told["notes"] = list(report.notes)
    return {name: value for name, value in told.items() if value}
