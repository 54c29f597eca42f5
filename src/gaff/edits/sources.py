"""Edits that bring values from elsewhere: replace, patch, ablate.

What they put in is a copy, since the model may write into it. No gradient flows to what was there, but for the rest
around a patch; to what is put in it flows where that has an autograd graph, as a value of the same run has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gaff.address.grammar import NAMED, parse_single
from gaff.address.nested import iter_tensors
from gaff.address.nested import shape_text as _text
from gaff.compat import elements, modes
from gaff.edits.event import Event, Known, generator, like, logical
from gaff.errors import PlanError
from gaff.keep import whole_numbers


def _copied(value: Tensor) -> Tensor:
    """The same numbers in other memory, whatever a mode of the program's makes of what operations return."""
    if torch.compiler.is_compiling() or modes.is_recording():
        return value.clone()
    with modes.outside_modes():
        return value.clone()


@runtime_checkable
class Source(Protocol):
    """A capture of another run, as ``gaff.capture`` and ``gaff.load`` return it: read when the edit acts."""

    def run(self, index: int | None) -> Any:
        """The values of one run (None: of all runs), to be read by address, as ``source.run(0)["fc@1"]``."""

    def all(self, address: str) -> list[Any]:
        """The values of a site in order of run and call."""


@dataclass(frozen=True, eq=False)
class Replace:
    """``value`` itself, of exactly the shape that passes."""

    value: Tensor
    is_pure = True
    uses_event = False
    _known: Known = field(default_factory=Known, init=False, repr=False)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """A copy of the value, on the device and in the dtype of the tensor. Raises PlanError where shapes differ."""
        value = logical(self.value)
        if value.shape != tensor.shape:
            raise PlanError(
                f"replacement of shape {_text(value)} given where {_text(tensor)} passes: expected the same shape; "
                "edits.fill(tensor) broadcasts"
            )
        known = self._known if value is self.value else None
        return _copied(like(value, tensor, known))  # the model may write into what it is given


@dataclass(frozen=True, eq=False)
class Patch:
    """What another run had here, or another site: all of it, or some of its ``rows`` and ``positions`` (here -> there).

    Rows are indices of dimension 0, positions of dimension 1. ``values`` is a tensor, or a capture, of which ``run``
    picks one of several runs; None: the run in progress, for which a session puts a function of the event in its place.
    ``source`` is the address of the site that they are taken from, None for that of the edit. ``detach``: no gradient
    flows to where they came from.
    """

    values: Tensor | Source | Callable[[Event], Tensor] | None = None
    source: str | None = None
    rows: tuple[tuple[int, int], ...] | None = None
    positions: tuple[tuple[int, int], ...] | None = None
    run: int | None = None
    detach: bool = False
    is_pure = True

    @property
    def is_of_same_run(self) -> bool:
        """Whether values are those of the run in progress, which only a session can give."""
        return self.values is None

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """A copy of the tensor with the other values at the wanted places, or a copy of these values alone.

        From a capture the value of the same call is taken, of the same site or that of ``source``. Raises PlanError
        where shapes or places do not fit, and SiteError where the capture has no such event, or several.
        """
        value = like(self._value(event), tensor)
        value = value.detach() if self.detach else value
        if self.rows is None and self.positions is None:
            if value.shape != tensor.shape:
                raise PlanError(
                    f"patch of shape {_text(value)} given where {_text(tensor)} passes: map them, "
                    "rows={here: there}, positions={here: there}"
                )
            return _copied(value)
        here, there = zip(*(_index(pairs, dim, tensor, value) for dim, pairs in enumerate((self.rows, self.positions))),
                          strict=True)  # fmt: skip
        given = value[there[0]][:, there[1]] if value.dim() > 1 else value[there[0]]
        at: tuple[Any, ...] = (here[0][:, None], here[1][None, :]) if tensor.dim() > 1 else (here[0],)
        if given.shape != tensor[at].shape:
            raise PlanError(f"patch of shape {_text(given)} given for a place of shape {_text(tensor[at])}")
        new = tensor.clone()
        new[at] = given
        return new

    def _value(self, event: Event) -> Tensor:
        """The tensor to patch in: the one given, or what the capture or the run has at the site and call."""
        if isinstance(self.values, Tensor):
            return logical(self.values)
        if self.values is None:
            raise PlanError(f"a patch from {self.source!r} of the same run acts in a session only: expected gaff.edit")
        if not isinstance(self.values, Source):
            return logical(self.values(event))
        address = _address(self.values, event)
        if self.source is not None:
            wanted = parse_single(self.source)
            address = str(wanted if wanted.call is not None else replace(wanted, call=event.call))
        runs = self.values.run(self.run)
        if self.run is None and len(several := runs.all(address)) > 1:
            raise PlanError(
                f"{address!r} fired {len(several)} times in what is patched from: expected patch(..., run=0) for those "
                "of one run, and an address with @call where it fired several times in it"
            )
        found = runs[address]
        if not isinstance(found, Tensor):
            inside = [tensor for _, tensor in iter_tensors(found)]
            if len(inside) == 1:  # as an edit of a tuple with one tensor is of that
                return inside[0]
            raise PlanError(f"the capture holds a {type(found).__name__} at {address}: expected a tensor")
        return logical(found)


