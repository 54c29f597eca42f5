"""How a run stands, for those who look on: every step's numbers, written once a second; lines; cells of notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from gaff.record.sample import Sample
from gaff.training.rules.judge import Judge
from gaff.training.watch import record_place
from gaff.training.watch.pace import Pace
from gaff.training.watch.recorder import Recorder
from gaff.training.watch.settings import Settings
from gaff.training.watch.step_series import Pulse, StepSeries
from gaff.training.watch.worker import Worker
from gaff.views import run_text

_FLUSH_S = 1.0  # what a kill may cost
_MOST_PULSES = 512


class Progress:
    """Collects what is known of each step, and hands it on by the clock; ``viewers`` are told as by ``LiveCell``.

    The ``Reporter`` makes it, with its own judge, recorder and worker. Called on the thread that trains; what it hands
    on is done on the worker's, where viewers are told as well.
    """

    def __init__(self, settings: Settings, judge: Judge, recorder: Recorder, worker: Worker) -> None:
        self.viewers: list[Callable[..., Any]] = []
        self._settings = settings
        self._judge = judge
        self._recorder = recorder
        self._worker = worker
        self._series = StepSeries()
        self._is_showing = False  # a job that tells viewers waits
        self._flushed = self._lined = perf_counter()

    @property
    def latest(self) -> Mapping[str, float]:
        """The latest number of each series that was read, by name: losses, the gradients' norm, the learning rate."""
        return self._series.latest

    def add(self, pulse: Pulse) -> None:
        """Take in a step."""
        self._series.add(pulse)

    def note_norms(self, sample: Sample) -> None:
        """Note the L2 norm of all gradients of a look together, for the series of steps; on the worker's thread.

        Infinite where any element is not finite: NaN stands for a step that was not looked at.
        """
        rows = [row for key, row in sample.rows.items() if key[1].endswith(":grad")]
        norms = [math.inf if row.nonfinite else row.norm for row in rows if row.count or row.nonfinite]
        if norms:
            self._series.note_norm(sample.step, math.sqrt(sum(one * one for one in norms)))

    def tick(self, step: int, pace: Pace) -> None:
        """After every step: hand over what is due by the clock. Costs next to nothing where nothing is.

        Series are written once a second or when 512 steps wait, a line of progress is told every ``interval_s``
        seconds.
        """
        now = perf_counter()
        if now - self._flushed > _FLUSH_S or len(self._series) >= _MOST_PULSES:
            self._flushed = now
            self.flush(step, pace)
        if self._settings.tell is not None and now - self._lined > self._settings.interval_s:
            self._lined = now
            self._worker.put(lambda: self._line(step, pace))

    def flush(self, step: int, pace: Pace) -> None:
        """Hand over what has been collected of every step, and how far the run is, for readers of a run in progress."""
        pulses = self._series.take()
        told = {**share_of(pace), "every": pace.distance}

        def job() -> None:
            if pulses:
                self._recorder.series(self._series.columns(pulses))
            self._recorder.event("progress", step, **told, memory=record_place.memory())

        self._worker.put(job)
        if self.viewers and not self._is_showing:  # a slow one is told less often
            self._is_showing = True
            self._worker.put(lambda: self._show(step, pace))

    def _show(self, step: int, pace: Pace) -> None:
        """Tell the viewers; one that raises is told nothing any more, and that is said: no look is lost by it."""
        self._is_showing = False
        for viewer in list(self.viewers):
            try:
                viewer(step, self.latest, self._judge.findings, pace.overhead)
            except Exception as error:  # noqa: BLE001  # whatever shows it, it is somebody else's
                self.viewers.remove(viewer)
                tell = self._settings.tell or self._settings.complain
                tell(f"gaff: a cell is not updated any more: {type(error).__name__}: {error}")

    def _line(self, step: int, pace: Pace) -> None:
        """Tell a line of progress on the terminal."""
        if self._settings.tell is not None:
            judge = self._judge
            told = run_text.line(step, self.latest, judge.findings, pace.overhead, pace.distance, judge.looks)
            self._settings.tell(told)


def share_of(pace: Pace) -> dict[str, float | None]:
    """What watching has cost so far, for the record: a share of the time since the first step, what came before, and
    what it has cost after the first seconds.
    """
    return {"overhead": pace.overhead, "startup": pace.startup_s, "seconds": pace.total_s, "steady": pace.steady}
