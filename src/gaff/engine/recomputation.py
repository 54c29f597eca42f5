"""Recomputation: which call of the first pass a recomputed call of a module stands for.

Activation checkpointing runs a part of the forward again inside the backward pass. An edit has to act again there,
with what it decided in the first pass, or backward would differentiate another function; regions come back in reverse
order, and a region of a forward without edits may come back among them.

Two kinds of activation checkpointing, each with an object that both passes can see and that dies with the autograd
graph: a non-reentrant one has its frame, a reentrant one its autograd node. Calls are matched by their order within
it. See docs/decisions/0007.

A custom Function that is no checkpoint of torch's may call modules in its backward in another order and with other
values, as an adjoint solver does: there a call is repeated by one that passes the same (``passed``), which is looked
for at both ends of those that are left, and by no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from gaff.compat import autograd, checkpoints
from gaff.engine import passed
from gaff.engine.crossing import Crossing
from gaff.errors import ExactnessError, PlanError


class Match(NamedTuple):
    """The call of the first pass that a recomputed call repeats.

    ``is_first_graph``: the first pass had no autograd graph, so gradient hooks must be set now.
    """

    crossing: Crossing
    is_first_graph: bool


class _Ends(NamedTuple):
    """Which calls in a custom Function one backward pass, ``mark``, has not repeated yet: the first and the last.

    ``is_reversed``: it goes backwards, as far as is known.
    """

    mark: int
    first: int
    last: int
    is_reversed: bool = False


class Replay:
    """The calls of one module, at its entry or at its exit, that may be recomputed.

    Its node owns it; hooks note calls in forwards (``remember``, ``wait``) and look them up in recomputations
    (``match``). Checkpoints are held weakly, so that it never keeps an autograd graph alive, and forgets its calls
    with it.
    """

    __slots__ = ("_ends", "_positions", "_regions", "_waiting")

    def __init__(self) -> None:
        self._regions: WeakKeyDictionary[Any, list[Crossing]] = WeakKeyDictionary()  # checkpoint -> calls in order
        self._positions: WeakKeyDictionary[Any, tuple[object, int, Any]] = WeakKeyDictionary()
        self._ends: WeakKeyDictionary[Any, _Ends] = WeakKeyDictionary()  # by custom Function
        self._waiting: dict[Crossing, ref[Any]] = {}  # calls without a graph, and what may recompute them

    def wait(self, crossing: Crossing, value: Any) -> bool:
        """Note a call that a reentrant checkpoint may run again with an autograd graph; whether there is one around it.

        The call is one without grad mode, or with it inside a custom Function, whose graph may be thrown away. By
        ``value``, what passes with the arguments of its call, a repetition is told from other calls; None if not known.

        A reentrant checkpoint runs its forward without grad mode, inside a custom Function; so does any other such
        Function. The call is noted for all that enclose it, and waits for the outermost: the inner ones are gone after
        the first pass, and are made anew when the outer one recomputes.
        """
        run = crossing.run
        functions = checkpoints.enclosing_functions() if run.functions is None else run.functions
        if not functions:
            return False
        run.is_waiting = True
        if crossing.memo is None:
            crossing.memo = {}
        if value is not None and not all(map(checkpoints.repeats_in_order, functions)):
            crossing.passed = passed.traits_of(value)
        self._waiting[crossing] = ref(functions[-1])  # the others die with the first pass
        for function in functions:
            self._regions.setdefault(function, []).append(crossing)
        return True

    def remember(self, crossing: Crossing, value: Any) -> None:
        """Note a call in an ordinary forward whose edits must be made again if a checkpoint recomputes it.

        Raises PlanError where tensors are saved by hooks, as a non-reentrant checkpoint does, and this torch does not
        tell of which.
        """
        if not crossing.has_graph or not autograd.is_outside_functions():
            self.wait(crossing, value)
        if checkpoints.has_saved_hooks():
            if not checkpoints.sees_checkpoints():
                raise PlanError(
                    "an edit inside torch.utils.checkpoint(use_reentrant=False) cannot be repeated with torch "
                    f"{torch.__version__}: expected use_reentrant=True, or no hooks for saved tensors around the call"
                )
            self._note(crossing, checkpoints.enclosing())

    def match(self, value: Any, *, has_grad: bool) -> Match | None:
        """The call that the current recomputation repeats; None for one that this session did not see.

        ``value`` is what passes now, None if not known.

        ``has_grad``: grad mode of the call; that of this thread may be another, since compiled code runs without.

        A non-reentrant checkpoint that recomputes around this call is asked first, the innermost, and its frame tells
        the calls; but where its recomputation was begun by another autograd node than the one that runs now, and that
        node is a known checkpoint itself, the node tells them. Otherwise the custom Function whose backward runs here
        is asked.

        Each answer moves on to the next call of that checkpoint, so a hook asks once for each call. A checkpoint
        inside the recomputed one is another object than in the first pass; the call is noted for it again.
        """
        node = autograd.current_node()
        chain = checkpoints.enclosing() if self._regions else []
        inner = next((number for number, found in enumerate(chain) if found.is_again), None)
        if inner is not None:
            known = self._positions.get(chain[inner].pass_)
            if known is None or node not in self._regions or (known[2] is not None and known[2]() is node):
                crossing = self._next(chain[inner].frame, chain[inner].pass_, node)
                if crossing is not None:
                    self._note(crossing, chain[:inner])
                return None if crossing is None else Match(crossing, False)
        if node is None or not autograd.is_python_node(node):
            return None
        is_ordered = checkpoints.repeats_in_order(node)
        crossing = self._next(node, node, autograd.backward_task()) if is_ordered else self._alike(node, value)
        if crossing is None:
            return None
        self._note(crossing, chain[:inner])
        is_outside = autograd.is_outside_functions()
        functions = [] if is_outside else checkpoints.enclosing_functions()
        if has_grad and (is_outside or (value is None and not functions)):  # compiled code is in one of torch's own
            self._waiting.pop(crossing, None)
        for function in functions:  # a checkpoint inside the recomputed one, made anew
            if function is not node:
                self._regions.setdefault(function, []).append(crossing)
        return Match(crossing, True)

    def __contains__(self, known: Any) -> bool:
        """Whether something may run this call (a ``Crossing``), which had no autograd graph, again with one.

        Or whether calls of this module were made in a custom Function, told by its node.
        """
        return known in (self._waiting if isinstance(known, Crossing) else self._regions)

    def regions(self) -> Iterator[Any]:
        """The checkpoints with calls of this module; they die with their autograd graphs."""
        return iter(list(self._regions))

    def give_up(self, *, is_final: bool) -> list[Crossing]:
        """Forget and return the calls without an autograd graph that nothing recomputed, once nothing can any more.

        With ``is_final`` all of them: the session closes, and nothing shall.
        """
        never = [crossing for crossing, node in self._waiting.items() if is_final or node() is None]
        for crossing in never:
            del self._waiting[crossing]
        return never

    def forget(self) -> None:
        """Repeat nothing any more: recomputations find no call."""
        self._regions.clear()

    def _note(self, crossing: Crossing, chain: list[checkpoints.Checkpoint]) -> None:
        """Note a call for the checkpoints of ``chain`` that run for the first time; its run waits for them."""
        for found in chain:
            if crossing.memo is None:
                crossing.memo = {}
            crossing.run.is_waiting = True
            if not found.is_again:
                self._regions.setdefault(found.frame, []).append(crossing)

    def _alike(self, node: Any, passing: Any) -> Crossing | None:
        """The call in a custom Function, from either end of those that are left, that passed the same; or None.

        The next one in order comes first, until one was found at the other end alone: then the last one does.
        """
        mark, calls = autograd.backward_task(), self._regions.get(node, [])
        known = self._ends.get(node)
        ends = _Ends(mark, 0, len(calls) - 1) if known is None or known.mark != mark else known
        if ends.first > ends.last or passing is None:
            return None
        now = passed.traits_of(passing)
        known_at = {at: calls[at].passed for at in (ends.first, ends.last)}  # None of what compiled code has told
        fitting = [at for at, told in known_at.items() if told is not None and passed.is_alike(told, now)]
        if not fitting:
            return None
        at = fitting[-1] if ends.is_reversed else fitting[0]
        is_last = at == ends.last and (ends.is_reversed or at != ends.first)
        is_sure = len(fitting) == 1 and ends.first != ends.last
        self._ends[node] = _Ends(mark, ends.first + (not is_last), ends.last - is_last,
                                 is_last if is_sure else ends.is_reversed)  # fmt: skip
        found: Crossing = calls[at]
        return found

    def _next(self, region: Any, place: Any, mark: Any) -> Crossing | None:
        """The next call of ``region`` in the recomputation ``place``; None for a region without calls of this module.

        A frame may be recomputed several times, each with another ``place``. A node is its own place, and counts anew
        for each backward pass, which is its ``mark``. Raises ExactnessError where the recomputation makes more calls
        than the first pass.
        """
        calls = self._regions.get(region)
        if calls is None:
            return None
        known = self._positions.get(place)
        is_frame = region is not place
        position = known[1] if known is not None and (is_frame or known[0] == mark) else 0
        if position == len(calls):
            raise ExactnessError("a module was called more often in the recomputation of a checkpoint than before it")
        trigger = known[2] if known is not None else ref(mark) if is_frame and autograd.is_python_node(mark) else None
        self._positions[place] = (None if is_frame else mark, position + 1, trigger)
        return calls[position]
