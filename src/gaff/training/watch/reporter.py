"""Where looks arrive: they are judged, written and told on another thread, while training goes on.

The path of a look: the watcher hands over a sampled step, ``sampling`` takes from it what must be taken at once, and
the rest is a job for the ``Worker``: read the numbers from their devices, ask the rules (``Judge``), write tables and
findings (``Recorder``), tell alarms on the terminal. What is known of every step, looked at or not, is collected in a
``StepSeries`` and written about once a second.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BufferedRandom, BufferedWriter, FileIO
from os import PathLike
from time import perf_counter
from typing import Any

from torch import Tensor

from gaff.compat.distributed import has_others
from gaff.record.finding import Finding
from gaff.record.sample import Key, Sample
from gaff.training.rules.judge import Judge
from gaff.training.rules.known import known
from gaff.training.rules.registry import Hit, Past, Rule
from gaff.training.watch import record_place, step_facts, target_facts
from gaff.training.watch.flight_recorder import FlightRecorder, changes
from gaff.training.watch.losses import StepNumbers
from gaff.training.watch.models import Model
from gaff.training.watch.pace import Pace
from gaff.training.watch.progress import Progress, share_of
from gaff.training.watch.recorder import Recorder
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.sampling import plain, reading_of
from gaff.training.watch.settings import Settings
from gaff.training.watch.shield import place_of
from gaff.training.watch.spread import spread_of
from gaff.training.watch.step_series import Pulse
from gaff.training.watch.worker import Worker
from gaff.views import run_text

_ALIKE = 0.8  # the least entropy of labels over the largest, of batches that one loss may have been given
_MOST_SAVED = 1000  # files of torch.save that are told
_FILES = (BufferedRandom, BufferedWriter, FileIO)  # what open() returns for bytes


class Reporter:
    """Takes care of everything that happens to a look after it was taken.

    Public methods are called by the training thread: they hand over a job and return. The jobs run on the worker's
    thread, in order; they alone touch the judge and the recorder, until ``close`` has waited for the last of them.
    ``failure``: why watching ended, or a look was lost, as a text; ``progress``: how the run stands.
    """

    def __init__(self, settings: Settings, flight: FlightRecorder, steps_made: Callable[[], int]) -> None:
        """Prepare the record, and make it unless ``settings`` are lazy; ``flight`` has the last steps.

        ``steps_made``: asked for how many optimizer steps were made, on the thread that trains. Raises RecordError
        where the folder holds a run already; PlanError for a rule that is none.
        """
        self._settings = settings
        self._flight = flight
        self._steps_made = steps_made
        self._due: list[str] = []  # why the last steps are to be written
        self._judge = Judge(known(settings.rules_off), self._alarm, _ask)
        self._recorder = Recorder(lambda: flight.open(record_place.log_path(settings)))
        self._worker = Worker(self._job_failed)
        self.progress = Progress(settings, self._judge, self._recorder, self._worker)
        self._began = perf_counter()
        self._spent = 0.0, 0.0  # of the worker's time, as far as it was taken
        self._noted: set[str] = set()
        self._has_complained = False
        self._saves = 0  # files that torch.save has written
        self._written: list[dict[str, Any]] = []  # findings, as they are in the record
        self.failure: str | None = None  # why watching ended, or a look was lost
        if not settings.is_lazy:
            record_place.prepare(settings)
            self._recorder.open()
        self._recorder.event("begin", **record_place.surroundings(settings))

    @property
    def path(self) -> str:
        """The folder of the record; empty where none is kept."""
        return str(self._settings.out) if self._settings.out is not None else ""

    @property
    def findings(self) -> list[Finding]:
        """The findings as of now, worst first: waits for the looks that are still to be judged."""
        self._worker.stop()
        return [self._judge.about(one, self.path) for one in self._judge.findings]

    def model(self, model: Model, step: int) -> None:
        """Note in the record that a model has been found, with its modules and weights; make the record if need be.

        The files are made at once, so that a process that is killed in its very first step leaves a record.
        """
        root, model.spread = model.root(), spread_of(model)
        told = {"name": model.name, "class": model.kind, "compiled": model.is_compiled,
                "parameters": len(model.parameters), **model.spread,
                **(step_facts.inventory(root) if root is not None else {})}  # fmt: skip
        with suppress(OSError):  # raised again in the job, whose failure is told
            self._recorder.open()
        self._worker.put(lambda: self._first("model", step, told))

    def look(
        self, sampled: SampledStep, parameters: Mapping[Key, Mapping[str, Any]], values: Mapping[str, Any]
    ) -> None:
        """Hand over a look that has ended. Its rows may still be on a device: they are read by the other thread.

        ``parameters``: what is known of each parameter, as ``step_facts.parameters`` tells it; ``values``: the losses.
        If too many jobs wait, because the disk is slow, the look is dropped, which the notes of the record say.
        """
        if has_others():
            self._tell_spread(sampled)
        read = reading_of(sampled, parameters, values, perf_counter() - self._began)
        notes = sorted(sampled.notes)
        self._worker.put_look(lambda: self._take(*read(), notes), sampled.size_bytes)

    def _tell_spread(self, sampled: SampledStep) -> None:
        """Tell of models that were put into DistributedDataParallel, or spread over processes, since they were found.

        Asked at the first look at a model, the second, the fourth ..., since it takes a search.
        """
        for model in sampled.models.all:
            model.looks += 1
            now = spread_of(model) if not model.looks & (model.looks - 1) else model.spread
            if now != model.spread:
                model.spread = now
                self.tell("spread", sampled.step, name=model.name, **now)

    def add(self, finding: Finding, step: int) -> None:
        """Hand over a finding that no rule has made: it is told and written as those of rules are."""

        def job() -> None:
            self._judge.add(finding)
            self._write_findings(step)

        self._worker.put(job)

    def withdraw(self, *rules: str) -> None:
        """What came later has refuted rules: what they have found is told no more."""
        self._worker.put(lambda: self._judge.withdrawn.update(rules))

    def tell(self, kind: str, step: int, **told: Any) -> None:
        """Hand over an event that is to stand in the record, with what is told of it as JSON takes it, or tensors."""
        self._worker.put(lambda: self._recorder.event(kind, step, **plain(told)))

    def saved(self, file: Any) -> None:
        """``torch.save`` has written a file: hand over its name, of the first 1,000; a buffer in memory has none."""
        if type(file) in _FILES:  # of others a name may be a property that does something
            file = file.name
        if isinstance(file, (str, bytes, PathLike)) and self._saves < _MOST_SAVED:
            self._saves += 1
            self.tell("saved", self._steps_made(), file=str.__str__(os.fsdecode(file)))

    def pulse(
        self, step: int, seconds: float, numbers: StepNumbers, skipped: int, samples: float, alone: tuple[float, float]
    ) -> None:
        """Take in what is known of each step, looked at or not; costs next to nothing and waits for no device.

        ``skipped``: steps that a GradScaler has left out so far; ``samples``: that the models were given in this step;
        ``alone``: as ``Alone.take`` tells it.
        """
        self.progress.add(Pulse(step, seconds, numbers, skipped, samples, alone))

    def tick(self, step: int, pace: Pace) -> None:
        """After every step: hand over what is due by the clock, or because somebody wants to see the last steps."""
        if self._due or self._flight.is_asked:
            self._write_flight(step)
        self.progress.tick(step, pace)

    def take_spent(self) -> tuple[float, float]:
        """Processor time of the other thread, in seconds, since this was last asked: of looks, and of all else."""
        (looks, others), self._spent = self._spent, (self._worker.looks_s, self._worker.others_s)
        return self._spent[0] - looks, self._spent[1] - others

    def pause(self) -> None:
        """Wait until no job is left, and no thread of ours: the process is about to fork."""
        self._worker.stop()

    def abandon(self) -> None:
        """Give up in a forked child: touch nothing that the parent writes to, and tell nothing."""
        self._worker.abandon()
        self._recorder.close()
        self._flight.close()
        self._settings = replace(self._settings, tell=None)

    def fail(self, error: Exception, step: int) -> None:
        """Tell, once, on the terminal and in the record, that watching has ended by an error of gaff's own."""
        self.failure = f"{type(error).__name__}: {error}{place_of(error)}"
        self._complain(f"gaff: watching has stopped at step {step}, training goes on: {self.failure}")
        self._worker.put(lambda: self._first("failure", step, {"error": self.failure, "notes": [self.failure]}))

    def close(self, step: int, pace: Pace, notes: Sequence[str], error: BaseException | None) -> None:
        """Finish the record, when the run is over: wait for all jobs, then write findings and notes for the last time.

        ``error``: what ended the run, if it was an exception; the last steps are then written, too. A disk that refuses
        is told, and not raised.
        """
        self.progress.flush(step, pace)
        if error is not None:
            self._due.append(type(error).__name__)
        self._worker.stop()
        if self._due or self._flight.is_asked:  # a rule may have fired just now
            self._write_flight(step)
            self._worker.stop()
        dropped = self._worker.dropped
        if dropped:
            notes = (*notes, f"{dropped} looks were dropped: the record could not be written fast enough")
        broken = [f"rule {name!r} raised {told}: not asked any more" for name, told in self._judge.broken.items()]
        why = f"{type(error).__name__}: {error}" if error is not None else None
        try:
            for what, lines in changes():
                self._recorder.event("changes", step, what=what, lines=lines)
            self._write_findings(step, is_last=True)
            told = {**share_of(pace), "notes": [*notes, *broken], "error": why}
            self._recorder.event("end", step, **told)
        except OSError as refused:
            self._job_failed(refused)
        self._recorder.close()

    def _write_flight(self, step: int) -> None:
        """Hand over the last steps as they are now, with the reasons why; what has happened is among them.

        Called on the thread that trains, which also fills the recorder of last steps: the rows are copied here.
        """
        why, self._due = self._due, []
        if self._flight.is_asked:
            self._flight.is_asked = False
            why = [*why, "SIGUSR1"]
            if self._settings.tell is not None:
                self._settings.tell(f"gaff: the last steps up to step {step} are written to {self.path}")
        rows = [one.to_dict() for one in self._flight.recent]
        self._worker.put(lambda: self._recorder.event("flight", step, why=why, rows=rows))

    # on the worker's thread

    def _first(self, kind: str, step: int, told: dict[str, Any]) -> None:
        """Write an event that may be the first of the record, which is made then."""
        self._recorder.open()
        self._recorder.event(kind, step, **told)

    def _take(self, sample: Sample, keys: Sequence[Key], table: Tensor, notes: Iterable[str]) -> None:
        """Judge and write one look: ``keys`` and ``table`` are its rows, ``sample`` the same as plain numbers.

        The L2 norm of all gradients together is noted for the series of steps.
        """
        self.progress.note_norms(sample)
        self._judge.look(sample)
        self._recorder.look(sample, keys, table)
        self._recorder.event("look", sample.step, phase=sample.phase, notes=self._new(notes), **_plain(sample.facts))
        self._write_findings(sample.step)

    def _new(self, notes: Iterable[str]) -> list[str]:
        """Those of ``notes`` that are not in the record yet; from now on they count as written."""
        new = [one for one in notes if one not in self._noted]
        self._noted.update(new)
        return new

    def _alarm(self, finding: Finding) -> None:
        """Tell a finding that has come to hold, for the judge, and have the last steps written at the next ``tick``."""
        self._due.append(finding.rule)
        if self._settings.tell is not None:
            self._settings.tell(run_text.alarm(self._judge.about(finding, self.path)))

    def _write_findings(self, step: int, *, is_last: bool = False) -> None:
        """Write all findings if they are others than at the last time, or if this is the last time.

        Whether they are is told by rule, place and being over, not by their numbers, which change in every look.
        """
        found = [self._judge.about(one, self.path) for one in self._judge.findings]
        told = [{"rule": one.rule, "site": one.site, "model": one.model, "over": one.is_over} for one in found]
        if told != self._written or is_last:
            self._written = told
            self._recorder.findings(found, step)

    def _job_failed(self, error: Exception) -> None:
        """A job has raised: if the disk refuses, nothing more is written; else a look is lost, and others follow."""
        if isinstance(error, OSError):
            self.failure = f"the record is not written any further: {error}"
            self._flight.leave(str(error))
            self._recorder.close()
            self._complain(f"gaff: the record is not written any further, training goes on: {error}")
        else:
            self.failure = f"{type(error).__name__}: {error}{place_of(error)}"
            self._complain(f"gaff: a look could not be judged or written, training goes on: {self.failure}")

    def _complain(self, text: str) -> None:
        """Tell a failure, the first one only: it says enough, and more would hide the user's own lines."""
        if not self._has_complained:
            self._has_complained = True
            (self._settings.tell or self._settings.complain)(text)


