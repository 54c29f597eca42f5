"""What a GradScaler has multiplied: which backward passes bring gradients that are larger by its factor."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

from torch import Tensor

from gaff.compat import autograd

_SCALED = 64  # losses that a GradScaler has multiplied, of which it is remembered
_AROUND = 64  # ops after which what it has returned is looked for


class ScaledLosses:
    """Remembers what GradScalers have multiplied and returned. Used on the thread that trains.

    ``scaler``: that of the last loss of the step in progress, for who asks; None where it was not multiplied.
    ``is_told``: the latest backward pass has begun from such a loss, of which this is known.
    """

    def __init__(self) -> None:
        self.scaler: Any = None
        self.is_told = False
        self._loose: list[ref[Tensor]] = []  # scaled in this step, and no backward pass has begun there
        self._scalers: WeakSet[Any] = WeakSet()  # that were seen to multiply
        self._known: list[tuple[ref[Tensor], ref[Tensor], Tensor, Any]] = []  # scaled, loss, its value, scaler
        self._mark = object()  # by which the nodes are marked of what a GradScaler has returned
        self._has_marked = False

    def note(self, loss: Tensor, scaled: Tensor, scaler: Any) -> None:
        """Remember that a GradScaler has multiplied ``loss``: the backward pass will begin from ``scaled``.

        Both are held weakly, of the last few losses only; the loss's value is kept by reference to its memory.
        """
        self._known = [one for one in self._known if one[0]() is not None][-_SCALED:]
        self._scalers.add(scaler)
        self._loose = [*self._loose, ref(scaled)][-_SCALED:]
        self._known.append((ref(scaled), ref(loss), loss.detach(), scaler))
        if (node := autograd.maker_of(scaled)) is not None:
            self._has_marked = True
            autograd.metadata_of(node)[self._mark] = scaler

    def factor(self, outputs: Any) -> Any:
        """By what a GradScaler has multiplied what a backward pass begins from; 1 where nobody has."""
        first = next(iter(outputs), None) if isinstance(outputs, (list, tuple)) else outputs
        scaler, *_ = self.by(first)
        return 1.0 if scaler is None else scale_of(scaler)

    def begins_at(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """A backward pass begins at a loss: remember its ``scaler``; returns the loss without a factor, and its value.

        None where these are not known, see ``by``.
        """
        if self._loose:
            self._loose = [one for one in self._loose if one() is not tensor]
        self.scaler, loss, value = self.by(tensor)
        if self.scaler is not None and value is None:  # made of what it has returned, as a sum
            self._loose.clear()
        return loss, value

    def step_ends(self) -> None:
        """Begin a new step."""
        self.scaler = None
        self._loose.clear()

    def may_hold_gradients(self) -> bool:
        """Whether the latest loss may be made of gradients with a GradScaler's factor on them.

        Something was multiplied in this step, and is gone without a backward pass that began there: only
        ``autograd.grad`` can have used it.
        """
        return self.scaler is not None and any(one() is None for one in self._loose)

    def divides(self, optimizer: Any) -> Any:
        """By what a GradScaler has divided the gradients of ``optimizer``, which is about to step; 1 where none has.

        A fused one divides by itself, and was given the factor.
        """
        for scaler in self._scalers:
            state = scaler._per_optimizer_states.get(id(optimizer), {})
            if state.get("found_inf_per_device") or getattr(optimizer, "grad_scale", None) is not None:
                return scale_of(scaler)
        return 1.0

    def by(self, tensor: Any) -> tuple[Any, Tensor | None, Tensor | None]:
        """The GradScaler that has multiplied a tensor, None where none has, the loss that it multiplied, and its value.

        The two latter are None where the loss is gone, and where a tensor was only made of what a scaler has returned,
        as by dividing that by a number of accumulated batches: its node is marked, for nobody need hold it.
        """
        if not self._scalers:
            return None, None, None
        known = next((one for one in self._known if one[0]() is tensor), None)
        if known is not None:
            return known[3], known[1](), known[2]
        is_made = self._has_marked and isinstance(tensor, Tensor) and autograd.maker_of(tensor) is not None
        nodes = autograd.nearest_nodes(tensor, _AROUND) if is_made else ()
        found = (autograd.metadata_of(node).get(self._mark) for node in nodes)
        return next((one for one in found if one is not None), None), None, None


def scale_of(scaler: Any) -> Any:
    """The factor of a GradScaler; where it lies on a device, a copy there, for it is changed in place. Never waits."""
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor) and scale.device.type != "cpu":
        return scale.detach().clone()
    return float(scaler.get_scale())
