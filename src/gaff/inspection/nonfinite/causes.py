"""The likely cause of a NaN or inf in the forward, from the op and from what came into it: one small rule a family.

A rule takes a ``Case`` and returns a sentence, or an empty text where it knows nothing; ``_RULES`` has those of each
op by name. They are asked once, for the op that began it, so they may read tensors and wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.compat import distributed, modes
from gaff.inspection.nonfinite.backward_causes import LIMITS
from gaff.inspection.nonfinite.case import Case, in_float64, is_finite_in_float64, magnitude
from gaff.inspection.nonfinite.ranges import can_hold, range_of

LOSSES = ("cross_entropy", "nll_loss", "kl_div", "ctc_loss", "binary_cross_entropy", "gaussian_nll_loss")
_PRODUCTS = ("mul", "multiply", "matmul", "mm", "bmm", "mv", "dot", "linear", "einsum", "outer")
_SUMS = ("add", "sub", "subtract", "rsub", "sum", "mean", "cumsum", "logsumexp", "addmm", "baddbmm", "addmv")
_SMALL = 0.25  # the power of the largest number below which no product of a few inputs is above it
UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_")


def cause_of(case: Case) -> str:
    """The likely cause, as one sentence: the first that a rule of the op knows, then of what any op may suffer from.

    Waits for the device, and may run the op a second time, in float64.
    """
    with torch.no_grad(), modes.outside_modes():
        for rule in (*_RULES.get(case.op.strip("_"), ()), _uninitialised, _infinities, _overflow):
            said: str = rule(case)
            if said:
                return said
    return f"finite inputs gave {case.output.kinds}; no rule knows why {case.op} does that: see the ranges"


def _log(case: Case) -> str:
    """Logarithms of 0 and below; of -1 and below for ``log1p``."""
    x, shift = case.first, -1 if case.op.startswith("log1p") else 0
    if x is None or x.min is None:
        return ""
    if x.min < shift:
        return f"{case.op.strip('_')} of numbers below {shift}, down to {x.min:.4g}: clamp the input first"
    if not x.zeros if not shift else x.min > shift:
        return ""
    zeros = x.zeros if not shift else _count(case.args[0], lambda value: value == shift)
    exactly = f": {zeros} of {x.elements} elements are exactly {shift}" if zeros else ""
    return f"{case.op.strip('_')} of {shift}{exactly}; add an eps or clamp the input"


def _sqrt(case: Case) -> str:
    """Square roots below 0, and ``rsqrt`` of 0, which divides by it."""
    x = case.first
    if x is None or x.min is None:
        return ""
    if x.min < 0:
        return f"{case.op.strip('_')} of a negative number, down to {x.min:.4g}: clamp the input at 0"
    if "rsqrt" in case.op and x.zeros:
        return f"division by zero: rsqrt of 0, for {x.zeros} of {x.elements} elements; add an eps inside"
    return ""


def _pow(case: Case) -> str:
    """Powers: 0 to a negative one, and negative numbers to one that is no integer.

    A number to the power of a tensor is run as the tensor's ``__rpow__``: there the first argument is the exponent.
    """
    base, exponent, x = case.argument(0, "input"), case.argument(1, "exponent"), case.first
    if exponent is None or x is None or x.min is None:
        return ""
    is_number = not isinstance(exponent, Tensor)
    zeros, lowest, is_root = x.zeros if is_number and exponent < 0 else 0, x.min, False
    if getattr(case.func, "__name__", "") == "__rpow__":
        base, exponent, is_number, zeros = exponent, base, False, 0
    if not isinstance(base, Tensor):
        lowest = float(base)
    if is_number:
        is_root = lowest < 0 and float(exponent) != int(exponent)
    elif not case.is_written:
        base = torch.as_tensor(base, device=exponent.device)
        zeros = int(((base == 0) & (exponent < 0)).sum())
        is_root = bool(((base < 0) & (exponent != exponent.round())).any())
    named = exponent if is_number else "a negative number" if zeros else "a fraction"
    if zeros:
        return f"division by zero: 0 to the power of {named}, for {zeros} of {case.output.elements} elements"
    return f"a negative number, down to {lowest:.4g}, to the power of {named}: clamp the base at 0" if is_root else ""


def _div(case: Case) -> str:
    """Division by 0, of a number or of elements of a tensor.

    A number divided by a tensor is run as the tensor's ``__rdiv__`` or ``reciprocal``: there the first argument is the
    divisor.
    """
    below = case.argument(1, "other")
    if case.op.strip("_") == "reciprocal" or getattr(case.func, "__name__", "") in ("__rdiv__", "__rtruediv__"):
        below = case.args[0]
    if isinstance(below, Tensor):
        known = case.range_of(below)
        zeros = known.zeros if known is not None else _count(below, lambda value: value == 0)
        if zeros:
            return f"division by zero: {zeros} of {below.numel()} elements of the divisor are 0; add an eps"
    elif below == 0:
        return "division by zero: the divisor is the number 0"
    return ""


def _softmax(case: Case) -> str:
    """Softmax of a row in which every score is -inf, as a mask that closes everything makes it, or of one with +inf.

    Both are inf - inf, since the maximum is subtracted. A +inf was put in: of one that an op has made that op is told.
    """
    scores = case.args[0] if case.args else case.kwargs.get("input")
    dim = case.argument(1, "dim")
    if not isinstance(scores, Tensor) or not can_hold(scores):
        return ""
    rows = (scores == -math.inf).all(-1 if dim is None else dim)
    masked = int(rows.sum())
    if masked:
        return (
            f"a fully masked row: in {masked} of {rows.numel()} rows every score is -inf, and softmax of that is 0/0; "
            "leave at least one position open, or mask with a large negative number"
        )
    if bool((scores == math.inf).any()):
        return "softmax of +inf, which was put in on purpose: a mask that closes a position with +inf instead of -inf?"
    return ""


def _attention(case: Case) -> str:
    """Fused attention with a mask that leaves a query nothing to attend to: a softmax of nothing but -inf inside."""
    mask = case.argument(3, "attn_mask")
    if not isinstance(mask, Tensor):
        return ""
    closed = ~mask if mask.dtype == torch.bool else mask == -math.inf
    rows = closed.all(-1)
    masked = int(rows.sum())
    if masked and case.output.nan * rows.numel() <= masked * case.output.elements:  # and not others, too
        return f"a fully masked row: {masked} of {rows.numel()} rows of attn_mask leave nothing to attend to"
    return ""


def _normalised(case: Case) -> str:
    """Norm layers with ``eps=0``, where all elements are equal, or a running variance is 0: in float64, too."""
    at = {"layer_norm": 4, "group_norm": 4, "batch_norm": 7, "instance_norm": 7}.get(case.op)
    eps = case.kwargs.get("eps", 1e-5) if at is None else case.argument(at, "eps")
    if eps is None or eps or is_finite_in_float64(case):
        return ""
    is_running = case.op == "batch_norm" and not case.argument(5, "training")
    is_running |= case.op == "instance_norm" and case.argument(5, "use_input_stats") is False
    what = "and a running variance of 0" if is_running else "on elements that are all equal"
    return f"division by zero variance: {case.op} with eps=0 {what}"


def _std(case: Case) -> str:
    """Deviations divided by n - correction, of no more elements than that. The sizes tell how many make one result."""
    x = case.args[0] if case.args else None
    if not isinstance(x, Tensor):
        return ""
    if not x.numel():
        return f"{case.op} of no elements at all"
    count = x.numel() // max(case.output.elements, 1)
    correction = case.kwargs.get("correction", 1)
    if count <= 1 and correction == 1:
        return f"{case.op} of a single element divides by n - 1 = 0: pass correction=0, or give it more elements"
    if correction is not None and count <= correction:
        return f"{case.op} of {count} elements divides by n - correction = {count - correction}: give it more elements"
    return ""


def _mean(case: Case) -> str:
    """Means of no elements."""
    x = case.args[0] if case.args else None
    return "the mean of no elements at all is 0/0" if isinstance(x, Tensor) and x.numel() == 0 else ""


def _loss(case: Case) -> str:
    """Losses averaged over nothing: every target ignored, or an empty batch."""
    x, target = case.args[0] if case.args else None, case.argument(1, "target")
    if isinstance(x, Tensor) and x.numel() == 0:
        return "the loss of an empty batch: the mean over no example is 0/0"
    ignored = case.kwargs.get("ignore_index", -100)
    if isinstance(target, Tensor) and not target.is_floating_point() and bool((target == ignored).all()):
        return f"every target is {ignored}, the ignore_index: the mean over no example is 0/0"
    return ""


def _cast(case: Case) -> str:
    """Casts to a type that does not reach as far as the largest number."""
    x, limit = case.first, LIMITS.get(case.output.dtype)
    if x is None or limit is None or x.dtype == case.output.dtype or x.largest <= limit:
        return ""
    return f"overflow: a cast of {x.largest:.4g} from {x.dtype} to {case.output.dtype}, which holds up to {limit:.4g}"


def _batch_norm(case: Case) -> str:
    """Batch norm with a negative running variance, of which the square root is taken."""
    variance = case.argument(2, "running_var")
    if isinstance(variance, Tensor) and bool((variance < 0).any()):
        return f"running_var is negative, down to {float(variance.min()):.4g}: it is no variance any more"
    return ""


def _unit(case: Case) -> str:
    """``normalize`` and ``cosine_similarity`` of a vector of norm 0, with an ``eps`` that is 0, or 0 in their type."""
    eps = case.argument(3, "eps")
    eps = (1e-12 if case.op == "normalize" else 1e-8) if eps is None else eps
    kind = getattr(torch, case.output.dtype, torch.float64)
    if not isinstance(eps, (int, float)) or float(torch.tensor(eps, dtype=kind, device="cpu")):
        return ""
    small = f", which is 0 in {case.output.dtype}," if eps else ""
    return f"division by zero: {case.op} with eps={eps:g}{small} of a vector whose norm is 0"


def _masked_attention(case: Case) -> str:
    """``nn.MultiheadAttention`` with a mask that leaves a query, or an example, nothing to attend to."""
    for name in ("attn_mask", "key_padding_mask"):
        mask = case.kwargs.get(name)
        if isinstance(mask, Tensor):
            rows = (mask if mask.dtype == torch.bool else mask == -math.inf).all(-1)
            if bool(rows.any()):
                return (
                    f"a fully masked row: {int(rows.sum())} of {rows.numel()} rows of {name} leave nothing to attend to"
                )
    return ""


def _impossible(case: Case) -> str:
    """Losses that are infinite because they should be: a target of probability 0, a path that does not fit."""
    closed = any(one.negative_inf for one in case.ranges)
    target = case.argument(1, "target")
    if closed and case.op == "cross_entropy" and isinstance(target, Tensor) and target.is_floating_point():
        return (
            "a class whose score is -inf has a share of the target, or a share of exactly 0, and 0 * inf is NaN: "
            "close classes with a large negative number, not with -inf"
        )
    if closed and case.op == "kl_div" and case.output.nan:
        return (
            "a class whose log-probability is -inf has a target of exactly 0, and 0 * inf is NaN: close classes with a "
            "large negative number, not with -inf"
        )
    if closed and case.kwargs.get("label_smoothing"):
        return (
            "label_smoothing asks for every class, also for one that a mask closed with -inf, and its loss is +inf: "
            "close classes with a large negative number"
        )
    if closed:
        return "a score of -inf is asked for: what a mask closed is a target, and its loss is +inf"
    return "no path fits the targets: the input is shorter than they need" if case.op == "ctc_loss" else ""


def _inside_one(case: Case) -> str:
    """Functions that are defined between -1 and 1 only, or finite only inside."""
    x, op = case.first, case.op.strip("_")
    if x is None or x.min is None or x.max is None or max(-x.min, x.max) < 1:
        return ""
    if max(-x.min, x.max) > 1 or op in ("atanh", "arctanh", "erfinv"):
        return f"{op} is defined between -1 and 1, and the input goes from {x.min:.6g} to {x.max:.6g}: clamp it"
    return ""


def _from_one(case: Case) -> str:
    """``acosh``, which is defined from 1 on."""
    x = case.first
    if x is None or x.min is None or x.min >= 1:
        return ""
    return f"{case.op.strip('_')} is defined from 1 on, and the input goes down to {x.min:.6g}: clamp it"


def _logit(case: Case) -> str:
    """``logit`` of 0 or 1, or of what is no probability."""
    x = case.first
    if x is None or x.min is None or x.max is None or (x.min > 0 and x.max < 1):
        return ""
    return f"logit is finite only between 0 and 1, and the input goes from {x.min:.6g} to {x.max:.6g}: pass eps="


def _gamma(case: Case) -> str:
    """The gamma function's logarithm and its derivatives have poles at 0 and at the negative integers."""
    x = case.ranges[-1] if case.ranges else None
    value = case.args[-1] if case.args else None
    is_kept = isinstance(value, Tensor) and not case.is_written
    if x is None or x.min is None or x.min > 0:
        return ""
    if is_kept and not _count(value, lambda one: (one <= 0) & (one == one.round())):
        return ""
    return f"{case.op.strip('_')} has poles at 0 and the negative integers, and the input goes down to {x.min:.4g}"


