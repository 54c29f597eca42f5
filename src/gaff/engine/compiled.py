"""Inside compiled code: hooks that Dynamo traces into the graph, and two ops by which the graph tells what passes.

torch guards no table of hooks that was empty when a graph was made, but it does guard a module's own ``forward``. A
session therefore lets each hooked module have its class's ``forward`` as an attribute of its own: compiled code
without taps no longer fits, code with them is compiled once, and fits again whenever the same modules are tapped;
once the session is closed the old code fits again.

A graph holds no number and no name of a session, only tensors: a *ticket*, the number of the receiver that hears of
a call, and a token that keeps the order. What is told runs in ordinary Python while the graph runs.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from gaff import compat, dynamo
from gaff.engine.modules import MISSING, Node
from gaff.engine.replay import Passage
from gaff.engine.structure import has_grad_mode, rebuild, stand_ins, structure_of
from gaff.errors import PlanError

_NUMBERS = itertools.count(1)  # of receivers, one for each time that a frame of compiled code runs
_PLACES = itertools.count(1)  # of calls in traced code
_RECEIVERS: dict[int, Receiver] = {}
_REDUCIBLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_FEW = 64  # tickets of a receiver above which those are looked for that no graph holds any more
_LOCK = threading.Lock()

Call = tuple[int, int, int]  # a ticket, a place and a thread: one call, once


def _define() -> None:
    """Define the two ops when a session first needs them."""
    with _LOCK:
        _ops()


@cache
def _ops() -> Any:
    library = torch.library.Library("gaff", "FRAGMENT")
    tags = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
    for ending, more in (("", ()), ("_any", (torch.Tag.flexible_layout,))):  # whether any strides will do
        tell_, arrive = f"tell{ending}_", f"arrive{ending}"
        told = "(Tensor[] values, Tensor(a!) token, Tensor ticket, int place, str what, int[] pairs) -> ()"
        library.define(tell_ + told, tags=(*tags, *more))
        library.define(f"{arrive}(Tensor[] gradients, Tensor ticket, int place, int number) -> ()", tags=(*tags, *more))
        library.impl(tell_, torch.compiler.disable(_tell), "CompositeExplicitAutograd")
        library.impl(arrive, torch.compiler.disable(_arrive), "CompositeExplicitAutograd")
        torch.library.register_fake(f"gaff::{tell_}", lambda *given: None, lib=library)
        torch.library.register_fake(f"gaff::{arrive}", lambda *given: None, lib=library)
        dynamo.keep_in_graphs(getattr(torch.ops.gaff, arrive).default)
    dynamo.leave_uncompiled(Entry.__call__, Exit.__call__, Leave.__call__, Look.__call__, structure_of, _hook)
    return library


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def new_place() -> int:
    """A number for one call in traced code: runs while torch traces."""
    return next(_PLACES)


def tell(
    values: list[Tensor], token: Tensor, ticket: Tensor, place: int, what: str, *, is_flexible: bool = False
) -> None:
    """Traced: let whoever has the ticket hear of ``values``; with ``is_flexible`` in whatever strides they have now.

    Complex ones go as pairs of numbers: Inductor takes no operation that writes (to the token) among complex tensors.
    """
    pairs = [number for number, value in enumerate(values) if value.is_complex()]
    plain = [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value for value in values]
    op = torch.ops.gaff.tell_any_ if is_flexible else torch.ops.gaff.tell_
    op(plain, token, ticket, place, what, pairs)


def _tell(values: list[Tensor], token: Tensor, ticket: Tensor, place: int, what: str, pairs: list[int]) -> None:
    number = int(ticket)
    receiver = _RECEIVERS.get(number)
    if receiver is not None:
        for pair in pairs:
            values[pair] = torch.view_as_complex(values[pair])
        receiver.lives.setdefault(number, []).append(compat.storage_life(ticket))
        receiver.tellers.setdefault(number, set()).add(threading.get_ident())
        receiver.renew(number)
        _mark(values, receiver)
        receiver.told((number, place, threading.get_ident()), values, what)


def _arrive(gradients: list[Tensor], ticket: Tensor, place: int, number: int) -> None:
    receiver = _RECEIVERS.get(int(ticket))
    if receiver is not None:
        _mark(gradients, receiver)
        receiver.arrived((int(ticket), place, threading.get_ident()), number, gradients)


class Inside:
    """What the taps of one session in compiled code share."""

    def __init__(self, *, has_marks: bool, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        _define()
        self.reduce = reduce  # what everybody who listens wants of a tensor, told in its place
        self.token = torch.zeros(1, dtype=torch.int64)
        self.has_marks = has_marks  # somebody asks which backward pass comes by
        self.receivers: list[Receiver] = []

    def close(self) -> None:
        """Whatever graph still tells something, nobody hears it."""
        for receiver in self.receivers:
            receiver.forget()
        self.receivers.clear()


class Receiver(ABC):
    """Hears of one module, at one side. ``ticket`` is another tensor for each frame of compiled code that runs."""

    def __init__(self, inside: Inside) -> None:
        self.token = inside.token
        self.reduce = inside.reduce
        self.waiting: dict[Call, list[Tensor]] = {}  # calls whose gradients may arrive, and what stands for the tensors
        self._numbers: deque[int] = deque()
        self.lives: dict[int, list[Any]] = {}  # of tickets: whether a graph still holds what stands for them
        self.tellers: dict[int, set[int]] = {}  # of tickets: threads on which frames with it have run
        self._most = _FEW
        self._latest = 0
        self.ticket = self._new_ticket()
        inside.receivers.append(self)

    def renew(self, number: int) -> None:
        """A frame with this ticket is running: the next one gets another."""
        if number == self._latest:
            self.ticket = self._new_ticket()

    def parts(self, values: list[Tensor]) -> list[Tensor]:
        """Traced: what is told of tensors."""
        return [part_of(one.detach(), self.reduce) for one in values]

    @abstractmethod
    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The graph has come by, with ``values`` of the structure ``what``."""

    def arrived(self, call: Call, number: int, gradients: list[Tensor]) -> None:
        """A gradient has come for one tensor of a call: the hooks on what stands for it hear of it."""
        stands = self.waiting.get(call)
        if stands is None and len(self.tellers.get(call[0], ())) == 1:  # backward runs on another thread
            found = [one for known, one in self.waiting.items() if known[:2] == call[:2]]
            stands = found[0] if len(found) == 1 else None
        if stands is not None:
            for hook in list((stands[number]._backward_hooks or {}).values()):
                hook(gradients[0])

    def forget(self) -> None:
        """Hear nothing any more."""
        with _LOCK:
            for number in self._numbers:
                _RECEIVERS.pop(number, None)
        self._numbers.clear()
        self.lives.clear()
        self.tellers.clear()
        self.waiting.clear()

    def _new_ticket(self) -> Tensor:
        with _LOCK:
            self._latest = number = next(_NUMBERS)
            _RECEIVERS[number] = self
            self._numbers.append(number)
            if len(self._numbers) > self._most:
                self._drop_dead()
        with torch.inference_mode(False):
            ticket = torch.tensor([number])  # with a dimension: torch guards the number of one without
        self.lives[number] = [compat.storage_life(ticket)]
        return ticket

    def has_living_graph(self) -> bool:
        """Whether a graph is alive that may still bring gradients."""
        return any(lives_on() for number, lives in self.lives.items() if number != self._latest for lives_on in lives)

    def _drop_dead(self) -> None:
        """Forget the tickets that no graph holds any more."""
        for number in list(self._numbers):
            lives = self.lives.get(number)
            if number != self._latest and lives is not None and not any(lives_on() for lives_on in lives):
                _RECEIVERS.pop(number, None)
                del self.lives[number]
                self.tellers.pop(number, None)
        self._numbers = deque(number for number in self._numbers if number in self.lives or number == self._latest)
        known = set(self._numbers)
        self.waiting = {call: stands for call, stands in self.waiting.items() if call[0] in known}
        self._most = max(_FEW, 2 * len(self._numbers))

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # a copy of the module gets a hook that does nothing


