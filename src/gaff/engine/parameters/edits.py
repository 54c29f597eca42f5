"""Edited parameters: other values stand in for them during a run, and again in its recomputations.

The parameter itself is never written to. What stands in is computed once a run, with an autograd graph that leads back
to the parameter, so that gradients reach it through the edit. Hooks of modules, torch's own code and the forward read
the tensor from the module's table, and find the one that stands there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import computes_later
from gaff.address.resolve import Found
from gaff.compat import autograd, checkpoints, distributed, modes
from gaff.engine.clock import Frame, Run
from gaff.engine.crossing import Crossing
from gaff.engine.node import Node
from gaff.engine.parameters.substitutes import Standing, original_of
from gaff.engine.parameters.values import OFFLOADED
from gaff.engine.streams import Act, EditStream
from gaff.errors import ExactnessError, GaffError, PlanError


class Swap:
    """One edit of one parameter, wherever the model holds it. Never writes into the parameter.

    The session makes it and has ``begin`` and ``end`` called for each run, and ``restore`` when it closes. One value
    stands in at a time: a run on another thread is refused (``refuse_other_thread``). With ``is_sharded`` the value
    stands in for each call of the parameter's FSDP2 unit instead (``begin_unit``, ``end_unit``), decided in
    the first.

    What a run decided is kept by its ``Crossing`` until the run ends, and longer by the calls that a checkpoint may
    repeat.
    """

    def __init__(
        self, found: Found, stream: EditStream, owners: Sequence[nn.Module], *, is_sharded: bool = False
    ) -> None:
        self._is_sharded = is_sharded  # FSDP2 puts the gathered parameter in place at each call of its unit
        self._called: set[Run] = set()  # in which the unit of FSDP2 was called
        self._found = found
        self._stream = stream
        self._owners = owners
        self._standing: Standing | None = None  # while another stands in
        self._is_told = False  # in this run it was told that the model has put another tensor there
        self._made: deque[int] = deque(maxlen=64)  # sequence numbers of the nodes that made what stood in
        self._again: list[Crossing] = []  # of recomputations in progress
        self._regions: list[tuple[Crossing, int]] = []  # that are recomputed, with their backward passes
        self.crossings: dict[Run, Crossing] = {}  # what was decided when a run in progress began

    def begin(self, run: Run) -> None:
        """A run begins: compute the value with its autograd graph, and let it stand in everywhere.

        Raises PlanError for a parameter that lies on the meta device, and what the edit raises.
        """
        self.restore()
        self._is_told = False
        crossing = self.crossings[run] = Crossing(run, 0, memo={})  # the decision is kept, checkpoint or not
        if not self._is_sharded:
            self._stand_in(crossing)

    def begin_unit(self, run: Run) -> None:
        """FSDP2 has gathered the parameter: until it gives it back, the value of this run stands in.

        Each call of the unit in a run gets the same value with a graph of its own: FSDP2 reduces what has come to the
        parameter when the backward pass leaves a call, and what comes to it later, through an older graph, is lost.
        """
        self.restore()
        crossing = self.crossings[run]
        if run in self._called:
            crossing = Crossing(run, crossing.call, True, crossing.memo, True)
        self._called.add(run)
        self._stand_in(crossing)

    def end_unit(self) -> None:
        """Put the parameter back: the run is over, or FSDP2 is about to free it.

        Raises ExactnessError where the model wrote into what stood in.
        """
        if not self.restore() and not self._is_told:
            raise ExactnessError(
                f"{self._found.site}: the model changed this parameter during the run, and the change fell on what "
                "stood in for it: expected a parameter that the forward only reads"
            )

    def end(self, run: Run) -> None:
        """Put the parameter back: the run is over. Raises ExactnessError where the model wrote into what stood in."""
        self.crossings.pop(run, None)
        self._called.discard(run)
        self.end_unit()

    def again(self, crossing: Crossing, frame: Frame) -> None:
        """A recomputation enters a module: until it leaves it, the value of that run stands in again.

        Done once for all modules around the parameter, by the outermost. Where the value of a run in progress stands
        there, the parameter itself is put over it first, since an edit starts from that. ``frame`` is the call that is
        recomputed; when it leaves, both are taken away, the last first.
        """
        if self._again and self._again[-1] is crossing:
            return  # in a module around this one
        node = autograd.current_node()
        if node is not None and autograd.is_python_node(node) and self._was_given_to(node):
            raise PlanError(
                f"{self._found.site}: the edited value was given to a custom Function that computes with it again in "
                "its backward, where the edit would count twice: expected an edit of what the module returns"
            )
        tensor = self._found.tensor
        standing = Standing.of(tensor, self._owners)
        task = autograd.backward_task()
        if not standing.is_of(task):  # what stands there is of another run, which is still in progress
            standing.add(frame, standing.original, task)
            frame.at_leave.append(lambda: standing.remove(frame))
        repeated = Crossing(crossing.run, crossing.call, True, crossing.memo, True)
        new = self._change(self._found.tensor, repeated)
        key = object()
        standing.add(key, new, task)
        self._again.append(crossing)
        frame.at_leave[:0] = [lambda: standing.remove(key), self._again.pop]

    @contextmanager
    def repeated(self, crossing: Crossing, number: int) -> Iterator[None]:
        """A checkpoint recomputes a region of the run of ``crossing``: its value stands in, from the first use on.

        Whatever uses it: also code that calls no module around the parameter, so that ``again`` does not come. But
        where FSDP2 has not gathered it: the region calls its unit, then. ``number``: which sessions edited it before.
        """
        task = autograd.backward_task()
        is_inside = (crossing, task) in self._regions  # of another that is recomputed now
        if is_inside or (self._is_sharded and distributed.is_spread(self._found.tensor)):
            yield
            return
        standing, key = Standing.of(self._found.tensor, self._owners), object()
        made: list[Tensor] = []

        def make() -> Tensor:
            repeated = Crossing(crossing.run, crossing.call, True, crossing.memo, True)
            made.append(self._change(self._found.tensor, repeated))
            self._again.append(crossing)
            return made[0]

        standing.wait(key, make, task, number)
        self._regions.append((crossing, task))
        try:
            yield
        finally:
            self._regions.pop()
            standing.leave(key)
            if made:
                self._again.pop()

    def restore(self) -> bool:
        """Put the parameter back in its place; False where somebody changed what stood in for it.

        Does nothing if nothing stands in. Recomputations take theirs away themselves.
        """
        is_as_put = self._standing is None or self._standing.remove(self)
        self._standing = None  # only now: what breaks off before is taken up again
        return is_as_put

    def need_in_place(self, module: nn.Module, crossing: Crossing) -> None:
        """The owner is called in a run. Raises ExactnessError where it has another tensor than what stands in."""
        if module is self._found.module and self._standing is not None and not self._is_sharded:
            now = self._found.tensor
            if original_of(now) is now:
                self._is_told = True
                self._stream.refuse(
                    crossing.run, crossing.call, "the model changed this parameter during the run, as functional_call "
                    "does: expected a parameter that the forward only reads, or an edit of what makes the other"
                )  # fmt: skip

    def refuse_other_thread(self) -> None:
        """Raises PlanError while a value stands in: another thread's run must not meet what is meant for this one."""
        if self._standing is not None:
            raise PlanError(
                f"{self._found.site}: the model runs on another thread while this parameter is edited for a run of its "
                "own: expected runs one after the other, or a copy of the model for each thread"
            )

    def _stand_in(self, crossing: Crossing) -> None:
        """Compute the value and let it stand in; an edit that returns the parameter itself leaves it there."""
        tensor = self._found.tensor
        if tensor.is_meta:
            raise PlanError(f"{self._found.site}: {OFFLOADED}, so that nothing can stand in for it")
        new = self._change(tensor, crossing)
        if new.grad_fn is not None:
            self._made.append(autograd.sequence_of(new.grad_fn))
        if new is not tensor:
            self._standing = Standing.of(tensor, self._owners)
            self._standing.add(self, new)

    def _was_given_to(self, node: Any) -> bool:
        """Whether a custom Function that is no checkpoint of torch's was given, as an argument, what stood in."""
        if checkpoints.repeats_in_order(node):
            return False
        makers = [onward for onward, _ in node.next_functions if onward is not None]
        return any(autograd.sequence_of(maker) in self._made for maker in makers)

    def _change(self, tensor: Tensor, crossing: Crossing) -> Tensor:
        """The edited value, with an autograd graph, in the parameter's precision, unseen by modes and checkpoints."""
        # what the edit saves for backward must not be counted by a checkpoint around it: its two passes differ in that;
        # precision and graph are the parameter's own, not those of the place at which the run began
        with (
            checkpoints.saved_plainly(),
            modes.outside_modes(),
            torch.enable_grad(),
            modes.without_autocast(tensor.device),
        ):
            return self._stream.change(tensor, crossing)