def _xlogy(case: Case) -> str:
    """``xlogy`` of a number that is not 0 and a 0, whose logarithm it takes."""
    below = case.range_of(case.argument(1, "other"))
    if below is None or below.min is None:
        return ""
    if below.min < 0:
        return f"log of numbers below 0 in {case.op.strip('_')}, down to {below.min:.4g}: clamp the second input first"
    return f"log of 0 in {case.op.strip('_')}: {below.zeros} of {below.elements} elements are 0" if below.zeros else ""


def _determinant(case: Case) -> str:
    """Logarithms of the determinant of a matrix that has no inverse, or of one that is negative."""
    if case.output.negative_inf:
        return f"log of 0: a matrix given to {case.op} is singular, so that its determinant is 0"
    return f"log of a negative number: the determinant of a matrix given to {case.op} is below 0, see slogdet"


def _data(case: Case) -> str:
    """Tensors made of numbers that were not finite before they were one, or too large for its type."""
    limit = LIMITS.get(case.output.dtype)
    try:
        wide = torch.as_tensor(case.argument(0, "data"), dtype=torch.float64, device="cpu")
    except (RuntimeError, TypeError, ValueError):  # complex numbers, or a buffer
        return ""
    if limit is not None and bool(wide.isfinite().all()):
        return f"overflow: numbers up to {magnitude(wide):.4g}, and {case.output.dtype} holds up to {limit:.4g}"
    return "it was in the numbers that the tensor was made of: a list or an array from outside torch"


