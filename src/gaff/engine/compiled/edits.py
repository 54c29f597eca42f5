"""Edits inside compiled code: of values, and of the gradients at them.

The edit itself becomes part of the compiled graph. Its numbers and its switch are tensors that the graph reads as it
runs, so that another strength needs no other graph. What it did is told to its stream afterwards, which counts and
measures.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gaff.address.grammar import Site
from gaff.address.nested import Arguments, iter_tensors, put
from gaff.compat import autograd, checkpoints, memory
from gaff.edits.arithmetic import Project
from gaff.edits.compiled import may_write
from gaff.edits.event import mixed
from gaff.edits.places import iter_innermost
from gaff.engine.clock import Clock
from gaff.engine.compiled.structure import BY_STANCE, WHY_UNTOLD
from gaff.engine.compiled.tell import (
    ODD,
    TURNS,
    Call,
    Inside,
    Receiver,
    is_view,
    new_place,
    note_odd,
    sign_of_edge,
    tell,
)
from gaff.engine.compiled.tracing import CALLER, GIVEN, LEAF, WRITTEN, hang, note_edit, oddity, take_turn, was_written
from gaff.engine.gradients.tensor_hooks import EDGE, is_at_edge
from gaff.engine.value_edits import RETURNED, TWINS, find
from gaff.errors import ExactnessError, PlanError

_WROTE = "the edit wrote into what it was given: expected a new tensor, t * 2 not t.mul_(2)"
_UNFIT = "the edit returned "
_VIEW = "inside compiled code the gradient of a view cannot be edited"
_LEAF = f"other runs may be given the same leaf, whose passes compiled code cannot tell apart: {BY_STANCE}"
_ODD = {CALLER: WHY_UNTOLD[CALLER], LEAF: _LEAF}


class TracedEdit(Receiver):
    """One edit of a value, in compiled code. ``apply``: what it does; ``switch``: its ``gate`` is 1 on, 0 off.

    Made for each opening of a session; called by the hooks of the module while Dynamo compiles them. A gate between 0
    and 1 mixes old and new. ``clock``: that of its session; ``repeats`` are checkpoints that would recompute the edit
    after the session.
    """

    clock: Clock

    def __init__(self, inside: Inside, site: Site, stream: Any, apply: Any, *, is_cut: bool) -> None:
        super().__init__(inside)
        self.site = site
        self.stream = stream
        self.apply = apply
        self.switch = stream.switch
        self.may_write = may_write(stream.edit)
        self.is_cut = is_cut  # while it acts nothing leads back to what passed: another graph than while it is off
        self.repeats: WeakSet[Any] = WeakSet()  # checkpoints that will recompute it
        self.constants = _marks(stream.edit)

    def change(self, value: Any, given: Arguments) -> Any:
        """While Dynamo compiles: what the model goes on with in the place of ``value``, which passes here."""
        key, tensor = find(value, self.site)
        if tensor is None:
            return value
        new = self._changed(tensor, "" if value is given else _remark(value, tensor, given.args))
        return put(value, key, new)

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The compiled graph has made the edit: tell the stream what passed and what went on.

        ``values`` are these two, ``what`` is a remark or empty. A recomputation is not told again. Raises PlanError for
        a result that is no edit, and ExactnessError where directions of a projection were written to, since the graph
        holds what was computed of them when it was compiled.
        """
        if what == _WROTE or what.startswith(_UNFIT):
            raise PlanError(f"{self.site}: {what}")
        if any(mark.is_written(one) for one, mark in self.constants):
            raise ExactnessError(f"{self.site}: directions to project on were written to while the edit was open")
        if autograd.backward_task() == -1:
            self.need_own_thread()
            self.stream.told(*values, what)
            self.repeats.update(found.frame for found in checkpoints.enclosing())
            self.repeats.update(checkpoints.enclosing_functions())

    def need_own_thread(self) -> None:
        """Raises ExactnessError on a thread that the session does not see: the graph has made the edit all the same."""
        if not self.clock.is_own_thread():
            raise ExactnessError(
                f"{self.site}: compiled code ran on another thread than that which opened the edit, and the edit is in "
                "that code for all threads: expected threads='all', one thread at a time, or "
                "torch.compiler.set_stance('force_eager')"
            )

    def _changed(self, old: Tensor, remark: str) -> Tensor:
        """While Dynamo compiles: the edited tensor, after an op that tells both."""
        new, wrong = self._mix(old)
        tell([old.detach(), new.detach()], self.token, self.ticket, new_place(), wrong or remark)
        return new

    def _mix(self, old: Tensor) -> tuple[Tensor, str]:
        """While Dynamo compiles: the edited tensor, mixed with the old one by the gate of the switch.

        The text is what is wrong with it, empty if nothing is. Torch would give an exception raised here, while it
        compiles, a class of its own.

        A fully on or off edit must give the very bits of the one or the other, so they are selected, not multiplied by
        1 or 0. An edit that cuts the autograd graph is compiled apart for fully on and for off: the branch that is not
        taken would send back 0 times NaN.
        """
        if self.is_cut and not self.switch.is_on:
            return old.clone(), ""
        given = old.clone() if self.may_write else old
        place = new_place()
        note_edit(place, is_done=False)
        new = self.apply(given)
        note_edit(place, is_done=True)
        if self.may_write and was_written(given):
            return old, _WROTE
        if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            return old, _unfit(new, old)
        if self.is_cut and self.switch.is_plain:
            return new, ""
        gate = self.switch.gate[0].to(old.device)
        if not (old.is_floating_point() or old.is_complex()):  # refused where it is told
            return torch.where(gate == 0, old, new), ""
        return torch.where(gate == 0, old, torch.where(gate == 1, new, mixed(old, new, gate.to(old.dtype)))), ""


