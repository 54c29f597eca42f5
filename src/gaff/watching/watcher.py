"""Watching a process that trains: which step is looked at, and who gets to know what it has shown.

All that is called from the user's code goes through ``_guarded``: a failure of ours ends the watching, is told once,
and never reaches the training.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gaff.engine.outer import Outer, Told
from gaff.health.rules import Rule
from gaff.watching import facts, trouble
from gaff.watching.desk import Desk
from gaff.watching.losses import Losses
from gaff.watching.models import Model, Models
from gaff.watching.pace import Pace
from gaff.watching.runs import Runs
from gaff.watching.updates import Clearing, Update, parameters_of
from gaff.watching.window import Window

_STUCK = 17  # skipped steps in a row: sixteen halvings lead a GradScaler from its first scale to 1


def to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


_OPEN: weakref.WeakSet[Watcher] = weakref.WeakSet()
_IS_FOLLOWED: list[bool] = []  # whether forks are


@dataclass(frozen=True, slots=True)
class Settings:
    """How to watch. ``budget``: the share of time that watching may take; ``every``: look at each nth step instead."""

    out: Path | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    every: int | None = None
    budget: float = 0.01
    rules: tuple[Rule, ...] = ()
    tell: Callable[[str], None] | None = None
    interval_s: float = 10.0
    rank: int = 0
    is_lazy: bool = False  # make the record when the first model is found
    head: Mapping[str, Any] = field(default_factory=dict)
    complain: Callable[[str], None] = to_stderr  # of a failure of ours, where there is no ``tell``


class Watcher:
    """Watches ``models``, by name, or whatever trains where there are none; ``optimizers``: only these count steps."""

    def __init__(
        self, settings: Settings, models: Mapping[str, nn.Module] | None = None, optimizers: Iterable[Any] = ()
    ) -> None:
        self.step = 0
        self.is_open = False
        self.pace = Pace(settings.budget, settings.every)
        self._models = Models(settings.only, settings.skip)
        self._runs = Runs(self._models, self, is_given=models is not None)
        self._is_given = models is not None
        self._optimizers = list(optimizers)
        for name, model in (models or {}).items():
            self._models.select(model)
            self._runs.know(self._models.add(name, model), model)
        self.desk = Desk(settings)
        self._losses = Losses()
        self._clearing = Clearing()
        safely = partial(partial, self.guarded)
        self._outer = Outer(
            Told(
                safely(self._backward_begins),
                safely(self._step_begins),
                safely(self._step_ended),
                safely(self._step_skipped),
                safely(self._losses.note_scale),
                safely(self._function_compiled),
            )
        )
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps, by optimizer
        self._updates: dict[int, Update] = {}
        self._skipped = 0
        self._in_a_row = 0  # skipped without a step in between
        self._since = 0.0
        self._is_examined = False  # where a NaN or inf began; only the first

    def open(self) -> None:
        self.is_open = True
        self._since = perf_counter()
        self._runs.open()
        self._outer.open()
        _follow_forks(self)
        for model in self._models.all:
            self.desk.model(model, 0)
        self._begin_window()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing of ours stays; what was seen of the last step is kept, and the record is finished."""
        if not self.is_open:
            return
        self._end_window(is_whole=False)
        self._pulse(0.0)
        self._remove()
        self.desk.close(self.step, self.pace, (*self._models.missed, *self._notes()), error)

    def _remove(self) -> None:
        self.is_open = False
        self._runs.close()
        self._outer.close()
        self._updates.clear()

    def guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.is_open:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self._remove()
            self.desk.fail(error, self.step)

    # what the runs tell

    def model_found(self, model: Model) -> None:
        self.desk.model(model, self.step)

    def evaluated(self, window: Window) -> None:
        self.desk.look(window, {}, {})

    def _function_compiled(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, (torch.optim.Optimizer, nn.Module)):  # a module knows that it is compiled
            self._runs.stop_hooks()

    # backward passes and steps

    def _backward_begins(self, losses: Any) -> None:
        self._runs.left_model()
        if self._window is not None:
            self._clearing.look()
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            if isinstance(loss, Tensor) and loss.numel() == 1:
                spike = self._losses.note(loss, self._window)
                if spike is not None:
                    self.desk.add(trouble.of_spike(spike, self.step, self._runs.batches), self.step)
        if self._losses.is_nonfinite:
            self._find_origin(f"the loss {self._losses.latest!r}", has_gradients=False)

    def _find_origin(self, what: str, *, has_gradients: bool) -> None:
        """Run the batches of this step again, once a run, to see where the NaN or inf began."""
        if not self._is_examined:
            self._is_examined = True
            self.is_open = False  # what is run again is not watched
            resume = self._runs.pause()
            try:
                finding = trouble.of_nonfinite(what, self.step, self._runs.batches, has_gradients=has_gradients)
            finally:
                self.is_open = True
                resume()
            self.desk.add(finding, self.step)

    def _is_counted(self, optimizer: Any) -> bool:
        if self._optimizers:
            return any(one is optimizer for one in self._optimizers)
        if not self._is_given:
            return True
        return any(self._models.name_of(parameter) for _, parameter in parameters_of(optimizer))

    def _step_begins(self, optimizer: Any, has_closure: bool) -> None:
        self._runs.left_model()
        if not self._is_counted(optimizer):
            return
        if self._window is not None:
            began = perf_counter()
            update = Update(optimizer, self._models, self._window.bank, has_closure=has_closure)
            update.was_cleared = has_closure or self._clearing.was_cleared(optimizer)
            update.begin()
            self._updates[id(optimizer)] = update
            self._window.cost_s += perf_counter() - began
            bad = None if has_closure else self._window.nonfinite_gradient()
            if bad is not None:
                self._find_origin(f"the gradient {bad[1]}", has_gradients=True)

    def _step_ended(self, optimizer: Any) -> None:
        if not self._is_counted(optimizer):
            return
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._in_a_row = 0
        if self._window is not None:
            began = perf_counter()
            update = self._updates.get(id(optimizer))
            if update is not None:
                update.end()
            self._window.cost_s += perf_counter() - began
        self._losses.lr = next((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), math.nan)
        if count > self.step:
            self._end_step(count)

    def _step_skipped(self, optimizer: Any) -> None:
        """A GradScaler has found gradients that are not finite: what the window has seen of them is its business."""
        if self._is_counted(optimizer):
            self._skipped += 1
            self._in_a_row += 1
            if self._in_a_row == _STUCK:
                self.desk.add(trouble.of_stuck_scaler(self.step, self._losses.scale, self._in_a_row), self.step)
                self._find_origin("a gradient", has_gradients=True)
            self._runs.batches.clear()
            self._updates.clear()
            if self._window is not None:
                self._window.is_open = False
                self._begin_window()

    def _end_step(self, count: int) -> None:
        now = perf_counter()
        seconds, self._since = now - self._since, now
        window = self._window
        self.pace.spend(self.desk.take_spent())
        if window is not None:
            self._end_window(is_whole=True)
        self._pulse(seconds)
        if window is not None:
            self.pace.looked(seconds, window.cost_s + perf_counter() - now)
        else:
            self.pace.passed(seconds)
        self.step = count
        self._runs.batches.clear()
        self._updates.clear()
        if self.pace.is_due(count):
            self._begin_window()
        else:
            self._clearing.forget()
        self.desk.tick(count, self.pace)

    def _pulse(self, seconds: float) -> None:
        self.desk.pulse(self.step, seconds, self._losses, self._skipped)
        self._losses.forget()

    # windows

    def _begin_window(self) -> None:
        for optimizer in self._counts:
            self._clearing.stepped(optimizer)
        self._runs.look(Window(self.step, "train", self._models))

    def _end_window(self, *, is_whole: bool) -> None:
        window = self._window
        self._runs.look(None)
        if window is None:
            return
        window.close()
        if is_whole:
            window.facts.update(
                optimizers=len(self._counts), skipped=self._skipped, scale=self._losses.scale, **self._losses.facts
            )
            parameters = facts.parameters(self._models, self._updates.values(), self._counts, window.modules_called)
            self.desk.look(window, parameters, self._losses.values())

    @property
    def _window(self) -> Window | None:
        return self._runs.window

    def _notes(self) -> list[str]:
        told = []
        if self._runs.has_compiled_function:
            told.append("a function was compiled: modules were not looked at, only parameters, gradients and losses")
        for model in self._models.all:
            if model.is_compiled:
                told.append(f"{model.name} is compiled: inside it only parameters and their gradients were looked at")
        return told

    # processes

    def before_fork(self) -> None:
        if self.is_open:
            self.desk.pause()  # a lock that another thread holds would be held for ever in the child

    def in_child(self) -> None:
        """A forked child (a DataLoader's worker) is not watched."""
        if self.is_open:
            self.desk.abandon()
            self._remove()


def _follow_forks(watcher: Watcher) -> None:
    _OPEN.add(watcher)
    if not _IS_FOLLOWED:  # cannot be taken back: once a process, and only where something is watched
        _IS_FOLLOWED.append(True)
        os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _before_fork() -> None:
    for one in list(_OPEN):
        one.before_fork()


def _in_child() -> None:
    for one in list(_OPEN):
        one.in_child()
