"""The flight recorder: every step leaves a row, looked at or not; what went wrong is kept when it is asked for."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from gaff.errors import GaffError
from gaff.inspection.nonfinite.rerun import Batch
from gaff.record.finding import Finding
from gaff.record.flight import ENDING, ROWS, Flight, RingWriter
from gaff.sessions.receipt import CHANGING
from gaff.training.clipping import Clipping
from gaff.training.watch import step_facts
from gaff.training.watch.losses import StepNumbers
from gaff.training.watch.models import Model
from gaff.training.watch.recorder import bytes_of
from gaff.training.watch.saved_batches import BatchSaver

_CHECKED = 4096  # bytes of a batch that its checksum is of
Batches = Sequence[tuple[Model, Batch]]


class FlightRecorder:
    """Rows of the last steps, and the batches that did harm. ``is_asked``: somebody wants to see the last steps now.

    ``out``: None keeps nothing. Values that are on a GPU are not waited for: they are NaN here.
    """

    def __init__(self, out: Path | None, *, keeps_batches: bool) -> None:
        self.is_asked = False
        self._out = out
        self.recent: deque[Flight] = deque(maxlen=ROWS)
        self._ring: RingWriter | None = None
        self._keeper = BatchSaver(out) if out is not None and keeps_batches else None
        self._before: Any = None
        self._notes: list[str] = []
        self._spent_s = 0.0
        self._first: tuple[str, bytes] = "", b""

    @property
    def notes(self) -> list[str]:
        return [*self._notes, *(self._keeper.notes if self._keeper is not None else ())]

    def open(self, log: Path | None) -> Path | None:
        """``log``: the file of this process's record; the ring lies beside it, if there is room for it."""
        if self._ring is None and log is not None:
            try:
                self._ring = RingWriter(log.with_suffix(ENDING))
            except OSError as error:
                self._notes.append(f"the last steps are not kept: {error}")
        return log

    def begins(self, batch: Batch) -> None:
        """The first run of a step."""
        if self._ring is not None and not self._first[0]:
            began = time.perf_counter()
            state = batch.random[0]
            random = bytes_of(state) if state.device.type == "cpu" else b""
            self._first = step_facts.fingerprint(batch.args, batch.kwargs, _CHECKED), random
            self._spent_s += time.perf_counter() - began

    def ended(self, step: int, seconds: float, numbers: StepNumbers, samples: int) -> None:
        """A step has ended, or the run in the middle of one."""
        (batch, random), self._first = self._first, ("", b"")
        if self._ring is not None:
            began = time.perf_counter()
            known = {name: _here(value) for name, value in numbers.losses.items()}
            flight = Flight(step, time.time(), seconds, numbers.lr, _here(numbers.scale), samples, batch, known, random)
            self._ring.write(flight)
            self.recent.append(flight)
            self._spent_s += time.perf_counter() - began

    def take_spent(self) -> float:
        """What rows have cost since the last time, in seconds."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def keep(self, step: int, why: str, batches: Batches) -> str:
        """Keep the last batch of the step, with its model. Where it is; empty where nothing is kept."""
        model, batch = batches[-1] if batches else (None, None)
        root = model.root() if model is not None else None
        if self._keeper is None or root is None or model is None or batch is None:
            return ""
        try:
            path = self._keeper.keep(step, why, model.name, root, batch)
        except Exception as error:  # noqa: BLE001  # whatever is in a batch: what was found must not be lost with it
            self._keeper.notes.append(f"the batch of step {step} was not kept: {type(error).__name__}: {error}")
            return ""
        return str(path) if path is not None else ""

    def keep_for(self, finding: Finding, batches: Batches) -> Finding:
        """Keep the batch that a finding is of; the finding with the place where it is."""
        path = self.keep(finding.since, finding.rule, batches)
        if not path:
            return finding
        again = f"gaff replay {self._out} --model FILE:NAME runs it again"
        return replace(finding, evidence={**finding.evidence, "kept": path}, remedy=f"{finding.remedy}; {again}")

    def follow_signal(self) -> None:
        """From now on SIGUSR1 asks for the last steps, unless the script has a use for it."""
        number = getattr(signal, "SIGUSR1", None)
        is_main = threading.current_thread() is threading.main_thread()
        if number is not None and is_main and signal.getsignal(number) == signal.SIG_DFL:
            self._before = signal.SIG_DFL
            signal.signal(number, self._ask)

    def close(self) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGUSR1) == self._ask:
                signal.signal(signal.SIGUSR1, self._before)
            self._before = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True


def changes() -> Iterator[tuple[str, list[str]]]:
    """What gaff's own limits and edits, those that are still there, have done in this process: what, and its lines."""
    for one in list(CHANGING):
        try:
            lines = str(one).splitlines()
        except (GaffError, RuntimeError) as error:
            lines = [f"cannot be told: {type(error).__name__}: {error}"]
        yield "clip_gradients" if isinstance(one, Clipping) else "edit", lines


def _here(value: Any) -> float:
    """A number that can be read without waiting."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else math.nan
    return math.nan if value is None else float(value)