class ParameterEdits(list[Swap]):
    """All parameters that a session edits: substitutes stand in together, from the beginning of a run to its end."""

    _unfollow: Callable[[], None] | None = None  # ends that checkpoints of the run in progress are followed

    def begin(self, run: Run) -> None:
        """A run begins. All or nothing: where one cannot stand in, none does."""
        try:
            for swap in self:
                swap.begin(run)
        except BaseException:
            self.restore()
            raise
        self._follow_no_more()
        decided = [(swap, swap.crossings[run]) for swap in self]
        self._unfollow = checkpoints.follow_regions(partial(_repeating, decided, next(_NUMBERS)))

    def _follow_no_more(self) -> None:
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def end(self, run: Run, output: Any) -> None:
        """A run has ended with ``output``. Raises the first ExactnessError, when all parameters are back in place."""
        self._follow_no_more()
        problems: list[GaffError] = []
        if computes_later(output):
            problems.append(
                PlanError(
                    "an edited parameter stands in until the model returns, and it returned what computes later (a "
                    "generator, a coroutine, a closure): expected a model that returns tensors"
                )
            )
        for swap in self:
            try:
                swap.end(run)
            except ExactnessError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def restore(self) -> None:
        """Every parameter is back in its place."""
        self._follow_no_more()
        for swap in self:
            swap.restore()


