"""What a training loop does besides calling models: backward passes, steps, scaling, clipping, loading, saving.

Each place of torch's is wrapped once in a process, whoever asks, and is as it was when the last one has gone; code that
is being compiled or exported sees nothing. Where somebody else has wrapped the same place meanwhile, theirs stays, with
ours inside and idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from gaff.compat import autograd
from gaff.compat.compiler import never_traced
from gaff.engine.process.calls import is_hidden
from gaff.engine.process.last_hook import Behind
from gaff.engine.process.optimizer import is_inner_step, is_told_to_skip
from gaff.engine.process.stack_room import passed_over


@dataclass(frozen=True, slots=True)
class Told:
    """What to call as a training run goes on, on the thread where it happens; see ``Outer``.

    Each is called from inside torch's own functions: an exception of one would end the user's run.
    """

    backward_begins: Callable[[Any], None]  # with the tensors it begins from
    step_begins: Callable[[Any, bool], None]  # with the optimizer, and whether it was given a closure
    step_ended: Callable[[Any], None]
    step_skipped: Callable[[Any], None]  # by a GradScaler
    loss_scaled: Callable[[Any, Any, Any], None]  # with the loss, what it has become, and the GradScaler
    compiled: Callable[[Any], None]  # with a function that was, or with what a module has become
    # by clip_grad_norm_: the norm before, the limit, and which norm it is; by clip_grad_value_: None, and the limit
    clipped: Callable[[Any, Any, Any], None] = lambda norm, most, kind: None
    iterated: Callable[[Any], None] = lambda loader: None  # a DataLoader, from its beginning
    saved: Callable[[Any], None] = lambda file: None  # by torch.save, which has written it: what it was given as file
    backward_ended: Callable[[], None] = lambda: None  # without an exception
    # by load_state_dict, with what it was given, and what it has returned
    loaded: Callable[[Any, Any, Any], None] = lambda module, state, keys: None


Tell = Callable[..., None]  # with a ``Told``, and what one of torch's functions was called with
_OPEN: list[Told] = []
_UNDO: list[Callable[[], None]] = []
_STEPPING: set[int] = set()  # optimizers inside a step
_LATE: dict[int, Behind] = {}  # by optimizer in a step: what stands in the place of its last hook
_FINISHED = [0]  # steps; to see that a GradScaler has made none


class Outer:
    """Tells ``told`` of every backward pass, optimizer step and scaled loss of the process, on any thread.

    Nested ones (a reentrant checkpoint's backward, ``super().step()``) are not told. ``torch.autograd.backward``,
    ``GradScaler`` and ``torch.compile`` are wrapped when the first of all ``Outer`` opens, and are torch's own again
    when the last one closes; steps are told by torch's global hooks of optimizers.
    """

    def __init__(self, told: Told) -> None:
        self._told = told

    def open(self) -> None:
        """Begin to tell; the first in the process installs what all share."""
        if not _OPEN:
            _UNDO.append(register_optimizer_step_pre_hook(never_traced(_step_begins)).remove)
            _UNDO.append(register_optimizer_step_post_hook(never_traced(_step_ended)).remove)
            _UNDO.append(_put_back_all)
            _replace("backward", _around(_tell_begins, _tell_ended), torch.autograd)
            _replace("scale", _around(then=_tell_scaled), torch.amp.GradScaler)
            _replace("step", _scaler_step, torch.amp.GradScaler)
            _replace("compile", _around(then=_tell_compiled), torch)
            _replace("clip_grad_norm_", _around(then=_tell_norm), torch.nn.utils, torch.nn.utils.clip_grad)
            _replace("clip_grad_value_", _around(then=_tell_value), torch.nn.utils, torch.nn.utils.clip_grad)
            _replace("__iter__", _around(_tell_iterated), DataLoader)
            _replace("save", _around(then=_tell_saved), torch, torch.serialization)
            _replace("load_state_dict", _around(then=_tell_loaded), nn.Module)
        _OPEN.append(self._told)

    def close(self) -> None:
        """Stop telling; the last one takes away what all share. May be called twice.

        Not to be called from inside what is told: torch is going through its own table of hooks then.
        """
        if self._told in _OPEN:
            _OPEN.remove(self._told)
            while _UNDO and not _OPEN:
                _UNDO.pop()()


def _told(live: list[bool]) -> list[Told]:
    """Who is to be told by a wrapper; nobody by one that was taken away, and that somebody else still calls."""
    return list(_OPEN) if live else []


def _replace(name: str, make: Callable[[Any, list[bool]], Any], *owners: Any) -> None:
    """Put ``make(original, live)`` in place of an attribute, with its name and text, until ``_UNDO`` is emptied.

    ``owners``: all places of torch's that hold it, among them the one that a pickle names. Where somebody else has
    wrapped ours since, undoing leaves theirs, which goes on to call ours: ours then tells nobody.
    """
    original = owners[0].__dict__[name]
    live = [True]
    ours = make(original, live)
    ours.__doc__, ours.__name__, ours.__qualname__ = original.__doc__, name, original.__qualname__
    ours.__module__, ours.__wrapped__ = original.__module__, original
    same = [owner for owner in owners if owner.__dict__.get(name) is original]
    for owner in same:
        setattr(owner, name, ours)

    def undo() -> None:
        live.clear()
        for owner in same:
            if owner.__dict__.get(name) is ours:  # else somebody has wrapped it since, and calls ours
                setattr(owner, name, original)

    _UNDO.append(undo)


def _silent(*given: Any, **named: Any) -> None:
    """Tell nothing."""


def _around(first: Tell = _silent, then: Tell = _silent) -> Callable[[Any, list[bool]], Any]:
    """What makes of a function of torch's one that tells: ``first(told, *args, **kwargs)`` before it runs, and
    ``then(told, result, *args, **kwargs)`` once it has run."""

    def make(original: Any, live: list[bool]) -> Any:
        @passed_over
        def around(*args: Any, **kwargs: Any) -> Any:
            for told in _told(live):
                first(told, *args, **kwargs)
            result = original(*args, **kwargs)
            for told in _told(live):
                then(told, result, *args, **kwargs)
            return result

        return around

    return make


def _is_outermost() -> bool:
    """Whether a backward pass that begins here, or has ended, is inside no other one, nor in code that is compiled."""
    return autograd.backward_task() == -1 and not is_hidden()


def _tell_begins(told: Told, tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward`` is about to run, which tells the tensors that it begins from."""
    if _is_outermost():
        told.backward_begins(tensors)


def _tell_ended(told: Told, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward`` has run."""
    if _is_outermost():
        told.backward_ended()


def _tell_scaled(told: Told, scaled: Any, scaler: Any, outputs: Any) -> None:
    """``GradScaler.scale`` has run, which tells each loss and what has become of it, unless scaling is off."""
    is_several = isinstance(outputs, (list, tuple)) and isinstance(scaled, (list, tuple))
    for loss, made in zip(outputs, scaled, strict=True) if is_several else [(outputs, scaled)]:
        if isinstance(loss, torch.Tensor) and made is not loss:
            told.loss_scaled(loss, made, scaler)


def _scaler_step(original: Any, live: list[bool]) -> Any:
    """``GradScaler.step``, which tells when it has made no step: none has finished while it ran."""

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = _FINISHED[0]
        result = original(scaler, optimizer, *args, **kwargs)
        if _FINISHED[0] == before:
            for told in _told(live):
                told.step_skipped(optimizer)
        return result

    return step


def _tell_compiled(told: Told, compiled: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    """``torch.compile`` has run, which tells what has been compiled.

    That is the module which it made of a module, or the function that it was given; used as a decorator with options it
    tells nothing.
    """
    for hook in (_step_begins, _step_ended):
        never_traced(hook)  # the compiler is loaded now
    if model is not None:
        told.compiled(compiled if isinstance(model, nn.Module) else model)


def _tell_norm(
    told: Told, norm: Any, parameters: Any, max_norm: float, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> None:
    """``torch.nn.utils.clip_grad_norm_`` has run, which tells the norm that it has found, and the limit."""
    told.clipped(norm, max_norm, norm_type)


def _tell_value(told: Told, result: Any, parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
    """``torch.nn.utils.clip_grad_value_`` has run, which tells the limit of each element."""
    told.clipped(None, clip_value, None)


def _tell_iterated(told: Told, loader: Any) -> None:
    """``DataLoader.__iter__`` is about to run: a loader begins anew."""
    told.iterated(loader)


def _tell_saved(told: Told, result: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.save`` has run, which tells what it was given as file, once that is written."""
    told.saved(f)


def _tell_loaded(told: Told, keys: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``Module.load_state_dict`` has run, which tells the names that it missed, and those that it does not know."""
    told.loaded(module, args[0] if args else kwargs.get("state_dict"), keys)


def tell_clipped(norm: Any, most: Any, kind: Any = 2.0) -> None:
    """Tell that gradients of this norm are about to be scaled down to one of ``most``, by other code than torch's.

    ``kind``: the order of the norm, as ``clip_grad_norm_`` has it.
    """
    for told in list(_OPEN):
        told.clipped(norm, most, kind)


def _step_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A step begins; not told for one that is a part of another.

    Hooks that others have set on the optimizer may change gradients yet, and come after torch's global ones. So the
    last of them tells for this step.
    """
    if _STEPPING and is_inner_step(optimizer):
        return
    _STEPPING.add(id(optimizer))
    _put_back_last(id(optimizer))  # of a step that has not ended
    hooks = optimizer._optimizer_step_pre_hooks
    if hooks:
        _LATE[id(optimizer)] = Behind(hooks, next(reversed(hooks)), _tell_begin)
    else:
        _tell_begin(optimizer, args, kwargs)


def _tell_begin(optimizer: Any, args: Any, kwargs: Any) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    for told in list(_OPEN):
        told.step_begins(optimizer, closure is not None)


def _put_back_last(identity: int) -> None:
    """Put back the hook of an optimizer that tells of a step, where it has not been called."""
    if (late := _LATE.pop(identity, None)) is not None:
        late.put_back()


def _put_back_all() -> None:
    """Put back what steps that have not ended have left."""
    for identity in list(_LATE):
        _put_back_last(identity)


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A step has ended, or was skipped inside the optimizer, where a fused one reads ``found_inf`` itself.

    Waits for the device where there is such a flag.
    """
    if _STEPPING and is_inner_step(optimizer):
        return
    _STEPPING.discard(id(optimizer))
    _FINISHED[0] += 1
    _put_back_last(id(optimizer))
    is_skipped = is_told_to_skip(optimizer)
    for told in list(_OPEN):
        (told.step_skipped if is_skipped else told.step_ended)(optimizer)