class TracedGradientEdit(TracedEdit):
    """One edit of the gradient at a value, in compiled code: a tensor hook that becomes part of the backward's graph.

    Each call has a ticket of its own, kept by its backward: as long as one is alive the edit is still to act. Where the
    hook is outside of a graph, as at a graph break, the ticket lives on with the loss: when its gradient has come the
    edit is ``done``, and once the session ``is_over`` such a hook lets further backward passes by.
    """

    def __init__(self, inside: Inside, site: Site, stream: Any, apply: Any, *, is_cut: bool) -> None:
        super().__init__(inside, site, stream, apply, is_cut=is_cut)
        self.turn = inside.turn
        self.is_first = True  # of those of its module
        self.done: set[int] = set()
        self.is_over = False

    def has_living_graph(self) -> bool:
        """Whether an autograd graph is alive that may still bring a gradient to be edited."""
        return any(one() is not None for at, lives in self.lives.items() for one in lives
                   if at != self.latest and at not in self.done)  # fmt: skip

    def change(self, value: Any, given: Arguments) -> Any:
        """While Dynamo compiles: hook the tensor that the address means; what passes stays as it is."""
        _, tensor = find(value, self.site)
        if tensor is not None and tensor.requires_grad:
            self._hook(tensor)
        return value

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The gradient of a frame is to come. Raises ExactnessError where its hook hears of another tensor's, or may
        come before others where it should come after them."""
        self.need_own_thread()
        if ODD[call[1]][0] == GIVEN and len(TURNS) > 1:
            raise ExactnessError(f"{self.site}: {WHY_UNTOLD[GIVEN]}")
        if ODD[call[1]][0] == WRITTEN:
            raise ExactnessError(f"{self.site}: {WHY_UNTOLD[WRITTEN]}")

    def arrived(self, call: Call, number: int, gradients: list[Tensor]) -> None:
        """The backward has made the edit: tell the stream the old gradient and the new one.

        ``number`` is that of what is wrong with the result. Raises PlanError for that, and ExactnessError at the edge
        of a graph, where a part of the gradient may be missing.
        """
        if number:
            raise PlanError(f"{self.site}: {_WROTE if number == 1 else f'{_UNFIT}another shape, type or device'}")
        if is_at_edge():
            raise ExactnessError(f"{self.site}: its gradient was not edited: {EDGE}")
        self.stream.told(*gradients, "")

    def _hook(self, tensor: Tensor) -> None:
        """Set the hook that edits. Raises PlanError where none can be: a view's gradient may come in parts, say."""
        odd = oddity(tensor)
        why = _VIEW if is_view(tensor) else _ODD.get(odd, "")
        if why:
            note_edit(new_place(), is_done=False)
            raise PlanError(f"{self.site}: {why}")  # torch breaks the graph here, or tells it where none may be broken
        ticket, place = self.ticket.clone(), new_place()
        note_odd(place, 0, odd)
        tell([], self.token, ticket, place, "")

        def arrived(gradient: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                if self.is_over:
                    return gradient
                self.done.add(int(ticket))
            new, wrong = self._mix(gradient)  # with its graph, for a second derivative
            sign = sign_of_edge(1 if wrong == _WROTE else 2 if wrong else 0)
            torch.ops.gaff.arrive([gradient.detach(), new.detach()], ticket, place, sign)
            return new

        hang(tensor, arrived)
        take_turn(tensor, self.turn, is_first=self.is_first)


def _unfit(new: Any, old: Tensor) -> str:
    """While Dynamo compiles: why a result cannot take the place of what passes, in the words of ``CheckedEdit``."""
    if not isinstance(new, Tensor):
        return f"{_UNFIT}{type(new).__name__} {'None' if new is None else 'object'}: expected a tensor"
    where = "" if new.device == old.device else f" on {new.device}"
    here = "" if new.device == old.device else f" on {old.device}"
    return f"{_UNFIT}{_size(new)}{where} where {_size(old)}{here} passes"


def _size(tensor: Tensor) -> str:
    return f"{'x'.join([str(one) for one in tensor.shape]) or 'a scalar'} {str(tensor.dtype).removeprefix('torch.')}"


def _remark(output: Any, tensor: Tensor, args: Any) -> str:
    """What the stream is to know of this output: it is the input itself, or holds the tensor twice; else empty."""
    if any(output is one for one in args):
        return RETURNED
    return TWINS if sum(one is tensor for _, one in iter_tensors(output)) > 1 else ""


def _marks(edit: Any) -> list[tuple[Tensor, memory.Mark]]:
    """What projections on several directions were made ready from, which a compiled graph does not make again."""
    projections = (one for one in iter_innermost(edit) if isinstance(one, Project))
    several = (one.directions for one in projections if one.directions.dim() > 1 and len(one.directions) > 1)
    return [(one, memory.Mark(one, by_bits=True)) for one in several]
