"""The numbers of a run, without tensors: plain values that save, load and print without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from gaff.errors import PlanError, RecordError
from gaff.record.picture import Picture
from gaff.views import trace_text
from gaff.views.framing import framed

_FORMAT = 1
_MOST_BYTES = 500 * 2**20
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of all elements of one tensor; ``std`` is the population's. ``nonfinite`` counts NaN and inf elements."""

    mean: float
    std: float
    min: float
    max: float
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient: shape as text, L2 norm, share of exact zeros. ``reason`` says why there is none.

    ``digest``, ``sketch``: as of a ``CallRow``.
    """

    shape: str = ""
    norm: float | None = None
    zeros: float | None = None
    reason: str = ""
    digest: str = ""
    sketch: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.norm is None:
            return f"None: {self.reason}"
        return f"{self.shape} zero" if self.norm == 0 else f"{self.shape} {self.norm:.3g}"


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call of one module, or of an op, whose ``cls`` is its place in the code.

    Shapes are texts such as ``1x3x8x8``; ``dtype`` is that of the first output tensor. ``digest`` is equal for equal
    bits of it; ``sketch`` stands for it when traces are compared (``gaff.tools.sketching``).
    """

    site: str
    path: str
    cls: str
    call: int
    depth: int
    input: str
    output: str
    dtype: str
    parameters: int  # elements that the module owns itself
    time_s: float  # with everything inside, and the cost of looking at it
    memory_bytes: int  # of the output tensors
    flops: int  # matrix products, convolutions, attention; with everything inside
    statistics: Statistics | None = None
    grad_output: Gradient | None = None
    grad_input: Gradient | None = None
    digest: str = ""
    sketch: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter and, after a backward pass, its gradient."""

    site: str
    shape: str
    dtype: str
    elements: int
    requires_grad: bool
    grad: Gradient | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """One run, told: ``rows`` in the order in which modules were entered. ``str`` is the table, ``tree()`` the tree.

    ``given``: a digest of the inputs. ``edges``: (row, row, known): the second was given what the first has made; where
    nobody is known to have made it, for it was an op, the first is the call before. ``pictures``: with
    ``gaff.trace(..., pictures=True)``.
    """

    model: str
    rows: tuple[CallRow, ...]
    parameters: tuple[ParameterRow, ...] = ()
    unused_modules: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    has_backward: bool = False
    has_flops: bool = True
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    given: str = ""
    edges: tuple[tuple[int, int, bool], ...] = ()
    pictures: tuple[Picture, ...] = ()

    def __str__(self) -> str:
        return trace_text.render_table(self)

    __repr__ = __str__

    def table(self, width: int | None = None, *, is_plain: bool = False) -> str:
        """The table cut to ``width`` characters; ``is_plain`` separates cells by tabs."""
        return trace_text.render_table(self, width, is_plain=is_plain)

    def tree(self) -> str:
        """The same calls, indented by module; repeated blocks are folded."""
        return trace_text.render_tree(self)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own; without numpy plain tables."""
        if find_spec("numpy") is None:
            return trace_text.render_html(self)
        return framed(self.to_html())

    def to_html(self) -> str:
        """A page with the table, the tree, the graph and the pictures. Raises PlanError without numpy."""
        if find_spec("numpy") is None:
            raise PlanError("a page of a trace needs numpy, which is not installed: pip install 'gaff[page]'")
        from gaff.views.page.one_run import document

        return document(self).to_html()

    def to_json(self) -> str:
        pictures = [one.to_dict() for one in self.pictures]
        return json.dumps({"gaff_trace": _FORMAT, **asdict(replace(self, pictures=())), "pictures": pictures}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Inverse of ``to_json``. Raises RecordError when ``text`` is no trace."""
        try:
            data = json.loads(text)
            if data.pop("gaff_trace") != _FORMAT:
                raise ValueError(f"another format, expected {_FORMAT}")
            data["rows"] = tuple(_call_row(row) for row in data["rows"])
            data["parameters"] = tuple(
                _build(ParameterRow, {**row, "grad": _optional(Gradient, row["grad"])}) for row in data["parameters"]
            )
            for name in ("unused_modules", "unused_parameters", "notes"):
                data[name] = tuple(str(item) for item in data[name])
            data["edges"] = tuple((int(one), int(other), bool(known)) for one, other, known in data.get("edges", ()))
            data["pictures"] = tuple(Picture.from_dict(one) for one in data.get("pictures", ()))
            return _build(cls, data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"trace cannot be read: {error!r}; expected what Trace.to_json wrote") from None

    def save(self, path: str | PathLike[str]) -> None:
        """A page where the name ends in ``.html``, else JSON, which ``load`` reads."""
        is_page = Path(path).suffix.lower() in (".html", ".htm")
        text = self.to_html() if is_page else self.to_json()
        Path(path).write_text(text + "\n", encoding="utf-8", errors="replace" if is_page else "strict")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        file = Path(path)
        if not file.is_file():
            raise RecordError(f"trace {str(path)!r} is no file: expected one that Trace.save wrote")
        if file.stat().st_size > _MOST_BYTES:
            raise RecordError(f"trace {str(path)!r} is larger than {_MOST_BYTES} bytes: not read")
        return cls.from_json(file.read_text(encoding="utf-8"))


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("site", "path", "cls", "input", "output", "dtype", "digest"), str),
    **dict.fromkeys(("call", "depth", "parameters", "flops"), int),
    "time_s": (int, float),
}


def _call_row(row: dict[str, Any]) -> CallRow:
    for name, kind in _KINDS.items():
        if name in row and not isinstance(row[name], kind):
            raise TypeError(f"a row has {name!r} {row[name]!r:.40}")
    parts: dict[str, Callable[[Any], Any]] = {
        "statistics": lambda value: _optional(Statistics, value),
        "grad_output": lambda value: _optional(Gradient, value),
        "grad_input": lambda value: _optional(Gradient, value),
    }
    return _build(CallRow, {name: parts[name](value) if name in parts else value for name, value in row.items()})


def _optional(cls: type[_Row], data: dict[str, Any] | None) -> _Row | None:
    return None if data is None else _build(cls, data)


def _build(cls: type[_Row], data: dict[str, Any]) -> _Row:
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r} of {cls.__name__}")
    if "sketch" in data:
        data["sketch"] = tuple(float(one) for one in data["sketch"])
    return cls(**data)
