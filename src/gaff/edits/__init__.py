"""What can be done to a tensor that passes: values to give to ``gaff.edit``, at outputs, inputs, gradients, parameters.

Every edit returns a new tensor of the same shape, dtype, device and layout, and draws nothing from global random
states. A function ``tensor -> tensor``, a module (it trains), or a list of edits (one after the other) serves, too.

The functions here check what they are given and raise PlanError; they return frozen values (``arithmetic``,
``sources``, ``places``), which know nothing of hooks or sessions. ``event`` says what an edit is, ``compiled`` how one
looks inside a compiled graph, ``files`` how it is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import Site, parse_single
from gaff.compat import elements
from gaff.edits.arithmetic import Add, Clamp, Clip, Fill, Noise, Project, Quantize, Reverse, Scale, Stop
from gaff.edits.event import Call, Edit, Event, need_callable, with_event
from gaff.edits.places import At, Chain, Skip, When, as_edit, numbers_of
from gaff.edits.sources import Ablate, Patch, Replace, Source, pairs_of
from gaff.errors import PlanError, need_truth, whole_number
from gaff.keep import Heads, Part

__all__ = [
    "Edit",
    "Event",
    "ablate",
    "add",
    "at",
    "chain",
    "clamp",
    "clip",
    "fill",
    "noise",
    "patch",
    "project",
    "quantize",
    "replace",
    "reverse",
    "scale",
    "skip",
    "stop",
    "when",
    "with_event",
    "zero",
]


def __dir__() -> list[str]:
    return __all__


def scale(factor: float | Tensor) -> Scale:
    """Multiply by ``factor``: a number, or a tensor that broadcasts to what passes."""
    return Scale(_need_factor(factor, "factor"))


def add(direction: float | Tensor, strength: float = 1.0) -> Add:
    """Add ``strength * direction`` (steering); ``direction`` broadcasts to what passes, ``[width]`` say."""
    return Add(_need_factor(direction, "direction"), _need_number(strength, "strength"))


def fill(value: float | Tensor) -> Fill:
    """Put ``value`` everywhere, a number or a tensor that broadcasts; no gradient flows to what was there.

    So a mean over a data set, ``[width]``, ablates by it, also step by step in ``generate``. ``scale(0.0)`` keeps the
    way of the gradient, and passes infinities on as NaN.
    """
    return Fill(_need_factor(value, "value"))


def zero() -> Fill:
    """Put zeros everywhere, as ``fill(0.0)``; no gradient flows to what was there."""
    return Fill(0.0)


def clamp(low: float | None = None, high: float | None = None) -> Clamp:
    """Keep every element between ``low`` and ``high``, of which one may be None. NaN stays NaN."""
    low = None if low is None else _need_number(low, "low")
    high = None if high is None else _need_number(high, "high")
    given = [one for one in (low, high) if one is not None]
    if not given or not given[0] <= given[-1]:  # NaN is not even as large as itself
        raise PlanError(f"clamp({low!r}, {high!r}) keeps nothing apart: expected bounds, the lower first")
    return Clamp(low, high)


def clip(norm: float, per: str = "tensor", dim: int = 0) -> Clip:
    """Scale down to an L2 norm of at most ``norm``: factor min(1, norm / (total + 1e-6)), as ``clip_grad_norm_``.

    The norm is added up in float64, and float16 and bfloat16 are multiplied in float32.

    ``per``: one norm for the whole "tensor", for each "row" (example: index of dimension 0), or for each "unit"
    (index of dimension ``dim``: 0 for the outputs of a weight, 1 for channels). A tensor of one dimension, such as the
    gradient of a bias, has one norm all the same. What has a non-finite norm passes.
    """
    if per not in ("tensor", "row", "unit"):
        raise PlanError(f"per={per!r} is not known: expected 'tensor', 'row' or 'unit'")
    norm, dim = _need_number(norm, "norm"), _need_whole(dim, "dim")
    if not norm > 0:
        raise PlanError(f"norm={norm!r} is no limit: expected a positive number")
    if dim != 0 and per != "unit":
        raise PlanError(f"clip(per={per!r}, dim={dim}): a dim is that of units: expected per='unit'")
    return Clip(norm, per, dim)


def noise(std: float, seed: int = 0) -> Noise:
    """Add normal noise of standard deviation ``std``.

    Drawn anew for each site, run, call and step from ``seed`` alone, of gradients also for each backward pass: the same
    in a recomputation and in a second session, and the global random state is not touched. Of several edits at one site
    each draws its own noise.
    """
    seed, std = _need_whole(seed, "seed"), _need_number(std, "std")
    if not std >= 0 or math.isinf(std):
        raise PlanError(f"std={std!r} is no standard deviation: expected a finite number, 0 or more")
    return Noise(std, seed)


def replace(value: Tensor | Callable[[Tensor], Tensor]) -> Replace | Call:
    """Put ``value`` in place: a tensor of exactly the shape that passes, or a function of what passes."""
    return Replace(value) if isinstance(value, Tensor) else Call(need_callable(value))


def patch(
    values: Tensor | Source | None = None,
    *,
    source: str | Site | None = None,
    rows: Mapping[int, int] | Sequence[int] | int | None = None,
    positions: Mapping[int, int] | Sequence[int] | int | None = None,
    run: int | None = None,
    detach: bool = False,
) -> Patch:
    """Put in what another run had, or what passed another site: ``patch(got)``, ``patch(source="h.3")``.

    Args:
        values: a tensor, or a ``gaff.capture`` of another run (also one from ``gaff.load``, or ``got.run(0)`` of it),
            call by call; None: the very run that is edited, in which ``source`` must pass first, as the model goes on
            with it.
        source: the address, or standard name, of the one output or input to take from; None: each site gets its own
            value. Without ``@call`` its call of the same number is meant.
        rows, positions: ``{here: there}`` along dimensions 0 and 1; the rest stays. A number or a list (-1: the last)
            means the same places in both. Without them shapes must be equal.
        run: which run of the capture, when it holds several.
        detach: let no gradient flow to where the values came from; without it it flows as through code of the model.
    """
    if isinstance(values, (str, Site)):
        raise PlanError(f"patch was given the address {str(values)!r} first: expected patch(source={str(values)!r})")
    if values is not None and not isinstance(values, (Tensor, Source)):
        raise PlanError(f"patch {values!r:.40} is nothing to patch from: expected a tensor or a gaff.capture")
    if source is not None and not isinstance(source, (str, Site)):
        raise PlanError(f"source={source!r:.40} is no address: expected one exact site as text, such as 'h.3'")
    need_truth(detach, "detach")
    address = None if source is None else str(parse_single(source) if isinstance(source, str) else source)
    if values is None and (address is None or run is not None):
        raise PlanError("patch was given nothing to patch from: expected a tensor, a capture, or source= alone")
    if isinstance(values, Tensor) and address is not None:
        raise PlanError(f"patch has a tensor and source={address!r}: expected one of them, a tensor has no sites")
    number = None if run is None else _need_whole(run, "run")
    return Patch(values, address, pairs_of(rows, "rows"), pairs_of(positions, "positions"), number, detach)


def ablate(how: str = "zero", reference: Tensor | Source | None = None, seed: int = 0) -> Ablate:
    """Take away what is particular to an example: "zero", the "mean" of ``reference``, or "resample" rows of it.

    ``reference``: activations ``[examples, ...]`` with the shape that passes behind the first dimension, or a
    ``gaff.capture`` of the same sites. Rows are drawn as ``noise`` draws.
    """
    if how not in ("zero", "mean", "resample"):
        raise PlanError(f"ablate {how!r} is not known: expected 'zero', 'mean' or 'resample'")
    if (how == "zero") is not (reference is None):
        raise PlanError(f"ablate {how!r}: a reference of activations goes with 'mean' and 'resample', and only these")
    if reference is not None and not isinstance(reference, (Tensor, Source)):
        raise PlanError(f"ablate by {reference!r:.60}: expected a tensor [examples, ...] or a gaff.capture")
    return Ablate(how, reference, _need_whole(seed, "seed"))


def project(directions: Tensor, *, keep: bool = False, dim: int = -1) -> Project:
    """Remove the part in the span of ``directions`` (``[width]`` or ``[k, width]``), or ``keep`` only that part.

    The span is found in float64 (dependent directions count once); float16 and bfloat16 are computed with in float32.
    """
    is_matrix = isinstance(directions, Tensor) and directions.dim() in (1, 2)
    is_known = is_matrix and elements.is_readable(directions)  # fake and meta tensors have no numbers
    known = directions.double() if is_known and directions.is_floating_point() else directions
    if not is_matrix or (is_known and not (known.any() and known.isfinite().all())):
        raise PlanError(
            f"directions {directions!r} span nothing: expected a finite tensor [width] or [k, width], not all zero"
        )
    return Project(directions, need_truth(keep, "keep"), _need_whole(dim, "dim"))


def reverse(factor: float = 1.0) -> Reverse:
    """Gradient reversal: a gradient is multiplied by ``-factor``.

    On a value, as in Ganin & Lempitsky 2015: the value passes as it is, and its gradient is turned on its way back.
    """
    return Reverse(_need_number(factor, "factor"))


def stop() -> Stop:
    """Let no gradient go further back: zeros at a gradient; a value passes, cut off from the autograd graph."""
    return Stop()


def quantize(dtype: str | torch.dtype, *, scaled: bool = False) -> Quantize:
    """Round to "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2" and back, to ask what precision would do.

    Gradients pass straight through. ``scaled``: the largest magnitude of the tensor is first brought to the largest
    of the type, as training in fp8 does; without it what is out of range becomes what torch makes of it: infinite, NaN
    (which the receipt counts) or, of some types, the largest number of the type.
    """
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlanError(f"quantize {dtype!r} is no floating type: expected 'float16', 'bfloat16', 'float8_e4m3fn' ...")
    return Quantize(name, need_truth(scaled, "scaled"))


def at(index: Part | Heads | Tensor, edit: Any) -> At:
    """Limit ``edit`` to a place: ``gaff.keep.rows``, ``positions``, ``channels``, ``heads``, or a boolean mask.

    ``at(keep.rows(0), at(keep.heads(3, 12), zero()))`` nests. Different rows of one batch may get different edits:
    a list of ``at`` at one site, many experiments in one forward.

    Values from elsewhere (``replace``, ``patch``, ``ablate``) may have the shape of the place, or of all that passes,
    or of a place between the two where they nest; they are taken from there as the place is. Where these have one
    shape, since the place names all rows in another order, they are those of all that passes, also where a capture has
    kept that place alone.
    """
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if not is_mask and not isinstance(index, (Part, Heads)):
        raise PlanError(f"index {index!r} is no place: expected gaff.keep.rows(0), heads(3, 12) ..., or a boolean mask")
    return At(index, as_edit(edit))


def chain(*edits: Any) -> Chain:
    """Make one edit after the other, in the order given; a list does the same."""
    return Chain(tuple(as_edit(edit) for edit in edits))


def when(edit: Any, *, runs: Any = None, calls: Any = None, steps: Any = None) -> When:
    """Limit ``edit`` to some events: a number, range, slice or list of runs, of calls within a run, of steps.

    Numbers count from 0; negative ones raise PlanError, since which is the last is not known before it is over. Runs
    are those of the session: root forwards, and calls of edited parts, or of modules around them, by themselves (the
    encoder that ``generate`` of an encoder-decoder calls first is a run of its own where a site lies in it). The steps
    of ``generate`` are runs, the prompt of a decoder is run 0. Steps count completed steps of all optimizers that hold
    parameters of the model.
    """
    return When(as_edit(edit), numbers_of(runs, "runs"), numbers_of(calls, "calls"), numbers_of(steps, "steps"))


def skip(value: Any = None) -> Skip:
    """Do not run the module; its output is its first input (None), ``value``, or ``value(*args, **kwargs)``.

    A module whose ``forward`` says that it returns a tuple needs such a function: anything else is refused.
    """
    if value is not None and not isinstance(value, Tensor) and not callable(value):
        raise PlanError(f"skip {value!r:.40}: expected nothing, a tensor, or a function of the module's arguments")
    return Skip(value)


def _need_number(value: Any, name: str) -> Any:
    """A number of Python's; those of NumPy are made one. Raises PlanError for anything else, truth values included."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        if not -(2**63) <= int(value) < 2**63:
            raise PlanError(f"{name} is beyond the whole numbers of torch: expected one of 64 bits, sign included")
        return int(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise PlanError(f"{name}={value!r:.60} is a {type(value).__name__}: expected a number")


def _need_whole(value: Any, name: str) -> int:
    """A whole number of Python's. Raises PlanError for anything else, truth values included."""
    if (number := whole_number(value)) is None:
        raise PlanError(f"{name}={value!r:.60} is no number: expected an integer")
    return number


def _need_factor(value: Any, name: str) -> Any:
    """A tensor as it is, anything else as a number."""
    return value if isinstance(value, Tensor) else _need_number(value, name)
