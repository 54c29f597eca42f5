"""The optimizer's step: what is done to the gradients before it, and how it is kept from happening."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gaff import compat

Before = Callable[[], "bool | Tensor"]  # whether the step shall be skipped; a tensor where the optimizer reads one


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper such as accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class StepGuard:
    """Calls ``before`` ahead of every step of an optimizer, when gradients are accumulated, reduced and unscaled.

    With a closure it is called after each evaluation of it. Where ``before`` says so the step changes neither
    parameters nor state: it runs on an empty stand-in of the optimizer, or, where the optimizer reads ``found_inf``
    (fused ones), is told on the device, without waiting for it.
    """

    def __init__(self, optimizer: Optimizer, before: Before, after: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._before = before
        self._after = after
        self._handles = ExitStack()
        self._dropped: list[tuple[Tensor, Tensor]] = []  # parameters and gradients kept from a step with a closure
        self._found: Any = None  # the optimizer's own ``found_inf``, while ours is in its place

    @property
    def reads_found_inf(self) -> bool:
        """Whether a step can be skipped by a flag on the device."""
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def open(self) -> None:
        self._handles.callback(self._optimizer.register_step_pre_hook(self._pre).remove)
        self._handles.callback(self._optimizer.register_step_post_hook(self._post).remove)

    def close(self) -> None:
        self._handles.close()

    def parameters(self) -> list[Tensor]:
        """All parameters, in the optimizer's order."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _pre(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            wrapped = self._wrap(closure)
            if len(args) > 1:
                return (args[0], wrapped, *args[2:]), kwargs
            return args, {**kwargs, "closure": wrapped}
        self._unscale()
        skip = self._before()
        if isinstance(skip, Tensor):
            self._tell(skip)
        elif skip:
            return (_stand_in(optimizer), *args[1:]), kwargs
        return None

    def _post(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._found is not None:
            [known] = self._found
            self._found = None
            if known is None:
                del optimizer.found_inf
            else:
                optimizer.found_inf = known
        for parameter, gradient in self._dropped:
            parameter.grad = gradient
        self._dropped.clear()
        self._after()

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            if self._before():
                given = [(one, one.grad) for one in self.parameters() if one.grad is not None]
                self._dropped = [(one, gradient) for one, gradient in given if gradient is not None]
                for parameter, _ in self._dropped:
                    parameter.grad = None
            return loss

        return evaluate

    def _unscale(self) -> None:
        """GradScaler leaves unscaling to fused optimizers: done here instead, so that limits mean what they say."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            gradients = [one.grad for one in self.parameters() if one.grad is not None]
            compat.scale_all(gradients, scale.double().reciprocal().float())
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]

    def is_overflow_of_scaler(self) -> bool:
        """Whether a GradScaler has found non-finite gradients and will have this step skipped. Waits for the device."""
        found = getattr(self._optimizer, "found_inf", None)
        return found is not None and bool(found.item())

    def _tell(self, skip: Tensor) -> None:
        known = getattr(self._optimizer, "found_inf", None)
        self._found = [known]
        flag = skip.to(torch.float32)
        self._optimizer.found_inf = flag if known is None else torch.maximum(flag, known.to(flag.device))  # type: ignore[attr-defined]


class BackwardGuard:
    """Calls ``change(parameter number, gradient)`` for each gradient as backward brings it; its result goes on."""

    def __init__(self, parameters: Iterable[Tensor], change: Callable[[int, Tensor], Tensor]) -> None:
        self._parameters = list(parameters)
        self._change = change
        self._handles = ExitStack()

    def open(self) -> None:
        for number, parameter in enumerate(self._parameters):
            handle = parameter.register_hook(lambda gradient, number=number: self._change(number, gradient))
            self._handles.callback(handle.remove)

    def close(self) -> None:
        self._handles.close()


class AccumulationWatch:
    """Calls ``seen(parameter)`` each time that a gradient has been added to ``parameter.grad``."""

    def __init__(self, parameters: Iterable[Tensor], seen: Callable[[Tensor], None]) -> None:
        self._parameters = list(parameters)
        self._seen = seen
        self._handles = ExitStack()

    def open(self) -> None:
        for parameter in self._parameters:
            self._handles.callback(parameter.register_post_accumulate_grad_hook(self._seen).remove)

    def close(self) -> None:
        self._handles.close()


def _stand_in(optimizer: Any) -> Any:
    """An optimizer of the same kind without parameters and state: its step changes nothing of the real one."""
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    stand_in.state = defaultdict(dict)
    return stand_in
