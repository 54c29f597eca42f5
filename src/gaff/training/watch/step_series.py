"""What is kept of every step, looked at or not, until it is written as columns of a series.

Losses and a GradScaler's factor may be tensors on a device until then: the thread that writes waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gaff.record.absent import ABSENT
from gaff.training.watch import losses
from gaff.training.watch.losses import StepNumbers

_ASKED = 16  # steps from one question whether several processes train together to the next


class Pulse(NamedTuple):
    """What is kept of one step; losses and scale may still be on a device."""

    step: int
    seconds: float
    numbers: StepNumbers
    skipped: int
    samples: float  # NaN where a model was called that was not known yet
    alone: tuple[float, float]  # seconds to the first forward and to the first backward pass


class StepSeries:
    """Steps that wait to be written; made and owned by the reporter.

    ``latest``: of each number the last value that was not NaN, for the line of progress. ``add`` and ``take`` are
    called by the training thread, ``columns`` and ``note_norm`` by the one that writes.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._pulses: list[Pulse] = []
        self._norms: dict[int, float] = {}  # of all gradients, by step
        self._several: set[str] = set()  # losses that were the mean of several backward passes
        self._is_spread = False  # several processes train together, or did until now

    def __len__(self) -> int:
        return len(self._pulses)

    def add(self, pulse: Pulse) -> None:
        """Keep what is known of a step that has ended, or of one in whose middle the run has. Waits for no device.

        Something that has neither a loss nor a duration is no step and is left out.
        """
        if not len(self._pulses) % _ASKED and not self._is_spread:
            self._is_spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        if pulse.numbers.losses or pulse.seconds:
            self._pulses.append(pulse)

    def take(self) -> list[Pulse]:
        """All steps that wait, oldest first; they are forgotten here."""
        pulses, self._pulses = self._pulses, []
        return pulses

    def note_norm(self, step: int, norm: float) -> None:
        """Keep the L2 norm of all gradients at a step that was looked at, until that step is written."""
        self._norms[step] = self.latest["grad_norm"] = norm

    def columns(self, pulses: Sequence[Pulse]) -> dict[str, list[float]]:
        """The numbers of consecutive steps as columns by name, NaN where there is none. Waits for devices.

        ``unclipped_norm`` is there only where ``clip_grad_norm_`` is called, ``passes:NAME`` only of losses that are
        the mean of several backward passes, ``scale`` and ``skipped`` only with a GradScaler, ``to_forward`` and
        ``to_backward`` (see ``Alone``) only where several processes train together.
        """
        nothing = math.nan
        names = dict.fromkeys(name for one in pulses for name in one.numbers.losses)
        columns: dict[str, list[float]] = {
            "step": [float(one.step) for one in pulses],
            "seconds": [one.seconds or nothing for one in pulses],
            "samples": [float(one.samples) for one in pulses],
            "lr": [one.numbers.lr for one in pulses],
            "grad_norm": [self._norms.pop(one.step, nothing) for one in pulses],
        }
        if any(one.numbers.unclipped is not None for one in pulses):
            norms = [one.numbers.unclipped for one in pulses]
            columns["unclipped_norm"] = losses.read_all(nothing if one is None else one for one in norms)
        for name in names:
            columns[f"loss:{name}"] = losses.read_all(one.numbers.losses.get(name, ABSENT) for one in pulses)
        self._several.update(name for one in pulses for name in one.numbers.passes)
        for name in self._several & names.keys():
            columns[f"passes:{name}"] = [
                float(one.numbers.passes.get(name, 1)) if name in one.numbers.losses else nothing for one in pulses
            ]
        scales: list[Any] = [one.numbers.scale for one in pulses]
        if any(one is not None for one in scales):
            columns["scale"] = losses.read_all(nothing if one is None else one for one in scales)
            columns["skipped"] = [float(one.skipped) for one in pulses]
        if self._is_spread:
            columns["to_forward"] = [one.alone[0] for one in pulses]
            columns["to_backward"] = [one.alone[1] for one in pulses]
        self.latest.update((name, values[-1]) for name, values in columns.items() if not math.isnan(values[-1]))
        return columns
