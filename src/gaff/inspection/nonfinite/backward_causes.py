"""The likely cause of a NaN or inf in a backward pass, from the autograd node and from what its op was given.

``STEEP`` names the ops whose inputs the examination has to note in the forward pass, because in backward they may be
overwritten or gone: those with a derivative that is infinite somewhere, and a few more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gaff.inspection.nonfinite.report import Range

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": sys.float_info.max}
# Ops whose derivative is infinite somewhere: what their inputs were is noted in the forward.
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
    "std": "the derivative of std is 0/0 where all elements are equal",
    "norm": "the derivative of a norm at 0 is 0/0",
    "vector_norm": "the derivative of a norm at 0 is 0/0",
    "cdist": "the derivative of a distance is infinite where both points are the same",
    "pairwise_distance": "the derivative of a distance is infinite where both points are the same",
    "acos": "the derivative of acos at -1 and 1 is infinite",
    "arccos": "the derivative of acos at -1 and 1 is infinite",
    "asin": "the derivative of asin at -1 and 1 is infinite",
    "arcsin": "the derivative of asin at -1 and 1 is infinite",
    "atanh": "the derivative of atanh at -1 and 1 is infinite",
    "atan2": "the derivative of atan2 at (0, 0) is 0/0",
    "arctan2": "the derivative of atan2 at (0, 0) is 0/0",
    "xlogy": "the derivative of xlogy at 0 is infinite",
    "logit": "the derivative of logit at 0 and 1 is infinite",
    "erfinv": "the derivative of erfinv at -1 and 1 is infinite",
    "softmax": "",
    "log_softmax": "",
    "exp": "",
    "where": "",
    "prod": "",
}
_ALWAYS_AT_EDGE = ("std", "acos", "arccos", "asin", "arcsin", "atanh", "logit", "erfinv", "cdist", "pairwise_distance")


def backward_cause(op: str, node: str, given: Sequence[Range], came: Range, handed: Range) -> str:
    """The likely cause, as a sentence: what made gradients that are not finite of finite ones at ``node``.

    ``given``: the op's inputs in forward; ``came``, ``handed``: the gradients at ``node``, finite and not. Asked are,
    in this order: infinite inputs, a steep derivative met by an input of 0, overflow. A gradient that came counts as
    too large itself above half the fourth root of what its type holds, which is chosen.
    """
    steep = STEEP.get(op.strip("_"), "")
    zeros = sum(one.zeros for one in given)
    infinite = [one for one in given if not one.is_finite]
    if infinite:
        return f"{node} meets {infinite[0].kinds} that went into {op}: 0 * inf, or inf - inf, in its derivative"
    if steep and (zeros or op.strip("_") in _ALWAYS_AT_EDGE):
        where = f" ({zeros} of {sum(one.elements for one in given)} elements are 0)" if zeros else ""
        if came.zeros == came.elements or (handed.nan and came.zeros):
            return (
                f"{steep}{where}, and the gradient that came is 0 there: 0 * inf is NaN. torch.where or a mask after "
                f"{op} cleans its value, not its derivative: change the input of {op} before it"
            )
        return f"{steep}{where}: add an eps to its input, or clamp it"
    limit = LIMITS.get(handed.dtype)
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
    return f"{node} made {handed.kinds} of finite gradients up to {came.largest:.4g}"
