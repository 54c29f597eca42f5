"""Parameters that FSDP2 shards: their gradients come by another way than through autograd, and their values pass.

FSDP2 keeps a shard of each parameter, gathers the whole for the forward and backward of its unit, and frees it again.
Gradients arrive at the whole, are reduced over processes, and are written to ``grad`` of the shard by FSDP2 itself.
See docs/decisions/0015. Its private names are in ``compat.distributed``, except for the few that are read here.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from gaff.address.resolve import Found
from gaff.compat import distributed
from gaff.compat.compiler import uncompiled
from gaff.engine.crossing import Crossing
from gaff.engine.gradients.tensor_hooks import on_gradient
from gaff.engine.streams import Act

_BY_PARAMETER: WeakKeyDictionary[Any, ShardedGradient] = WeakKeyDictionary()


class ShardListener(Protocol):
    """Hears of the gradient of one sharded parameter; a ``LeafGradient`` is one.

    Called on the thread that runs the backward pass.
    """

    @property
    def only_looks(self) -> bool:
        """Whether it changes nothing, and so comes after those that do."""

    def coming(self) -> None:
        """Backward has reached the gathered parameter: its gradient will be reduced."""

    def reduced(self, gradient: Tensor) -> Tensor | None:
        """The gradient after the reduction, before it is added to ``grad``; returns another one, or None."""


class ShardedGradient:
    """What one backward pass adds to one sharded parameter, reduced over processes, before it is added.

    FSDP2 writes ``grad`` of its sharded parameter itself: no tensor hook fires there. It tells when it has, but then
    the sum is there. So what ``grad`` holds is put aside before the reduction, and the new is added to it afterwards,
    as FSDP2 would have done. Taking the difference of two sums instead would round.

    One for each parameter in the process, whichever sessions listen; it goes with the last listener.
    """

    def __init__(self, record: Any) -> None:
        self._record = record
        self.listeners: list[ShardListener] = []
        self._part: Any = None
        self._whole: Any = None
        self._part_handle: Any = None
        self._whole_handle: Any = None
        self._kept: Tensor | None = None

    @classmethod
    def of(cls, record: Any) -> ShardedGradient:
        """That of FSDP2's record of a parameter, made when first asked for."""
        found = _BY_PARAMETER.get(record)
        if found is None:
            found = _BY_PARAMETER[record] = cls(record)
        return found

    @property
    def name(self) -> str:
        """The parameter's name, as FSDP2 tells it once its model has run; for messages."""
        return getattr(self._record, "_param_fqn", None) or "a parameter"

    @property
    def is_put_off(self) -> bool:
        """Whether FSDP2 holds gradients of passes that it has not reduced yet, and reduces with the next one's."""
        whole = getattr(self._record, "_unsharded_param", None)
        return self._record.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None

    def follow(self) -> None:
        """Hook the shard and the gathered parameter that are there now, if they are other tensors than before.

        FSDP2 may replace its tensors, and makes the gathered one in the first forward.
        """
        _Reduction.of(self._record).followed.add(self)
        part, whole = self._record.sharded_param, getattr(self._record, "_unsharded_param", None)
        if part is not self._part and part.requires_grad:
            if self._part_handle is not None:
                self._part_handle.remove()
            self._part, self._part_handle = part, part.register_post_accumulate_grad_hook(uncompiled(self._reduced))
            part._post_accumulate_grad_hooks.move_to_end(self._part_handle.id, last=False)
        if whole is not self._whole and whole is not None and whole.requires_grad:
            if self._whole_handle is not None:
                self._whole_handle.remove()
            self._whole, self._whole_handle = whole, on_gradient(whole, self._coming)

    def leave(self, listener: ShardListener) -> None:
        """Let a listener go; with the last one all hooks are removed."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        if not self.listeners:
            _Reduction.of(self._record).leave(self)
            for handle in (self._part_handle, self._whole_handle):
                if handle is not None:
                    handle.remove()
            self._part = self._whole = self._part_handle = self._whole_handle = None
            _BY_PARAMETER.pop(self._record, None)

    def _coming(self, _gradient: Tensor) -> None:
        for listener in self.listeners:
            listener.coming()

    def put_aside(self) -> None:
        """Take away what ``grad`` holds, so that FSDP2 writes the new gradient instead of adding it."""
        if self._part is not None and self._part.grad is not None:
            self._kept, self._part.grad = self._part.grad, None

    @torch.no_grad()
    def _reduced(self, part: Tensor) -> None:
        """Tell the listeners the gradient that FSDP2 has written, and add it to what was put aside, in place.

        Called by FSDP2 as the first hook after accumulation, so that hooks of others see the sum that they expect.
        """
        gradient: Any = part.grad
        for listener in self.listeners:
            new = listener.reduced(gradient)
            gradient = gradient if new is None else new
        kept, self._kept = self._kept, None
        if kept is not None:
            distributed.local_of(kept).add_(distributed.local_of(gradient))
            gradient = kept
        if part.grad is not gradient:
            part.grad = gradient

    def restore(self) -> None:
        """Put ``grad`` back as it was, where the reduction brought no gradient or failed."""
        kept, self._kept = self._kept, None
        if kept is not None and self._part is not None:
            self._part.grad = kept


class _Reduction:
    """Puts ``grad`` of followed parameters aside while FSDP2 reduces their group, however that ends.

    Stands as ``post_backward`` on the instance of FSDP2's group, in the place of the method of its class, as long as a
    parameter of the group is followed.
    """

    def __init__(self, group: Any) -> None:
        self.followed: set[ShardedGradient] = set()
        self._group = ref(group)

    @classmethod
    def of(cls, record: Any) -> _Reduction:
        """That of the group with which FSDP2 reduces a parameter, put in place when first asked for."""
        group = distributed.group_of(record)
        found = group.__dict__.get("post_backward")
        if found is None:
            found = group.post_backward = cls(group)
        return found  # type: ignore[no-any-return]

    def leave(self, one: ShardedGradient) -> None:
        """Follow ``one`` no more; with the last one FSDP2 has its own function again."""
        self.followed.discard(one)
        if not self.followed:
            vars(self._group()).pop("post_backward", None)

    def __call__(self, *unused: Any) -> None:
        group: Any = self._group()
        followed = list(self.followed)
        for one in followed:
            one.put_aside()
        try:
            type(group).post_backward(group, *unused)
        finally:
            for one in followed:
                one.restore()


class SwapUnit(Act):
    """At the module with which FSDP2 gathers the parameter: lets the edited value stand in, from its entry to its exit.

    FSDP2 puts the gathered parameter in place at each call of its unit, so an edit cannot stand in for a whole run, and
    would take what stands in for its own at the exit, where its hook comes later. A recomputation is left to
    ``SwapScope``.
    """

    def __init__(self, node: Any, swap: Any) -> None:
        self._node = node
        self.swap = swap

    def __call__(self, value: Any, given: Any, crossing: Crossing) -> None:
        if not crossing.is_again:
            self.swap.begin_unit(crossing.run)
            self._node.note(self, True)

    def leave(self, noted: Any, output: Any, given: Any, crossing: Crossing) -> None:
        """Take the value away, before FSDP2's own hook."""
        self.swap.end_unit()


class Shards:
    """FSDP2's own records of a model's parameters, looked up when first asked for; one for each session."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[tuple[int, str], tuple[Any, Any]] | None = None

    def of(self, found: Found) -> Any:
        """The record of a parameter and the module with which it is gathered; None for one that is not sharded."""
        if self._found is None:
            self._found = distributed.sharded_parameters(self._model)
        return self._found.get((id(found.module), found.name))
