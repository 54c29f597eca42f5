"""The optimizer's step: what is done to the gradients before it, and how it is kept from happening.

torch calls hooks before and after ``step``, of one optimizer or of all in the process; they cannot say that the step
shall not happen. ``StepGuard`` therefore lets the optimizer's own code run on nothing. The other classes only look:
``watch_steps`` before steps, ``count_steps`` after them, ``BackwardGuard`` and ``watch_accumulation`` at the gradients
while they come.

A step that calls ``super().step()`` runs the hooks once more inside: all of this passes over the inner ones.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gaff.compat import distributed, elements, foreach, memory
from gaff.compat.compiler import never_traced, uncompiled
from gaff.compat.leaves import put_gradient
from gaff.compat.modes import frames_from
from gaff.engine.gradients.sharded import ShardedGradient
from gaff.engine.gradients.tensor_hooks import on_gradient, take_turn
from gaff.engine.process.group_counts import GroupCounts, counted
from gaff.engine.process.last_hook import LastPreHook

_GUARDS: WeakKeyDictionary[Any, WeakSet[StepGuard]] = WeakKeyDictionary()  # open ones, by optimizer
_TELLS: WeakSet[Any] = WeakSet()  # optimizers whose ``found_inf`` is a guard's, during a step
Before = Callable[[], "bool | Tensor"]  # whether the step shall be skipped; a tensor where the optimizer reads one


def is_skipped(optimizer: Any) -> bool:
    """Whether a guard kept the step that has just run from changing anything, as far as the host knows.

    A skip that the optimizer was told of on the device is not known here: asking would mean waiting for it.
    """
    return any(guard.has_skipped for guard in _GUARDS.get(optimizer, ()))


def is_nested_step(optimizer: Any) -> bool:
    """Whether the step whose hook asks runs inside another step of the same optimizer, as ``super().step()`` does.

    To be called from inside a step hook.
    """
    return any(outer is optimizer for outer in _iter_outer_steps(sys._getframe(1)))


def is_inner_step(optimizer: Any) -> bool:
    """Whether the step whose hook asks is a part of another one that is in progress, and counts with that.

    Of the same optimizer, or of one that has some of its parameters and steps them by it (Lookahead, ZeRO's). To be
    called from inside a step hook.
    """
    for outer in _iter_outer_steps(sys._getframe(1)):
        if outer is optimizer:
            return True
        theirs = {id(one) for group in getattr(outer, "param_groups", ()) for one in group["params"]}
        if any(id(one) in theirs for group in optimizer.param_groups for one in group["params"]):
            return True
    return False


def _iter_outer_steps(frame: FrameType | None) -> Iterator[Any]:
    """The optimizers inside whose steps that of the hook in ``frame`` runs, from within.

    Read from the Python stack: torch wraps each ``step`` in a function named ``wrapper``, so its code appears once more
    for each, with the optimizer as ``self``.
    """
    wrappers = [one for one in frames_from(frame) if one.f_code.co_name == "wrapper"]
    for outer in wrappers[1:]:
        if outer.f_code is wrappers[0].f_code:
            yield outer.f_locals.get("self")


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper such as accelerate's, or what was given where it wraps none."""
    for _ in range(_MOST_WRAPPERS):
        if "_optimizer_step_pre_hooks" in getattr(optimizer, "__dict__", {}):
            break
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)  # of PostLocalSGDOptimizer
        if inner is None:
            break
        optimizer = inner
    return optimizer


_LAST = 1 << 62  # of no session: the hooks of edits stay before it or behind it, as they were set
_MOST_WRAPPERS = 8


