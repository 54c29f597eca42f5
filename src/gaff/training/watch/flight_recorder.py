"""The flight recorder: every step leaves a row, looked at or not; what went wrong is kept when it is asked for.

Rows go into a ring of fixed size beside the record (``gaff.record.flight``), which outlives a process that is killed.
The last of them are also held in memory, and the reporter writes these into the record where a rule has fired, the run
has failed, or somebody has sent SIGUSR1. Batches are written only with ``keep_batch``, by a ``BatchSaver``.
"""

from __future__ import annotations

import math
import os
import shlex
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
from gaff.training.watch.recorder import memory_of
from gaff.training.watch.saved_batches import BatchSaver

_CHECKED = 4096  # bytes of a batch that its checksum is of
Batches = Sequence[tuple[Model, Batch]]


class FlightRecorder:
    """Keeps a row of each of the last steps, and the batches that did harm.

    ``out`` is the folder of the record; with None nothing is kept. ``is_asked`` is set by SIGUSR1, and cleared by
    whoever writes the last steps. Made and closed by the watcher; all but ``open`` and ``leave`` is called on the
    thread that trains. A value that is on a GPU is not waited for: it is NaN here.
    """

    def __init__(self, out: Path | None, *, keeps_batches: bool) -> None:
        self.is_asked = False
        self._out = out
        self.recent: deque[Flight] = deque(maxlen=ROWS)
        self._ring: RingWriter | None = None
        self._keeper = BatchSaver(out) if out is not None and keeps_batches else None
        self._before: Any = None
        self._notes: list[str] = []
        self._first: tuple[str, Tensor | None] = "", None

    @property
    def notes(self) -> list[str]:
        """What could not be kept, and why, for the record's notes."""
        return [*self._notes, *(self._keeper.notes if self._keeper is not None else ())]

    def open(self, log: Path | None) -> Path | None:
        """Open the ring beside ``log``, the file of this process's record, and return ``log`` as it is.

        Called when the record is made, perhaps on the writer's thread. Where there is no room for the ring, the run
        goes on without one, and ``notes`` says so.
        """
        if self._ring is None and log is not None:
            try:
                self._ring = RingWriter(log.with_suffix(ENDING))
            except OSError as error:
                self._notes.append(f"the last steps are not kept: {error}")
        return log

    def begins(self, batch: Batch) -> None:
        """Note what the first run of a step meets: a checksum of its batch, and the state of torch's CPU generator.

        Later runs of the same step are passed over, as is everything without a ring. At most 4,096 bytes of each tensor
        are read, and none that is on a device.
        """
        if self._ring is not None and not self._first[0]:
            state = batch.random[0]
            random = state if state.device.type == "cpu" else None
            self._first = step_facts.checksum((tensor for tensor, _ in batch.versions), _CHECKED), random

    def ended(self, step: int, seconds: float, numbers: StepNumbers, samples: int) -> None:
        """Write the row of a step that has ended, or of one in whose middle the run has.

        ``seconds`` is 0 for the latter. ``samples``: how many the models were given. Waits neither for a device nor for
        the disk.
        """
        (batch, state), self._first = self._first, ("", None)
        if self._ring is not None:
            known = {name: _here(value) for name, value in numbers.losses.items()}
            flight = Flight(step, time.time(), seconds, numbers.lr, _here(numbers.scale), samples, batch, known)
            self._ring.write(flight, memory_of(state) if state is not None else None)
            self.recent.append(flight)

    def leave(self, text: str) -> None:
        """Keep, beside the last steps, why the record is not written any further."""
        if self._ring is not None:
            self._ring.leave(text)

    def keep(self, step: int, why: str, batches: Batches) -> str:
        """Write the last of ``batches`` to disk, with its model's weights; the path of the file, or an empty text.

        It is empty where batches are not kept, the model is gone, or the file could not be written, which ``notes``
        then says. ``why`` is the name of the rule and becomes part of the file's name. Waits for devices and the disk.
        No error gets out, since a finding is on its way to the record at this moment and must not be lost with the
        batch.
        """
        model, batch = batches[-1] if batches else (None, None)
        root = model.root() if model is not None else None
        if self._keeper is None or root is None or model is None or batch is None:
            return ""
        if batch.part is not None:
            self._keeper.notes.append(f"the batch of step {step} was not kept: a part was called by itself")
            return ""
        try:
            path = self._keeper.keep(step, why, model.name, root, batch)
        except Exception as error:  # noqa: BLE001  # whatever is in a batch: what was found must not be lost with it
            self._keeper.notes.append(f"the batch of step {step} was not kept: {type(error).__name__}: {error}")
            return ""
        return str(path) if path is not None else ""

    def keep_for(self, finding: Finding, batches: Batches) -> Finding:
        """Keep the last of ``batches`` for ``finding``; the finding, with the place of the file where one was written.

        The place is put into its evidence as ``kept``, and the command that runs the batch again into its remedy; not
        where a NaN was there before the step, for then the batch is not the one that made it.
        """
        path = self.keep(finding.since, finding.rule, batches)
        if not path:
            return finding
        again = f"; gaff replay {shlex.quote(str(self._out))} --model FILE:NAME runs it again"
        again = "" if finding.evidence.get("direction") == "before" else again
        return replace(finding, evidence={**finding.evidence, "kept": path}, remedy=f"{finding.remedy}{again}")

    def follow_signal(self) -> None:
        """Let SIGUSR1 ask for the last steps from now on, unless the script has a use for it.

        Does nothing off the main thread, where Python sets no handlers, nor on a system without that signal.
        """
        number = getattr(signal, "SIGUSR1", None)
        is_main = threading.current_thread() is threading.main_thread()
        if number is not None and is_main and (signal.getsignal(number) == signal.SIG_DFL or _is_left(number)):
            self._before = signal.SIG_DFL
            signal.signal(number, self._ask)

    def close(self) -> None:
        """The run is over: the signal is the script's again, and the ring is closed.

        Off the main thread Python sets no handlers: there ours stays, and gives way when the signal comes.
        """
        before, self._before = self._before, None
        is_main = threading.current_thread() is threading.main_thread()
        if before is not None and is_main and signal.getsignal(signal.SIGUSR1) == self._ask:
            signal.signal(signal.SIGUSR1, before)
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Only note that SIGUSR1 asks for the last steps: a handler may run between any two lines of the user's."""
        self.is_asked = True
        if self._before is None:  # closed on another thread: the signal does what it did before
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_left(number: int) -> bool:
    """Whether the handler of a signal is one that a recorder left behind which was closed on another thread."""
    owner = getattr(signal.getsignal(number), "__self__", None)
    return isinstance(owner, FlightRecorder) and owner._before is None


def changes() -> Iterator[tuple[str, list[str]]]:
    """What gaff's own limits and edits have done in this process: for each that is still alive its kind, and its lines.

    The kind is ``clip_gradients`` or ``edit``. Told when the run ends, so that a record shows what changed the
    training.
    """
    for one in list(CHANGING):
        try:
            lines = str(one).splitlines()
        except (GaffError, RuntimeError) as error:
            lines = [f"cannot be told: {type(error).__name__}: {error}"]
        yield "clip_gradients" if isinstance(one, Clipping) else "edit", lines


def _here(value: Any) -> float:
    """A value as a number if it can be read without waiting for a device; else NaN, as of None."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else math.nan
    return math.nan if value is None else float(value)
