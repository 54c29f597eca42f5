"""Runs of models: which calls come from outside any model, in which mode, and which of them are looked at."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gaff.address.nested import iter_tensors, size_bytes
from gaff.address.resolve import unwrap
from gaff.compat import autograd, checkpoints
from gaff.engine.exported import try_run_as
from gaff.engine.process.calls import ClassCalls, ModuleHooks
from gaff.inspection.nonfinite.rerun import Batch
from gaff.training.watch import step_facts
from gaff.training.watch.compiled import InsideCompiled
from gaff.training.watch.models import Model, Models
from gaff.training.watch.sampled_step import SampledStep

_KEPT = 16  # batches of one step that are kept for a look at what went wrong: the last ones
_KEPT_BYTES = 1 << 28
_LOOKED_AT = (1, 10, 100, 1000, 10_000)  # runs of one evaluation
_MOST_RUNS = 256  # without any step


class Listener(Protocol):
    """Who is told of runs. ``guarded`` calls a function and never lets an error of it out."""

    step: int

    def guarded(self, action: Callable[..., None], *arguments: Any) -> None: ...

    def model_found(self, model: Model) -> None: ...

    def evaluated(self, window: SampledStep) -> None: ...

    def may_evaluate(self) -> bool: ...

    def step_is_endless(self) -> None: ...

    def step_over(self) -> None: ...


class ModelCalls:
    """Follows the calls of ``models``; finds new ones unless ``is_given``. Only on the thread that opened it."""

    def __init__(self, models: Models, listener: Listener, begins: Callable[[Batch], None], *, is_given: bool) -> None:
        self._begins = begins
        self.batches: list[tuple[Model, Batch]] = []  # of the step in progress
        self.window: SampledStep | None = None  # of the step in progress, if it is looked at
        self.has_compiled_function = False
        self._models = models
        self._listener = listener
        self._is_given = is_given
        self._calls = ClassCalls(self._called)
        self._hooks = ModuleHooks(self._entered, self._left)
        self._known: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()
        self._target: SampledStep | None = None  # of what is called now
        self._inside: nn.Module | None = None  # the outermost module in progress
        self._hooked: nn.Module | None = None  # the same where only a hook has told of it
        self._expected: set[type] = set()
        self._thread = 0
        self._is_open = False
        self._evals = 0  # runs without gradients since the last one with
        self._size = self._largest = 0  # of batches
        self._samples = 0  # that models were trained on in the step in progress
        self._latest_eval = 0  # step of the latest of them
        self._in_training_mode: dict[str, int] = {}  # how many of them, by model
        self._inside_compiled = InsideCompiled(models, self._left)
        self._graphs = ExitStack()  # exported ones that run as trees of modules

    def open(self) -> None:
        self._is_open = True

    def expect(self, kind: type) -> None:
        """Modules of this class must be known before they are called, for hooks would be seen by what they compile."""
        self._calls.follow(kind)
        self._expected.add(kind)

    def is_mine(self) -> bool:
        """Whether this is the thread that trains: the first from which anything was told."""
        here = threading.get_ident()
        self._thread = self._thread or here
        return self._thread == here

    def close(self) -> None:
        self._is_open = False
        self._hooks.switch_off()
        self._inside_compiled.close()
        self._graphs.close()
        self._calls.close()
        if self.window is not None:
            self.window.is_open = False
        self.window = self._target = self._inside = None
        self.batches.clear()

    def know(self, model: Model, module: nn.Module) -> None:
        """Calls of ``module`` are runs of ``model``."""
        for one in (module, unwrap(module)):
            if one not in self._known:
                self._known[one] = model
                self._calls.follow(type(one))

    def look(self, window: SampledStep | None) -> None:
        """From now on runs in training mode go to ``window``; None: to nobody, and no hook is left."""
        self.window = self._target = window
        self._switch(is_on=window is not None)
        self._graphs.close()
        if window is not None:
            try_run_as([tree for model in self._models.all for tree in model.graphs], self._graphs)
        for model in self._models.all:
            self._inside_compiled.look(model, is_on=window is not None)

    def _switch(self, *, is_on: bool) -> None:
        """Hooks on all modules: not where compiled code would meet them, and be compiled once more."""
        if is_on and not self.has_compiled_function and not self._inside_compiled.is_needed():
            self._hooks.switch_on()
        else:
            self._hooks.switch_off()

    def left_model(self) -> None:
        """Backward or a step has begun: no model is running, whatever an exception has left."""
        self._inside = self._hooked = None

    def is_rest(self) -> bool:
        """Whether the latest batch is less than half of the largest: the rest of a data set, whose loss is noisier."""
        return bool(self.batches) and 2 * self._size < self._largest

    @property
    def samples(self) -> int:
        """That models were given since they were last taken, in training mode."""
        return self._samples

    def take_samples(self) -> int:
        """How many samples models were given since the last time, in training mode."""
        samples, self._samples = self._samples, 0
        return samples

    def stop_hooks(self) -> None:
        """Compiled code must not see hooks: it would be compiled once more."""
        self.has_compiled_function = True
        self._hooks.switch_off()

    def pause(self) -> Callable[[], None]:
        """Nobody is told of anything until what is returned is called."""
        was_on, self._is_open = self._hooks.is_on, False
        self._hooks.switch_off()

        def resume() -> None:
            self._is_open = True
            if was_on:
                self._hooks.switch_on()

        return resume

    def _entered(self, module: nn.Module, args: Any) -> None:
        """Before any module, while hooks are on: an unknown outermost one may be a model that nobody has told of."""
        if self._inside is None and self._is_open and autograd.backward_task() == -1 and self.is_mine():
            self._inside = self._hooked = module
            self._listener.guarded(self._discover, module, args)

    def _discover(self, module: nn.Module, args: Any) -> None:
        """``args``: None where the call is still to begin."""
        if module in self._known or type(module).__module__.startswith("gaff."):
            return
        entry = self._models.entries.get(module)
        if entry is not None:  # a part that is called by itself, such as an encoder
            model = self._models.named(entry.model)
        else:
            found = None if self._is_given else self._models.find(module)
            if found is None:
                return
            model = found
            self._listener.model_found(model)
        self.know(model, module)
        if args is None:
            return
        self._listener.step_over()
        if _phase(module) == "train":
            self._begin_train(model, module, args, {})
        else:
            self._target = None  # too late for a look: its hooks are past
        if model.is_compiled:
            self._hooks.switch_off()
            self._inside = None

    def _left(self, module: nn.Module, args: Any, output: Any, stands: dict[int, Tensor] | None = None) -> None:
        if self._target is not None and self._is_open and self.is_mine():
            self._listener.guarded(self._target.left, module, args, output, stands)
        if module is self._hooked:
            self._inside = self._hooked = None
            self._target = self.window

    def _called(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """A call of a module of a followed class: of an outermost one that is known, a run."""
        is_outermost = self._is_open and self._inside is None and autograd.backward_task() == -1  # no recomputation
        if is_outermost and type(module) in self._expected and module not in self._known and self.is_mine():
            self._hooks.switch_off()
            self._listener.guarded(self._discover, module, None)
        model = self._known.get(module) if is_outermost else None
        if model is None or not self.is_mine():
            return call(module, *args, **kwargs)
        self._inside = module
        self._listener.guarded(self._begin, model, module, args, kwargs)
        state = torch.get_rng_state() if self._target is not None and self._target.phase == "eval" else None
        try:
            return call(module, *args, **kwargs)
        finally:
            self._inside = None
            self._listener.guarded(self._end, model, module, state)

    def _begin(self, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._listener.step_over()
        if _phase(module) == "train":
            self._begin_train(model, module, args, kwargs)
        else:
            self._begin_eval(model, module, args, kwargs)
        if self._inside_compiled.is_needed():
            self._hooks.switch_off()
            self._inside_compiled.look(model, is_on=self._target is not None or self.window is not None)

    def _begin_train(self, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._evals = 0
        self._in_training_mode.clear()
        window = self._target = self.window
        if window is not None and window.runs >= _MOST_RUNS and self._listener.step == 0:
            self._listener.step_is_endless()
            window = None
        if window is not None:
            window.root_given(model.name, args, kwargs)
            window.facts.setdefault("batch", step_facts.batch_size(args, kwargs))
            window.facts.setdefault("precision", step_facts.precision(module))
            window.facts.setdefault("fingerprint", step_facts.fingerprint(args, kwargs))
        self.batches.append((model, Batch.of(args, kwargs)))
        self._begins(self.batches[-1][1])
        while len(self.batches) > 1 and (len(self.batches) > _KEPT or _bytes_of(self.batches) > _KEPT_BYTES):
            del self.batches[0]
        self._size = step_facts.batch_size(args, kwargs)
        self._samples += self._size * any(True for _ in iter_tensors((args, kwargs)))  # keywords are not always seen
        self._largest = max(self._largest, self._size)

    def _begin_eval(self, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The first run of each evaluation is looked at, and then ever fewer."""
        self._evals += 1
        since = self._listener.step - self._latest_eval
        self._latest_eval = self._listener.step
        if module.training and not torch.is_grad_enabled():
            self._in_training_mode[model.name] = self._in_training_mode.get(model.name, 0) + 1
        self._target = None
        if self._evals in _LOOKED_AT and (self._evals > 1 or self._listener.may_evaluate()):
            window = self._target = SampledStep(self._listener.step, "eval", self._models)
            window.facts["training"] = module.training
            often = self._in_training_mode.get(model.name, 0)  # a rollout or teacher in each step is no evaluation
            if (often >= 10 or (often and since >= 5)) and step_facts.has_modes(module):
                window.facts["train_mode"] = [model.name]
            window.root_given(model.name, args, kwargs)
            self._switch(is_on=True)

    def _end(self, model: Model, module: nn.Module, state: Tensor | None) -> None:
        target = self._target
        if target is not None and target.phase == "eval":
            if state is not None and not module.training and not torch.equal(state, torch.get_rng_state()):
                target.facts["random_in_eval"] = [model.name]
            target.close()
            self._listener.evaluated(target)
            self._inside_compiled.look(model, is_on=self.window is not None)
        self._target = self.window  # for what a checkpoint recomputes
        self._switch(is_on=self.window is not None)


def _phase(module: nn.Module) -> str:
    if not module.training:
        return "eval"
    return "train" if torch.is_grad_enabled() or checkpoints.enclosing_functions() else "eval"  # inside a checkpoint


def _bytes_of(batches: Iterable[tuple[Model, Batch]]) -> int:
    return sum(size_bytes(tensor) for _, batch in batches for _, tensor in iter_tensors((batch.args, batch.kwargs)))
