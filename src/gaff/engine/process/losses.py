"""Calls of torch's loss functions, with what they are given: outputs on one side, the truth on the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gaff.engine.process.stack_room import passed_over

LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
          "binary_cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss", "soft_margin_loss",
          "multilabel_margin_loss", "multilabel_soft_margin_loss", "poisson_nll_loss")  # fmt: skip


class LossCalls:
    """Calls ``told(name, input, target)`` before each call of one of torch's loss functions, while it is on.

    Returns what the function is to be given as its target. Functions that a program has imported by name before are not
    told of; modules such as ``nn.CrossEntropyLoss`` are, which look them up. Not to be on where code is compiled.
    """

    def __init__(self, told: Callable[[str, Any, Any], Any]) -> None:
        self._told = told
        self._originals: dict[str, tuple[Any, Any]] = {}  # what was there, and what stands there now

    def switch(self, *, is_on: bool) -> None:
        """Put the functions in place, or take them away again where nobody has replaced them since."""
        if is_on == bool(self._originals):
            return
        if is_on:
            for name in LOSSES:
                original = getattr(F, name)
                self._originals[name] = original, self._around(name, original)
                setattr(F, name, self._originals[name][1])
            return
        for name, (original, ours) in self._originals.items():
            if getattr(F, name) is ours:
                setattr(F, name, original)
        self._originals = {}

    def _around(self, name: str, loss: Any) -> Any:
        @wraps(loss)
        @passed_over
        def around(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            given = self._told(name, input, target) if isinstance(target, Tensor) else target
            return loss(input, given, *args, **kwargs)

        return around