class HookInside(Receiver):
    """A hook that does what ``func`` does outside of compiled code, and something else inside of it."""

    is_gaffs = True
    edits: tuple[Any, ...] = ()

    def __init__(self, inside: Inside, func: Any, node: Node) -> None:
        super().__init__(inside)
        self.node = node
        self.func = func
        self.args = (node,)  # as of the hooks that are partials
        self.outside = torch.compiler.disable(func)


class Entry(HookInside):
    """Before a module: its arguments. ``is_bound``: compiled code may begin here, and with it a run."""

    def __init__(self, inside: Inside, func: Any, node: Node, *, is_bound: bool) -> None:
        super().__init__(inside, func, node)
        self.taps = node.entries
        self.is_bound = is_bound

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            return self.outside(self.node, module, args, kwargs)
        _refuse_export()
        if self.taps or self.is_bound:
            values: list[Tensor] = []
            what = structure_of((args, kwargs), values)
            given = self.parts(values) if self.taps else []
            tell(given, self.token, self.ticket, new_place(), what)
        for edit in self.edits:
            args, kwargs = edit.change_arguments(args, kwargs)
        return (args, kwargs) if self.edits else None

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        clock = self.node.clock
        if clock.closed or compat.backward_task() != -1:
            return
        if self.is_bound:
            clock.enter_compiled(self.node)
        run = clock.run_of_compiled(self.node)
        if run is not None:
            number = run.entered[self.node.index]
            run.entered[self.node.index] = number + 1
            if self.taps:
                args, kwargs = rebuild(what, values.__getitem__)
                for tap in self.taps:
                    tap(args, kwargs, run, number)


