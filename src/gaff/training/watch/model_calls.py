"""Hooks on a process's models: which calls come from outside any model, and what returns inside of them.

Nothing is judged here: what happens is told to ``CallsTold``, in the thread in which it happens. Two ways lead in. The
class of each known outermost model has its ``__call__`` wrapped for as long as it is watched, which costs one call a
run (``_called``). In steps that are looked at torch's global module hooks are on besides (``_entered``, ``_left``), by
which modules inside are seen, and models that nobody has told of.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from gaff.address.resolve import unwrap
from gaff.compat import autograd, compiler, modes
from gaff.engine.exported import try_run_as
from gaff.engine.process import stack_room
from gaff.engine.process.calls import ClassCalls, ModuleHooks, Passing, is_compiled
from gaff.training.watch.compiled import InsideCompiled
from gaff.training.watch.models import Model, Models
from gaff.training.watch.shield import FRAMES, Shield

_AROUND = 2  # frames between a program and its model: ``_Call.__call__`` and ``_called``
_HOOK = 4  # frames from a hook to where there is room: ``enter``, ``_entered``, ``widen`` and what that calls


@dataclass(frozen=True, slots=True)
class CallsTold:
    """What to call as models run: the methods of the watcher, each called through the shield."""

    # an outermost call, with what it is given, and whether hooks on the module are past already
    begins: Callable[[Model, nn.Module, Any, Any, bool], None]
    is_idle: Callable[[], bool]  # whether the end of a run interests nobody; not called through the shield
    ends: Callable[[Model, nn.Module, Any], None]  # such a call, and what it returned; None where it raised
    ends_late: Callable[[], None]
    left: Callable[[nn.Module, Any, Any, dict[int, Tensor] | None], None]  # any module has returned, while hooks are on


class ModelCalls:
    """Follows the calls of ``models``, and finds new ones unless they were given.

    The watcher makes it, tells it when to ``look``, and closes it. Module hooks are on only while something is looked
    at; compiled models have hooks of their own, inside their compiled code. One call is outermost at a time: what is
    called inside it, in a backward pass or on another thread opens no run.
    """

    def __init__(self, models: Models, told: CallsTold, shield: Shield) -> None:
        self.has_compiled_function = False
        self._models = models
        self._told = told
        self._shield = shield
        self._calls = ClassCalls(self._called, self._wants)
        self._hooks = ModuleHooks(self._entered, self._left)
        self._known: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()
        self._inside: nn.Module | None = None  # the outermost module in progress
        self._hooked: nn.Module | None = None  # the same where only a hook has told of it
        self._hooked_by = stack_room.RunningFunction(0, None)  # torch's, which called the hook, and then the module
        self._expected: dict[type, bool] = {}  # classes of models still to be found, and whether these are compiled
        self.passing = Passing()  # runs that are only counted
        self._inside_compiled = InsideCompiled(models, self._left)
        self._graphs = ExitStack()  # exported ones that run as trees of modules
        self._unheard = compiler.on_compiling(self._compiling)
        if (wrapper := compiler.wrapper_class()) is not None:  # somebody may have compiled a model before
            self._expect(wrapper)

    def _expect(self, kind: type) -> None:
        """Follow a class that was compiled, so that its modules are known as models before they first run.

        A model that was found only by a global hook, in the middle of its first call, would be compiled with that hook.
        """
        self._calls.follow(kind)
        self._expected[kind] = True

    def know(self, model: Model, module: nn.Module) -> None:
        """Count calls of ``module`` as runs of ``model`` from now on, and those of what is inside wrappers such as DDP.

        The modules are held weakly. Their classes' ``__call__`` is wrapped until ``close``.
        """
        for one in (module, unwrap(module)):
            if one not in self._known:
                self._known[one] = model
                self._calls.follow(type(one))
                if not self._models.is_given and not type(one).__module__.startswith("torch."):
                    self._expected.setdefault(type(one), False)  # others of it may follow, one for each fold

    def look(self, *, is_on: bool) -> None:
        """Let every module that returns be told of, or, with ``is_on`` false, leave no hook on.

        Exported graphs run as trees of modules meanwhile, since they would call no module.
        """
        self.passing.left = 0
        self.switch(is_on=is_on)
        self._graphs.close()
        if is_on:
            try_run_as([tree for model in self._models.all for tree in model.graphs], self._graphs)
        for model in self._models.all:
            self._inside_compiled.look(model, is_on=is_on)

    @property
    def is_on(self) -> bool:
        """Whether hooks are on just now that must be switched off again, global ones or those in compiled code."""
        return self._hooks.is_on or self._inside_compiled.is_needed()

    def switch(self, *, is_on: bool) -> None:
        """Put torch's global module hooks on or take them off.

        They stay off where code is compiled: it would be compiled with them, and once more without.
        """
        if is_on and not self.has_compiled_function and not self._inside_compiled.is_needed():
            self._hooks.switch_on()
        else:
            self._hooks.switch_off()

    def look_inside(self, model: Model, *, is_on: bool) -> None:
        """Switch the hooks in the compiled code of one model on or off; global hooks go off where there is any."""
        if self._inside_compiled.is_needed():
            self._hooks.switch_off()
            self._inside_compiled.look(model, is_on=is_on)

    def count_only(self, runs: int, *, trains: bool) -> None:
        """Let as many of the next runs like the one in progress only be counted: a step may have hundreds.

        What else happens ends it: a backward pass, a step, a look.
        """
        is_compiled = self._inside_compiled.is_needed() or self.has_compiled_function
        if runs and self._inside is not None and not is_compiled:
            self.passing.begin(self._inside, runs, trains=trains)
            self._calls.pass_over(type(self._inside), self.passing)

    def left_model(self) -> None:
        """Note that backward or a step has begun: no model is running, whatever a call that raised has left noted."""
        if self._hooked is not None:
            stack_room.settle()
        self._inside = self._hooked = None
        self.passing.left = 0

    def compiled(self, function: Any) -> None:
        """Note that ``torch.compile`` was called: its code must not see hooks on all modules, or be compiled once more.

        ``function``: what was compiled, or what a module has become. Compiled modules are expected, and told by hooks
        of their own once they run. Where a function was compiled that is no method of a module or an optimizer, nobody
        can tell which modules it calls, and module hooks stay off for the rest of the run.
        """
        if isinstance(function, nn.Module):
            self._expect(type(function))
        elif not isinstance(getattr(function, "__self__", None), (torch.optim.Optimizer, nn.Module)):
            self.has_compiled_function = True
            self._hooks.switch_off()

    def _compiling(self) -> None:
        """Code is about to be compiled, on any thread: it must not see hooks on all modules; the rest of this look does
        without. Code that was compiled without them has no guard that would notice them later."""
        self._hooks.switch_off()

    def pause(self) -> Callable[[], None]:
        """Tell nobody of anything until the returned function is called: gaff is about to run a model itself."""
        was_on = self._hooks.is_on
        self._hooks.switch_off()
        self._shield.is_open = False

        def resume() -> None:
            self._shield.is_open = True
            if was_on:
                self._hooks.switch_on()

        return resume

    def close(self) -> None:
        """Take all hooks and wrappers away: nothing of gaff's stays on a class, a module or an exported graph."""
        self._unheard()
        self._hooks.switch_off()
        self._inside_compiled.close()
        self._graphs.close()
        self._calls.close()
        self.left_model()
        stack_room.settle()

    def _entered(self, module: nn.Module, args: Any) -> None:
        """Before any module, while global hooks are on: see whether an unknown outermost one is a model.

        A known model's call has been noted by ``_called`` before this hook runs, so that ``_inside`` is not None then.
        """
        if not self._shield.is_open or not self._shield.is_of_mine(module, self._inside):
            return
        room = stack_room.widen(FRAMES)
        self._forget_raised(is_hook=True)
        is_again = autograd.backward_task() != -1  # a recomputation, which may stop early and tell no end
        kept = 0 if is_again else 1  # torch calls a module by one frame more where there are hooks
        if self._inside is None and not is_again:
            kept += _HOOK
            self._hooked_by = stack_room.RunningFunction.of(2)
            self._inside = self._hooked = module
            self._shield.run(self._discover, module, args)
        stack_room.narrow(room - kept)

    def _discover(self, module: nn.Module, args: Any) -> None:
        """Make an outermost module known as a run of a model, if it is one, and tell that its run has begun.

        ``args``: what it was called with; None where the call is still to begin, and will be told by ``_called``. A
        part of a known model that is called by itself, such as an encoder, counts as a run of that model. Modules of
        gaff's own and those without parameters and buffers, such as a loss, are passed over; so are all new ones if the
        models were given, and in a worker of a DataLoader, which may use a model to get its data ready.
        """
        if module in self._known or type(module).__module__.startswith("gaff.") or get_worker_info() is not None:
            return
        entry = self._models.entries.get(module) or self._models.entries.get(unwrap(module))
        if entry is not None:  # a part that is called by itself, such as an encoder, or what was compiled since
            model = self._models.named(entry.model)
            model.is_compiled = model.is_compiled or is_compiled(module)
        else:
            found = None if self._models.is_given else self._models.find(module)
            if found is None:
                return
            model = found
        self.know(model, module)
        if args is None:
            return
        call = modes.nearest_call(sys._getframe(1))  # torch's, which has not told the hook of keywords
        kwargs = call.f_locals.get("kwargs") if call is not None and call.f_locals.get("self") is module else None
        self._told.begins(model, module, args, dict(kwargs or {}), True)
        if model.is_compiled:
            self._hooks.switch_off()
            self._inside = None

    def _left(self, module: nn.Module, args: Any, output: Any, stands: dict[int, Tensor] | None = None) -> None:
        """After any module, while hooks are on, global ones or those in compiled code: tell it.

        ``stands`` is that of ``SampledStep.left``. The end of a run that only a hook has told of is told here, too,
        since its class was not wrapped when it was called.
        """
        self._shield.run(self._told.left, module, args, output, stands)
        if stands is None and self._shield.is_mine() and autograd.backward_task() == -1:
            stack_room.narrow(1)
        if (
            module is self._hooked and stack_room.RunningFunction.of(2).depth == self._hooked_by.depth
        ):  # not inside itself
            self._inside = self._hooked = None
            self._shield.run(self._told.ends_late)
            stack_room.settle()

    def _forget_raised(self, *, is_hook: bool = False) -> None:
        """Note that a model which only a hook has told of has raised, if it has: nobody tells that it has ended.

        ``is_hook``: asked by a hook, which torch calls from where the other one was called if it is no deeper.
        """
        if self._hooked is None:
            return
        known = self._hooked_by
        if not known.is_running() or (is_hook and stack_room.RunningFunction.of(3).depth <= known.depth):
            self.left_model()

    def _wants(self, module: nn.Module) -> bool:
        """Whether a call of this module, made now, may be an outermost one of a known model."""
        self._forget_raised()
        if self._inside is not None or self.passing.is_inside or not self._shield.is_open:
            return False
        return module in self._known or type(module) in self._expected

    @stack_room.passed_over
    def _called(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """Make a call of a module of a followed class; if it is the outermost one of a known model, it is a run.

        Stands around ``call``, on whatever thread. What the module raises passes through, and the run is told to have
        ended. A forward that a checkpoint repeats runs inside a backward pass and is no run.
        """
        shield = self._shield
        if self._inside is not None or not shield.is_open or autograd.backward_task() != -1:  # the last: recomputed
            return call(module, *args, **kwargs)
        if type(module) in self._expected and module not in self._known and shield.is_of_mine(module):
            if self._expected[type(module)]:
                self._hooks.switch_off()
            shield.run(self._discover, module, None)
        model = self._known.get(module)
        if model is None or not shield.is_of_mine(module):
            return call(module, *args, **kwargs)
        self._inside = module
        self.passing.left = 0
        stack_room.widen(_AROUND + _HOOK)
        shield.run(self._told.begins, model, module, args, kwargs, False)
        output = None
        try:
            output = call(module, *args, **kwargs)
            return output
        finally:
            self._inside = None if shield.is_mine() else self._inside  # another thread may have come to train meanwhile
            if not self._told.is_idle():
                shield.run(self._told.ends, model, module, output)
            stack_room.settle()
