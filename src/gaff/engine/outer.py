"""What happens around the models of a process: calls from outside any module, backward passes, optimizer steps.

Nothing here sits on a module or a tensor of the user's, so nothing of it is copied, pickled, exported or scripted.
While no module hook is asked for, only the calls of known outermost modules cost anything: their class's ``__call__``
is wrapped, for a hook on the module would switch fused paths off and travel with its pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gaff import compat
from gaff.engine.steps import is_nested_step


class Calls:
    """Calls ``around(module, args, kwargs, call)`` instead of each call of a module of the classes that it follows.

    ``around`` makes the call itself, with ``call()``. Modules called inside traced or compiled code are left alone.
    """

    def __init__(self, around: Callable[[nn.Module, Any, Any, Callable[..., Any]], Any]) -> None:
        self._around = around
        self._classes: dict[type, tuple[Any, Any]] = {}  # ours, and the ``__call__`` of their own if they had one

    def follow(self, kind: type) -> None:
        """Also modules of this class, whose ``__call__`` is wrapped."""
        if kind in self._classes:
            return
        original = kind.__call__
        around = self._around

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            return around(module, args, kwargs, original)

        self._classes[kind] = __call__, kind.__dict__.get("__call__")
        kind.__call__ = __call__  # type: ignore[method-assign]

    def close(self) -> None:
        for kind, (ours, own) in self._classes.items():
            if kind.__dict__.get("__call__") is not ours:
                continue  # somebody has wrapped it since, and calls ours
            if own is not None:
                kind.__call__ = own  # type: ignore[method-assign]
            else:
                del kind.__call__
        self._classes.clear()


class ModuleHooks:
    """Global hooks, on and off: ``entered(module, args)`` before, ``left(module, args, output)`` after a forward.

    Global ones do not switch off the fused paths of torch's transformer layers; what runs inside those is not seen.
    """

    def __init__(self, entered: Callable[[nn.Module, Any], None], left: Callable[[nn.Module, Any, Any], None]) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                entered(module, args)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                left(module, args, output)

        self._enter = enter
        self._leave = leave
        self._handles: list[Any] = []

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def switch_on(self) -> None:
        if not self._handles:
            self._handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]

    def switch_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


@dataclass(frozen=True, slots=True)
class Told:
    """What to call as a training run goes on; see ``Outer``."""

    backward_begins: Callable[[Any], None]  # with the tensors it begins from
    step_begins: Callable[[Any, bool], None]  # with the optimizer, and whether it was given a closure
    step_ended: Callable[[Any], None]
    step_skipped: Callable[[Any], None]  # by a GradScaler
    loss_scaled: Callable[[Any, Any, Any], None]  # with the loss, what it has become, and the GradScaler
    function_compiled: Callable[[Any], None]


class Outer:
    """Tells ``told`` of every backward pass, optimizer step and scaled loss of the process, on any thread.

    Nested ones (a reentrant checkpoint's backward, ``super().step()``) are not told.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self._undo: list[Callable[[], None]] = []
        self._stepping: set[int] = set()  # optimizers inside a step
        self._finished = 0  # steps; to see that a GradScaler has made none

    def open(self) -> None:
        self._undo.append(register_optimizer_step_pre_hook(self._step_begins).remove)
        self._undo.append(register_optimizer_step_post_hook(self._step_ended).remove)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.amp.GradScaler, "scale", self._scale)
        self._replace(torch.amp.GradScaler, "step", self._scaler_step)
        self._replace(torch, "compile", self._compile)

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        ours = make(original)
        ours.__doc__, ours.__name__, ours.__qualname__ = original.__doc__, name, original.__qualname__
        ours.__module__, ours.__wrapped__ = original.__module__, original
        setattr(owner, name, ours)

        def undo() -> None:
            if owner.__dict__.get(name) is ours:  # else somebody has wrapped it since, and calls ours
                setattr(owner, name, original)

        self._undo.append(undo)

    def _backward(self, original: Any) -> Any:
        told = self._told

        def backward(*args: Any, **kwargs: Any) -> Any:
            if compat.backward_task() != -1 or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            told.backward_begins(args[0] if args else kwargs.get("tensors"))
            return original(*args, **kwargs)

        return backward

    def _scale(self, original: Any) -> Any:
        told = self._told

        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and scaled is not outputs:
                told.loss_scaled(outputs, scaled, scaler)
            return scaled

        return scale

    def _scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._finished
            result = original(scaler, optimizer, *args, **kwargs)
            if self._finished == before:
                self._told.step_skipped(optimizer)
            return result

        return step

    def _compile(self, original: Any) -> Any:
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if model is not None and not isinstance(model, nn.Module):
                self._told.function_compiled(model)
            return original(model, *args, **kwargs)

        return compile

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepping and is_nested_step(optimizer):
            return
        self._stepping.add(id(optimizer))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._told.step_begins(optimizer, closure is not None)

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepping and is_nested_step(optimizer):
            return
        self._stepping.discard(id(optimizer))
        self._finished += 1
        found = getattr(optimizer, "found_inf", None)  # a GradScaler's, which fused optimizers read themselves
        if found is not None and bool(found.item()):
            self._told.step_skipped(optimizer)
        else:
            self._told.step_ended(optimizer)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module, or of one inside it, run compiled code."""
    return any(
        type(one).__name__ == "OptimizedModule" or getattr(one, "_compiled_call_impl", None) is not None
        for one in module.modules()
    )
