"""Ops between a model and its loss that make a NaN or inf, or a gradient that is one, read from the autograd graph.

Such as the root of a mean squared error that is zero, or the logarithm of a probability that is. A model's own ops are
found by running it again; those of the script's loss are not seen by anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaff.compat.autograd import kept_by, nearest_nodes

_MOST_NODES = 1000  # behind a loss that is not finite
_HEALING = ("WhereBackward", "MaskedFillBackward", "NanToNumBackward", "MaskedSelectBackward", "IndexBackward",
            "MaximumBackward", "MinimumBackward", "ClampBackward", "ClampMinBackward", "ClampMaxBackward")  # fmt: skip
_NEAR = 32  # behind one of a sampled step


class UnsafeOp(NamedTuple):
    """An op with the number of its elements at which it is not safe, on their device; ``what`` says what they are."""

    op: str
    what: str
    found: Tensor
    of: int

    def __str__(self) -> str:
        return f"{self.op} {self.what} at {int(self.found)} of {self.of} elements"


class _Kind(NamedTuple):
    """A kind of autograd node: the tensor that it keeps, where its result is not finite, and where its slope is not."""

    op: str
    kept: str
    is_bad: Callable[[Tensor, Any], Tensor]
    bad: str
    is_steep: Callable[[Tensor, Any], Tensor]
    steep: str


def _never(value: Tensor, node: Any) -> Tensor:
    return torch.zeros_like(value, dtype=torch.bool)


_LOG = _Kind("log", "self", lambda x, _: (x <= 0) & x.isfinite(), "is given 0 or less", _never, "")
_KINDS = {
    "LogBackward": _LOG,
    "Log2Backward": _LOG._replace(op="log2"),
    "Log10Backward": _LOG._replace(op="log10"),
    "Log1PBackward": _Kind("log1p", "self", lambda x, _: (x <= -1) & x.isfinite(), "is given -1 or less", _never, ""),
    # a NaN in these results may have come in, an infinity has not
    "RsqrtBackward": _Kind("rsqrt", "result", lambda y, _: y.isinf(), "is given 0", _never, ""),
    "ReciprocalBackward": _Kind("a division", "result", lambda y, _: y.isinf(), "is by 0", _never, ""),
    "ExpBackward": _Kind("exp", "result", lambda y, _: y.isposinf(), "overflows", _never, ""),
    "SqrtBackward": _Kind("sqrt", "result", _never, "", lambda y, _: y == 0, "returns 0, where its slope is infinite,"),
    "DivBackward": _Kind("a division", "other", lambda x, _: x == 0, "is by 0", _never, ""),
    "PowBackward": _Kind("pow", "self", lambda x, node: _is_outside(x, _exponent(node)), "has no finite value",
                         lambda x, node: (x == 0) & (0 < _exponent(node) < 1),
                         "is given 0, where its slope is infinite,"),
    "AcosBackward": _Kind("acos", "self", lambda x, _: (x.abs() > 1) & x.isfinite(), "is given what is no cosine",
                          lambda x, _: x.abs() == 1, "is given 1 or -1, where its slope is infinite,"),
    "AsinBackward": _Kind("asin", "self", lambda x, _: (x.abs() > 1) & x.isfinite(), "is given what is no sine",
                          lambda x, _: x.abs() == 1, "is given 1 or -1, where its slope is infinite,"),
}  # fmt: skip


def _exponent(node: Any) -> float:
    """The exponent of a power by one number; 1 where it is another thing."""
    exponent = getattr(node, "_saved_exponent", None)
    return float(exponent) if isinstance(exponent, (int, float)) else 1.0


def _is_outside(x: Tensor, exponent: float) -> Tensor:
    """Where a power has no finite value: of 0 by a negative exponent, of less than 0 by one that is no integer."""
    found = (x == 0) & (exponent < 0)
    return found if exponent.is_integer() else found | ((x < 0) & x.isfinite())


def unsafe_op(loss: Tensor) -> str:
    """The op behind a loss that is not finite whose own result is not, in words; empty where there is none.

    Among the 1,000 nodes nearest to it the farthest one: those after it are given what it has made. What is given a NaN
    is none, and what lies behind an op that leaves elements out, as ``torch.where`` does, is told only where nothing
    else is. Waits for the device.
    """
    for stops in (_HEALING, ()):
        nodes = nearest_nodes(loss, _MOST_NODES, stops=stops)
        found = [one for one in _unsafe(nodes, is_steep=False) if int(one.found)]
        if found:
            return str(found[-1])
    return ""


def steep_ops(loss: Tensor) -> list[UnsafeOp]:
    """The ops nearest to a loss that may have an infinite slope, with how often they have. Waits for no device."""
    return list(_unsafe(nearest_nodes(loss, _NEAR), is_steep=True))


def _unsafe(nodes: Iterable[Any], *, is_steep: bool) -> Iterator[UnsafeOp]:
    """The ops of known kinds among some nodes, with how many of their elements are not safe."""
    for node in nodes:
        kind = _KINDS.get(node.name().rstrip("0123456789"))
        if kind is None or (is_steep and not kind.steep):
            continue
        kept = kept_by(node, kind.kept)
        if type(kept) is Tensor and kept.is_floating_point():
            test, what = (kind.is_steep, kind.steep) if is_steep else (kind.is_bad, kind.bad)
            yield UnsafeOp(kind.op, what, test(kept.detach(), node).sum(), kept.numel())