class Exit(HookInside):
    """After a module: its output, and the gradients of its tensors when they come."""

    def __init__(self, inside: Inside, func: Any, node: Node) -> None:
        super().__init__(inside, func, node)
        self.taps, self.arms = node.exits, node.arms
        self._first: dict[Passage, Call] = {}  # calls that a checkpoint may run again

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = MISSING) -> Any:
        if not torch.compiler.is_compiling():
            return self.outside(self.node, module, args, kwargs, output)
        before = output
        if (self.arms or self.edits) and isinstance(module, nn.Linear) and is_view(output):
            output = output.clone()  # of a product in two dimensions that nobody else sees
        for edit in self.edits:
            output = edit.change(output, args)
        if self.taps or self.arms:
            values: list[Tensor] = []
            what = structure_of(output, values)
            ticket = self.ticket.clone() if self.arms else self.ticket  # as it is now: torch may set hooks later
            place = new_place()
            given = self.parts(values) if self.taps else []
            tell(given, self.token, ticket, place, what)
            if self.arms:
                _hook(values, ticket, place, self.reduce)
        return None if output is before else output

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        clock = self.node.clock
        if clock.closed:
            return
        if compat.backward_task() != -1:
            self._told_again(call, what)
            return
        run = clock.run_of_compiled(self.node)
        if run is not None:
            number = run.left[self.node.index]
            run.left[self.node.index] = number + 1
            if self.taps:
                output = rebuild(what, values.__getitem__)
                for tap in self.taps:
                    tap(output, run, number)
            if self.arms:
                self._arm(call, what, Passage(run, number))

    def _arm(self, call: Call, what: str, passage: Passage) -> None:
        replay = self.node.exit_replay
        if has_grad_mode(what):
            if compat.has_saved_hooks():
                replay.remember(passage, has_grad=True)
                self._first = {one: at for one, at in self._first.items() if at in self.waiting}
                self._first[passage] = call
            self._hang_up(call, what, passage)
        elif not replay.wait(passage):
            for arm in self.arms:
                arm.give_up(passage.run, passage.call)

    def _told_again(self, call: Call, what: str) -> None:
        """A recomputation: its gradients belong to the call of the first pass."""
        found = self.node.exit_replay.match(has_grad=has_grad_mode(what)) if self.arms else None
        if found is not None and found.is_first_graph and has_grad_mode(what):
            self._hang_up(call, what, found.passage)
        elif found is not None and (first := self._first.get(found.passage)) in self.waiting:
            self.waiting[call] = self.waiting[first]

    def _hang_up(self, call: Call, what: str, passage: Passage) -> None:
        """Let gradient hooks be set on what stands for the tensors of the call."""
        self.waiting[call] = stands = stand_ins(what)
        output = rebuild(what, stands.__getitem__)
        for arm in self.arms:
            arm(output, ((), {}), passage.run, passage.call)


class Leave(HookInside):
    """Where compiled code ends, and with it a run that began there."""

    def __init__(self, inside: Inside, func: Any, node: Node, *, is_bound: bool) -> None:
        super().__init__(inside, func, node)
        self.is_bound = is_bound
        self.has_marks = inside.has_marks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self.outside(self.node, module, args, kwargs, output)
        elif self.is_bound:
            values: list[Tensor] = []
            what = structure_of(output, values)
            ticket = self.ticket.clone() if self.has_marks else self.ticket
            place = new_place()
            tell([], self.token, ticket, place, what)
            if self.has_marks:
                _hook(values, ticket, place)

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        if not self.node.clock.closed and compat.backward_task() == -1:
            output = None
            if self.has_marks:
                self.waiting[call] = stands = stand_ins(what)
                output = rebuild(what, stands.__getitem__)
            with torch.enable_grad() if has_grad_mode(what) else nullcontext():
                self.node.clock.leave(self.node, output)


