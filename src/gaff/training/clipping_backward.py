"""Limits on each gradient as backward brings it, where ``gaff.clip_gradients`` is given ``when="backward"``.

What comes is still scaled and one contribution of perhaps several: limits that need all gradients are refused before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gaff.compat import autograd, distributed, elements, foreach
from gaff.engine.process.optimizer import BackwardGuard
from gaff.errors import PlanError
from gaff.training.clipping_audit import Audit
from gaff.training.clipping_limits import Limits
from gaff.training.clipping_parameters import TINY, LimitedParameters, any_each


class BackwardClipping:
    """Changes gradients by ``hooks`` on their tensors, from ``follow`` until these are closed.

    ``audit`` is told which were changed.
    """

    def __init__(self, parameters: LimitedParameters, limits: Limits, audit: Audit) -> None:
        self.hooks = BackwardGuard(self._change)
        self._parameters = parameters
        self._limits = limits
        self._audit = audit

    def follow(self) -> list[Tensor]:
        """Follow the optimizer's parameters; those are returned that were not followed yet."""
        return self.hooks.follow(self._parameters.all, self._parameters.model)

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step, which is not to be skipped, and follow parameters that are new.

        What a backward pass has brought these already nobody saw come: it is limited here, as it stands.
        """
        for parameter in self.follow():
            if parameter.grad is not None:
                parameter.grad = self._change(parameter, parameter.grad)
        self._audit.add(None)
        return False

    def _change(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient to go on with, of one that has just come; called inside backward, and waits for the device.

        It is not written to, since other nodes of the autograd graph may hold it. Where a parameter's parts lie on
        several processes all of these come here together: the norm is that of the whole gradient, and each process
        changes its own part.
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
            if self._parameters.nonfinite([gradient], [number]):
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


def _with(gradient: Tensor, local: Tensor) -> Tensor:
    """The gradient whose part in this process is ``local``, which is all of one that is not spread."""
    return distributed.with_local(gradient, local) if distributed.is_spread(gradient) else local
