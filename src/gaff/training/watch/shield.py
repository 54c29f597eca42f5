"""The wall between a watched program and gaff: one thread is listened to, and no error of gaff's gets out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from gaff.compat import autograd, modes
from gaff.compat.signals import is_of_handler
from gaff.engine.process import stack_room
from gaff.training.watch.training_thread import TrainingThread

FRAMES = 500  # more than anything behind the wall needs
# Found once: what is here is done some ten times in a step.
_tracing_state, _WithoutModes = torch._C._get_tracing_state, torch._C.DisableTorchFunction


class Shield:
    """Calls what is told by the program, as long as it is open and on the thread that trains (``TrainingThread``).

    A failure closes the shield, and is handed to ``failed``, once: from then on nothing of gaff's does anything.
    ``moved`` is called on a thread that has become the one that trains: what was seen of another is not of its step.

    Behind it the program sees nothing: not by modes and subclasses of its own, which torch would tell of every
    operation, nor by its recursion limit, against which frames of gaff's would count.

    All that gaff does on the program's threads goes through here, so that it is measured here: ``take_spent``.

    What is only one fact among many is asked through ``attempt``: an error in it costs that fact alone, ``given_up``
    tells which, and why. ``is_strict``: for tests, such an error is a failure as any other.
    """

    is_strict = False

    def __init__(self, failed: Callable[[Exception], None], moved: Callable[[], None]) -> None:
        self.is_open = False
        self.thread = TrainingThread()
        self.is_quiet = threading.RLock()  # held while something is done: who closes it waits for that
        self.given_up: dict[str, str] = {}
        self._failed = failed
        self._moved = moved
        self._spent_s = 0.0  # less the time at which the call in progress began
        self._depth = 0  # 1 inside such a call
        self._elsewhere_s = 0.0  # on threads of autograd's own

    def is_mine(self) -> bool:
        """Whether this is the thread that trains.

        While ``torch.jit.trace`` writes down what runs, nobody trains: what we compute would be part of it. Nor while
        gaff itself calls a model, as for a trace of it.
        """
        return self.thread.is_this() and _tracing_state() is None

    def is_of_mine(self, module: nn.Module, inside: nn.Module | None = None) -> bool:
        """As ``is_mine``, of a module that is about to run: where it trains, and is ``inside`` no other, its thread may
        become the one that trains."""
        is_mine = self.is_mine()
        if is_mine and self.thread.has_trained:
            return True
        inside = inside if self.thread.has_trained else None  # of a thread that does not train
        is_training = inside is None and getattr(module, "training", False) and torch.is_grad_enabled()  # frozen: none
        if is_mine and is_training:
            self.thread.has_trained = True
        is_first = is_training and not is_mine and autograd.backward_task() == -1
        return is_mine or (is_first and self._comes_here(is_step=False))

    def _comes_here(self, *, is_step: bool) -> bool:
        """Whether this thread, on which a model or an optimizer is about to train, becomes the one that trains."""
        if not self.is_open or _tracing_state() is not None or not self.thread.moves_here(is_step=is_step):
            return False
        self.run(self._moved)
        return True

    def run(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Call ``action``, if the shield is open and this is the thread that trains; no error of it gets out."""
        if self.is_open and self.thread.is_this() and _tracing_state() is None:  # ``is_mine``, one call less
            self._act(action, arguments, is_mine=True)

    def run_beside(self, action: Callable[..., Any], *arguments: Any) -> None:
        """As ``run``, for what does not train, such as saving: also before it is known which thread trains."""
        if self.is_open and self.thread.may_be_this():
            self._act(action, arguments, is_mine=True)

    def run_step(self, counts: Callable[[Any], bool], action: Callable[..., Any], optimizer: Any, *more: Any) -> None:
        """As ``run``, for an optimizer that is about to step: if its steps count, its thread may become the one that
        trains."""
        if self.is_open and not self.is_mine():
            self._act(lambda: counts(optimizer) and self._comes_here(is_step=True), (), is_mine=False)
        self.run(action, optimizer, *more)

    def run_on_any_thread(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Call ``action``, if the shield is open: for gradients, which autograd may bring on a thread of its own."""
        if self.is_open:
            self._act(action, arguments, is_mine=self.is_mine())

    def _act(self, action: Callable[..., Any], arguments: tuple[Any, ...], *, is_mine: bool) -> None:
        """Call ``action`` behind the wall. What comes first and last here counts as gaff's time, too."""
        began = perf_counter()
        is_outer = is_mine and not self._depth
        if is_outer:
            self._depth, self._spent_s = 1, self._spent_s - began
        room = stack_room.widen(FRAMES)
        try:
            with self.is_quiet, _WithoutModes():
                if not self.is_open:  # it was closed while this thread waited
                    return
                if modes.dispatch_depth():
                    with modes.outside_modes():
                        action(*arguments)
                else:
                    action(*arguments)
        except Exception as error:  # nothing of ours may end a training run
            if is_of_handler(error):
                raise  # the program's own, as of a timeout
            self.is_open = False
            self._failed(error)
        finally:
            stack_room.narrow(room)
            if is_outer:
                self._depth, self._spent_s = 0, self._spent_s + perf_counter()
            elif not is_mine:
                self._elsewhere_s += perf_counter() - began

    def attempt(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """What ``action`` returns, which looks for ``what``; None where it raises, and from then on."""
        if what in self.given_up:
            return None
        try:
            return action(*arguments)
        except Exception as error:  # whatever is odd about the program, the rest of it is looked at
            if self.is_strict or is_of_handler(error):
                raise
            self.given_up[what] = f"{type(error).__name__}: {error}{place_of(error)}"
            return None

    def around(self, action: Callable[..., Any]) -> Callable[..., None]:
        """``action``, called through the shield."""
        return partial(self.run, action)

    def note(self, seconds: float) -> None:
        """Count seconds that gaff has spent on this thread outside of ``run``."""
        self._spent_s += seconds

    def take_spent(self) -> float:
        """Seconds that gaff has spent here since this was last asked, also in the call going on.

        To be called from inside what ``run`` calls.
        """
        now = perf_counter()
        spent, self._spent_s = self._spent_s + now + self._elsewhere_s, -now
        self._elsewhere_s = 0.0
        return spent


def place_of(error: Exception) -> str:
    """File and line at which an error was raised, for a message; empty where that is not known."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" (in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
