"""The likely cause of a NaN or inf in a backward pass, from the autograd node and from what its op was given.

``STEEP`` names the ops whose inputs the examination has to note in the forward pass, because in backward they may be
overwritten or gone: those with a derivative that is infinite somewhere, and a few more.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from gaff.compat import distributed
from gaff.inspection.nonfinite.report import Range

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": sys.float_info.max}
# Ops whose derivative is infinite somewhere: what their inputs were is noted in the forward. Not here are norms,
# distances, deviations and atan2, for which torch puts 0 where the formula has 0/0.
STEEP = {
    "sqrt": "the derivative of sqrt at 0 is infinite",
    "rsqrt": "the derivative of rsqrt at 0 is infinite",
    "pow": "the derivative of a power below 1 at 0 is infinite",
    "float_power": "the derivative of a power below 1 at 0 is infinite",
    "log": "the derivative of log at 0 is infinite",
    "log2": "the derivative of log2 at 0 is infinite",
    "log10": "the derivative of log10 at 0 is infinite",
    "reciprocal": "the derivative of 1/x at 0 is infinite",
    "div": "the derivative of a quotient is infinite where the divisor is 0",
    "acos": "the derivative of acos at -1 and 1 is infinite",
    "arccos": "the derivative of acos at -1 and 1 is infinite",
    "asin": "the derivative of asin at -1 and 1 is infinite",
    "arcsin": "the derivative of asin at -1 and 1 is infinite",
    "atanh": "the derivative of atanh at -1 and 1 is infinite",
    "acosh": "the derivative of acosh at 1 is infinite",
    "arccosh": "the derivative of acosh at 1 is infinite",
    "log1p": "the derivative of log1p at -1 is infinite",
    "xlogy": "the derivative of xlogy at 0 is infinite",
    "logit": "the derivative of logit at 0 and 1 is infinite",
    "erfinv": "the derivative of erfinv at -1 and 1 is infinite",
    "softmax": "",
    "log_softmax": "",
    "exp": "",
    "exp2": "",
    "where": "",
    "prod": "",
}
# torch's Functions that bring gradients from other processes
_COLLECTIVES = ("Broadcast", "Gather", "Scatter", "Reduce", "AllGather", "AlltoAll", "AllReduce")
# From where on ops are defined: below, their values and derivatives are NaN.
_LOWEST = {"sqrt": 0.0, "rsqrt": 0.0, "pow": 0.0, "float_power": 0.0, "acosh": 1.0, "arccosh": 1.0}
_EDGES = {"acos": 1.0, "arccos": 1.0, "asin": 1.0, "arcsin": 1.0, "atanh": 1.0, "erfinv": 1.0, "logit": 1.0}


def is_steep(op: str, args: Sequence[Any]) -> bool:
    """Whether to note in the forward what an op is given: not of a power of 1 and more, whose derivative is finite."""
    is_flat = op.strip("_") in ("pow", "float_power") and len(args) > 1 and isinstance(args[1], (int, float))
    return op.strip("_") in STEEP and not (is_flat and args[1] >= 1)


def backward_cause(op: str, node: str, given: Sequence[Range], came: Range, handed: Range) -> str:
    """The likely cause, as a sentence: what made gradients that are not finite of finite ones at ``node``.

    ``given``: the op's inputs in forward; ``came``, ``handed``: the gradients at ``node``, finite and not. Asked are,
    in this order: infinite inputs, a steep derivative met by an input of 0, overflow. A gradient that came counts as
    too large itself above half the fourth root of what its type holds, which is chosen.
    """
    steep = STEEP.get(op.strip("_"), "")
    met = _met(op.strip("_"), node, given)
    zeros = sum(one.zeros for one in met)
    infinite = [one for one in given if not one.is_finite]
    is_exp, base = op.strip("_") in ("exp", "exp2"), 2.0 if op.strip("_") == "exp2" else math.e
    is_masked = is_exp and not any(one.nan or one.positive_inf for one in given)
    if infinite and not is_masked:  # of -inf both exp and its derivative are 0
        return f"{node} meets {infinite[0].kinds} that went into {op}: 0 * inf, or inf - inf, in its derivative"
    if op.strip("_") == "pow" and len(given) > 1 and handed.nan and (given[0].min or 0.0) < 0:
        return (
            f"the derivative of a power by its exponent holds the logarithm of the base, which goes down to "
            f"{given[0].min:.4g}: clamp the base above 0"
        )
    is_whole = "pow" in op and zeros > 0  # a whole power of negative numbers is defined, and not below 0 at 0
    lowest = None if is_whole or not given or given[0].min is None else _LOWEST.get(op.strip("_"))
    if lowest is not None and handed.nan and (given[0].min or 0.0) < lowest:
        return (
            f"{op} is given numbers down to {given[0].min:.4g}, and is defined from {lowest:g} on: below, its "
            f"derivative is NaN as its value is. torch.where or a mask after {op} cleans its value, not its "
            f"derivative: change the input of {op} before it"
        )
    if steep and (zeros or _is_at_edge(op.strip("_"), given)):
        where = f" ({zeros} of {sum(one.elements for one in met)} elements are 0)" if zeros else ""
        if came.zeros == came.elements or (handed.nan and came.zeros):
            return (
                f"{steep}{where}, and the gradient that came is 0 there: 0 * inf is NaN. torch.where or a mask after "
                f"{op} cleans its value, not its derivative: change the input of {op} before it"
            )
        return f"{steep}{where}: add an eps to its input, or clamp it"
    limit = LIMITS.get(handed.dtype)
    if is_exp and limit is not None and given and (given[0].max or 0.0) > math.log(limit) / math.log(base):
        return (
            f"{op} overflows: it is given up to {given[0].max:.4g}, and its derivative is as large as its value; where "
            f"the gradient that came is 0, 0 * inf is NaN. torch.where or a clamp after {op} cleans its value, not its "
            f"derivative: clamp the input of {op} before it"
        )
    if limit is not None and came.largest * 2 > limit**0.25 and not handed.nan:
        return (
            f"overflow: the gradient that came goes up to {came.largest:.4g}, "
            f"and {handed.dtype} holds up to {limit:.4g}"
        )
    if limit is not None and not handed.nan:
        return (
            f"{node} made {handed.kinds} of gradients up to {came.largest:.4g}: more than {handed.dtype} holds "
            f"({limit:.4g}) on the way, or a division by zero in it"
        )
    if distributed.has_others() and node.removesuffix("Backward").lstrip("_").startswith(_COLLECTIVES):
        return f"{node} brought {handed.kinds} from another process: the gradient of this one was finite"
    return f"{node} made {handed.kinds} of finite gradients up to {came.largest:.4g}"


def _met(op: str, node: str, given: Sequence[Range]) -> Sequence[Range]:
    """The inputs of an op whose zeros make its derivative infinite: of a quotient the divisor, of a power the base.

    A number divided by a tensor is made of the tensor's reciprocal.
    """
    if op == "div" and node.startswith("Reciprocal"):
        return given
    if op in ("pow", "float_power"):
        return given[:1]
    if op in ("div", "xlogy"):
        return given[1:]
    return () if op in _EDGES else given


def _is_at_edge(op: str, given: Sequence[Range]) -> bool:
    """Whether the input reaches the end of where the op is defined."""
    edge, x = _EDGES.get(op), given[0] if given else None
    if op in ("acosh", "arccosh", "log1p") and x is not None and x.min is not None:
        return x.min <= (-1.0 if op == "log1p" else 1.0)
    if edge is None or x is None or x.min is None or x.max is None:
        return False
    return x.max >= edge or x.min <= (0.0 if op == "logit" else -edge)