_NUMBERS = count()  # of runs with edited parameters, over all sessions: a session makes its value of what others made


def _repeating(decided: list[tuple[Swap, Crossing]], number: int, recompute: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint calls in the place of ``recompute``: the values that were ``decided`` in its run stand in."""

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as standing:
            inside = checkpoints.follow_regions(partial(_repeating, decided, number))  # regions that are made anew
            standing.callback(inside)
            for swap, crossing in decided:
                standing.enter_context(swap.repeated(crossing, number))
            return recompute(*args, **kwargs)

    return again


class SwapScope(Act):
    """At the entry of a module around edited parameters: a recomputation of it needs the values of its run.

    One for all ``swaps`` that matter to the module. The first pass notes the run's decisions in the memo of the call,
    which the recomputation finds again.
    """

    def __init__(self, node: Node) -> None:
        self.swaps: list[Swap] = []
        self._node = node

    def __call__(self, value: Any, given: Any, crossing: Crossing) -> None:
        for swap in self.swaps if not crossing.is_again else ():
            swap.need_in_place(self._node.module, crossing)
        if crossing.memo is None:
            return
        if not crossing.is_again:
            found = [(swap, swap.crossings.get(crossing.run)) for swap in self.swaps]
            crossing.memo[self] = [(swap, first) for swap, first in found if first is not None]
        elif crossing.memo.get(self):
            frame = self._node.frame()
            for swap, first in crossing.memo[self]:
                swap.again(first, frame)

    def refuse_other_thread(self) -> None:
        """Refuse a run that this session does not see when it enters the module."""
        for swap in self.swaps:
            swap.refuse_other_thread()

    def around(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands as the module's forward: what jumps over every hook, as Ctrl-C does, gives the parameter back here.

        An ordinary exception passes, since torch calls the last hooks after it.
        """
        try:
            return original(*args, **kwargs)
        except Exception:
            raise  # torch calls the hooks after these
        except BaseException:
            for swap in self.swaps:
                swap.restore()
            raise