def _ask(rule: Rule, sample: Sample, past: Past) -> list[Hit] | str:
    """The hits of a rule, or what it raised: one rule of the user's must not end the others."""
    try:
        return list(rule(sample, past))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _plain(told: Mapping[str, Any]) -> dict[str, Any]:
    """What of a step's facts goes into the record as JSON; tensors and dicts are left out.

    ``guess`` is what guessing gives: of a loss over classes the entropy of the labels where they were seen, else the
    logarithm of the number of classes; of a logistic loss without targets, as of pairs, ln 2; of others what the spread
    of the targets makes of the loss. ``labels``: how often each class comes, of a few; of more the guess
    is by all looks so far (``is_pooled``); ``among``: how many classes there are. ``reach``: the least and the largest
    target of squared and absolute errors.
    """
    plain = {name: one for name, one in told.items() if isinstance(one, (str, int, float, bool, type(None), list))}
    factor = told.get("factor", {"loss": "", "by": 1.0})
    if factor["loss"]:
        plain.update(factor_of=factor["loss"], factor=factor["by"], weight=factor.get("weight", 1.0),
                     scale=factor.get("scale"))  # fmt: skip
    marks = told.get("marks", {})
    if marks:
        plain["marks"] = [[*key, [float(f"{one:.9g}") for one in row]] for key, row in marks.items()]
    errors = [
        one for one in told.get("targets", ()) if one["function"] in target_facts.ERRORS and math.isfinite(one["high"])
    ]
    if errors:
        plain["reach"] = [min(one["low"] for one in errors), max(one["high"] for one in errors)]
    name, guess = _guess(told)
    if not name or not 0 <= guess < math.inf:
        return plain
    by = factor["by"] if factor["loss"] == name else 1.0
    targets = _counted(told.get("targets", ()))
    labels = next((one["labels"] for one in targets if "labels" in one), None)
    is_counted = "classes" in told and "scores" not in told
    counted: dict[str, Any] = {"labels": labels} if labels is not None and is_counted else {}
    is_uneven = any(one["is_uneven"] for one in targets)
    counted |= {"is_pooled": True} if is_counted and (labels is None or is_uneven) else {}
    is_spread = name == told.get("mean_of") and any(one.get("is_pooled") for one in told.get("targets", ()))
    counted |= {"is_pooled": True} if is_spread else {}
    counted |= {"among": told["classes"]["count"]} if is_counted else {}
    return {**plain, "guess_of": name, "guess": by * guess, **counted}


