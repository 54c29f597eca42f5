"""What passes at the wanted sites for one batch: by an extractor that stops early, or by a session with a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import GRADIENT_PORTS
from gaff.compat import distributed, elements
from gaff.compat.leaves import hooked, kept_gradients, kept_weights, need_no_updates, others
from gaff.engine.process.calls import unseen
from gaff.errors import PlanError
from gaff.harvesting.batches import Numbered
from gaff.harvesting.rows import NORM_OF
from gaff.sessions.capture import Capture
from gaff.sessions.plan import Plan
from gaff.sessions.request import Request
from gaff.sessions.take import Take

Loss = Callable[[Any, Any], Tensor]
Norms = Callable[[nn.Module], AbstractContextManager[Any]]  # whose ``run(None)`` tells norms by parameter: [samples]


def reader_of(
    model: nn.Module, plan: Plan, loss: Loss | None, norms: Norms | None = None
) -> Callable[[Numbered], Mapping[str, Any]]:
    """A function from a batch to the values by address, on the model's device.

    With ``norms``, which opens a measurement of the norms of the samples' gradients, these come along, by
    ``NORM_OF`` and the name of the parameter. Raises what ``gaff.take`` raises, and PlanError where gradients are
    wanted and there is no loss, or the other way round.
    """
    _check(model, plan, loss, norms)
    step = partial(_forward, model)
    if loss is not None:
        step = partial(_with_backward, model, set(model.parameters()), hooked(model.parameters()), loss)
    if distributed.meshes_of_rows(model):
        return partial(_put_together, plan, _bare_capture(model, plan), step)
    if loss is not None:
        capture = Capture(model, plan, {})

        def backward(given: Numbered) -> Mapping[str, Any]:
            with capture, nullcontext() if norms is None else norms(model) as measured:
                step(given)
            found = {address: capture[address] for address in capture}
            if measured is not None:
                found |= {NORM_OF + name: one for name, one in measured.run(None).items()}
            return found

        return backward
    extractor = Take(model, plan)

    def forward(given: Numbered) -> Mapping[str, Any]:
        with torch.no_grad():
            found: Mapping[str, Any] = extractor(*given.args, **given.kwargs)
        return found

    return forward


def _check(model: nn.Module, plan: Plan, loss: Loss | None, norms: Norms | None) -> None:
    """Raise PlanError where loss, gradients and norms do not fit each other or the model."""
    plan.need_captures()
    gradients = [request for request in plan.requests if _port(request) in GRADIENT_PORTS]
    if gradients and loss is None:
        raise PlanError(f"{gradients[0]}: is a gradient: expected loss=, a function (output, batch) -> scalar loss")
    if norms is not None and (loss is None or distributed.meshes_of(model)):
        raise PlanError("sample_norms= wants a loss and a model that is whole in this process: expected loss=, a "
                        "function (output, batch) -> sum of the samples' losses")  # fmt: skip
    if loss is not None and not gradients and norms is None:
        raise PlanError("loss= is given and no gradient is asked for: expected an address such as 'fc:grad_output'")
    if norms is not None:
        norms(model)  # what it refuses is refused now
    if loss is not None:
        need_no_updates(model.named_parameters(), "harvest without loss=")


def _bare_capture(model: nn.Module, plan: Plan) -> Capture:
    """A capture of parts as they pass. Raises PlanError where a site has its own reduction, which wants a whole."""
    own = next((request for request in plan.requests if request.reduce is not None), None)
    if own is not None:
        raise PlanError(f"{own}: has a reduction of its own, and the model's layers are split over processes: expected "
                        "reduce= of the harvest, which is given whole values")  # fmt: skip
    return Capture(model, replace(plan, options=replace(plan.options, reduce=None, dtype=None)), {})


def _put_together(plan: Plan, capture: Capture, step: Callable[[Numbered], None], given: Numbered) -> Mapping[str, Any]:
    """The values of one batch, each as one process would have it, reduced and cast after that. Communicates."""
    with capture:
        step(given)
    found = {}
    for address in capture:
        value = capture.full(address)
        value = value if plan.options.reduce is None else plan.options.reduce(value)
        found[address] = elements.cast(value, plan.options.dtype or value.dtype) if value.is_floating_point() else value
    return found


def _forward(model: nn.Module, given: Numbered) -> None:
    with unseen(), torch.no_grad():
        model(*given.args, **given.kwargs)


def _with_backward(
    model: nn.Module, parameters: set[Tensor], updated: list[Tensor], loss: Loss, given: Numbered
) -> None:
    """One step; gradients of all leaves, also of a head outside the model, are those from before, and so are the
    parameters ``updated``, to whose gradients a hook of the user's listens."""
    with ExitStack() as stack:
        stack.enter_context(kept_gradients(parameters))
        stack.enter_context(kept_weights(updated))
        stack.enter_context(unseen())
        with torch.enable_grad():
            total = loss(model(*given.args, **given.kwargs), given.batch)
            if not isinstance(total, Tensor) or total.numel() != 1:
                raise PlanError("loss= returned no scalar: expected a function (output, batch) -> loss")
            if torch.is_inference_mode_enabled():
                raise PlanError("a loss has no gradient in torch.inference_mode(): expected the harvest outside of it")
            if not total.requires_grad:
                raise PlanError(
                    "the loss has no gradient: expected one of what the model returns, and a parameter or an input "
                    "that requires grad (all may be frozen)"
                )
            stack.enter_context(kept_gradients(others([total], parameters)))
            total.backward(retain_graph=True)  # a part of the graph may be the batch's own


def _port(request: Request) -> str:
    return str(getattr(request.target, "port", ""))
