"""Limits on each gradient as backward brings it, where ``gaff.clip_gradients`` is given ``when="backward"``.

What comes is still scaled and one contribution of perhaps several: limits that need all gradients are refused before.
In a program with a GradScaler what is not finite passes as it is, for the scaler to see, until the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gaff.compat import autograd, distributed, elements, foreach
from gaff.engine.process.optimizer import BackwardGuard
from gaff.engine.process.training_loop import Outer, Told
from gaff.errors import PlanError
from gaff.training.clipping_audit import Audit
from gaff.training.clipping_limits import Limits
from gaff.training.clipping_parameters import TINY, LimitedParameters, any_each


class BackwardClipping:
    """Changes gradients by ``hooks`` on their tensors, from ``open`` to ``close``.

    ``audit`` is told which were changed.
    """

    def __init__(self, parameters: LimitedParameters, limits: Limits, audit: Audit) -> None:
        self.hooks = BackwardGuard(self._change)
        self._outer = Outer(Told(_nothing, _nothing, _nothing, _nothing, self._note_scaled, _nothing))
        self._is_scaled = False
        self._is_overflow: Callable[[], bool] = bool
        self._passed: set[int] = set()  # numbers of parameters whose gradient was not finite, and was left so
        self._zeroed: dict[str, None] = {}  # names of those in which zeros took the place of what was not, in order
        self._parameters = parameters
        self._limits = limits
        self._audit = audit

    def open(self, is_overflow: Callable[[], bool]) -> None:
        """Begin to change gradients.

        ``is_overflow``: asked at a step, whether a GradScaler will have it skipped for gradients that are not finite.
        """
        self._is_overflow = is_overflow
        self._outer.open()
        self.follow()

    def close(self) -> None:
        """Leave gradients as autograd brings them."""
        self.hooks.close()
        self._outer.close()

    def follow(self) -> list[Tensor]:
        """Follow the optimizer's parameters; those are returned that were not followed yet."""
        return self.hooks.follow(self._parameters.all, self._parameters.model)

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step, follow parameters that are new, and tell whether the step is to be skipped, as a scaler would.

        What a backward pass has brought these already nobody saw come: it is limited here, as it stands. What was left
        as it came, and no scaler has skipped, is dealt with as ``nonfinite`` says.
        """
        for parameter in self.follow():
            if parameter.grad is not None:
                parameter.grad = self._change(parameter, parameter.grad)
        late = [self._parameters.all[number] for number in sorted(self._passed)]
        self._passed.clear()
        is_skipped = any(one.grad is not None for one in late) and self._is_overflow()
        for parameter in late if not is_skipped else ():
            if parameter.grad is not None:
                parameter.grad = self._change(parameter, parameter.grad, is_last=True)
        self._audit.add(None, skipped=is_skipped, nonfinite=tuple(self._zeroed))
        self._zeroed.clear()
        return is_skipped

    def _note_scaled(self, loss: Any, scaled: Any, scaler: Any) -> None:
        self._is_scaled = True

    def _change(self, parameter: Tensor, gradient: Tensor, *, is_last: bool = False) -> Tensor:
        """The gradient to go on with, of one that has just come; called inside backward, and waits for the device.

        It is not written to, since other nodes of the autograd graph may hold it. Where a parameter's parts lie on
        several processes all of these come here together, and do the same: the norm is that of the whole gradient, and
        each process changes its own part. ``is_last``: no scaler will look at it any more.
        """
        limits = self._limits
        if gradient.is_sparse:
            raise PlanError("when='backward' cannot clip a sparse gradient as it comes: expected when='step'")
        if autograd.is_wrapper(gradient):
            raise PlanError(
                "when='backward' cannot clip what a batched pass (is_grads_batched, vectorize=True) brings, of which "
                "nobody sees the numbers: run it outside of the clipping, or expected when='step'"
            )
        number = self._parameters.numbers[id(parameter)]
        gradient = distributed.settled(gradient)
        local, norm = distributed.local_of(gradient), self._norm(gradient)
        if not bool(norm.isfinite()):
            is_bad = distributed.is_spread(gradient) or not bool(local.isfinite().all())  # else the norm overflows
            if self._is_scaled and not is_last and is_bad:
                self._passed.add(number)
                return gradient
            if bad := self._parameters.nonfinite([gradient], [number]):
                self._zeroed.update(dict.fromkeys(bad))
                local = torch.where(local.isfinite(), local, 0)
            norm = self._norm(_with(gradient, local), elements.wide_type(gradient))
        if limits.value is not None:
            self._audit.add_each([number], any_each([local.abs() > limits.value], [gradient]))
            local = local.clamp(-limits.value, limits.value)
        elif limits.norm is not None:
            factor = (limits.norm / (norm + TINY)).clamp(max=1.0)
            self._audit.add_each([number], [factor < 1])
            local = foreach.scaled(local, factor)
        return _with(gradient, local)

    def _norm(self, gradient: Tensor, wide: torch.dtype | None = None) -> Tensor:
        """The norm of one gradient, in the type ``wide`` if given; of a spread one that of the whole, in float64."""
        if distributed.is_spread(gradient):
            return foreach.norms_of([gradient], self._limits.norm_type)[1]
        norm: Tensor = torch.linalg.vector_norm(gradient, self._limits.norm_type, dtype=wide)
        return norm


def _nothing(*told: Any) -> None:
    """What is done about the rest of a training loop."""


def _with(gradient: Tensor, local: Tensor) -> Tensor:
    """The gradient whose part in this process is ``local``, which is all of one that is not spread."""
    return distributed.with_local(gradient, local) if distributed.is_spread(gradient) else local
