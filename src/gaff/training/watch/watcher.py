"""Watching a process that trains: which step is looked at, and who gets to know what it has shown.

All that is called from the user's code goes through ``guarded``: a failure of ours ends the watching, is told once,
and never reaches the training.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gaff.compat import compiler
from gaff.engine.process.calls import Outer, Told
from gaff.training.rules.registry import Rule
from gaff.training.watch import incidents, step_facts
from gaff.training.watch.flight_recorder import FlightRecorder
from gaff.training.watch.losses import Losses
from gaff.training.watch.model_calls import ModelCalls
from gaff.training.watch.models import Model, Models
from gaff.training.watch.optimizers import Optimizers
from gaff.training.watch.pace import Alone, Pace
from gaff.training.watch.reporter import Reporter
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.updates import Clearing, Update

_MOMENTS = 4  # what an optimizer keeps is read at every fourth look
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
    keep_batch: bool = False  # of steps in which something goes wrong, with the model's weights
    is_lazy: bool = False  # make the record when the first model is found
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
        self._recall = FlightRecorder(settings.out, keeps_batches=settings.keep_batch)
        self._alone = Alone()
        begins = self._alone.before(self._recall.begins)
        self._runs = ModelCalls(self._models, self, begins, is_given=models is not None)
        self._optimizers = Optimizers(optimizers, self._models, is_any=models is None)
        for name, model in (models or {}).items():
            self._models.select(model)
            self._runs.know(self._models.add(name, model), model)
        self.desk = Reporter(settings, self._recall)
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
                safely(self._compiled),
            )
        )
        self._updates: dict[int, Update] = {}
        self._skipped = 0
        self._in_a_row = 0  # skipped without a step in between
        self._since = 0.0
        self.ended_at: float | None = None  # the leader's step, until something else begins: others may follow it
        self._is_in_closure = False
        self._skipper: int | None = None  # the optimizer whose skipped steps count: others of the step skip theirs, too
        self._stepped: set[int] = set()  # optimizers that made theirs in it
        self._evaluated_at: int | None = None
        self._is_endless = False
        self._looks = -1
        self._is_examined = False  # where a NaN or inf began; only the first
        self._exit = partial(_close, weakref.ref(self))

    def open(self) -> None:
        self.is_open = True
        self._recall.follow_signal()
        self._since = perf_counter()
        self._runs.open()
        self._outer.open()
        _follow_forks(self)
        atexit.register(self._exit)
        for model in self._models.all:
            self.desk.model(model, 0)
        self._begin_window()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing of ours stays; a look at a step that has not ended is left out, and the record is finished."""
        atexit.unregister(self._exit)
        if not self.is_open:
            self._outer.close()  # a failure could not: torch was going through its hooks
            return
        self.guarded(self.step_over)
        self._end_window(is_whole=False)
        if error is not None and not isinstance(error, SystemExit):
            self._recall.keep(self.step, "exception", self._runs.batches)
        self._pulse(0.0)
        self._stop_looking()
        self._outer.close()
        self.desk.close(
            self.step,
            self.pace,
            (*self._models.missed, *_notes(self._models, self._runs, is_endless=self._is_endless), *self._recall.notes),
            error,
        )
        self._recall.close()

    def _stop_looking(self) -> None:
        """What is left of ours does nothing any more."""
        self.is_open = False
        self._runs.close()
        self._updates.clear()
        self._optimizers.forget()
        self._clearing.forget()

    def guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call it, if this is the thread that trains; no error of ours gets out."""
        if not self.is_open or not self._runs.is_mine():
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self._stop_looking()
            self.desk.fail(error, self.step)

    # what the runs tell

    def step_over(self) -> None:
        """Something new begins: what belongs to a step that has ended is complete, steps of other optimizers too."""
        if self.ended_at is not None and not self._is_in_closure:
            self._end_step(self.step + 1, self.ended_at)

    def model_found(self, model: Model) -> None:
        self.desk.model(model, self.step)

    def evaluated(self, window: SampledStep) -> None:
        self.pace.spend(window.cost_s)
        self._evaluated_at = self.step
        self.desk.look(window, {}, {})

    def may_evaluate(self) -> bool:
        """Whether an evaluation may be looked at: a teacher that runs in every step is one, too."""
        return self._evaluated_at is None or self.step - self._evaluated_at >= max(10, self.pace.distance)

    def step_is_endless(self) -> None:
        """So many runs without an optimizer's step that nobody can be training with one."""
        self._is_endless = True
        self._end_window(is_whole=True)

    def _compiled(self, function: Any) -> None:
        if isinstance(function, nn.Module):
            self._runs.expect(type(function))
            return
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, (torch.optim.Optimizer, nn.Module)):  # a module knows that it is compiled
            self._runs.stop_hooks()

    # backward passes and steps

    def _backward_begins(self, losses: Any) -> None:
        self._runs.left_model()
        self.step_over()
        self._alone.backward_begins()
        if self._window is not None:
            self._clearing.look()
        several = losses if isinstance(losses, (list, tuple)) else [losses]  # a generator is not ours to use up
        bad = ""
        for at, loss in enumerate(several):
            if isinstance(loss, Tensor) and loss.numel() == 1:
                spike = self._losses.note(loss, self._window, at)
                if spike is not None and not self._runs.is_rest():
                    spiked = incidents.of_spike(spike, self.step, self._runs.batches)
                    self.desk.add(self._recall.keep_for(spiked, self._runs.batches), self.step)
                bad = bad or (self._losses.latest if self._losses.is_nonfinite else "")
        if bad:
            self._find_origin(f"the loss {bad!r}", has_gradients=False)

    def _find_origin(self, what: str, *, has_gradients: bool) -> None:
        """Run the batches of this step again, once a run, to see where the NaN or inf began."""
        if not self._is_examined:
            self._is_examined = True
            self.is_open = False  # what is run again is not watched
            resume = self._runs.pause()
            try:
                finding, batch = incidents.of_nonfinite(
                    what, self.step, self._runs.batches, has_gradients=has_gradients
                )
            finally:
                self.is_open = True
                resume()
            self.desk.add(self._recall.keep_for(finding, batch or self._runs.batches[-1:]), self.step)

    def _step_begins(self, optimizer: Any, has_closure: bool) -> None:
        self._runs.left_model()
        if not self._optimizers.has(optimizer):
            return
        self._is_in_closure = False
        if id(optimizer) in self._stepped:
            self.step_over()
        self._is_in_closure = has_closure  # what it runs belongs to this step
        if self._window is not None:
            began = perf_counter()
            has_moments = self._looks % _MOMENTS == 0
            update = Update(
                optimizer, self._models, self._window.bank, has_closure=has_closure, has_moments=has_moments
            )
            update.was_cleared = has_closure or self._clearing.was_cleared(optimizer)
            update.begin()
            self._updates[id(optimizer)] = update
            self._window.cost_s += perf_counter() - began
            bad = None if has_closure else self._window.nonfinite_gradient()
            if bad is not None:
                self._find_origin(f"the gradient {bad[1]}", has_gradients=True)

    def _step_ended(self, optimizer: Any) -> None:
        if not self._optimizers.has(optimizer):
            return
        self._is_in_closure = False
        is_end = self._optimizers.stepped(optimizer)
        self._in_a_row = 0
        if self._window is not None:
            began = perf_counter()
            update = self._updates.get(id(optimizer))
            if update is not None:
                update.end()
            self._window.cost_s += perf_counter() - began
        if is_end:
            self._losses.lr = next((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), math.nan)
            self._skipper = None
            self._stepped = {id(optimizer)}
            self.ended_at = now = perf_counter()
            self._recall.ended(self.step, now - self._since, self._losses, self._runs.samples)
            if self._optimizers.known == 1:  # else others may follow: their steps belong to the same
                self.step_over()
        elif self.ended_at is not None:
            self._stepped.add(id(optimizer))

    def _step_skipped(self, optimizer: Any) -> None:
        """A GradScaler has found gradients that are not finite: what the window has seen of them is its business."""
        if self._optimizers.has(optimizer):
            self.step_over()
            if self._skipper not in (None, id(optimizer)):
                return
            self._skipper = id(optimizer)
            self._skipped += 1
            self._in_a_row += 1
            if self._in_a_row == _STUCK:
                self.desk.add(incidents.of_stuck_scaler(self.step, self._losses.scale, self._in_a_row), self.step)
                self._find_origin("a gradient", has_gradients=True)
            self._runs.batches.clear()
            self._updates.clear()
            if self._window is not None:
                self._window.is_open = False
                self._begin_window()

    def _end_step(self, count: int, ended: float) -> None:
        now = perf_counter()
        seconds, self._since = ended - self._since, ended
        self.ended_at = None
        stepped, self._stepped = self._stepped, set()
        window = self._window
        self.pace.spend(self.desk.take_spent() + self._recall.take_spent())
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
        if self.pace.is_due(count) or self._recall.is_asked:
            self._begin_window(stepped)
        else:
            self._clearing.forget()
        self.desk.tick(count, self.pace)

    def _pulse(self, seconds: float) -> None:
        samples = self._runs.take_samples()
        if samples and not seconds:  # the run has ended in the middle of a step
            self._recall.ended(self.step, seconds, self._losses, samples)
        self.desk.pulse(self.step, seconds, self._losses, self._skipped, samples, self._alone.take(self._since))
        self._losses.forget()

    # windows

    def _begin_window(self, stepped: set[int] | None = None) -> None:
        """``stepped``: optimizers that have just made a step, whose gradients must be cleared; None: all."""
        for optimizer in self._optimizers.counts:
            if stepped is None or id(optimizer) in stepped:
                self._clearing.stepped(optimizer)
        self._models.is_fresh = False
        self._looks += 1
        self._runs.look(SampledStep(self.step, "train", self._models))

    def _end_window(self, *, is_whole: bool) -> None:
        window = self._window
        self._runs.look(None)
        if window is None:
            return
        window.close()
        if is_whole:
            window.facts.update(
                optimizers=len(self._optimizers.counts),
                skipped=self._skipped,
                scale=self._losses.scale,
                **self._losses.facts,
            )
            parameters = step_facts.parameters(
                self._models, self._updates.values(), self._optimizers.counts, window.modules_called
            )
            self.desk.look(window, parameters, self._losses.values())

    @property
    def _window(self) -> SampledStep | None:
        return self._runs.window

    # processes

    def in_child(self) -> None:
        """A forked child (a DataLoader's worker) is not watched."""
        if self.is_open:
            self.desk.abandon()
            self._recall.close()
            self._stop_looking()
            self._outer.close()


def _close(watcher: weakref.ref[Watcher]) -> None:
    """At the end of the process, for those that nobody has removed."""
    found = watcher()
    if found is not None:
        found.close(getattr(sys, "last_value", None))  # what has ended the process, if something was raised


def _follow_forks(watcher: Watcher) -> None:
    _OPEN.add(watcher)
    if not _IS_FOLLOWED:  # cannot be taken back: once a process, and only where something is watched
        _IS_FOLLOWED.append(True)
        os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _before_fork() -> None:
    for one in list(_OPEN):
        if one.is_open:
            one.desk.pause()  # a lock that another thread holds would be held for ever in the child


def _in_child() -> None:
    for one in list(_OPEN):
        one.in_child()


def _notes(models: Models, runs: ModelCalls, *, is_endless: bool) -> list[str]:
    """What was not looked at, and why."""
    told = []
    if is_endless:
        told.append("no optimizer's step came for long: the first runs were looked at, then no more")
    if runs.has_compiled_function:
        told.append("a function was compiled: modules were not looked at, only parameters, gradients and losses")
    for model in models.all:
        if model.is_compiled and not compiler.traces_gradient_hooks():
            told.append(f"{model.name} is compiled: inside it only parameters and their gradients were looked at")
    return told