class Look(Receiver):
    """After a module: tells ``listener(module, args, output, stands)``, inside compiled code and outside of it.

    ``stands``: by the identity of a tensor of the output, what can be hooked to hear of its gradient; in compiled code.
    """

    def __init__(self, inside: Inside, module: nn.Module, listener: Any, *, has_args: bool) -> None:
        super().__init__(inside)
        self.module = ref(module)
        self.listener = listener
        self.has_args = has_args
        self.outside = torch.compiler.disable(self._outside)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.outside(module, args, output)
        if torch.compiler.is_exporting():
            return None
        before = output
        if isinstance(module, nn.Linear) and is_view(output):
            output = output.clone()  # of a product in two dimensions that nobody else sees
        own: list[Tensor] = []
        structure_of(output, own)
        values: list[Tensor] = []
        what = structure_of((output, args if self.has_args else ()), values)
        ticket, place = self.ticket.clone(), new_place()
        tell(self.parts(values), self.token, ticket, place, what, is_flexible=True)
        if torch.is_grad_enabled():
            _hook(own, ticket, place, is_flexible=True)  # the first of the values
        return None if output is before else output

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        module = self.module()
        if module is not None:
            output, args = rebuild(what, values.__getitem__)
            self.waiting[call] = stands = stand_ins(what) if has_grad_mode(what) else []
            self.listener(module, args, output, {id(one): stand for one, stand in zip(values, stands, strict=False)})

    def _outside(self, module: nn.Module, args: Any, output: Any) -> None:
        self.listener(module, args, output, None)


class Looks:
    """Hooks of ``Look`` on many modules, on and off. The same hooks each time, so that compiled code fits again."""

    def __init__(self, modules: Iterable[tuple[nn.Module, bool]], listener: Any) -> None:
        self._inside = Inside(has_marks=False)
        self._looks = [(ref(one), Look(self._inside, one, listener, has_args=has_args)) for one, has_args in modules]
        self._handles: list[Any] = []

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def switch_on(self) -> None:
        for reference, look in () if self._handles else self._looks:
            module = reference()
            if module is not None:
                self._handles += [module.register_forward_hook(look), OwnForward(module)]

    def switch_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for _, look in self._looks:
            look.waiting.clear()

    def close(self) -> None:
        """For good."""
        self.switch_off()
        self._inside.close()


class OwnForward:
    """Lets ``module`` have a ``forward`` as an attribute of its own, which torch guards, until all are removed."""

    _standing: ClassVar[WeakKeyDictionary[nn.Module, list[Any]]] = WeakKeyDictionary()  # how many, ours, what was there

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        known = self._standing.get(module)
        if known is not None:
            known[0] += 1
            return
        before = module.__dict__.get("forward")
        own: Any = MethodType(type(module).forward, module) if before is None else _passing_on(before)
        self._standing[module] = [1, own, before]
        module.__dict__["forward"] = own

    def remove(self) -> None:
        known = self._standing[self._module]
        known[0] -= 1
        if not known[0]:
            del self._standing[self._module]
            inside = self._module.__dict__
            if inside.get("forward") is known[1]:
                del inside["forward"]
                if known[2] is not None:
                    inside["forward"] = known[2]


def _passing_on(forward: Any) -> Any:
    return lambda *args, **kwargs: forward(*args, **kwargs)


def is_view(value: Any) -> bool:
    """Whether a tensor is a view of another, in traced code, too."""
    return isinstance(value, Tensor) and value._base is not None


def _hook(values: list[Tensor], ticket: Tensor, place: int, reduce: Any = None, *, is_flexible: bool = False) -> None:
    """Traced: let the gradient of each tensor be told."""
    for number, value in enumerate(values):
        if value.requires_grad and not is_view(value):
            value.register_hook(_arrival(ticket, place, number, reduce, is_flexible))


def _arrival(ticket: Tensor, place: int, number: int, reduce: Any, is_flexible: bool) -> Any:
    def arrived(gradient: Tensor) -> None:
        op = torch.ops.gaff.arrive_any if is_flexible else torch.ops.gaff.arrive
        op([part_of(gradient.detach(), reduce)], ticket, place, number)

    return arrived


def part_of(tensor: Tensor, reduce: Any) -> Tensor:
    """Traced: ``reduce(tensor)``, so that the compiler need not write the tensor down.

    Not of half precision: Inductor would leave out the rounding, and what it overflows, too.
    """
    return reduce(tensor) if reduce is not None and tensor.dtype in _REDUCIBLE else tensor


def _mark(values: Iterable[Tensor], receiver: Receiver) -> None:
    for value in values if receiver.reduce is not None else ():
        if value.dtype in _REDUCIBLE:
            dynamo.mark_reduced(value)


def _refuse_export() -> None:
    if torch.compiler.is_exporting():
        raise PlanError("torch exports or traces the model while a gaff session is open on it: close it first")
