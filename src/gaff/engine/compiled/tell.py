"""How a compiled graph tells what passes: two ops, and who hears of them by a ticket.

``gaff::tell_`` is called in the forward with values, ``gaff::arrive`` in the backward with gradients; they compute
nothing and return nothing. ``tell_`` writes to a token instead, which keeps it in the graph and in order; it is not
repeated when a checkpoint inside the graph recomputes. ``arrive`` has an ordered effect.

A *ticket* is a tensor that holds the number of a ``Receiver``, a *place* the number of one call in the compiled code. A
graph is compiled once and runs with other tickets, so it serves many receivers, and many calls of each: every frame
that runs uses up one ticket, and a ticket and a place together name one call.
"""

from __future__ import annotations

import gc
import itertools
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from gaff.compat import autograd, compiler, memory
from gaff.engine.compiled.structure import stand_ins, structure_of
from gaff.engine.compiled.tracing import CALLER, GIVEN, LEAF, LOOKS, WRITTEN, hang, oddity, take_turn, when_written
from gaff.engine.gradients.tensor_hooks import told_by_graph

ODD: dict[int, dict[int, str]] = {}  # by place and number: what is odd about a tensor
WRITTEN_BEFORE: set[int] = set()  # places before which a graph has written to a parameter that is told there
_NUMBERS = itertools.count(1)  # of receivers, one for each time that a frame of compiled code runs
_PLACES = itertools.count(1)  # of calls in traced code
_RECEIVERS: dict[int, Receiver] = {}
_REDUCIBLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TURNS: list[str] = []  # those of all edits of gradients in compiled code whose sessions are open
_FEW = 64  # tickets of a receiver above which those are looked for that no graph holds any more
_LOCK = threading.Lock()
Call = tuple[int, int, int]  # a ticket, a place and a thread: one call, once


def _ops() -> Any:
    """Define the ops; their library must be held, or they are gone.

    They are marked as unsafe in CUDA graphs, since they run Python. Those that end in ``_any`` take tensors in
    whatever strides they have, so that the compiler need not copy them into those of the eager model.
    """
    library = torch.library.Library("gaff", "FRAGMENT")
    tags = (torch.Tag.cudagraph_unsafe,)
    for ending, more in (("", ()), ("_any", (torch.Tag.flexible_layout,))):  # whether any strides will do
        tell_, arrive = f"tell{ending}_", f"arrive{ending}"
        told = "(Tensor[] values, Tensor(a!) token, Tensor ticket, int place, str what, int[] pairs) -> ()"
        library.define(tell_ + told, tags=(*tags, *more))
        library.define(f"{arrive}(Tensor[] gradients, Tensor ticket, int place, int number) -> ()", tags=(*tags, *more))
        library.impl(tell_, torch.compiler.disable(_tell), "CompositeExplicitAutograd")
        library.impl(arrive, torch.compiler.disable(_arrive), "CompositeExplicitAutograd")
        torch.library.register_fake(f"gaff::{tell_}", lambda *given: None, lib=library)
        torch.library.register_fake(f"gaff::{arrive}", lambda *given: None, lib=library)
        compiler.keep_in_graphs(getattr(torch.ops.gaff, arrive).default)
    compiler.leave_uncompiled(structure_of, tell_gradients)
    return library


@cache
def _leave_uncompiled(kind: type[Receiver]) -> None:
    """Keep Dynamo from compiling a hook's own frames where the code around it is not compiled."""
    called: list[Any] = [getattr(kind, name, None) for name in ("__call__", "exit")]
    compiler.leave_uncompiled(*(one for one in called if hasattr(one, "__code__")))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def new_place() -> int:
    """A number for one call in compiled code: drawn while Dynamo compiles, and a constant of the graph."""
    return next(_PLACES)


def tell(
    values: list[Tensor], token: Tensor, ticket: Tensor, place: int, what: str, *, is_flexible: bool = False
) -> None:
    """While Dynamo compiles: let whoever has the ticket hear of ``values``, whose structure is ``what``.

    ``token`` keeps the order. With ``is_flexible`` the values are told in whatever strides they have then. Complex
    ones go as pairs of numbers: Inductor takes no operation that writes (to the token) among complex tensors.
    """
    pairs = [number for number, value in enumerate(values) if value.is_complex()]
    plain = [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value for value in values]
    op = torch.ops.gaff.tell_any_ if is_flexible else torch.ops.gaff.tell_
    op(plain, token, ticket, place, what, pairs)


def _tell(values: list[Tensor], token: Tensor, ticket: Tensor, place: int, what: str, pairs: list[int]) -> None:
    """The op itself, in the forward: ordinary Python, on the thread that runs the graph, on the true values.

    Notes what shows whether the autograd graph is still alive, and gives the receiver a new ticket for the next frame.
    A ticket that nobody holds any more is ignored.
    """
    number = int(ticket)
    receiver = _RECEIVERS.get(number)
    if receiver is not None:
        for pair in pairs:
            values[pair] = torch.view_as_complex(values[pair])
        receiver.lives.setdefault(number, []).append(memory.storage_life(ticket))
        receiver.tellers.setdefault(number, set()).add(threading.get_ident())
        receiver.renew(number)
        _mark(values, receiver)
        receiver.told((number, place, threading.get_ident()), values, what)


