"""Edits as compiled code can hold them: functions of the tensor alone, with their numbers in tensors.

A number in a tensor is an input of the compiled graph: another one needs no other compiled graph. So each ``_scale``,
``_add`` ... makes, once and outside of compiled code, a function that closes over such tensors; it repeats what
``change`` of the edit computes, without caches and without an event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gaff.edits.arithmetic import (
    Add,
    Clamp,
    Clip,
    Fill,
    Project,
    Reverse,
    Scale,
    Stop,
    clipped,
    need_broadcast,
    orthonormal,
    outside,
    wide,
)
from gaff.edits.event import Call, Edit, Event, like, need_number, need_room, too_narrow, without
from gaff.edits.places import At, Chain, is_placed, iter_innermost
from gaff.edits.sources import Ablate, Patch, Replace, mean_of, need_rows
from gaff.errors import PlanError

Change = Callable[[Tensor], Tensor]
_ANY_EVENT = Event()
_UNKNOWN = "{} asks when it acts, draws numbers, or rounds to a type"
_OF_A_RUN = "values come from a capture or the run: expected a tensor, such as got[address]"


def traced(edit: Edit, *, is_gradient: bool) -> Change | str:
    """``edit`` as a function that Dynamo can compile, or why it has no form in a graph.

    None has one that asks when it acts or draws numbers, nor one that rounds to a narrow type: Inductor leaves out
    conversions to it and back. The session then runs compiled code eagerly. ``is_gradient``: what passes is a gradient,
    and ``reverse`` and ``stop`` act on it themselves.
    """
    if isinstance(edit, Chain):
        parts = [traced(part, is_gradient=is_gradient) for part in edit.edits]
        return next((one for one in parts if isinstance(one, str)), "") or _chain(
            [one for one in parts if callable(one)]
        )
    if isinstance(edit, At):
        inner = traced(edit.edit, is_gradient=is_gradient)
        if isinstance(inner, str):
            return inner
        if is_placed(edit.edit) and not isinstance(edit.index, Tensor):
            return _values_at(edit)
        part = replace(edit, edit=Call(inner))
        return lambda tensor: part.change(tensor, _ANY_EVENT)
    if isinstance(edit, Call):
        return edit.function
    if isinstance(edit, (Reverse, Stop)) and is_gradient:
        return _scale(Scale(-float(edit.factor))) if isinstance(edit, Reverse) else torch.zeros_like
    if isinstance(edit, (Reverse, Stop)):
        return lambda tensor: edit.change(tensor, _ANY_EVENT)
    make = _MAKERS.get(type(edit))
    return _UNKNOWN.format(type(edit).__name__.lower()) if make is None else make(edit)


def cuts(edit: Edit) -> bool:
    """Whether ``edit`` may leave no way from what comes out to what passed: by constants, or a function of the user.

    Such an edit cannot be switched off by a number inside the same compiled graph: mixing would lead the gradient back
    to what passed.
    """
    return any(isinstance(one, (Call, Fill, Stop, Replace, Patch, Ablate)) for one in iter_innermost(edit))


def may_write(edit: Edit) -> bool:
    """Whether ``edit`` may write into what it is given: a function of the user may."""
    return any(isinstance(one, Call) for one in iter_innermost(edit))


def _chain(parts: list[Change]) -> Change:
    """One function after the other."""

    def change(tensor: Tensor) -> Tensor:
        for part in parts:
            tensor = part(tensor)
        return tensor

    return change


def _number(value: float) -> Tensor:
    """A number as a tensor of one element: of one without dimensions torch guards the number itself."""
    with torch.inference_mode(False):
        return torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def _constant(value: Tensor) -> Change:
    """A constant as ``like`` brings it to what passes; its range is asked for here, which compiled code cannot do."""
    narrow = too_narrow(value)

    def at(tensor: Tensor) -> Tensor:
        need_room(value, tensor.dtype, narrow)
        return like(value, tensor)

    return at


def _given(what: str, value: float) -> Change:
    """A number as ``number`` brings it to the type of what passes, and as an input of the compiled graph."""
    held, lacking = _number(value), without(value)

    def at(tensor: Tensor) -> Tensor:
        need_number(what, value, tensor.dtype, lacking)
        return held[0].to(tensor.device, tensor.dtype)

    return at


def _by_number(value: float, change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """``change`` by a number, which is an input of the compiled graph, in the precision in which torch takes a number.

    It goes as a tensor without dimensions, which decides no type beside a tensor that has some. Kernels in CUDA graphs
    can read none from the CPU, and one on their device would be rounded to a narrow type before it is used.
    """
    held = _number(value)

    def at(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return at(tensor.reshape(1)).reshape(())
        if tensor.is_cpu or not (tensor.is_floating_point() or tensor.is_complex()):
            return change(tensor, held.to(tensor.device)[0])
        work = wide(tensor)
        return change(tensor.to(work), held.to(tensor.device, work)[0]).to(tensor.dtype)

    return at


def _scale(edit: Scale) -> Change:
    """``Scale``, with its factor as an input of the compiled graph."""
    if isinstance(edit.factor, Tensor):
        given = _constant(edit.factor)
        return lambda tensor: tensor * given(tensor)
    return _by_number(edit.factor, lambda tensor, factor: tensor * factor)


def _add(edit: Add) -> Change:
    """``Add``, with strength and number as inputs; a strength of 1 is left out, as it changes no bit."""
    if isinstance(edit.direction, Tensor):
        direction, strength = _constant(edit.direction), _given("a strength of", edit.strength)
        if edit.strength == 1.0:
            return lambda tensor: tensor + direction(tensor)
        return lambda tensor: tensor + strength(tensor) * direction(tensor)
    amount = edit.direction if edit.strength == 1 else edit.strength * edit.direction
    return _by_number(amount, lambda tensor, one: tensor + one)


def _fill(edit: Fill) -> Change:
    """``Fill``: a number copied everywhere, since ``full_like`` takes no number from a tensor; or a tensor."""
    if isinstance(edit.value, Tensor):
        whole, given = edit.value, _constant(edit.value)

        def change(tensor: Tensor) -> Tensor:
            need_broadcast(whole, tensor)
            return given(tensor).expand_as(tensor).clone(memory_format=torch.contiguous_format)

        return change
    value = _given("fill with", edit.value)
    return lambda tensor: torch.empty_like(tensor).copy_(value(tensor))


def _clamp(edit: Clamp) -> Change:
    """``Clamp``, with its bounds as inputs, brought to the tensor's device and dtype."""
    given = [None if one is None else _given("clamp at", one) for one in (edit.low, edit.high)]

    def change(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            raise PlanError(f"clamp of {tensor.dtype}: complex numbers have no order")
        bounds = [None if one is None else one(tensor) for one in given]
        return torch.clamp(tensor, bounds[0], bounds[1])

    return change


def _clip(edit: Clip) -> Change:
    """``Clip``, with its largest norm as an input."""
    largest = _number(float(edit.norm))

    def change(tensor: Tensor) -> Tensor:
        return clipped(tensor, largest[0].to(tensor.device), edit._dims(tensor), keeps=edit.per != "tensor")

    return change


def _project(edit: Project) -> Change | str:
    """``Project``; not by directions that are trained, since decompositions have no form in a graph.

    The basis of several directions is made once, that of one wherever the edit is made.
    """
    if edit.directions.requires_grad:
        return "directions to project on are trained"
    is_one = edit.directions.dim() == 1 or len(edit.directions) == 1
    basis = None if is_one else orthonormal(edit.directions)

    def change(tensor: Tensor) -> Tensor:
        with torch.autocast(tensor.device.type, enabled=False):
            rows = orthonormal(torch.atleast_2d(edit.directions)) if basis is None else basis
            return outside(tensor, like(rows, tensor, dtype=wide(tensor)), edit.dim, keep=edit.keep)

    return change


def _replace(value: Tensor, what: str) -> Change:
    """A constant of exactly the shape that passes, copied. ``what`` names it in the message."""
    constant = _constant(value)

    def change(tensor: Tensor) -> Tensor:
        if value.shape != tensor.shape:
            raise PlanError(f"{what} of shape {tuple(value.shape)} given where {tuple(tensor.shape)} passes")
        return constant(tensor).clone()

    return change


def _patch(edit: Patch) -> Change | str:
    """``Patch`` by a tensor as a whole; not where values come from a run, nor for some rows and positions."""
    if edit.rows is not None or edit.positions is not None:
        return "rows or positions are mapped: expected edits.at(place, edits.patch(tensor))"
    if not isinstance(edit.values, Tensor):
        return _OF_A_RUN
    return _replace(edit.values.detach() if edit.detach else edit.values, "patch")


def _values_at(edit: At) -> Change | str:
    """``Replace``, or ``Patch`` by a tensor as a whole, at a slice; no others, and none inside of further edits.

    Values that have the shape of the part are its own, others are of the whole and taken as the part is.
    """
    inner, place = edit.edit, edit.index
    if not isinstance(inner, (Patch, Replace)) or isinstance(place, Tensor):
        return "several edits bring values at a place, or a mean does: expected edits.patch(tensor) there"
    given = inner.values if isinstance(inner, Patch) else inner.value
    assert isinstance(given, Tensor)  # else it is not traced
    values = given.detach() if isinstance(inner, Patch) and inner.detach else given
    bring = _replace(values, "patch" if isinstance(inner, Patch) else "replacement")

    def change(tensor: Tensor) -> Tensor:
        part = place(tensor)
        new = bring(part) if part.shape == values.shape != tensor.shape else place(bring(tensor))
        return replace(edit, edit=Call(lambda _: new)).change(tensor, _ANY_EVENT)

    return change


def _ablate(edit: Ablate) -> Change | str:
    """``Ablate`` by zeros or a mean of given activations; not where it draws rows or reads a capture."""
    if edit.how == "zero" or edit.reference is None:
        return torch.zeros_like
    if edit.how != "mean" or not isinstance(edit.reference, Tensor):
        return "rows are drawn" if edit.how != "mean" else _OF_A_RUN
    rows, narrow = edit.reference, too_narrow(edit.reference)

    def change(tensor: Tensor) -> Tensor:
        need_rows(rows, tensor)
        need_room(rows, tensor.dtype, narrow)
        return mean_of(rows, tensor)

    return change


_MAKERS: dict[type, Callable[[Any], Change | str]] = {
    Scale: _scale,
    Add: _add,
    Fill: _fill,
    Clamp: _clamp,
    Clip: _clip,
    Project: _project,
    Replace: lambda edit: _replace(edit.value, "replacement"),
    Patch: _patch,
    Ablate: _ablate,
}