@dataclass(frozen=True, eq=False)
class Ablate:
    """Without information about the example: zero, the mean of a reference, or rows drawn from it."""

    how: str
    reference: Tensor | Source | None = None
    seed: int = 0
    is_pure = True

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """Zeros; the mean over the examples of the reference, in every row; or for each row a drawn example of it.

        Float16 and bfloat16 are averaged in float32. Rows are drawn on the CPU, so that every device gets the same
        ones. Raises PlanError where a row of the reference has another shape than a row of the tensor.
        """
        if self.how == "zero" or self.reference is None:
            return torch.zeros_like(tensor)
        given = _rows(self.reference, event)
        need_rows(given, tensor)
        rows = like(given, tensor)
        if self.how == "mean":
            return mean_of(given, tensor)
        draw = generator(event, self.seed, torch.device("cpu"))
        return rows[torch.randint(len(rows), (len(tensor),), generator=draw, device="cpu").to(rows.device)]


def need_rows(rows: Tensor, tensor: Tensor) -> None:
    """Raise PlanError where a reference has no examples, or such as have another shape than a row of ``tensor``."""
    if not tensor.dim() or not len(rows) or rows.shape[1:] != tensor.shape[1:]:
        raise PlanError(
            f"reference of shape {_text(rows)} given where {_text(tensor)} passes: expected rows of equal shape; "
            "edits.fill(rows.mean(0)), say, puts what broadcasts everywhere"
        )


def mean_of(rows: Tensor, tensor: Tensor) -> Tensor:
    """The mean of some rows, in each row of ``tensor``, on its device and in its dtype; averaged in float32 at least.

    What passes in float64 is averaged in that. Raises PlanError for whole numbers, whose mean is none as a rule.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise PlanError(
            f"a mean of {_text(tensor)} would lose its fraction: expected a site with floating values, or 'resample'"
        )
    known = [torch.float32, *(one.dtype for one in (rows, tensor) if not elements.is_small_float(one))]
    wide = functools.reduce(torch.promote_types, known)
    return rows.to(tensor.device, wide).mean(0).to(tensor.dtype).expand_as(tensor).contiguous()


def pairs_of(mapping: Any, name: str) -> tuple[tuple[int, int], ...] | None:
    """``{here: there}`` as a value; a number, or a list of them, stands for the same places in both. None stays None.

    Raises PlanError for anything else. ``name`` is for the message.
    """
    if mapping is None:
        return None
    if not isinstance(mapping, Mapping):
        mapping = {number: number for number in whole_numbers(mapping, f"{name}=")}
    if not mapping:
        raise PlanError(
            f"{name}={mapping!r} names no place: expected {{here: there}}, such as {{0: 1}}, a number or a list"
        )
    here, there = (whole_numbers(list(one), f"{name}=") for one in (mapping, mapping.values()))
    return tuple(zip(here, there, strict=True))


def _rows(reference: Tensor | Source, event: Event) -> Tensor:
    """The activations of reference, ``[examples, ...]``: those given, or all of the capture at this site and call."""
    if isinstance(reference, Tensor):
        return logical(reference)
    found = [logical(one) for one in reference.all(_address(reference, event))]
    shapes = sorted({tuple(one.shape[1:]) for one in found})
    if len(shapes) > 1:
        raise PlanError(
            f"{_address(reference, event)}: runs of the reference have examples of the shapes {list(shapes[0])} and "
            f"{list(shapes[1])}: expected one shape, as of runs of one length, or a tensor [examples, ...]"
        )
    return torch.cat(found)


def _address(source: Source, event: Event) -> str:
    """By what a capture is asked for the values of the site and call of ``event``.

    By the standard name, where both were asked for by that name: what it means may lie elsewhere in its model.
    """
    named = {replace(parse_single(name), call=None) for name in source.run(None) if name.startswith(NAMED)}
    if event.name and (wanted := parse_single(event.name)) and replace(wanted, call=None) in named:
        return str(replace(wanted, call=event.call))
    return str(replace(event.site, call=event.call))


def _index(pairs: Any, dim: int, tensor: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """For one dimension the indices here and there, as tensors on the device of ``tensor``; without ``pairs`` all.

    Raises PlanError for a place that is not there, and where all are meant and the sizes differ. Of a dimension that
    neither has both are empty, and are not used.
    """
    if dim >= tensor.dim() and pairs is None:
        return torch.empty(0, dtype=torch.long, device="cpu"), torch.empty(0, dtype=torch.long, device="cpu")
    if dim >= tensor.dim() or dim >= value.dim():
        raise PlanError(f"positions mapped in a tensor of shape {_text(tensor)}: it has no dimension {dim}")
    if pairs is None:
        pairs = [(number, number) for number in range(tensor.shape[dim])]
        if tensor.shape[dim] != value.shape[dim]:
            raise PlanError(
                f"patch of shape {_text(value)} given where {_text(tensor)} passes: map dimension {dim}, too"
            )
    for here, there in pairs:
        if not (-tensor.shape[dim] <= here < tensor.shape[dim] and -value.shape[dim] <= there < value.shape[dim]):
            raise PlanError(
                f"{here}: {there} is outside dimension {dim} of {_text(tensor)} (here) or {_text(value)} (there)"
            )
    if len({here % tensor.shape[dim] for here, _ in pairs}) < len(pairs):
        raise PlanError(f"{dict(pairs)} names a place twice (counted from either end): expected each once")
    here, there = (
        torch.tensor([pair[side] for pair in pairs], dtype=torch.int64, device=tensor.device) for side in (0, 1)
    )
    return here, there
