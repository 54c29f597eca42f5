"""Gradients of leaves: of parameters, and of tensors that the user gave.

A hook on a leaf stays from run to run, and needs no module; what it tells is what one backward pass adds to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gaff.compat import autograd, checkpoints
from gaff.engine.clock import Clock, Run
from gaff.engine.gradients.derivatives import outermost_passes
from gaff.engine.gradients.later import NEEDS_NONE
from gaff.engine.gradients.pending import BATCHED, NOT_REACHED, Gradients
from gaff.engine.gradients.sharded import ShardedGradient
from gaff.engine.gradients.tensor_hooks import on_gradient, take_turn
from gaff.engine.streams import Stream

SWAPPED = (
    "torch.utils.swap_tensors has put another tensor into this one (as conversions do with swap_module_params), and "
    "took the hook along: open the session after that"
)
REPLACED = "the parameter was replaced by another tensor, or one stood in for it, while the session was open"
_MOST_HOOKED = 8
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
        self._hooked: dict[int, tuple[Tensor, int, Any]] = {}  # by identity: a tensor, what it held then, its hook
        self._has_fired = False
        self._last: tuple[int, Any] = (-1, None)  # the backward pass and checkpoint of the last arrival

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
                self._sharded.listeners.append(self)
                self._sharded.listeners.sort(key=lambda one: one.only_looks)  # the order is kept within each kind
            self._sharded.follow()
            self._tensor = self._sharded._record.sharded_param
            return
        tensor = self._find()
        if tensor is not self._tensor and self._tensor is not None:
            self._stream.skip(REPLACED)
        self._tensor = tensor
        known = self._hooked.get(id(tensor))
        if known is not None and known[1] != tensor._cdata:
            self._hooked[id(tensor)] = tensor, tensor._cdata, known[2]
            self._stream.refuse(run or self._clock.before, 0, SWAPPED)
        elif known is None and tensor.requires_grad and (tensor.is_leaf or self._is_anywhere):
            handle = on_gradient(tensor, self._arrived)
            self._hooked[id(tensor)] = tensor, tensor._cdata, handle
            if not self.only_looks:
                take_turn(handle, self.number)
            if len(self._hooked) > _MOST_HOOKED:  # others for each run: the first, and the last few, are followed
                self._hooked.pop(list(self._hooked)[1])[2].remove()

    def remove(self) -> None:
        """Take the hooks away; ``follow`` can set one again."""
        if self._sharded is not None:
            self._sharded.leave(self)
        for _, _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

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
        run = self._coming
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
            self._stream.absent(self._clock.latest, 0, OFFLOADED_GRADIENT if is_meta else NOT_REACHED)
        self._tensor = None
        self._last = (-1, None)

    def _arrived(self, gradient: Tensor | None) -> Any:
        """The tensor hook: tell the stream, with the run whose backward pass this is, or -1 if that is unknown.

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
        if autograd.is_wrapper(gradient):
            self._stream.refuse(run, 0, BATCHED)
            return None
        if self._gradients.has_edits:
            self._refuse_parts(run)
        return self._stream.add(gradient, run, 0)

    def _run(self) -> Run | None:
        """The run whose backward pass this is: one whose outputs it has come by, the last of several; or the only one.

        Inside a reentrant checkpoint, which runs a pass of its own, it is the run that made the checkpoint's node.
        None where several runs have been and the pass came by nothing that they made of the tensor: it may be of an
        earlier forward, or of a loss on the tensor itself.
        """
        runs = list(self._gradients.runs_of(autograd.backward_task()))
        if not runs:
            made = (self._clock.run_of(function) for function in checkpoints.recomputing_functions())
            runs = [run for run in made if run is not None]
        latest = self._clock.latest
        is_only = latest.index <= 0 and self._clock.is_own_backward()
        return runs[-1] if runs else latest if is_only else None

    def _refuse_parts(self, run: Run) -> None:
        """Refuse to edit a gradient that comes in parts; an edit of each part is no edit of their sum.

        Reentrant checkpoints run backward apart: a parameter used in two, or in one and outside, gets its gradient in
        parts. A second arrival in the same pass from another place tells that.
        """
        region = next(checkpoints.recomputing_functions(), None)
        last, self._last = self._last, (outermost_passes(), region)
        if last[0] == self._last[0] and last[1] is not region:
            self._stream.refuse(
                run, 0, "the gradient comes in parts, for reentrant checkpoints are apart: expected use_reentrant=False"
            )
