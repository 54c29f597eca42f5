"""Watching a process that trains: which step is looked at, and who gets to know what it has shown.

All that is called from the user's code goes through ``_guarded``: a failure of ours ends the watching, is told once,
and never reaches the training.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gaff.engine.outer import Calls, ModuleHooks, Outer
from gaff.health.rerun import Batch
from gaff.health.rules import Rule
from gaff.select import unwrap
from gaff.watching import facts, trouble
from gaff.watching.desk import Desk
from gaff.watching.losses import Losses
from gaff.watching.models import Model, Models
from gaff.watching.pace import Pace
from gaff.watching.updates import Clearing, Update, parameters_of
from gaff.watching.window import Window

_STUCK = 17  # skipped steps in a row: sixteen halvings lead a GradScaler from its first scale to 1
_KEPT = 16  # batches of one step that are kept for a look at what went wrong


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
        self._models = Models(settings.only, settings.skip)
        self._is_given = models is not None
        self._optimizers = list(optimizers)
        self._desk = Desk(settings)
        self._pace = Pace(settings.budget, settings.every)
        self._losses = Losses()
        self._clearing = Clearing()
        self._outer = Outer(self)
        self._calls = Calls(self._called)
        self._hooks = ModuleHooks(self._entered, self._left)
        self._known: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()  # called from outside
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps, by optimizer
        self._window: Window | None = None
        self._target: Window | None = None  # of what is called now
        self._updates: dict[int, Update] = {}
        self._batches: list[tuple[Model, Batch]] = []
        self._inside: nn.Module | None = None  # the outermost module in progress
        self._thread = 0
        self._skipped = 0
        self._in_a_row = 0  # skipped without a step in between
        self._evals = 0  # runs without gradients since the last step
        self._eval_modes: dict[str, int] = {}
        self._since = 0.0
        self._has_compiled_function = False
        self._is_examined = False  # where a NaN or inf began; only the first
        for name, model in (models or {}).items():
            self._models.select(model)
            self._know(self._models.add(name, model), model)

    def open(self) -> None:
        self.is_open = True
        self._since = perf_counter()
        self._thread = threading.get_ident()
        self._outer.open()
        _follow_forks(self)
        self._begin_window()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing of ours stays; what was seen of the last step is kept, and the record is finished."""
        if not self.is_open:
            return
        self._end_window(is_whole=False)
        self._pulse(0.0)
        self._remove()
        missed = tuple(self._models.missed)
        self._desk.close(self.step, self._pace, (*missed, *self._notes()), error)

    @property
    def desk(self) -> Desk:
        return self._desk

    @property
    def pace(self) -> Pace:
        return self._pace

    def _remove(self) -> None:
        self.is_open = False
        self._hooks.switch_off()
        self._calls.close()
        self._outer.close()
        if self._window is not None:
            self._window.is_open = False
        self._window = self._target = None
        self._batches.clear()
        self._updates.clear()

    def _guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.is_open:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self._remove()
            self._desk.fail(error, self.step)

    # what the engine tells

    def backward_begins(self, losses: Any) -> None:
        self._guarded(self._backward_begins, losses)

    def backward_ended(self) -> None:
        pass

    def step_begins(self, optimizer: Any, has_closure: bool) -> None:
        self._guarded(self._step_begins, optimizer, has_closure)

    def step_ended(self, optimizer: Any) -> None:
        self._guarded(self._step_ended, optimizer)

    def step_skipped(self, optimizer: Any) -> None:
        self._guarded(self._step_skipped, optimizer)

    def loss_scaled(self, loss: Any, scaled: Any, scaler: Any) -> None:
        self._guarded(self._losses.note_scale, loss, scaled, scaler)

    def function_compiled(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (torch.optim.Optimizer, nn.Module)):
            return  # steps are told in any case; a module knows that it is compiled
        self._has_compiled_function = True
        self._hooks.switch_off()

    # calls of models

    def _entered(self, module: nn.Module, args: Any) -> None:
        """Before any module, while hooks are on: an unknown outermost one is a model that nobody has told us of."""
        if self._inside is None and threading.get_ident() == self._thread and not hasattr(module, "_is_replica"):
            self._inside = module
            self._guarded(self._discover, module, args)

    def _discover(self, module: nn.Module, args: Any) -> None:
        if module in self._known or type(module).__module__.startswith("gaff."):
            return
        entry = self._models.entries.get(module)
        if entry is not None:  # a part that is called by itself, such as an encoder
            model = self._models.named(entry.model)
        elif self._is_given:
            return
        else:
            found = self._models.find(module)
            if found is None:
                return
            model = found
            self._desk.model(model, self.step)
        self._know(model, module)
        if self._window is not None and self._phase(module) == "train":
            self._begin_run(model, module, args, {})

    def _know(self, model: Model, module: nn.Module) -> None:
        """Calls of ``module`` are runs of ``model``."""
        self._known[module] = model
        self._calls.follow(type(module))
        inner = unwrap(module)
        if inner is not module:
            self._known[inner] = model
            self._calls.follow(type(inner))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        target = self._target
        if target is not None:
            self._guarded(target.left, module, args, output)
        if module is self._inside:
            self._inside = None

    def _called(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """A call of a module of a followed class: of an outermost one, a run."""
        model = self._known.get(module) if self.is_open and self._inside is None else None
        if model is None or threading.get_ident() != self._thread:
            return call(module, *args, **kwargs)
        self._inside = module
        self._guarded(self._begin_run, model, module, args, kwargs)
        states = self._random_state if self._target is not None and self._target.phase == "eval" else None
        try:
            return call(module, *args, **kwargs)
        finally:
            self._inside = None
            self._guarded(self._end_run, model, module, states)

    @property
    def _random_state(self) -> Tensor:
        return torch.get_rng_state()

    def _phase(self, module: nn.Module) -> str:
        return "train" if torch.is_grad_enabled() and module.training else "eval"

    def _begin_run(self, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        phase = self._phase(module)
        if phase == "train":
            self._evals = 0
            self._eval_modes.clear()
            self._target = self._window
            if self._window is not None:
                self._window.root_given(model.name, args, kwargs)
                self._window.facts.setdefault("batch", facts.batch_size(args, kwargs))
                self._window.facts.setdefault("precision", facts.precision(module))
            if len(self._batches) < _KEPT:
                self._batches.append((model, Batch.of(args, kwargs)))
        else:
            self._begin_eval(model, module, args, kwargs)
        if model.is_compiled or self._has_compiled_function:
            self._hooks.switch_off()

    def _begin_eval(self, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The first run of each evaluation is looked at, and then ever fewer."""
        self._evals += 1
        if module.training and not torch.is_grad_enabled():
            self._eval_modes[model.name] = self._eval_modes.get(model.name, 0) + 1
        self._target = None
        if self._evals in (1, 10, 100, 1000, 10_000):
            self._target = Window(self.step, "eval", self._models)
            self._target.facts["training"] = module.training
            if self._eval_modes.get(model.name, 0) >= 10 and facts.has_dropout(module):
                self._target.facts["train_mode"] = [model.name]
            self._target.root_given(model.name, args, kwargs)
            self._hooks.switch_on()

    def _end_run(self, model: Model, module: nn.Module, state: Tensor | None) -> None:
        target = self._target
        if target is not None and target.phase == "eval":
            if state is not None and not module.training and not torch.equal(state, self._random_state):
                target.facts["random_in_eval"] = [model.name]
            target.close()
            self._desk.look(target, {}, {})
            self._target = None
        if self._window is None:
            self._hooks.switch_off()
        elif not self._has_compiled_function:
            self._hooks.switch_on()
            self._target = self._window  # for what a checkpoint recomputes

    # backward passes and steps

    def _backward_begins(self, losses: Any) -> None:
        self._inside = None
        if self._window is not None:
            self._clearing.look()
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            if isinstance(loss, Tensor) and loss.numel() == 1:
                spike = self._losses.note(loss, self._window)
                if spike is not None:
                    self._desk.add(trouble.of_spike(spike, self.step, self._batches), self.step)
        if self._losses.is_nonfinite:
            self._find_origin(f"the loss {self._losses.latest!r}", has_gradients=False)

    def _find_origin(self, what: str, *, has_gradients: bool) -> None:
        """Run the batches of this step again, once a run, to see where the NaN or inf began."""
        if not self._is_examined:
            self._is_examined = True
            self.is_open = False  # what is run again is not watched
            self._hooks.switch_off()
            try:
                finding = trouble.of_nonfinite(what, self.step, self._batches, has_gradients=has_gradients)
            finally:
                self.is_open = True
            if self._window is not None and not self._has_compiled_function:
                self._hooks.switch_on()
            self._desk.add(finding, self.step)

    def _is_counted(self, optimizer: Any) -> bool:
        if self._optimizers:
            return any(one is optimizer for one in self._optimizers)
        if not self._is_given:
            return True
        return any(self._models.name_of(parameter) for _, parameter in parameters_of(optimizer))

    def _step_begins(self, optimizer: Any, has_closure: bool) -> None:
        self._inside = None
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
                self._desk.add(trouble.of_stuck_scaler(self.step, self._losses.scale, self._in_a_row), self.step)
                self._find_origin("a gradient", has_gradients=True)
            self._batches.clear()
            self._updates.clear()
            if self._window is not None:
                self._window.is_open = False
                self._begin_window()

    def _end_step(self, count: int) -> None:
        now = perf_counter()
        seconds, self._since = now - self._since, now
        window = self._window
        self._pace.spend(self._desk.take_spent())
        if window is not None:
            self._end_window(is_whole=True)
        self._pulse(seconds)
        if window is not None:
            self._pace.looked(seconds, window.cost_s + perf_counter() - now)
        else:
            self._pace.passed(seconds)
        self.step = count
        self._batches.clear()
        self._updates.clear()
        if self._pace.is_due(count):
            self._begin_window()
        else:
            self._clearing.forget()
        self._desk.tick(count, self._pace)

    def _pulse(self, seconds: float) -> None:
        self._desk.pulse(self.step, seconds, self._losses, self._skipped)
        self._losses.forget()

    # windows

    def _begin_window(self) -> None:
        self._window = Window(self.step, "train", self._models)
        for optimizer in self._counts:
            self._clearing.stepped(optimizer)
        if not self._has_compiled_function:
            self._hooks.switch_on()
        self._target = self._window

    def _end_window(self, *, is_whole: bool) -> None:
        window = self._window
        self._window = self._target = None
        self._hooks.switch_off()
        if window is None:
            return
        window.close()
        if is_whole:
            window.facts.update(
                optimizers=len(self._counts), skipped=self._skipped, scale=self._losses.scale, **self._losses.facts
            )
            parameters = facts.parameters(self._models, self._updates.values(), self._counts, window.modules_called)
            self._desk.look(window, parameters, self._losses.values())

    def _notes(self) -> list[str]:
        told = []
        if self._has_compiled_function:
            told.append("a function was compiled: modules were not looked at, only parameters, gradients and losses")
        for model in self._models.all:
            if model.is_compiled:
                told.append(f"{model.name} is compiled: inside it only parameters and their gradients were looked at")
        return told

    # processes

    def before_fork(self) -> None:
        if self.is_open:
            self._desk.pause()  # a lock that another thread holds would be held for ever in the child

    def in_child(self) -> None:
        """A forked child (a DataLoader's worker) is not watched."""
        if self.is_open:
            self._desk.abandon()
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
