"""What happens around the models of a process: calls from outside any module, backward passes, optimizer steps.

Nothing here sits on a module or a tensor of the user's, so nothing of it is copied, pickled, exported or scripted.
While no module hook is asked for, only the calls of known outermost modules cost anything: their class's ``__call__``
is wrapped, for a hook on the module would switch fused paths off and travel with its pickle. Each place is wrapped
once in a process, whoever asks, and is as it was when the last one has gone; traced and compiled code sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gaff.compat import autograd
from gaff.engine.process.optimizer import is_nested_step

Surround = Callable[[nn.Module, Any, Any, Callable[..., Any]], Any]


def is_hidden() -> bool:
    """Whether this code is being compiled, exported or traced: what is done now would become part of the result."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


class _Call:
    """In place of a class's ``__call__``. A class that is pickled by value with it gets ``nn.Module``'s own."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.own = kind.__dict__.get("__call__")
        self.arounds: list[Surround] = []

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        return self if module is None else MethodType(self, module)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.own or self._inherited()
        if is_hidden():
            return call(module, *args, **kwargs)
        for around in self.arounds[1:]:
            call = _bind(around, call)
        return self.arounds[0](module, args, kwargs, call) if self.arounds else call(module, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (nn.Module, "__call__")

    def _inherited(self) -> Callable[..., Any]:
        """Looked up anew each time: others replace ``nn.Module.__call__`` for a while."""
        for base in self.kind.__mro__[1:]:
            if "__call__" in base.__dict__:
                return base.__dict__["__call__"]  # type: ignore[no-any-return]
        return nn.Module.__call__


def _bind(around: Surround, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *args, **kwargs: around(module, args, kwargs, call)


class ClassCalls:
    """Calls ``around(module, args, kwargs, call)`` instead of each call of a module of the classes that it follows.

    ``around`` makes the call itself, with ``call(module, *args, **kwargs)``.
    """

    def __init__(self, around: Surround) -> None:
        self._around = around
        self._followed: list[_Call] = []

    def follow(self, kind: type) -> None:
        """Also modules of this class."""
        known = kind.__dict__.get("__call__")
        if not isinstance(known, _Call):
            known = _Call(kind)
            kind.__call__ = known  # type: ignore[method-assign]
        if self._around not in known.arounds:
            known.arounds.append(self._around)
            self._followed.append(known)

    def close(self) -> None:
        for one in self._followed:
            one.arounds.remove(self._around)
            if not one.arounds and one.kind.__dict__.get("__call__") is one:  # else somebody has wrapped it since
                if one.own is not None:
                    one.kind.__call__ = one.own
                else:
                    del one.kind.__call__
        self._followed.clear()


class Outermost:
    """``begin(args, kwargs)`` before and ``end(output)`` after each outermost call of one of ``models``, while open.

    On the thread that opens it; what is called inside compiled code is never outermost.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        begin: Callable[[tuple[Any, ...], dict[str, Any]], None],
        end: Callable[[Any], None],
    ) -> None:
        self._models = list(models)
        self._begin = begin
        self._end = end
        self._is_running = False
        self._thread = 0
        self._calls = ClassCalls(self._around)

    def __enter__(self) -> None:
        self._thread = get_ident()
        for model in self._models:
            self._calls.follow(type(model))

    def __exit__(self, *exc: object) -> None:
        self._calls.close()

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        is_one = any(module is model for model in self._models)
        if not is_one or self._is_running or get_ident() != self._thread:
            return call(module, *args, **kwargs)
        self._is_running = True
        try:
            self._begin(args, kwargs)
            output = call(module, *args, **kwargs)
            self._end(output)
            return output
        finally:
            self._is_running = False


class ModuleHooks:
    """Global hooks, on and off: ``entered(module, args)`` before, ``left(module, args, output)`` after a forward.

    Global ones do not switch off the fused paths of torch's transformer layers; what runs inside those is not seen.
    """

    def __init__(self, entered: Callable[[nn.Module, Any], None], left: Callable[[nn.Module, Any, Any], None]) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            if not is_hidden():
                entered(module, args)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not is_hidden():
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
    compiled: Callable[[Any], None]  # with a function that was, or with what a module has become


_OPEN: list[Told] = []
_UNDO: list[Callable[[], None]] = []
_STEPPING: set[int] = set()  # optimizers inside a step
_FINISHED = [0]  # steps; to see that a GradScaler has made none


class Outer:
    """Tells ``told`` of every backward pass, optimizer step and scaled loss of the process, on any thread.

    Nested ones (a reentrant checkpoint's backward, ``super().step()``) are not told.
    """

    def __init__(self, told: Told) -> None:
        self._told = told

    def open(self) -> None:
        if not _OPEN:
            _UNDO.append(register_optimizer_step_pre_hook(_step_begins).remove)
            _UNDO.append(register_optimizer_step_post_hook(_step_ended).remove)
            _replace(torch.autograd, "backward", _backward)
            _replace(torch.amp.GradScaler, "scale", _scale)
            _replace(torch.amp.GradScaler, "step", _scaler_step)
            _replace(torch, "compile", _compile)
        _OPEN.append(self._told)

    def close(self) -> None:
        """Not to be called from inside what is told: torch is going through its own table of hooks then."""
        if self._told in _OPEN:
            _OPEN.remove(self._told)
            while _UNDO and not _OPEN:
                _UNDO.pop()()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    ours = make(original)
    ours.__doc__, ours.__name__, ours.__qualname__ = original.__doc__, name, original.__qualname__
    ours.__module__, ours.__wrapped__ = original.__module__, original
    setattr(owner, name, ours)

    def undo() -> None:
        if owner.__dict__.get(name) is ours:  # else somebody has wrapped it since, and calls ours
            setattr(owner, name, original)

    _UNDO.append(undo)


def _backward(original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if autograd.backward_task() == -1 and not is_hidden():
            for told in list(_OPEN):
                told.backward_begins(args[0] if args else kwargs.get("tensors"))
        return original(*args, **kwargs)

    return backward


def _scale(original: Any) -> Any:
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and scaled is not outputs:
            for told in list(_OPEN):
                told.loss_scaled(outputs, scaled, scaler)
        return scaled

    return scale


def _scaler_step(original: Any) -> Any:
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = _FINISHED[0]
        result = original(scaler, optimizer, *args, **kwargs)
        if _FINISHED[0] == before:
            for told in list(_OPEN):
                told.step_skipped(optimizer)
        return result

    return step


def _compile(original: Any) -> Any:
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = original(model, *args, **kwargs)
        if model is not None:
            for told in list(_OPEN):
                told.compiled(compiled if isinstance(model, nn.Module) else model)
        return compiled

    return compile


def _step_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    if id(optimizer) in _STEPPING and is_nested_step(optimizer):
        return
    _STEPPING.add(id(optimizer))
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    for told in list(_OPEN):
        told.step_begins(optimizer, closure is not None)


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    if id(optimizer) in _STEPPING and is_nested_step(optimizer):
        return
    _STEPPING.discard(id(optimizer))
    _FINISHED[0] += 1
    found = getattr(optimizer, "found_inf", None)  # a GradScaler's, which fused optimizers read themselves
    is_skipped = found is not None and bool(found.item())
    for told in list(_OPEN):
        (told.step_skipped if is_skipped else told.step_ended)(optimizer)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module, or of one inside it, run compiled code."""
    return any(
        type(one).__name__ == "OptimizedModule"
        or getattr(one, "_compiled_call_impl", None) is not None
        or hasattr(vars(one).get("forward"), "_torchdynamo_orig_callable")
        for one in module.modules()
    )
