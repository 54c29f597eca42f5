"""Calls of the modules of a process: those from outside any module, those that are only counted, all while one looks.

Nothing here sits on a module or a tensor of the user's, so nothing of it is copied, pickled, exported or scripted.
While no module hook is asked for, only the calls of known outermost modules cost anything: their class's ``__call__``
is wrapped, for a hook on the module would switch fused paths off and travel with its pickle. Each place is wrapped once
in a process, whoever asks, and is as it was when the last one has gone; code that is being compiled or exported sees
nothing. Where somebody else has wrapped the same place meanwhile, theirs stays, with ours inside and idle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from threading import get_ident
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gaff.engine.process import stack_room
from gaff.engine.process.stack_room import passed_over

Surround = Callable[[nn.Module, Any, Any, Callable[..., Any]], Any]


def is_hidden() -> bool:
    """Whether this code is being compiled, exported, or recorded by ``torch.jit.trace``.

    What is done in such code would become part of the result, and outlive whoever asked for it.
    """
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


OWN_THREADS: set[int] = set()  # threads that do something of gaff's own just now


@contextmanager
def unseen() -> Iterator[None]:
    """What this thread does inside, such as calling a model to look at it, is no part of the program: watches hear
    nothing of it."""
    here = get_ident()
    is_first = here not in OWN_THREADS
    OWN_THREADS.add(here)
    try:
        yield
    finally:
        if is_first:
            OWN_THREADS.discard(here)


_FRAMES = 2  # between a program and a call that is only counted: ``_Call.__call__`` and ``Passing.call``


class Passing:
    """Calls of one module that are only counted, for steps that make hundreds: ``left`` of those that come next.

    Those count that are made in the same mode, on the same thread; all others are handed to those who asked for the
    class's calls. Of calls that train only those are taken that are given one tensor: its first dimension is added to
    ``take_samples``. ``passed``: calls since ``begin``; ``is_inside``: one is in progress.
    """

    __slots__ = ("_has_grad", "_is_training", "_module", "_samples", "_spent_s", "_thread", "_trains", "is_inside",
                 "left", "passed")  # fmt: skip

    def __init__(self) -> None:
        self._module: Any = None  # a weak reference
        self._thread = 0
        self._trains = self._is_training = self._has_grad = False
        self.is_inside = False
        self.left = 0
        self.passed = 0
        self._samples = 0
        self._spent_s = 0.0

    def begin(self, module: nn.Module, calls: int, *, trains: bool) -> None:
        """Count so many calls of ``module`` like one that could be made now; ``trains``: it is part of a step."""
        self._module = weakref.ref(module)
        self._thread = get_ident()
        self._trains, self._is_training, self._has_grad = trains, module.training, torch.is_grad_enabled()
        self.left = calls
        self.passed = 0

    def takes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is only counted, which is done here. One function, for it is called where time counts."""
        began = perf_counter()
        if (
            self._module() is not module
            or module.training is not self._is_training
            or torch.is_grad_enabled() is not self._has_grad
            or get_ident() != self._thread
        ):
            return False
        if self._trains:
            if kwargs or len(args) != 1 or type(args[0]) is not torch.Tensor:
                return False
            shape = args[0].shape
            self._samples += shape[0] if shape else 1
        self.left -= 1
        self.passed += 1
        self._spent_s += perf_counter() - began
        return True

    def call(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make a call that was taken; the two frames of ours do not count against the program's recursion limit."""
        room = stack_room.widen(_FRAMES)
        self.is_inside = True
        try:
            return call(module, *args, **kwargs)
        finally:
            self.is_inside = False
            stack_room.narrow(room)

    def take_samples(self) -> int:
        """How many samples the calls that train were given since this was last asked."""
        samples, self._samples = self._samples, 0
        return samples

    def take_spent(self) -> float:
        """The seconds that counting took since this was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class _Call:
    """Stands in place of a class's ``__call__`` and hands each call to those who asked for it.

    There is one for each class, shared by all who follow that class; the first in ``arounds`` is the outermost. It is a
    descriptor, as a function is, so that ``module(...)`` finds a bound ``function``, which looks as the class's own
    does; a call that nobody wants, as that of a module inside itself, finds the class's own and no frame of ours. A
    class that is pickled by value with it gets ``nn.Module``'s own ``__call__``: the other process has nothing of ours.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.own = kind.__dict__.get("__call__")
        self.arounds: list[Surround] = []
        self.wants: list[Callable[[nn.Module], bool]] = []  # who wants a call, in the same order
        self.passing: Passing | None = None  # of the only one who asked
        self.function = update_wrapper(_function_of(self), self.original)

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return self.original if torch.compiler.is_compiling() else self.function
        for wants in self.wants:
            if not torch.compiler.is_compiling() and wants(module):
                return MethodType(self.function, module)
        return MethodType(self.original, module)

    def __reduce__(self) -> Any:
        return getattr, (nn.Module, "__call__")

    @property
    def original(self) -> Any:
        """The ``__call__`` that the class would have without ours, as a function of the module and its arguments.

        An inherited one is looked up anew each time, since others replace ``nn.Module.__call__`` for a while.
        """
        found = self.own
        if found is None:
            for base in self.kind.__mro__[1:]:  # no generator: asked at each call of a module inside another
                if "__call__" in base.__dict__:
                    found = base.__dict__["__call__"]
                    break
        if type(found) is FunctionType:
            return found
        return found.function if type(found) is _Call else partial(_call_descriptor, found)


def _function_of(stand: _Call) -> Any:
    """What a module of the class runs when it is called, as a function."""

    @passed_over
    def function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = stand.own if type(stand.own) is FunctionType else stand.original
        arounds, passing = stand.arounds, stand.passing
        if not arounds or is_hidden():
            return call(module, *args, **kwargs)
        if len(arounds) == 1:
            if passing is not None and passing.left and passing.takes(module, args, kwargs):
                return passing.call(call, module, args, kwargs)
            return arounds[0](module, args, kwargs, call)
        for around in arounds[1:]:
            call = _bind(around, call)
        return arounds[0](module, args, kwargs, call)

    return function


def _call_descriptor(found: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call what a class has as ``__call__``, a method of some other kind or any object, as Python would."""
    bind = getattr(type(found), "__get__", None)
    return (found if bind is None else bind(found, module, type(module)))(*args, **kwargs)


def _bind(around: Surround, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with ``around`` about it, as one function of the module and its arguments."""
    return lambda module, *args, **kwargs: around(module, args, kwargs, call)


class ClassCalls:
    """Calls ``around(module, args, kwargs, call)`` instead of each call of a module of the classes that it follows.

    ``around`` makes the call itself, with ``call(module, *args, **kwargs)``, and returns what that returned. It runs on
    the thread that calls the module, whatever thread that is. ``wants`` is asked before each call of a module of such a
    class whether that call is meant; one that was asked for and kept may come later, so ``around`` must tell, too.
    Nothing is wrapped before ``follow``, and nothing stays after ``close``.
    """

    def __init__(self, around: Surround, wants: Callable[[nn.Module], bool]) -> None:
        self._around = around
        self._wants = wants
        self._followed: list[_Call] = []

    def follow(self, kind: type) -> None:
        """Stand around the modules of this class, too; nothing happens for one that is followed already.

        Subclasses inherit the stand-in, unless they have a ``__call__`` of their own.
        """
        known = kind.__dict__.get("__call__")
        if not isinstance(known, _Call):
            known = _Call(kind)
            type.__setattr__(kind, "__call__", known)  # a metaclass may say no, or do more
        if self._around not in known.arounds:
            known.passing = None
            known.arounds.append(self._around)
            known.wants.append(self._wants)
            self._followed.append(known)

    def pass_over(self, kind: type, passing: Passing) -> None:
        """Let ``passing`` count calls of a class that is followed, as long as nobody else follows it, too."""
        known = kind.__dict__.get("__call__")
        if isinstance(known, _Call) and known.arounds == [self._around]:
            known.passing = passing

    def close(self) -> None:
        """Follow no class any more; a class that nobody else follows gets its ``__call__`` back."""
        for one in self._followed:
            one.arounds.remove(self._around)
            one.wants.remove(self._wants)
            one.passing = None
            if not one.arounds and one.kind.__dict__.get("__call__") is one:  # else somebody has wrapped it since
                if one.own is not None:
                    type.__setattr__(one.kind, "__call__", one.own)
                else:
                    type.__delattr__(one.kind, "__call__")
        self._followed.clear()


@contextmanager
def outermost_calls(
    models: Sequence[nn.Module],
    begin: Callable[[tuple[Any, ...], dict[str, Any]], None],
    end: Callable[[Any], None],
) -> Iterator[None]:
    """``begin(args, kwargs)`` before and ``end(output)`` after each outermost call of one of ``models``, while open.

    On the thread that opens it; what is called inside compiled code is never outermost. A call of one of the models
    inside another, or inside itself, tells nothing. ``end`` is not called where the model raised; exceptions of both
    pass through.
    """
    thread, running = get_ident(), list[nn.Module]()

    def wants(module: nn.Module) -> bool:
        return any(module is model for model in models) and not running and get_ident() == thread

    def around(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        if not wants(module):
            return call(module, *args, **kwargs)
        running.append(module)
        try:
            begin(args, kwargs)
            output = call(module, *args, **kwargs)
            end(output)
            return output
        finally:
            running.clear()

    calls = ClassCalls(around, wants)
    try:
        for model in models:
            calls.follow(type(model))
        yield
    finally:
        calls.close()


class ModuleHooks:
    """Global hooks, on and off: ``entered(module, args)`` before, ``left(module, args, output)`` after a forward.

    Global ones do not switch off the fused paths of torch's transformer layers; what runs inside those is not seen.
    They cost every module call of the process while they are on, so whoever uses them has them on in sampled steps
    only.
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
        """Whether the hooks are on torch's global tables just now."""
        return bool(self._handles)

    def switch_on(self) -> None:
        """Put both hooks on torch's global tables, behind those of others; nothing happens where they are on."""
        if not self._handles:  # each is kept as soon as it is on: whoever interrupts this can take it off
            self._handles.append(register_module_forward_pre_hook(self._enter))
            self._handles.append(register_module_forward_hook(self._leave))

    def switch_off(self) -> None:
        """Take both hooks off; nothing happens where they are not on."""
        while self._handles:
            self._handles.pop().remove()


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module, or of one inside it, run compiled code.

    ``torch.compile`` leaves one of three marks: a module of its own around the model, an attribute on the module
    (``module.compile()``), or a compiled ``forward`` on the instance.
    """
    return any(
        type(one).__name__ == "OptimizedModule"
        or getattr(one, "_compiled_call_impl", None) is not None
        or hasattr(vars(one).get("forward"), "_torchdynamo_orig_callable")
        for one in module.modules()
    )
