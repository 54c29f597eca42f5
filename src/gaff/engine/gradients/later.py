"""Tensors that do not require grad when they pass, and may come to: hooked then, or told of as None."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from gaff.compat import autograd, memory
from gaff.engine.clock import Run
from gaff.engine.streams import Stream

NO_GRAD_MODE = "grad mode was off in this call, and nothing recomputed it"
NEEDS_NONE = "the tensor does not require grad"
GETS_NONE = "the tensor is a view made without grad mode: torch brings it no gradient"
WRITTEN_LATER = "the tensor did not require grad; what was written into it later does"


_MOST_RUNS = 256


class Later:
    """The tensors that somebody may still make require grad, by the run in which they passed. Each is held weakly.

    Those of a run that has ended are waited for as long as they live, as features that are fed to a head of one's own;
    of the last runs alone (256, chosen).
    """

    def __init__(self) -> None:
        self._waiting: dict[Run, list[tuple[weakref.ref[Tensor], int, str, Stream, int]]] = {}

    def add(self, tensor: Tensor, stream: Stream, run: Run, call: int) -> None:
        """Wait for a tensor, which does not require grad now.

        One that was written to since has another value, and what comes to it is no gradient of the one that passed.
        """
        reason = GETS_NONE if autograd.is_view_without_grad(tensor) else NEEDS_NONE
        reason = reason if torch.is_grad_enabled() else NO_GRAD_MODE
        self._waiting.setdefault(run, []).append((weakref.ref(tensor), memory.version_of(tensor), reason, stream, call))

    def settle(self, arm: Callable[[Tensor, Stream, Run, int], object]) -> None:
        """Let ``arm`` hook what has come to require grad, of the runs that are over or in progress on this thread.

        The streams of tensors that are gone are told why nothing comes, when their run is over.
        """
        for at, run in enumerate(list(self._waiting)):
            if not run.frames or run.thread == get_ident():
                self._settle(run, arm, is_final=at < len(self._waiting) - _MOST_RUNS)

    def close(self, arm: Callable[[Tensor, Stream, Run, int], object]) -> None:
        """Settle all of them: the session ends."""
        for run in list(self._waiting):
            self._settle(run, arm, is_final=True)

    def _settle(self, run: Run, arm: Callable[[Tensor, Stream, Run, int], object], *, is_final: bool) -> None:
        waiting, kept = self._waiting.pop(run, []), []
        try:
            while waiting:
                reference, version, reason, stream, call = one = waiting.pop(0)
                tensor = reference()
                if tensor is not None and autograd.takes_gradient(tensor):
                    if memory.version_of(tensor) == version:
                        arm(tensor, stream, run, call)
                    else:
                        stream.absent(run, call, WRITTEN_LATER)
                elif is_final or (not run.frames and (tensor is None or reason == GETS_NONE)):
                    stream.absent(run, call, reason)
                else:
                    kept.append(one)
        finally:
            if kept or waiting:
                self._waiting[run] = [*kept, *waiting, *self._waiting.get(run, ())]


class ShareOfLate(Stream):
    """Stands for a stream whose input came to require grad after the module was entered: its share is refused."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def add(self, value: Any, run: Run, call: int) -> None:
        """A gradient has come to the input, of which nothing tells what the module's own part is."""
        self.refuse(run, call, "the input came to require grad inside the module: ask for :input_grad, the total")

    def absent(self, run: Run, call: int, reason: str) -> None:
        """Hand on that there is none."""
        self._stream.absent(run, call, reason)

    def refuse(self, run: Run, call: int, reason: str) -> None:
        """Hand on that it cannot be told."""
        self._stream.refuse(run, call, reason)