def _uninitialised(case: Case) -> str:
    """Memory from ``torch.empty`` and its like, which holds whatever was there."""
    if case.op not in UNINITIALISED:
        return ""
    if distributed.has_others():
        return "memory that no op wrote to, though a collective may have, with what another process sent"
    return "memory that was never written to: torch.empty is not zeros"


def _infinities(case: Case) -> str:
    """Infinite values that were meant and met another, or a zero: the result is a NaN that nobody meant."""
    bad = [one for one in case.ranges if not one.is_finite]
    is_mask = case.op == "scaled_dot_product_attention" and not any(one.nan or one.positive_inf for one in bad)
    if not bad or is_mask:  # -inf is how a mask says no
        return ""
    op, known = case.op.strip("_"), f"an infinite value that was put in on purpose ({bad[0].kinds} in {bad[0].name})"
    if op in _PRODUCTS:
        is_zero = op in ("mul", "multiply") or _zero_meets_infinity(case)  # of single numbers nothing else makes a NaN
        return f"{known} met {'a 0: 0 * inf' if is_zero else 'another: inf - inf'} is NaN"
    if op in ("div", "divide", "true_divide"):
        return f"{known} is divided by another: inf / inf is NaN"
    is_sum = op in _SUMS and (len(case.ranges) > 1 or (bad[0].positive_inf and bad[0].negative_inf))
    return f"{known} met another: inf - inf is NaN" if is_sum else f"{known} went into {op}, which has no value there"


