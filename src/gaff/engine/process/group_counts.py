"""What an optimizer counts in its groups of parameters, to be put back where a step is left out in its middle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GroupCounts:
    """The numbers and tensors that stand beside the parameters in an optimizer's groups, as a step met them.

    Many optimizers count their steps there, also where no parameter has a gradient. What the user's closure writes to
    groups, as a schedule does, stays.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._met: list[dict[str, Any]] = []
        self._entered: list[dict[str, Any]] = []

    def begin(self) -> None:
        """A step with a closure begins."""
        self._met = self._now()

    def enter(self) -> None:
        """Its closure is about to be evaluated."""
        self._entered = self._now()

    def left(self) -> None:
        """The closure was evaluated, and the step is to be left out: what has changed in it is the user's."""
        for met, before, now in zip(self._met, self._entered, self._now(), strict=False):
            met.update({name: value for name, value in now.items() if not _is_same(before.get(name), value)})

    def put_back(self) -> None:
        """Make them what they were before the step, but for what the closure has changed."""
        for group, met in zip(self._optimizer.param_groups, self._met, strict=False):
            for name in counted(group).keys() - met.keys():  # as a count that the first step makes
                del group[name]
            for name, value in met.items():
                now = group.get(name)
                if not isinstance(now, Tensor) or not isinstance(value, Tensor) or now.shape != value.shape:
                    group[name] = value
                elif not _is_same(now, value):
                    now.detach().copy_(value)

    def forget(self) -> None:
        """The step is over."""
        self._met, self._entered = [], []

    def _now(self) -> list[dict[str, Any]]:
        return [counted(group) for group in self._optimizer.param_groups]


def counted(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers and tensors of a group, tensors copied; its parameters and all else are left out."""
    kinds = (bool, int, float, Tensor)
    known = {name: value for name, value in group.items() if name != "params" and isinstance(value, kinds)}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in known.items()}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