class StepGuard:
    """Calls ``before`` ahead of every step of an optimizer, when gradients are accumulated, reduced and unscaled.

    With a closure it is called after each evaluation of it. Where ``before`` says so the step changes neither
    parameters nor state: it runs without gradients on an empty stand-in of the optimizer, or, where the optimizer reads
    ``found_inf`` (fused ones), is told on the device, without waiting for it. ``began`` comes first, ``after`` last.

    All are called on the thread that steps. What is taken away for a skipped step (gradients, the optimizer's own flag)
    is put back after it, or, where the step raised, when the next one begins or the guard closes. What ``before``
    raises goes to whoever called ``step``, and nothing has been stepped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Before,
        began: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer = optimizer
        self._before = before
        self._began = began
        self._after = after
        self._handles = ExitStack()
        self._dropped: list[tuple[Tensor, Tensor]] = []  # parameters and gradients kept from a skipped step
        self._found: Any = None  # the optimizer's own ``found_inf``, while ours is in its place
        self._counts = GroupCounts(optimizer)
        self._versions: list[int] = []  # of the parameters, as the step began
        self.has_skipped = False  # the last step
        self.has_moved = False  # some step has changed parameters before it evaluated its closure

    def open(self) -> None:
        """Register the hooks on the optimizer; those of others come first, before a step also those set later."""
        _GUARDS.setdefault(self._optimizer, WeakSet()).add(self)
        self._handles.callback(self._restore)  # whatever an exception left
        self._handles.callback(LastPreHook(self._optimizer, self._pre).remove)
        self._handles.callback(self._optimizer.register_step_post_hook(never_traced(self._post)).remove)

    def close(self) -> None:
        """Remove the hooks and put back whatever a step left undone. May be called twice."""
        self._handles.close()
        _GUARDS.get(self._optimizer, WeakSet()).discard(self)

    def can_tell(self) -> bool:
        """Whether the next step can be skipped by a flag on the device: it is read, and there is no state to be made.

        A fused optimizer makes its state also in a skipped step, of SGD's momentum without ever writing to it. So its
        first step is skipped by way of the host.
        """
        if not getattr(self._optimizer, "_step_supports_amp_scaling", False):
            return False
        state, groups = self._optimizer.state, self._optimizer.param_groups
        is_plain = isinstance(self._optimizer, torch.optim.SGD) and not any(group["momentum"] for group in groups)
        given = [one for one in self.parameters() if one.grad is not None]
        return is_plain or all(any(value is not None for value in state.get(one, {}).values()) for one in given)

    def parameters(self) -> list[Tensor]:
        """All parameters of the optimizer, in its order, as they are at this moment."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def is_overflow_of_scaler(self) -> bool:
        """Whether a GradScaler has found non-finite gradients and will have this step skipped. Waits for the device."""
        return has_overflown(self._optimizer)

    def _pre(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the step: put back what the last one left, then ask ``before``, at once or after each closure.

        Returns what the step is called with instead: a wrapped closure, or the stand-in in place of the optimizer; None
        leaves its arguments alone.
        """
        if is_nested_step(optimizer):
            return None
        self._restore()
        self.has_skipped = False
        self._began()
        wrapped = _around_closure(args, kwargs, self._enter, self._ask)
        if wrapped is not None:
            self._counts.begin()
            self._versions = [memory.version_of(one) for one in self.parameters()]
            return wrapped
        self._unscale()
        skip = self._before()
        if isinstance(skip, Tensor):
            self._tell(skip)
        elif skip:
            self._drop()
            return (_stand_in(optimizer), *args[1:]), kwargs
        return None

    def _post(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After the step: put back what was taken away, then tell ``after``."""
        if not is_nested_step(optimizer):
            if self.has_skipped:
                self._counts.put_back()
            self._counts.forget()
            self._restore()
            self._after()

    def _restore(self) -> None:
        """Put the optimizer's own ``found_inf`` and the gradients of a skipped step back where they were."""
        if self._found is not None:
            [known] = self._found
            self._found = None
            _TELLS.discard(self._optimizer)
            if known is not None:
                self._optimizer.found_inf = known  # type: ignore[attr-defined]
            elif hasattr(self._optimizer, "found_inf"):
                del self._optimizer.found_inf
        for parameter, gradient in self._dropped:
            if parameter.grad is None:  # else a new one has come, after an exception kept this from being called
                put_gradient(parameter, gradient)
        self._dropped.clear()

    def _enter(self) -> None:
        """The closure is about to be evaluated; what the optimizer has changed before is no change of the user's."""
        self.has_moved |= self._versions != [memory.version_of(one) for one in self.parameters()]
        self._counts.enter()

    def _ask(self) -> None:
        """Ask ``before`` after an evaluation of the closure; a step that is to be skipped finds no gradients."""
        if self._before():
            self._counts.left()
            self._drop()

    def _drop(self) -> None:
        """Take all gradients away, so that the step does nothing.

        Without gradients also what an optimizer keeps beside its parameter groups stays as it is.
        """
        self.has_skipped = True
        for one in self.parameters():
            if one.grad is not None:
                self._dropped.append((one, one.grad))
                one.grad = None

    def _unscale(self) -> None:
        """Unscale the gradients in place where GradScaler has left that to a fused optimizer.

        Limits would otherwise be of scaled gradients. The optimizer's ``grad_scale`` is taken away, or it would divide
        again.
        """
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            gradients = [one.grad for one in self.parameters() if one.grad is not None]
            foreach.scale_all(gradients, scale.to(elements.wide_type(scale)).reciprocal().float())
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]

    def _tell(self, skip: Tensor) -> None:
        """Give the optimizer a flag to read on the device: ``found_inf``, joined with a GradScaler's own."""
        known = getattr(self._optimizer, "found_inf", None)
        if self._optimizer not in _TELLS:  # another guard of the same optimizer has it to put back
            self._found = [known]
            _TELLS.add(self._optimizer)
        flag = skip.to(torch.float32)
        self._optimizer.found_inf = flag if known is None else torch.maximum(flag, known.to(flag.device))  # type: ignore[attr-defined]