def _zero_meets_infinity(case: Case) -> bool:
    """Whether a 0 of one factor is multiplied with an infinite element of the other, told by the op on 0s and 1s."""
    factors = [one for _, one in iter_tensors((case.args, case.kwargs))][:2]
    text = [one for one in case.args[:1] if isinstance(one, str)]  # of einsum
    if len(factors) < 2 or case.is_written or any(one.is_sparse or one.is_nested for one in factors):
        return any(one.zeros for one in case.ranges)
    zeros, infinite = [(one == 0).double() for one in factors], [one.isinf().double() for one in factors]
    try:
        met = [case.func(*text, zeros[0], infinite[1]), case.func(*text, infinite[0], zeros[1])]
    except (RuntimeError, TypeError, ValueError):  # arguments that this form of the op does not take
        return any(one.zeros for one in case.ranges)
    return any(bool((one > 0).any()) for one in met)


def _overflow(case: Case) -> str:
    """Overflow, found by running the op again in float64: what is finite there was too large for the type.

    Not of ops in place or with ``out=``, which would write to the user's tensors again. Where float64 overflows as
    well nothing more can be said, and a NaN there has another cause.
    """
    limit = LIMITS.get(case.output.dtype)
    wide = [one for one in case.ranges if limit is not None and one.dtype != case.output.dtype and one.largest > limit]
    if wide and case.output.dtype in ("float16", "bfloat16"):
        is_auto = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        how = f"autocast runs {case.op} in" if is_auto else f"{case.op} returns"
        return (
            f"overflow: {wide[0].name} goes up to {wide[0].largest:.4g} in {wide[0].dtype}, and {how} "
            f"{case.output.dtype}, which holds up to {limit:.4g}"
        )
    tensors = None if limit is None else in_float64(case)
    if limit is None or tensors is None:
        return _exp_limit(case, limit)
    ranges = [range_of(tensor.double(), "") for tensor in tensors]
    largest = max((magnitude(tensor) for tensor in tensors), default=0.0)
    if any(one.nan for one in ranges):
        return ""
    if largest <= limit and all(one.is_finite for one in ranges):
        if case.output.nan and max((one.largest for one in case.ranges), default=0.0) < limit**_SMALL:
            return (
                f"underflow inside {case.op}: what it was given is small, and its result in float64 finite; a number "
                f"on the way, such as an eps, is 0 in {case.output.dtype}"
            )
        return (
            f"overflow inside {case.op}: its result, at most {largest:.4g}, would fit {case.output.dtype} "
            f"(up to {limit:.4g}), a step on the way does not"
        )
    if not math.isfinite(largest) and case.op.strip("_") not in ("exp", "expm1"):
        return (
            f"{case.op} of what it was given is infinite in float64, too: a pole (a division by 0, say), or an overflow"
        )
    over = f", {math.log2(largest / limit):.1f} bits too much" if math.isfinite(largest) and largest > 0 else ""
    return (
        f"overflow: {case.op} gives {_number(largest)}, and {case.output.dtype} holds up to {limit:.4g}{over}"
        + _hint(case)
    )


