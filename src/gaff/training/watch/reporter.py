"""Where looks arrive: they are judged, written and told on another thread, while training goes on."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gaff.errors import RecordError
from gaff.record.finding import Finding
from gaff.record.run import ENDING, HEAD, VERSION
from gaff.record.sample import Key, Sample, Units
from gaff.record.statistics import Numbers
from gaff.training.rules.judge import Judge
from gaff.training.watch import losses, step_facts
from gaff.training.watch.flight_recorder import FlightRecorder, changes
from gaff.training.watch.losses import Losses
from gaff.training.watch.models import Model
from gaff.training.watch.pace import Pace
from gaff.training.watch.recorder import Recorder, bytes_of
from gaff.training.watch.sampled_step import SampledStep, unscaled
from gaff.training.watch.worker import Worker
from gaff.views import run_text

if TYPE_CHECKING:
    from gaff.training.watch.watcher import Settings

_FLUSH_S = 1.0  # what a kill may cost
_MOST_PULSES = 512


class Pulse(NamedTuple):
    """What is kept of every step; losses and scale may still be on a device."""

    step: int
    seconds: float
    lr: float
    losses: dict[str, Any]
    scale: Any
    skipped: int
    samples: int
    alone: tuple[float, float]  # seconds to the first forward and to the first backward pass


class Reporter:
    """Everything that happens to a look after it was taken. The methods are called by the training thread."""

    def __init__(self, settings: Settings, recall: FlightRecorder) -> None:
        self._settings = settings
        self._recall = recall
        self._due: list[str] = []  # why the last steps are to be written
        self._tell = settings.tell
        self._path = str(settings.out) if settings.out is not None else ""
        self._recorder = Recorder(lambda: recall.open(_log_path(settings)))
        self._judge = Judge(settings.rules, self._alarm)
        self._writer = Worker(self._job_failed)
        self._pulses: list[Pulse] = []
        self._is_spread = False  # several processes train together, or did until now
        self._began = perf_counter()
        self._flushed = self._began
        self._lined = self._began
        self._spent = 0.0
        self._norms: dict[int, float] = {}  # of all gradients, by step
        self._latest: dict[str, float] = {}
        self._noted: set[str] = set()
        self._has_failed = False
        self._written: list[dict[str, Any]] = []  # findings, as they are in the record
        self.failure: str | None = None
        if not settings.is_lazy:
            _prepare(settings)
            self._recorder.open()
        self._recorder.event("begin", **_surroundings(settings))

    @property
    def findings(self) -> list[Finding]:
        """As of now: waits for the looks that are still to be judged."""
        self._writer.stop()
        return [self._judge.about(one, self._path) for one in self._judge.findings]

    def model(self, model: Model, step: int) -> None:
        """A model has been found."""
        root = model.root()
        told = {"name": model.name, "class": model.kind, "compiled": model.is_compiled,
                "parameters": len(model.parameters),
                "replicated": type(root).__name__ == "DistributedDataParallel",
                **(step_facts.spread_over(root) if root is not None else {}),
                **(step_facts.inventory(root) if root is not None else {})}  # fmt: skip

        def job() -> None:
            self._recorder.open()
            self._recorder.event("model", step, **told)

        self._writer.put(job)

    def look(self, window: SampledStep, parameters: Mapping[Key, Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """A window has closed. Its rows may still be on a device: they are read by the other thread."""
        keys, rows = window.bank.take()
        units, shares, told = dict(window.bank.units), dict(window.extras), dict(window.facts)
        inputs, notes = dict(window.bank.inputs), sorted(window.notes)
        step, phase, scale = window.step, window.phase, window.scale
        began = perf_counter() - self._began

        def job() -> None:
            table = torch.cat([one.cpu() for one in rows]) if rows else torch.zeros(0, 74, dtype=torch.float64)
            table = _unscale(keys, table, losses.read(scale))
            sample = Sample(step, phase, began)
            sample.rows = {key: Numbers(row) for key, row in zip(keys, table.tolist(), strict=True)}
            sample.units = {key: _units(one.cpu(), inputs[key]) for key, one in units.items()}
            sample.shares = {name: float(total) / max(1, count) for name, (total, count) in shares.items()}
            sample.parameters = {key: step_facts.read(one) for key, one in parameters.items()}
            sample.losses = {name: losses.read(value) for name, value in values.items()}
            sample.facts = {**told, "scale": None if told.get("scale") is None else losses.read(told["scale"])}
            self._take(sample, keys, table, notes)

        self._writer.put(job)

    def add(self, finding: Finding, step: int) -> None:
        """Found by other means than a rule."""

        def job() -> None:
            self._judge.add(finding)
            self._write_findings(step)

        self._writer.put(job)

    def pulse(
        self, step: int, seconds: float, known: Losses, skipped: int, samples: int, alone: tuple[float, float]
    ) -> None:
        """Every step: what costs next to nothing."""
        self._is_spread = self._is_spread or (torch.distributed.is_available() and torch.distributed.is_initialized())
        values = known.values()
        if values or seconds:
            self._pulses.append(Pulse(step, seconds, known.lr, values, known.scale, skipped, samples, alone))

    def tick(self, step: int, pace: Pace) -> None:
        """Every step: see whether it is time to write, or to tell."""
        now = perf_counter()
        if self._due or self._recall.is_asked:
            self._write_flight(step)
        if now - self._flushed > _FLUSH_S or len(self._pulses) >= _MOST_PULSES:
            self._flushed = now
            self._flush(step, pace)
        if self._tell is not None and now - self._lined > self._settings.interval_s:
            self._lined = now
            self._writer.put(lambda: self._line(step, pace))

    def take_spent(self) -> float:
        """Processor time of the other thread since the last time."""
        spent, self._spent = self._writer.spent_s - self._spent, self._writer.spent_s
        return spent

    def pause(self) -> None:
        self._writer.stop()

    def abandon(self) -> None:
        self._writer.abandon()
        self._recorder.close()
        self._tell = None

    def fail(self, error: Exception, step: int) -> None:
        """Watching has ended by a failure of ours: told once, on the terminal and in the record."""
        place = _place_of(error)
        self.failure = f"{type(error).__name__}: {error}{place}"
        self._report_failure(f"gaff: watching has stopped at step {step}, training goes on: {self.failure}")
        self._writer.put(lambda: self._recorder.event("failure", step, error=self.failure, notes=[self.failure]))

    def close(self, step: int, pace: Pace, notes: Sequence[str], error: BaseException | None) -> None:
        self._flush(step, pace)
        if error is not None:
            self._due.append(type(error).__name__)
        self._writer.stop()
        if self._due:  # a rule may have fired just now
            self._write_flight(step)
            self._writer.stop()
        if self._writer.dropped:
            notes = (*notes, f"{self._writer.dropped} looks were dropped: the record could not be written fast enough")
        broken = [f"rule {name!r} raised {told}: not asked any more" for name, told in self._judge.broken.items()]
        try:
            for what, lines in changes():
                self._recorder.event("changes", step, what=what, lines=lines)
            self._write_findings(step, is_last=True)
            self._recorder.event(
                "end",
                step,
                overhead=pace.overhead,
                seconds=pace.total_s,
                notes=[*notes, *broken],
                error=f"{type(error).__name__}: {error}" if error is not None else None,
            )
        except OSError as refused:
            self._job_failed(refused)
        self._recorder.close()

    def _write_flight(self, step: int) -> None:
        """The last steps, as they are: what has happened is among them."""
        why, self._due = self._due, []
        if self._recall.is_asked:
            self._recall.is_asked = False
            why = [*why, "SIGUSR1"]
            if self._tell is not None:
                self._tell(f"gaff: the last steps up to step {step} are written to {self._path}")
        rows = [one.to_dict() for one in self._recall.recent]

        def job() -> None:
            self._recorder.event("flight", step, why=why, rows=rows)

        self._writer.put(job)

    # on the other thread

    def _take(self, sample: Sample, keys: Sequence[Key], table: Tensor, notes: Iterable[str]) -> None:
        norms = [row.norm for key, row in sample.rows.items() if key[1].endswith(":grad") and row.count]
        if norms:
            self._norms[sample.step] = self._latest["grad_norm"] = math.sqrt(sum(one * one for one in norms))
        self._judge.look(sample)
        self._recorder.look(sample, keys, table)
        self._recorder.event("look", sample.step, phase=sample.phase, notes=self._new(notes), **_plain(sample.facts))
        self._write_findings(sample.step)

    def _new(self, notes: Iterable[str]) -> list[str]:
        """Those that are not in the record yet."""
        new = [one for one in notes if one not in self._noted]
        self._noted.update(new)
        return new

    def _flush(self, step: int, pace: Pace) -> None:
        pulses, self._pulses = self._pulses, []
        told = {"overhead": pace.overhead, "every": pace.distance, "seconds": pace.total_s, "memory": _memory()}

        def job() -> None:
            if pulses:
                self._recorder.series(self._columns(pulses))
            self._recorder.event("progress", step, **told)

        self._writer.put(job)

    def _columns(self, pulses: Sequence[Pulse]) -> dict[str, Any]:
        nothing = math.nan
        names = dict.fromkeys(name for one in pulses for name in one.losses)
        columns: dict[str, list[float]] = {
            "step": [float(one.step) for one in pulses],
            "seconds": [one.seconds or nothing for one in pulses],
            "samples": [float(one.samples) for one in pulses],
            "lr": [one.lr for one in pulses],
            "grad_norm": [self._norms.pop(one.step, nothing) for one in pulses],
        }
        for name in names:
            columns[f"loss:{name}"] = [losses.read(one.losses.get(name, nothing)) for one in pulses]
        if any(one.scale is not None for one in pulses):
            columns["scale"] = [nothing if one.scale is None else losses.read(one.scale) for one in pulses]
            columns["skipped"] = [float(one.skipped) for one in pulses]
        if self._is_spread:
            columns["to_forward"] = [one.alone[0] for one in pulses]
            columns["to_backward"] = [one.alone[1] for one in pulses]
        self._latest.update((name, values[-1]) for name, values in columns.items() if not math.isnan(values[-1]))
        return columns

    def _line(self, step: int, pace: Pace) -> None:
        if self._tell is not None:
            self._tell(run_text.line(step, self._latest, self._judge.findings, pace.overhead, pace.distance))

    def _alarm(self, finding: Finding) -> None:
        self._due.append(finding.rule)
        if self._tell is not None:
            self._tell(run_text.alarm(self._judge.about(finding, self._path)))

    def _write_findings(self, step: int, *, is_last: bool = False) -> None:
        found = [self._judge.about(one, self._path) for one in self._judge.findings]
        told = [{"rule": one.rule, "site": one.site, "model": one.model, "over": one.is_over} for one in found]
        if told != self._written or is_last:
            self._written = told
            self._recorder.findings(found, step)

    def _job_failed(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._recorder.close()
            self._report_failure(f"gaff: the record is not written any further, training goes on: {error}")
        else:
            self.failure = f"{type(error).__name__}: {error}{_place_of(error)}"
            self._report_failure(f"gaff: a look could not be judged or written, training goes on: {self.failure}")

    def _report_failure(self, text: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            (self._tell or self._settings.complain)(text)


def _prepare(settings: Settings) -> None:
    """Make the folder; raises RecordError where it holds a run already."""
    folder = settings.out
    if folder is None:
        return
    try:
        if folder.exists() and (not folder.is_dir() or list(folder.glob(f"rank{settings.rank}*{ENDING}"))):
            raise RecordError(f"{str(folder)!r} holds a run already: expected a new folder; name another, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        head = folder / HEAD
        if not head.exists():
            head.write_text(json.dumps({"version": VERSION}))
    except OSError as error:
        raise RecordError(f"{str(folder)!r} cannot be written: {error.strerror}") from None


def _log_path(settings: Settings) -> Path | None:
    """A new file for this process, named by its rank, and by its number where there are several of one rank."""
    if settings.out is None:
        return None
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    rank = distributed.get_rank() if known else settings.rank
    path = settings.out / f"rank{rank}{ENDING}"
    return settings.out / f"rank{rank}-{os.getpid()}{ENDING}" if path.exists() else path


def _surroundings(settings: Settings) -> dict[str, Any]:
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available(),
            "rank": settings.rank, "budget": settings.budget, "every": settings.every}  # fmt: skip


def _units(table: Tensor, inputs: int) -> Units:
    """``table``: [3, n], see ``gaff.training.statistics.plain.observe_units_``."""
    largest, smallest, magnitude = table
    size = torch.maximum(largest.abs(), smallest.abs())
    active = int.from_bytes(bytes_of(size >= 1e-5), "little")
    is_constant = bool((largest - smallest <= 1e-6 * size).all()) and bool((size > 0).any())
    middle = float(magnitude.median())
    outlier = float(magnitude.max()) / middle if middle else math.nan
    return Units(table.shape[1], inputs, active, is_constant, outlier)


def _unscale(keys: Sequence[Key], table: Tensor, scale: float) -> Tensor:
    """Gradients of activations belong to the scaled loss; those of parameters are unscaled before the step."""
    if scale == 1.0:
        return table
    rows = [unscaled(row, scale) if ":grad_output" in key[1] else row for key, row in zip(keys, table, strict=True)]
    return torch.stack(rows)


def _plain(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if isinstance(value, (str, int, float, bool, type(None), list))}


def _memory() -> dict[str, int]:
    """Peak, in bytes: of the process, and of what torch has allocated on the GPU."""
    told = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_initialized():
        told["cuda"] = torch.cuda.max_memory_allocated()
    return told


def _place_of(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" (in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