def _arrive(gradients: list[Tensor], ticket: Tensor, place: int, number: int) -> None:
    """The op itself, in the backward: hand the gradient of tensor ``number`` of a call to whoever hears of it.

    ``~number`` stands for a gradient at the edge of a graph, of which a part may be missing.
    """
    receiver = _RECEIVERS.get(int(ticket))
    if receiver is not None:
        _mark(gradients, receiver)
        with told_by_graph(is_edge=number < 0):
            number = ~number if number < 0 else number
            receiver.arrived((int(ticket), place, threading.get_ident()), number, gradients)


class Inside:
    """What the taps of one session in compiled code share: the token, the wanted reduction, and all receivers.

    ``reduce``: what everybody who listens wants of a tensor, computed in the graph and told in its place, so that the
    compiler need not write the tensor down. ``turn``: of a session that edits gradients, longer than those of all that
    were opened before and are open; see ``tracing.take_turn``.
    """

    turn = LOOKS

    def __init__(self, *, has_marks: bool, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        self.reduce = reduce  # what everybody who listens wants of a tensor, told in its place
        with torch.inference_mode(False):  # it is written to, whatever mode the session was opened in
            self.token = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.has_marks = has_marks  # somebody asks which backward pass comes by
        self.receivers: list[Receiver] = []

    def take_turn(self, number: int) -> None:
        """The session makes this number of edits of gradients: they come after those of all that were opened before."""
        with _LOCK:
            self.turn = max(TURNS, key=len, default=LOOKS) + "+"
            TURNS.extend([self.turn] * number)

    def close(self) -> None:
        """Let nobody hear of it, whatever compiled graph still tells something; tickets mean nothing from then on."""
        with _LOCK:
            TURNS[:] = [turn for turn in TURNS if turn != self.turn]
        for receiver in self.receivers:
            receiver.forget()
        if any(receiver.meets_leaf for receiver in self.receivers):
            _take_away()
        self.receivers.clear()


class Receiver(ABC):
    """Hears of one module, at one side. ``ticket`` is another tensor for each frame of compiled code that runs.

    Every hook and edit inside compiled code is one. It is found by number in a table of the process. A ticket is
    needed as long as a backward may bring gradients for it: that is told by the memory of the ticket, which the graph
    holds until then. Dead ones are dropped when there are many.
    """

    def __init__(self, inside: Inside) -> None:
        _leave_uncompiled(type(self))
        self.token = inside.token
        self.reduce = inside.reduce
        self.waiting: dict[Call, list[Tensor]] = {}  # calls whose gradients may arrive, and what stands for the tensors
        self.lives: dict[int, list[Any]] = {}  # of tickets: whether a graph still holds what stands for them
        self.tellers: dict[int, set[int]] = {}  # of tickets: threads on which frames with it have run
        self._most = _FEW
        self.meets_leaf = False  # hooks are set on one, which outlives the graph
        self.latest = 0
        self.ticket = self._new_ticket()
        inside.receivers.append(self)

    def renew(self, number: int) -> None:
        """Take a new ticket for the next frame: one with ``number`` is running, and may tell several times."""
        if number == self.latest:
            self.ticket = self._new_ticket()

    def parts(self, values: list[Tensor]) -> list[Tensor]:
        """While Dynamo compiles: what is told of tensors, detached, reduced where all agree on that."""
        return [part_of(one.detach(), self.reduce) for one in values]

    @abstractmethod
    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The compiled graph has come by, with ``values`` of the structure ``what``; in forwards and in recomputations.

        Must not keep the values beyond the call without a copy: compiled code uses their memory again.
        """

    def arrived(self, call: Call, number: int, gradients: list[Tensor]) -> None:
        """A gradient has come for one tensor of a call: the hooks on what stands for it hear of it.

        A device's backward runs on another thread than its forward; the call is then found by ticket and place, if
        frames with that ticket ran on one thread only.
        """
        stands = self.waiting.get(call)
        if stands is None and len(self.tellers.get(call[0], ())) == 1:  # backward runs on another thread
            found = [one for known, one in self.waiting.items() if known[:2] == call[:2]]
            stands = found[0] if len(found) == 1 else None
        if stands is not None:
            for hook in list((stands[number]._backward_hooks or {}).values()):
                hook(gradients[0])

    def wait(self, call: Call, what: str) -> list[Tensor]:
        """Make what stands for the tensors of a call, in their order, for hooks to be set on; see ``arrived``."""
        odd = {number: one for number, one in ODD.get(call[1], {}).items() if one != GIVEN or TURNS}
        self.waiting[call] = stands = stand_ins(what, odd)
        self.meets_leaf |= LEAF in odd.values()
        return stands

    def forget(self) -> None:
        """Take all tickets out of the table: nothing is heard any more."""
        with _LOCK:
            for number in self.lives:
                _RECEIVERS.pop(number, None)
        self.lives.clear()
        self.tellers.clear()
        self.waiting.clear()

    def _new_ticket(self) -> Tensor:
        """Make a ticket with the next number and enter it into the table, under a lock."""
        number = next(_NUMBERS)
        with torch.inference_mode(False):
            ticket = torch.tensor([number], device="cpu")  # with a dimension: torch guards the number of one without
        with _LOCK:
            self.latest, _RECEIVERS[number] = number, self
            self.lives[number] = [memory.storage_life(ticket)]
            if len(self.lives) > self._most:
                self._drop_dead()
        return ticket

    def _drop_dead(self) -> None:
        """Forget the tickets that no autograd graph holds any more."""
        for number, lives in list(self.lives.items()):
            if number != self.latest and all(life() is None for life in lives):
                _RECEIVERS.pop(number, None)
                del self.lives[number]
                self.tellers.pop(number, None)
        self.waiting = {call: stands for call, stands in self.waiting.items() if call[0] in self.lives}
        self._most = max(_FEW, 2 * len(self.lives))

    def __reduce__(self) -> Any:
        """A copy or pickle of the module gets a hook that does nothing."""
        return getattr, (nullcontext(), "__exit__")  # a copy of the module gets a hook that does nothing


def is_view(value: Any) -> bool:
    """Whether a tensor is a view of another; also answers while Dynamo compiles."""
    return isinstance(value, Tensor) and value._base is not None


def tell_gradients(
    values: list[Tensor], ticket: Tensor, place: int, reduce: Any = None, *, is_flexible: bool = False
) -> None:
    """While Dynamo compiles: let the gradient of each tensor be told that requires grad and is no view.

    ``place`` and ``ticket`` must be those of the call in which the values were told; a tensor's number is its place in
    ``values``. Views are left out, since one may be changed in place later, and its gradient then comes in parts.
    """
    for number, value in enumerate(values):
        if value.requires_grad and not is_view(value):
            odd = oddity(value)
            note_odd(place, number, odd)
            if odd != CALLER:
                hang(value, _arrival(ticket, place, number, reduce, is_flexible))
                take_turn(value)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_odd(place: int, number: int, odd: str) -> None:
    """As Dynamo traces: note what is odd about the tensor of which ``oddity`` has just told, and what comes to be."""
    ODD.setdefault(place, {})[number] = odd
    when_written(partial(ODD[place].__setitem__, number, WRITTEN))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_stale(place: int, is_written: bool) -> None:
    """As Dynamo traces: note that the graph has written to a parameter before the call at ``place``, or uses another.

    What it writes reaches the parameter when the graph has ended.
    """
    if is_written:
        WRITTEN_BEFORE.add(place)


def _arrival(ticket: Tensor, place: int, number: int, reduce: Any, is_flexible: bool) -> Any:
    """The tensor hook that tells a gradient, for Dynamo to put into the backward's graph."""

    def arrived(gradient: Tensor | None) -> None:
        if gradient is None:  # of a graph that broke: what comes to an output that nobody used
            return
        op = torch.ops.gaff.arrive_any if is_flexible else torch.ops.gaff.arrive
        op([part_of(gradient.detach(), reduce)], ticket, place, sign_of_edge(number))

    return arrived


_ARRIVED = next(one for one in _arrival.__code__.co_consts if isinstance(one, CodeType))


def _take_away() -> None:
    """Remove the hooks that compiled code has set on leaves which came into its graphs, of tickets that nobody knows.

    Nothing else tells where they are: who holds such a function, as a table of hooks does, is asked of the collector.
    """
    for hook in [one for one in gc.get_objects() if type(one) is FunctionType and one.__code__ is _ARRIVED]:
        ticket = (hook.__closure__ or ())[_ARRIVED.co_freevars.index("ticket")].cell_contents
        is_known = type(ticket) is not Tensor or int(ticket) in _RECEIVERS  # while torch traces it is none
        for table in gc.get_referrers(hook) if not is_known else ():
            for key in [key for key, one in table.items() if one is hook] if type(table) is OrderedDict else ():
                del table[key]


def sign_of_edge(number: int) -> int:
    """The number of a tensor for ``gaff::arrive``: in a graph as it is; ``~number`` at the edge of one.

    torch sets a hook on what comes into a graph after that graph has run, on the tensor itself.
    """
    if not torch.compiler.is_compiling() and autograd.is_edge_of_compiled():
        return ~number
    return number


def part_of(tensor: Tensor, reduce: Any) -> Tensor:
    """While Dynamo compiles: ``reduce(tensor)``, so that the compiler need not write the tensor down.

    Not of half precision: Inductor would leave out the rounding, and what it overflows, too.
    """
    return reduce(tensor) if reduce is not None and tensor.dtype in _REDUCIBLE else tensor


def _mark(values: Iterable[Tensor], receiver: Receiver) -> None:
    """Mark values that are a number in the place of a tensor, so that streams do not reduce them again."""
    for value in values if receiver.reduce is not None else ():
        if value.dtype in _REDUCIBLE:
            compiler.mark_reduced(value)


_LIBRARY = _ops()  # this is imported when a session first needs them
