"""A side: the entry or the exit of a node, and the one way in which a value passes it, whoever brings it there.

Hooks of modules, ops and tickets of compiled graphs make crossings of the sides of their nodes; what hangs on a side
never knows which of them it was. See ``streams`` for what may hang there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from gaff.address.nested import Arguments, iter_tensors
from gaff.compat import autograd, checkpoints
from gaff.compat.autograd import is_grad_enabled, is_outside_functions, takes_gradient
from gaff.compat.checkpoints import may_repeat
from gaff.engine.clock import Clock, Run
from gaff.engine.crossing import Crossing
from gaff.engine.recomputation import Replay
from gaff.engine.streams import Act, Look
from gaff.errors import PlanError


class Side:
    """The entry or the exit of a node: ``taps`` look at what passes, ``acts`` change it or set gradient hooks on it.

    Both act in their order. What passes the entry is ``Arguments``, what passes the exit is the output. ``is_edited``:
    some act is an edit, so a recomputation has to make the same again. ``direct``: the only act, the short way.
    """

    __slots__ = ("_clock", "_module", "_replay", "acts", "direct", "is_edited", "taps")

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        self.taps: tuple[Look, ...] = ()
        self.acts: tuple[Act, ...] = ()
        self.is_edited = False
        self.direct: Callable[[Tensor], Tensor | None] | None = None
        self._module = module
        self._clock = clock
        self._replay: Replay | None = None

    @property
    def replay(self) -> Replay:
        """The crossings that may be recomputed; made when first needed.

        Each side has its own, since calls inside one another are entered and left in different orders.
        """
        self._replay = found = self._replay or Replay()
        return found

    def cross(self, value: Any, given: Arguments, run: Run, call: int) -> Any:
        """A value passes in an ordinary forward, and acts act on it; returns what passes on.

        ``given`` are the arguments of the call, at the entry the value itself. The taps are the backend's affair.
        """
        return self.act(value, given, self.meet(run, call, _makes_graph(value), (given, value)))

    def again(self, value: Any, given: Arguments) -> Any:
        """A value passes in a recomputation; returns what passes on, as it did in the first pass."""
        crossing = self.met_again(_makes_graph(value), (given, value))
        return value if crossing is None else self.act(value, given, crossing)

    def meet(self, run: Run, call: int, has_graph: bool, passing: Any) -> Crossing:
        """A crossing of what is ``passing`` in an ordinary forward, noted for recomputations if there may be any.

        Edits are made again in each; gradient hooks wait for one only where this pass has no autograd graph, or one
        that a custom Function such as a reentrant checkpoint may throw away.
        """
        crossing = Crossing(run, call, has_graph)
        if self.is_edited:
            if may_repeat():
                self.replay.remember(crossing, passing)
        elif not (has_graph and is_outside_functions()):
            self.replay.wait(crossing, passing)
        return crossing

    def met_again(self, has_grad: bool, passing: Any) -> Crossing | None:
        """The crossing that the current recomputation makes; None where there is nothing to be done in it.

        Gradient hooks are set where the first pass had none that lasts. Raises PlanError where an open session's edited
        module is called inside a backward pass, and nothing tells to which forward that belongs: going on without the
        edit would make gradients of another function.
        """
        if not self.acts or (self._clock.closed and not self.is_edited):
            return None
        found = self.replay.match(passing, has_grad=has_grad)
        if found is not None:
            first = found.crossing
            has_graph = found.is_first_graph and has_grad and not self._clock.closed
            return Crossing(first.run, first.call, has_graph, first.memo, True)
        is_open = not self._clock.closed and self._clock.is_own_backward() and not self._is_of_others()
        if self.is_edited and (is_open or autograd.current_node() in self.replay):
            raise PlanError(
                f"{type(self._module).__name__} was called inside a backward pass, and its edits belong to a forward "
                "that cannot be told: expected torch.utils.checkpoint(use_reentrant=False), or no call of an edited "
                "module in backward"
            )
        return None

    def act(self, value: Any, given: Arguments, crossing: Crossing, acts: Iterable[Act] | None = None) -> Any:
        """Let ``acts``, all of the side's if left out, act on what passes; returns what passes on.

        An act that needs an autograd graph and has none now waits, where something may run the call again, else it is
        given up. In a recomputation that is the first pass of a checkpoint inside, that one will run it again.
        """
        if crossing.memo is not None:
            crossing.waits = not is_outside_functions() if crossing.is_again else crossing in self.replay
        for act in self.acts if acts is None else acts:
            if act.needs_graph and crossing.waits:
                act.before_graph(value, crossing)
            if crossing.has_graph or not act.needs_graph:
                changed = act(value, given, crossing)
                value = value if changed is None else changed
            elif not crossing.waits and not crossing.is_again:
                act.without_graph(value, given, crossing)
        return value

    def give_up(self, *, is_final: bool) -> None:
        """Tell acts of calls without an autograd graph that nothing recomputed them.

        Those are told whose checkpoint is gone; with ``is_final``, when the session closes, all that are left.
        """
        if self.acts and self._replay is not None:
            for crossing in self._replay.give_up(is_final=is_final):
                for act in self.acts:
                    if not crossing.has_graph or (crossing.memo and act in crossing.memo):
                        act.give_up(crossing.run, crossing.call)

    def regions(self) -> Iterator[Any]:
        """The checkpoints whose autograd graphs are alive, with crossings of this side; none is held here."""
        return self._replay.regions() if self._replay is not None else iter(())

    def drop(self) -> None:
        """Let go of what acts here, which may know its node; nothing is repeated from then on."""
        self.acts = ()
        self.direct = None
        if self._replay is not None:
            self._replay.forget()

    def _is_of_others(self) -> bool:
        """Whether what recomputes here belongs to a forward that this session did not see.

        A non-reentrant checkpoint would have been remembered if it was seen; a custom Function's node was made
        elsewhere if none of this session's runs made it.
        """
        if any(found.is_again for found in checkpoints.enclosing()):
            return True
        current = autograd.current_node()
        if current is None or not autograd.is_python_node(current):
            return False
        return not any(map(self._clock.made, (current, *checkpoints.recomputing_functions())))


def _makes_graph(value: Any) -> bool:
    """Whether an autograd graph is made of what passes: also where grad mode is off, and may be on inside the call."""
    if is_grad_enabled():
        return True
    return is_outside_functions() and any(takes_gradient(tensor) for _, tensor in iter_tensors(value))
