"""The rows of a trace: one for each call and each parameter, as plain values without tensors.

``gaff.inspection.tracer`` makes them, ``gaff.inspection.trace.Trace`` holds and saves them, views draw them. The
functions below make them anew from JSON, and raise TypeError or ValueError for what they cannot be made of; who reads
a file turns that into a ``RecordError``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, TypeVar

from gaff.address.grammar import parse_site
from gaff.record.picture import Picture

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Statistics:
    """The moments of one tensor's elements; ``std`` is the population's, ``nonfinite`` counts NaN and inf elements.

    Elements that are not finite are not left out of the moments: a NaN makes them NaN.
    """

    mean: float
    std: float
    min: float
    max: float
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What stands for the elements of a tensor when traces are compared (``gaff.inspection.sketches``).

    ``digest`` is equal for equal bits, and empty where there is nothing to compare; the distance of two ``sketch``
    tells how far their tensors are apart. ``odd`` is equal where the same elements are NaN and infinite, and empty
    where none is. ``whole`` is equal for equal whole numbers and truth values, which no rounding changes; ``types``
    names the types of all other tensors. Both are empty where they were not written. In JSON they stand beside the
    other fields of what they are of.
    """

    digest: str = ""
    sketch: tuple[float, ...] = ()
    odd: str = ""
    whole: str = ""
    types: str = ""

    def is_same_as(self, other: Fingerprint) -> bool:
        """Whether both stand for the same bits, as far as they could be read."""
        return bool(self.digest) and self.digest == other.digest


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient: shape as text, L2 norm, share of exact zeros. ``reason`` says why there is none."""

    shape: str = ""
    norm: float | None = None
    zeros: float | None = None
    reason: str = ""
    fingerprint: Fingerprint = Fingerprint()

    def __str__(self) -> str:
        if self.norm is None:
            return f"None: {self.reason}"
        return f"{self.shape} zero" if self.norm == 0 else f"{self.shape} {self.norm:.3g}"


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call of one module, or of an op, whose ``cls`` is its place in the code.

    Shapes are texts such as ``1x3x8x8``; ``dtype`` and ``statistics`` are those of the first output tensor,
    ``fingerprint`` is that of all of them.
    """

    site: str
    cls: str
    call: int
    depth: int
    input: str
    output: str
    dtype: str
    parameters: int  # elements that the module owns itself
    time_s: float  # with everything inside, less what looking at the calls inside took
    memory_bytes: int  # of the output tensors
    flops: int  # matrix products, convolutions, attention; with everything inside
    statistics: Statistics | None = None
    grad_output: Gradient | None = None
    grad_input: Gradient | None = None
    fingerprint: Fingerprint = Fingerprint()

    @property
    def path(self) -> str:
        """The path of the module that was called, or in whose forward the op is."""
        return parse_site(self.site).path


@dataclass(frozen=True, slots=True)
class ModuleSetting:
    """How a module was set: its mode and, of one of torch's own, what ``print`` tells, such as ``(16,), eps=1e-05``.

    ``parameters``: elements that it and all modules inside have, each parameter once; -1 where that was not written.
    """

    path: str
    training: bool
    settings: str = ""
    parameters: int = -1

    @property
    def mode(self) -> str:
        """The word for its mode."""
        return "training" if self.training else "eval"


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter and, after a backward pass, its gradient; ``grad`` is None where the trace ran no backward pass.

    ``digest``: equal for equal bits, as far as they were read (some of a large one); empty where they could not be.
    """

    site: str
    shape: str
    dtype: str
    elements: int
    requires_grad: bool
    grad: Gradient | None = None
    digest: str = ""


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("site", "path", "cls", "input", "output", "dtype", "digest", "odd"), str),
    **dict.fromkeys(("call", "depth", "parameters", "flops"), int),
    "time_s": (int, float),
}


def row_dict(row: CallRow | ModuleSetting | ParameterRow) -> dict[str, Any]:
    """A row as JSON has it: that of a call with its path, and fingerprints not as parts of their own."""
    head = {"site": row.site, "path": row.path} if isinstance(row, CallRow) else {}
    return {**head, **asdict(row, dict_factory=_flat)}


def _flat(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``asdict``: the fields as a dict, with those of a fingerprint beside the others."""
    told = dict(items)
    fingerprint = told.pop("fingerprint", {})
    return {**told, **fingerprint}


def call_row(row: dict[str, Any]) -> CallRow:
    """Inverse of ``row_dict`` for a call; changes the dict.

    Raises TypeError for a value of a wrong type, ValueError for an unknown field or a path that is not the site's,
    SiteError for a site that cannot be read.
    """
    for name, kind in _KINDS.items():
        if name in row and not isinstance(row[name], kind):
            raise TypeError(f"a row has {name!r} {row[name]!r:.40}")
    if parse_site(row["site"]).path != row.pop("path"):
        raise ValueError(f"a row of {row['site']!r} has the path of another")
    parts = {"statistics": Statistics, "grad_output": Gradient, "grad_input": Gradient}
    told = {name: optional_row(part, row.get(name)) for name, part in parts.items()}
    return build_row(CallRow, {**row, **told})


def optional_row(cls: type[_Row], data: dict[str, Any] | None) -> _Row | None:
    """``build_row`` for a part of a row that may be missing: None stays None."""
    return None if data is None else build_row(cls, data)


def build_row(cls: type[_Row], data: dict[str, Any]) -> _Row:
    """A dataclass from a dict of JSON, out of which a fingerprint is taken where the class has one.

    Raises ValueError for a field that ``cls`` does not have, TypeError where one is missing.
    """
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if "fingerprint" in known:
        sketch = tuple(float(one) for one in data.pop("sketch", ()))
        odd, whole, types = (str(data.pop(name, "")) for name in ("odd", "whole", "types"))
        data["fingerprint"] = Fingerprint(data.pop("digest", ""), sketch, odd, whole, types)
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r} of {cls.__name__}")
    return cls(**data)


class Traced(Protocol):
    """What can be drawn of a traced run: the fields of ``gaff.inspection.trace.Trace``, as views need them.

    A ``Protocol``, so that views can draw a trace without an import from a higher floor.
    """

    @property
    def model(self) -> str:
        """The class name of the model, without its wrappers."""

    @property
    def rows(self) -> tuple[CallRow, ...]:
        """All calls in the order in which they were entered: a module comes before what is inside it."""

    @property
    def modules(self) -> tuple[ModuleSetting, ...]:
        """How each module was set that was called."""

    @property
    def parameters(self) -> tuple[ParameterRow, ...]:
        """Every parameter once, under the first of its names."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the first text that the model was given; empty for other inputs."""

    @property
    def unused_modules(self) -> tuple[str, ...]:
        """Paths of the modules that were not called, without containers, which never are."""

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Paths of parameters that require grad and got none, or that the output does not depend on."""

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass was run, so that gradients are told."""

    @property
    def has_flops(self) -> bool:
        """Whether operations were counted; else ``flops`` of every row is 0."""

    @property
    def device(self) -> str:
        """The device on which the model computes, as text: ``cpu``, ``cuda:0``."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the numbers do not tell, or tell only in part."""

    @property
    def edges(self) -> tuple[tuple[int, int, bool], ...]:
        """Which row was given what another has made: (maker, user, whether that is certain), by number."""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """What was drawn of the tensors that passed, for traces with pictures; else empty."""
