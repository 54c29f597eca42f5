"""Hooks on a process's models: which calls come from outside any model, and what returns inside of them.

Nothing is judged here: what happens is told to ``CallsTold``, in the thread in which it happens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.resolve import unwrap
from gaff.compat import autograd
from gaff.engine.exported import try_run_as
from gaff.engine.process.calls import ClassCalls, ModuleHooks
from gaff.training.watch.compiled import InsideCompiled
from gaff.training.watch.models import Model, Models
from gaff.training.watch.shield import Shield


@dataclass(frozen=True, slots=True)
class CallsTold:
    """What to call as models run."""

    found: Callable[[Model], None]  # one that nobody has named
    # an outermost call, with what it is given, and whether hooks on the module are past already
    begins: Callable[[Model, nn.Module, Any, Any, bool], None]
    ends: Callable[[Model, nn.Module], None]
    ends_late: Callable[[], None]
    left: Callable[[nn.Module, Any, Any, dict[int, Tensor] | None], None]  # any module has returned, while hooks are on


class ModelCalls:
    """Follows the calls of ``models``; finds new ones unless ``is_given``.

    Module hooks are on only while something is looked at. Compiled models have hooks of their own, inside their graphs.
    """

    def __init__(self, models: Models, told: CallsTold, shield: Shield, *, is_given: bool) -> None:
        self.has_compiled_function = False
        self._models = models
        self._told = told
        self._shield = shield
        self._is_given = is_given
        self._calls = ClassCalls(self._called)
        self._hooks = ModuleHooks(self._entered, self._left)
        self._known: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()
        self._inside: nn.Module | None = None  # the outermost module in progress
        self._hooked: nn.Module | None = None  # the same where only a hook has told of it
        self._expected: set[type] = set()
        self._is_on = False  # somebody looks
        self._inside_compiled = InsideCompiled(models, self._left)
        self._graphs = ExitStack()  # exported ones that run as trees of modules

    def _expect(self, kind: type) -> None:
        """Modules of this class must be known before they are called, for hooks would be seen by what they compile."""
        self._calls.follow(kind)
        self._expected.add(kind)

    def know(self, model: Model, module: nn.Module) -> None:
        """Calls of ``module`` are runs of ``model``."""
        for one in (module, unwrap(module)):
            if one not in self._known:
                self._known[one] = model
                self._calls.follow(type(one))

    def look(self, *, is_on: bool) -> None:
        """Let every module that returns be told of; off: no hook is left."""
        self.switch(is_on=is_on)
        self._graphs.close()
        if is_on:
            try_run_as([tree for model in self._models.all for tree in model.graphs], self._graphs)
        for model in self._models.all:
            self._inside_compiled.look(model, is_on=is_on)

    def switch(self, *, is_on: bool) -> None:
        """Hooks on all modules: not where compiled code would meet them, and be compiled once more."""
        if is_on and not self.has_compiled_function and not self._inside_compiled.is_needed():
            self._hooks.switch_on()
        else:
            self._hooks.switch_off()

    def look_inside(self, model: Model, *, is_on: bool) -> None:
        """Hooks in the compiled code of one model, where it has some."""
        if self._inside_compiled.is_needed():
            self._hooks.switch_off()
            self._inside_compiled.look(model, is_on=is_on)

    def left_model(self) -> None:
        """Backward or a step has begun: no model is running, whatever an exception has left."""
        self._inside = self._hooked = None

    def compiled(self, function: Any) -> None:
        """``torch.compile`` was called: its code must not see hooks on all modules, or it would be compiled once more.

        ``function``: what was compiled, or what a module has become. Modules of the user's know that they are compiled.
        """
        if isinstance(function, nn.Module):
            self._expect(type(function))
        elif not isinstance(getattr(function, "__self__", None), (torch.optim.Optimizer, nn.Module)):
            self.has_compiled_function = True
            self._hooks.switch_off()

    def pause(self) -> Callable[[], None]:
        """Nobody is told of anything until what is returned is called."""
        was_on = self._hooks.is_on
        self._hooks.switch_off()
        self._shield.is_open = False

        def resume() -> None:
            self._shield.is_open = True
            if was_on:
                self._hooks.switch_on()

        return resume

    def close(self) -> None:
        """Nothing of ours stays on a class, a module or a graph."""
        self._hooks.switch_off()
        self._inside_compiled.close()
        self._graphs.close()
        self._calls.close()
        self._inside = self._hooked = None

    def _entered(self, module: nn.Module, args: Any) -> None:
        """Before any module, while hooks are on: an unknown outermost one may be a model that nobody has told of."""
        is_outermost = self._inside is None and self._shield.is_open and autograd.backward_task() == -1
        if is_outermost and self._shield.is_mine():
            self._inside = self._hooked = module
            self._shield.run(self._discover, module, args)

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
            self._told.found(model)
        self.know(model, module)
        if args is None:
            return
        self._told.begins(model, module, args, {}, True)
        if model.is_compiled:
            self._hooks.switch_off()
            self._inside = None

    def _left(self, module: nn.Module, args: Any, output: Any, stands: dict[int, Tensor] | None = None) -> None:
        self._shield.run(self._told.left, module, args, output, stands)
        if module is self._hooked:
            self._inside = self._hooked = None
            self._told.ends_late()

    def _called(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """A call of a module of a followed class: of an outermost one that is known, a run."""
        shield = self._shield
        is_outermost = shield.is_open and self._inside is None and autograd.backward_task() == -1  # no recomputation
        if is_outermost and type(module) in self._expected and module not in self._known and shield.is_mine():
            self._hooks.switch_off()
            shield.run(self._discover, module, None)
        model = self._known.get(module) if is_outermost else None
        if model is None or not shield.is_mine():
            return call(module, *args, **kwargs)
        self._inside = module
        shield.run(self._told.begins, model, module, args, kwargs, False)
        try:
            return call(module, *args, **kwargs)
        finally:
            self._inside = None
            shield.run(self._told.ends, model, module)
