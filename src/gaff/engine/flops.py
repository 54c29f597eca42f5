"""Floating point operations, by the formulas of torch's own counter.

``gaff.trace`` has one counter on while the model runs forward, and reads ``total`` at the entry and the exit of each
module.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gaff.compat.modes import decomposed

# Operations without a formula whose work grows faster than what they are given: products, decompositions, attention.
_HEAVY = re.compile(
    r"lstm|gru|rnn|conv(_|olution|\dd)|attention|transformer_encoder|_fft|grid_sampl|m[mv](_|\b)|dot\b|gemm|"
    r"quantized::(linear|conv)|"
    r"int[48]pack|trilinear|[cp]dist|euclidean_dist|linalg_(?!check|vector_norm|cross|diagonal)|cholesky|inverse|_svd|"
    r"lu_(unpack|with_info|solve)|lstsq|triangular_solve|matrix_exp|addr\b|\bger\b"
)


class FlopCount(TorchDispatchMode):
    """Adds up ``total`` while active: matrix products, convolutions and attention; other operations count nothing.

    The formulas are ``torch.utils.flop_counter.flop_registry``; torch's FlopCounterMode itself would add its own hooks
    to every module. An operation without a formula is decomposed into smaller ones where torch can, and these are
    counted; ``uncounted`` names those that look expensive and could not be, so that the total is a lower bound. Of
    torch's operators that call functions (``cond``, ``while_loop``) the operations inside are counted as they run.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.uncounted: set[str] = set()  # heavy operations without a formula
        self.own_s = 0.0  # seconds that went into counting
        self._whole: set[Any] = set()  # operations that are not made of smaller ones

    @classmethod
    def warm(cls) -> FlopCount:
        """Make a counter whose first count costs no more than the others.

        torch loads what it needs for counting at the first one, and that time would otherwise fall into the user's
        run.
        """
        counter = cls()
        with torch.no_grad(), counter:
            torch.nn.functional.conv2d(torch.zeros(1, 1, 1, 1, device="cpu"), torch.zeros(1, 1, 1, 1, device="cpu"))
        counter.total = 0
        return counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count it, from its arguments and its output."""
        began = time.perf_counter()
        kwargs = kwargs or {}
        odd = _odd_among(args) or _odd_among(kwargs.values())
        count = None if odd else flop_registry.get(getattr(func, "_overloadpacket", func))
        if count is None and odd != _NESTED and func not in self._whole and func is not torch.ops.prim.device.default:
            with self:
                result = decomposed(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            self._whole.add(func)
        ran = time.perf_counter()
        result = func(*args, **kwargs)
        ended = time.perf_counter()
        if odd or (count is None and _HEAVY.search(func.name())):
            self.uncounted.add(odd or func.name().removeprefix("aten::"))
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=result))
        self.own_s += time.perf_counter() - began - (ended - ran)
        return result


_NESTED, _SPARSE = "operations of nested tensors", "operations of sparse tensors"
_MKLDNN = "operations of MKL-DNN tensors"


def _odd_among(values: Iterable[Any]) -> str:
    """What to say of tensors among ``values`` whose shape does not tell the work; empty where there is none."""
    for value in values:
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            return _NESTED if value.is_nested else _MKLDNN if value.is_mkldnn else _SPARSE
    return ""