class BackwardGuard:
    """Calls ``change(parameter, gradient)`` for each gradient as backward brings it; its result goes on.

    It is called inside backward, as a rule once a pass, with what autograd has added up in it, before that is added to
    ``parameter.grad``. Parameters are held as long as they are followed, since torch cannot swap one (a conversion of
    the model may) that has weak references, and known by identity: tensors cannot be compared by ``==``. FSDP2's come
    by another way, after they were reduced over processes.
    """

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._change = change
        self._handles: dict[int, tuple[Tensor, Any, int]] = {}  # by identity; with the tensor inside, as it was hooked
        self._sharded: dict[int, _Listener] = {}

    def follow(self, parameters: Iterable[Tensor], model: Any = None) -> list[Tensor]:
        """Follow these parameters and no others, and return those that were not followed yet.

        To be called again when some have come or gone, or have come to require grad. ``model``: whose FSDP2's
        parameters are; without it they are taken for ordinary ones. One that was swapped has lost its hook.
        """
        shards = distributed.sharded_parameters(model) if model is not None else {}
        records = {id(record.sharded_param): record for record, _ in shards.values()}
        new: list[Tensor] = []
        parameters = list(parameters)
        for gone in self._handles.keys() - set(map(id, parameters)):
            self._handles.pop(gone)[1].remove()
        for parameter in parameters:
            record = records.get(id(parameter))
            if record is not None:
                if id(parameter) not in self._sharded:
                    one = self._sharded[id(parameter)] = _Listener(ShardedGradient.of(record), self._change, parameter)
                    one.gradient.listeners.append(one)
                    new.append(parameter)
                self._sharded[id(parameter)].gradient.follow()
                continue
            known = self._handles.get(id(parameter))
            if known is not None and known[2] != parameter._cdata:
                parameter._backward_hooks = None  # or torch would add to a table that it no longer reads
                known = None
            if parameter.requires_grad and known is None:
                handle = on_gradient(parameter, partial(_arrived, ref(self), id(parameter)))
                take_turn(handle, _LAST)
                self._handles[id(parameter)] = parameter, handle, parameter._cdata
                new.append(parameter)
        return new

    def arrived(self, which: int, gradient: Tensor) -> Tensor | None:
        """Hand the gradient of the parameter of this identity on to ``change``."""
        known = self._handles.get(which)
        return None if known is None else self._change(known[0], gradient)

    def close(self) -> None:
        """Remove all hooks; gradients come as autograd brings them."""
        for _, handle, _ in self._handles.values():
            handle.remove()
        self._handles.clear()
        for one in self._sharded.values():
            one.gradient.leave(one)
        self._sharded.clear()


def _arrived(guard: ref[BackwardGuard], which: int, gradient: Tensor | None) -> Tensor | None:
    """A gradient has come; a custom Function hands None to what it does not need. The hook holds no guard."""
    found = guard()
    return None if gradient is None or found is None else found.arrived(which, gradient)


class _Listener:
    """Changes the gradient of one parameter of FSDP2 when it has been reduced; see ``ShardedGradient``."""

    only_looks = False

    def __init__(
        self, gradient: ShardedGradient, change: Callable[[Tensor, Tensor], Tensor], parameter: Tensor
    ) -> None:
        self.gradient = gradient
        self._change = change
        self._parameter = ref(parameter)

    def coming(self) -> None:
        """Do nothing: before the reduction there is no gradient to change."""

    def reduced(self, gradient: Tensor) -> Tensor | None:
        """The gradient to go on with; None, for no change, where the parameter is gone."""
        parameter = self._parameter()
        return None if parameter is None else self._change(parameter, gradient)


