"""One run of a command with one thing changed, or with nothing changed, which ends after so many steps."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gaff.engine.force_eager import forced_eager
from gaff.engine.process.models import RootCalls
from gaff.engine.process.training_loop import Outer, Told
from gaff.record.experiments import Experiment
from gaff.training.diagnosis import changes, data
from gaff.training.diagnosis.changes import Change, LimitNorm
from gaff.training.watch.watcher import Watcher

MAKERS: Mapping[str, Callable[[Experiment], Change]] = {
    "lr": lambda one: changes.learning_rate(_value(one), is_factor=one.is_factor),
    "warmup": lambda one: changes.warmup(int(_value(one))),
    "clip": lambda one: changes.LimitNorm(_value(one)),
    "decay": lambda one: changes.weight_decay(_value(one)),
    "fp32": lambda one: changes.FullPrecision(),
    "train-mode": lambda one: changes.TrainMode(),
    "zero-grad": lambda one: changes.ClearGradients(),
    "unfreeze": lambda one: changes.Unfreeze(),
    "one-batch": lambda one: data.OneBatch(),
    "scramble": lambda one: data.Scramble(),
    "blind": lambda one: data.Blind(),
    "seed": lambda one: changes.Seed(int(_value(one))),
}


class Trial:
    """Changes one thing in this process from now on, and ends the process when an optimizer has made ``steps`` steps.

    ``experiment``: None for the run as it is. Steps that a GradScaler leaves out count. The process ends at once, with
    exit code 0 and its outputs flushed, as if it were killed: nothing that the script does after its steps is done,
    so that it writes no results of a run that was changed. Compiled code runs eagerly, in the run as it is, too.
    """

    def __init__(self, watcher: Watcher, experiment: Experiment | None, steps: int) -> None:
        self._watcher = watcher
        self._name = "" if experiment is None else experiment.name
        self._change = Change() if experiment is None else MAKERS[experiment.kind](experiment)
        self._most = steps
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        nothing: Callable[..., None] = lambda *given: None  # noqa: E731
        told = Told(nothing, self._stepping, self._stepped, self._count,
                    nothing, self._compiled)  # fmt: skip
        self._outer = Outer(told)
        self._calls = RootCalls(self._around)

    def open(self) -> None:
        """Install what is needed; to be called after the watcher was opened, which then sees steps as they are."""
        self._outer.open()
        self._calls.__enter__()
        self._change.install()
        atexit.register(self._tell)  # before the watcher closes: last in, first out

    def _around(self, module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An outermost call; those that train are changed: grad mode is on, and the module has parameters."""
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return call(*args, **kwargs)
        with ExitStack() as stack:
            args, kwargs = self._change.around(module, (args, kwargs), stack)
            output = call(*args, **kwargs)
            self._change.returned(output)
            return output

    def _compiled(self, function: Any) -> None:
        """Something was compiled: it runs eagerly, so that changes are seen by it, and little is spent on few steps."""
        if not forced_eager.is_held:
            forced_eager.__enter__()

    def _stepping(self, optimizer: Any, has_closure: bool) -> None:
        if has_closure and isinstance(self._change, LimitNorm):
            self._change.why_not = "the step is given a closure (as Lightning's are), inside which gradients come"
        else:
            self._change.before_step(optimizer)

    def _stepped(self, optimizer: Any) -> None:
        self._change.after_step(optimizer)
        self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        """Count a step that was made, or left out; the last one ends the process."""
        self._steps[optimizer] = number = self._steps.get(optimizer, 0) + 1
        if number >= self._most:
            self._end()

    def _tell(self) -> None:
        """Write into the record what was changed, and how often that made a difference."""
        why = "" if self._change.acted or not self._name else self._change.why_not
        step = self._watcher.steps_made
        self._watcher.reporter.tell("experiment", step, change=self._name, acted=self._change.acted, why_not=why)

    def _end(self) -> None:
        """Finish the record and end the process, without anything that Python or the script would still do."""
        self._tell()
        self._watcher.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
                stream.flush()
        os._exit(0)


def begin(told: Mapping[str, Any], watcher: Watcher) -> None:
    """Begin the trial that ``told`` describes: ``experiment``, its name or empty, and ``steps``."""
    experiment = Experiment.parse(told["experiment"]) if told["experiment"] else None
    Trial(watcher, experiment, int(told["steps"])).open()


def _value(experiment: Experiment) -> float:
    assert experiment.value is not None  # ``Experiment.parse`` has given it one
    return experiment.value
