"""Gradients of leaves: of parameters, and of tensors that the user gave.

A hook on a leaf stays from run to run, and needs no module; what it tells is what one backward pass adds to ``.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from gaff.compat import autograd, checkpoints, memory
from gaff.engine.clock import Clock, Run
from gaff.engine.gradients.armed import STALE
from gaff.engine.gradients.derivatives import PASSES
from gaff.engine.gradients.later import NEEDS_NONE
from gaff.engine.gradients.pending import BATCHED, NOT_REACHED, Gradients
from gaff.engine.gradients.sharded import ShardedGradient
from gaff.engine.gradients.tensor_hooks import on_base, on_gradient, take_turn
from gaff.engine.streams import Stream
from gaff.errors import PlanError

SWAPPED = (
    "torch.utils.swap_tensors has put another tensor into this one (as conversions do with swap_module_params), and "
    "took the hook along: open the session after that"
)
REPLACED = "the parameter was replaced by another tensor, or one stood in for it, while the session was open"
APART = (
    "the gradient comes in parts, by backward passes inside one another: of reentrant checkpoints, for which "
    "use_reentrant=False helps, or of autograd.grad in the backward of a custom Function"
)
_FROM_BEFORE = (
    "FSDP2 holds gradients of backward passes before this session that it has not reduced yet "
    "(set_requires_gradient_sync(False)), and reduces with the next one's: expected a session from the first of them on"
)
_PUT_OFF = (
    "FSDP2 has put the reduction of this gradient off to a later backward pass (set_requires_gradient_sync(False))"
)
OFFLOADED_GRADIENT = "it lies on the meta device between calls (offloaded): its gradient goes to a copy that is dropped"


class LeafGradient:
    """The contribution of each backward pass to a parameter, or to a tensor given by the user, before accumulation.

    The session makes one for each such site, lets it ``follow`` at opening and at the beginning and end of each run,
    and closes it. ``find`` returns the tensor as it is now. ``is_anywhere``: on whatever thread its gradient comes.
    ``sharded`` is what ``Shards.of`` tells of an FSDP2 parameter, which gets its gradient by another way.
    """

    def __init__(
        self,
        gradients: Gradients,
        stream: Stream,
        clock: Clock,
        find: Callable[[], Tensor],
        *,
        is_anywhere: bool = False,
        sharded: Any = None,
    ) -> None:
        self._sharded = ShardedGradient.of(sharded[0]) if sharded is not None else None
        self._coming: Run | None = None
        self._is_anywhere = is_anywhere  # a tensor that the user holds: on whatever thread its gradient comes
        self._gradients = gradients
        self._stream = stream
        self._clock = clock
        self._find = find
        self._tensor: Tensor | None = None
        # by identity: what returns the tensor, or None once it is gone, what that held when hooked, and its hook
        self._hooked: dict[int, tuple[Callable[[], Tensor | None], int, Any]] = {}
        self._is_stale: Callable[[], bool] = bool  # where the user gave a view
        self._base: Any = None  # and the handle of the hook on what that was made of
        self._prune_at = 8
        self._has_fired = False
        self._last: tuple[int, Any] = (-1, None)  # the outermost pass of the last arrival, and where inside

    @property
    def only_looks(self) -> bool:
        """Whether its hooks change nothing: they then come after those of edits."""
        return self._gradients.only_looks

    @property
    def number(self) -> int:
        """That of its session."""
        return self._gradients.number

    def follow(self, run: Run | None = None) -> None:
        """Hook the tensor that is there now: a parameter may have been replaced, or have come to require grad.

        Those that were there before keep their hooks, since a backward pass may still come to them. The stream is told
        of a replacement. What stands in for a parameter and is no leaf (``functional_call``) has a gradient of its own,
        which is none of the parameter. Of a sharded parameter the shard is followed.
        """
        if self._sharded is not None:
            if self not in self._sharded.listeners:
                if self._sharded.is_put_off:
                    raise PlanError(f"{self._sharded.name}:grad: {_FROM_BEFORE}")
                self._sharded.listeners.append(self)
                self._sharded.listeners.sort(key=lambda one: one.only_looks)  # the order is kept within each kind
            self._sharded.follow()
            self._tensor = self._sharded._record.sharded_param
            return
        tensor = self._find()
        if tensor is not self._tensor and self._tensor is not None:
            self._stream.remark(REPLACED)
            self._let_go(self._tensor)
        self._tensor = tensor
        known = self._hooked.get(id(tensor))
        if known is not None and known[0]() is not tensor:
            known = None  # that one is gone, and this one has its place
        if known is not None and known[1] != tensor._cdata:
            self._hooked[id(tensor)] = known[0], tensor._cdata, known[2]
            self._stream.refuse(run or self._clock.before, 0, SWAPPED)
        elif known is None and tensor.requires_grad and (tensor.is_leaf or self._is_anywhere):
            self._hook(tensor)

    def _let_go(self, tensor: Tensor) -> None:
        """Hold a tensor weakly that has been replaced, as others for each run are.

        Not the first, which is the parameter itself: torch refuses to swap a tensor that somebody holds weakly.
        """
        known = self._hooked.get(id(tensor))
        if known is not None and next(iter(self._hooked)) != id(tensor):
            self._hooked[id(tensor)] = weakref.ref(tensor), *known[1:]

    def _hook(self, tensor: Tensor) -> None:
        """Set the hook of one tensor, and forget those that are gone."""
        if len(self._hooked) >= self._prune_at:
            self._hooked = {at: known for at, known in self._hooked.items() if known[0]() is not None}
            self._prune_at = 2 * len(self._hooked) + 8
        handle = on_gradient(tensor, self._arrived)
        self._hooked[id(tensor)] = partial(itself, tensor), tensor._cdata, handle
        if not self.only_looks:
            take_turn(handle, self.number)
        if tensor._is_view() and not tensor.is_leaf:
            self._is_stale = memory.write_watch(tensor)
            self._base = on_base(tensor, self._is_stale, self._arrived_elsewhere)

    def remove(self) -> None:
        """Take the hooks away."""
        if self._sharded is not None:
            self._sharded.leave(self)
        for _, _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        if self._base is not None:
            self._base.remove()

    def coming(self) -> None:
        """Note that backward has reached the gathered parameter, and whose run that is.

        FSDP2 reduces gradients after that, perhaps when the pass is over and its number is gone.
        """
        run = self._run()
        self._coming = run if run is not None or not self._clock.is_own_backward() else self._clock.before

    def reduced(self, gradient: Tensor) -> Tensor | None:
        """Tell the stream the gradient, reduced over all processes: this one's part of it, before it is added.

        Returns the gradient that an edit puts in its place, else None.
        """
        run = self._coming  # None: FSDP2 has gathered it for the first time, in no run that was seen
        if run is None and self._clock.is_own_backward():
            run = self._clock.before
        if not self._gradients.is_open or run is None:
            return None
        self._gradients.seen(run)
        self._has_fired = True
        found: Tensor | None = self._stream.add(gradient, run, 0)
        return found

    def close(self) -> None:
        """Remove the hook; tell the stream if the tensor needs no gradient, or if none came though backward ran."""
        self.remove()
        if self._tensor is not None and not self._tensor.requires_grad and not self._has_fired:
            self._stream.absent(self._clock.latest, 0, NEEDS_NONE)
        elif not self._has_fired and self._gradients.has_backward:
            is_meta = self._tensor is not None and self._tensor.is_meta
            reason = OFFLOADED_GRADIENT if is_meta else NOT_REACHED
            if self._sharded is not None and self._sharded.is_put_off:
                reason = _PUT_OFF
            self._stream.absent(self._clock.latest, 0, reason)
        self._tensor = None
        self._last = (-1, None)

    def _arrived(self, gradient: Tensor | None) -> Any:
        """The tensor hook: tell the stream, with the run whose backward pass this is, -1 where that is unknown.

        A pass on a thread at which the session does not look is ignored, unless it is known to bring gradients of a
        run, or the user gave the tensor.
        """
        run = self._run()
        is_ours = run is not None or self._is_anywhere or self._clock.is_own_backward()
        if not self._gradients.is_open or not is_ours or gradient is None:
            return None  # a backward pass of a thread at which this session does not look
        run = run or self._clock.before
        self._gradients.seen(run)
        self._has_fired = True
        why = BATCHED if autograd.is_wrapper(gradient) else STALE if self._is_stale() else ""
        if why:
            self._stream.refuse(run, 0, why)
            return None
        if self._gradients.has_edits:
            self._refuse_parts(run)
        return self._stream.add(gradient, run, 0)

    def _arrived_elsewhere(self, _gradient: Tensor) -> None:
        """A gradient has come to what a view was made of, past the view: nothing tells what of it was the view's."""
        run = self._run()
        if self._gradients.is_open and (run is not None or self._clock.is_own_backward()):
            run = run or self._clock.before
            self._gradients.seen(run)
            self._has_fired = True
            self._stream.refuse(run, 0, STALE)

    def _run(self) -> Run | None:
        """The run whose backward pass this is: one whose outputs it has come by, the last of several.

        Inside a reentrant checkpoint, which runs a pass of its own, it is the run that made the checkpoint's node.
        Where the pass came by no output, that which made the nodes from which the gradient comes. None where no run
        did: it is of an earlier forward, or of a loss on the tensor itself; or where nothing tells, and there were
        several.
        """
        runs = list(self._gradients.runs_of(autograd.backward_task()))
        if not runs:
            made = (self._clock.run_of(function) for function in checkpoints.recomputing_functions())
            runs = [run for run in made if run is not None]
        if runs or not self._clock.is_own_backward():
            return runs[-1] if runs else None
        latest = self._clock.latest
        position = self._tensor.output_nr if self._tensor is not None else 0  # of the outputs of its autograd node
        nodes = self._gradients.pass_graph.handing_to(position) if latest.index >= 0 else None
        if not nodes:
            return latest if latest.index <= 0 else None
        made = (self._clock.run_of(node) for node in nodes if autograd.is_due(node))
        return max((run for run in made if run is not None), key=lambda run: run.index, default=None)

    def _refuse_parts(self, run: Run) -> None:
        """Refuse to edit a gradient that comes in parts; an edit of each part is no edit of their sum.

        Reentrant checkpoints run backward apart, and so may a custom Function, also several times: a parameter used in
        two of them, or in one and outside, gets its gradient in parts. A second arrival in the same pass from another
        place tells that.
        """
        region = next(checkpoints.recomputing_functions(), None)
        place = (region, autograd.backward_task() if region is not None else -1)
        last, self._last = self._last, (PASSES.outermost, place)
        if last[0] == self._last[0] and last[1] != place:
            self._stream.refuse(run, 0, APART)


def itself(tensor: Tensor) -> Tensor:
    """The tensor that was given: what is never replaced, as a parameter may be, or is held as long as this is."""
    return tensor
