"""Floating point operations, by the formulas of torch's own counter."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_HEAVY = re.compile(
    r"lstm|gru|rnn|scaled_dot_product|_fft|grid_sampl|mm(_|\b)|gemm|quantized::(linear|conv)|int[48]pack"
)


class FlopCount(TorchDispatchMode):
    """Adds up ``total`` while active: matrix products, convolutions and attention; other operations count nothing.

    The formulas are ``torch.utils.flop_counter.flop_registry``; torch's FlopCounterMode itself would add its own
    hooks to every module.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.uncounted: set[str] = set()  # heavy operations without a formula

    @classmethod
    def warm(cls) -> FlopCount:
        """One whose first count costs no more than the others: torch loads what it needs at the first."""
        counter = cls()
        with torch.no_grad(), counter:
            torch.nn.functional.conv2d(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        counter.total = 0
        return counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        result = func(*args, **kwargs)
        if count is None and _HEAVY.search(func.name()):
            self.uncounted.add(func.name().removeprefix("aten::"))
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=result))
        return result