def watch_accumulation(parameters: Iterable[Tensor], seen: Callable[[Tensor], None]) -> ExitStack:
    """Call ``seen(parameter)`` each time that a gradient was added to ``parameter.grad``, until what it returns closes.

    Inside backward. A parameter that does not require grad is an error of torch's.
    """
    with ExitStack() as handles:
        for parameter in parameters:
            handles.callback(parameter.register_post_accumulate_grad_hook(uncompiled(seen)).remove)
        return handles.pop_all()


def _stand_in(optimizer: Any) -> Any:
    """An optimizer of the same kind without parameters and state: its step changes nothing of the real one.

    It shares all other attributes, so that its code runs as it would; it is made without ``__init__``, which would ask
    for parameters.
    """
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = [{**group, **counted(group), "params": []} for group in optimizer.param_groups]
    stand_in.state = defaultdict(dict)
    return stand_in


def owns_some(parameters: Callable[[], Iterable[Tensor]]) -> Callable[[Any], bool]:
    """A function that tells whether an optimizer owns some of ``parameters()``.

    It remembers the answer for each, and looks it up anew where ``add_param_group`` gave the optimizer more.
    """
    known: WeakKeyDictionary[Any, tuple[int, bool]] = WeakKeyDictionary()  # with how many parameters it had

    def owns(optimizer: Any) -> bool:
        groups = [group["params"] for group in optimizer.param_groups]
        count = sum(map(len, groups))
        if known.get(optimizer, (None,))[0] != count:
            mine = {id(parameter) for parameter in parameters()}
            known[optimizer] = count, any(id(one) in mine for group in groups for one in group)
        return known[optimizer][1]

    return owns


def count_steps(parameters: Callable[[], Iterable[Tensor]], completed: Callable[[], None]) -> Any:
    """Call ``completed()`` after each step that changed something, of optimizers that own some of ``parameters()``.

    By a global hook of torch's, on the thread that steps; the handle removes it. Steps that a guard skipped through the
    host, and inner ones, do not count, nor do those of a fused optimizer that a GradScaler's flag made change nothing:
    that is read, for which the device is waited for.
    """
    owns = owns_some(parameters)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        is_made = not is_skipped(optimizer) and not is_inner_step(optimizer) and owns(optimizer)
        if is_made and not has_overflown(optimizer):
            completed()

    return register_optimizer_step_post_hook(never_traced(stepped))


def has_overflown(optimizer: Any) -> bool:
    """Whether a GradScaler has told a fused optimizer to change nothing. Waits for the device where there is a flag.

    A flag of ours beside it means that steps are skipped on the device, where nobody counts them.
    """
    return optimizer not in _TELLS and is_told_to_skip(optimizer)


def is_told_to_skip(optimizer: Any) -> bool:
    """Whether a fused optimizer was given a flag, a GradScaler's or ours, by which it changes nothing. Waits for it."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def watch_steps(
    parameters: Callable[[], Iterable[Tensor]] | None,
    before: Callable[[Any], None],
    skipped: Callable[[], None] = lambda: None,
    ended: Callable[[Any], None] | None = None,
) -> ExitStack:
    """Call ``before(optimizer)`` ahead of each step of an optimizer that owns some of ``parameters()`` (None: any).

    ``skipped`` instead, where a GradScaler has told a fused optimizer to change nothing, for which the device is waited
    for where there is such a flag; ``ended(optimizer)`` after each step. With a closure ``before`` comes after each
    evaluation of it, since the gradients come from there. What it raises goes to whoever called ``step``. Ends when
    what is returned closes.
    """
    owns = owns_some(parameters) if parameters is not None else lambda optimizer: True

    def stepping(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if is_inner_step(optimizer) or not owns(optimizer):
            return None
        if is_told_to_skip(optimizer):
            skipped()
            return None
        wrapped = _around_closure(args, kwargs, lambda: None, partial(before, optimizer))  # gradients come from it
        if wrapped is None:
            before(optimizer)
        return wrapped

    with ExitStack() as handles:
        handles.callback(register_optimizer_step_pre_hook(never_traced(stepping)).remove)
        if ended is not None:
            after = never_traced(lambda optimizer, args, kwargs: ended(optimizer))
            handles.callback(register_optimizer_step_post_hook(after).remove)
        return handles.pop_all()


def _around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], first: Callable[[], None], then: Callable[[], None]
) -> Any:
    """What a step is called with so that ``first()`` comes before each evaluation of its closure, and ``then()`` after.

    None where it has none.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def evaluate() -> Any:
        first()
        loss = closure()
        then()
        return loss

    return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})