def _counted(targets: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What losses over classes were given whose labels were counted; empty where these are not of one loss: it is not
    known which of them is the one that is trained with, and which is only looked at."""
    found = [one for one in targets if "entropy" in one]
    told = sorted(one["entropy"] for one in found if math.isfinite(one["entropy"]))
    kinds = {(one["function"], tuple(one["output"][1:2]), one["is_uneven"]) for one in found}
    return found if len(kinds) == 1 and (not told or told[0] >= _ALIKE * told[-1]) else []


def _guess(told: Mapping[str, Any]) -> tuple[str, float]:
    """The loss of which it is known what guessing gives, by its name, and that; empty and 0 where there is none."""
    targets = told.get("targets", ())
    if "classes" in told:
        entropy = min((one["entropy"] for one in _counted(targets)[-1:]), default=math.inf)
        among = told["classes"].get("times", 1.0) * math.log(told["classes"]["count"])
        # of pairs the right one may always be the first, so that their labels tell nothing
        return told["classes"]["loss"], among if "scores" in told else min(entropy, among)
    if "logistic" in told:  # by a score of zero for all
        return told["logistic"], math.log(2)
    spreads = [one["spread"] for one in targets if "spread" in one]
    return (told["mean_of"], spreads[0]) if "mean_of" in told and len(spreads) == 1 else ("", 0.0)