def _exp_limit(case: Case, limit: float | None) -> str:
    """What can be said of an overflow without running the op again: how large its inputs were, and what fits.

    Nothing of a NaN, which no single overflow makes, and where what was given is small.
    """
    x = case.first
    if limit is None or x is None or x.max is None:
        return ""
    if case.op.strip("_") in ("exp", "expm1") and x.max > math.log(limit):
        return f"overflow: exp of {x.max:.4g}, and {case.output.dtype} holds exp up to {math.log(limit):.4g}"
    given = max([x.largest, *(abs(one) for one in case.args if isinstance(one, (int, float)))])
    if case.output.nan or given < limit**0.25:
        return ""
    return f"overflow: the inputs go up to {x.largest:.4g}, and {case.output.dtype} holds up to {limit:.4g}"


def _hint(case: Case) -> str:
    """What to do about an overflow, where there is a usual remedy."""
    x = case.first
    if case.op.strip("_") in ("exp", "expm1") and x is not None and x.max is not None:
        return f"; exp of {x.max:.4g}: subtract the maximum first"
    return "; use bfloat16 or scale down" if case.output.dtype == "float16" else ""


def _number(value: float) -> str:
    """A number as messages show it."""
    return f"{value:.4g}" if math.isfinite(value) else "more than float64 holds"


def _count(value: Any, is_wanted: Callable[[Tensor], Tensor]) -> int:
    """How many elements of a tensor are wanted; 0 of anything else."""
    return int(is_wanted(value).sum()) if isinstance(value, Tensor) else 0


Rule = Callable[[Case], str]


def _table(rows: Sequence[tuple[str, Rule]]) -> dict[str, list[Rule]]:
    """Rules by the name of an op, from rows with several names each; the rules of an op are asked in this order."""
    found: dict[str, list[Rule]] = {}
    for names, rule in rows:
        for name in names.split():
            found.setdefault(name, []).append(rule)
    return found


_RULES = _table(
    (
        ("log log2 log10 log1p", _log),
        ("sqrt rsqrt", _sqrt),
        ("pow float_power", _pow),
        ("div divide true_divide reciprocal floor_divide remainder fmod", _div),
        ("softmax log_softmax", _softmax),
        ("scaled_dot_product_attention", _attention),
        ("multi_head_attention_forward", _masked_attention),
        ("to half bfloat16 float type type_as", _cast),
        ("batch_norm", _batch_norm),
        ("normalize", _unit),
        ("cosine_similarity", _unit),
        ("layer_norm batch_norm instance_norm group_norm rms_norm", _normalised),
        ("std var std_mean var_mean", _std),
        ("mean nanmean", _mean),
        (" ".join(LOSSES), _impossible),
        ("cross_entropy nll_loss binary_cross_entropy mse_loss l1_loss smooth_l1_loss kl_div", _loss),
        ("acos arccos asin arcsin atanh arctanh erfinv", _inside_one),
        ("acosh arccosh", _from_one),
        ("lgamma digamma polygamma mvlgamma", _gamma),
        ("xlogy", _xlogy),
        ("logdet", _determinant),
        ("tensor as_tensor asarray from_numpy", _data),
        ("logit", _logit),
    )
)
