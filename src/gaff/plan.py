"""A plan: what was asked for, as a frozen value. Checked against a model before anything is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address import Address, Pattern, Site, parse
from gaff.edits.event import Edit
from gaff.edits.places import as_edit
from gaff.errors import PlanError, SiteError
from gaff.select import Found, resolve
from gaff.text import table

Reducer = Callable[[Tensor], Tensor]
Target = Address | nn.Module | Tensor | Callable[[Site], bool]

_THREADS = ("own", "all")
_EVICT = ("raise", "oldest")


@dataclass(frozen=True, slots=True)
class Maybe:
    """Patterns that may match nothing or stay silent without an error."""

    patterns: tuple[Any, ...]


def maybe(*patterns: Any) -> Maybe:
    """Allow these patterns to match nothing, or never to fire; the receipt still says so."""
    return Maybe(patterns)


@dataclass(frozen=True, slots=True)
class Request:
    """One pattern of a plan. ``reduce`` overrides the plan's own for its sites; ``edit`` changes them."""

    target: Target
    optional: bool = False
    reduce: Reducer | None = None
    edit: Edit | None = None  # of a plan to edit by

    def __str__(self) -> str:
        if isinstance(self.target, (Site, Pattern)):
            return str(self.target)
        if isinstance(self.target, Tensor):
            return f"<tensor {'x'.join(map(str, self.target.shape)) or 'scalar'}>"
        if isinstance(self.target, nn.Module):
            return f"<module {type(self.target).__name__}>"
        return f"<predicate {getattr(self.target, '__name__', type(self.target).__name__)}>"


@dataclass(frozen=True, slots=True)
class Options:
    """How values are kept; the meaning of each is told at ``gaff.capture``."""

    to: str | None = None
    dtype: torch.dtype | None = None
    reduce: Reducer | None = None
    last: int | None = None
    budget: int | None = None  # bytes
    evict: str = "raise"
    clone: bool = False
    reference: bool = False  # parameters: not cloned
    graph: bool = False
    threads: str = "own"
    check_finite: bool = False  # of edits

    def __post_init__(self) -> None:
        for name in ("clone", "reference", "graph", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r} is no truth value: expected True or False")
        if self.last is not None and (not isinstance(self.last, int) or self.last < 1):
            raise PlanError(f"last={self.last!r} keeps nothing: expected a number of events per site, 1 or more")
        if self.threads not in _THREADS:
            raise PlanError(f"threads={self.threads!r} is not known: expected one of {', '.join(map(repr, _THREADS))}")
        if self.evict not in _EVICT:
            raise PlanError(f"evict={self.evict!r} is not known: expected one of {', '.join(map(repr, _EVICT))}")
        if self.to is not None:
            try:
                torch.device(self.to)
            except RuntimeError as error:
                raise PlanError(f"to={self.to!r} is no device: {str(error).splitlines()[0]}") from None
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise PlanError(f"dtype={self.dtype!r} is no floating type: expected one, such as torch.float16")
        if self.reduce is not None and not callable(self.reduce):
            raise PlanError(f"reduce={self.reduce!r} cannot be called: expected gaff.keep.rows(0) or a function")


class Resolved(NamedTuple):
    """One site that a request names in the checked model."""

    found: Found
    request: int  # position in the plan
    is_exact: bool  # asked for by its own address, not through a pattern


@dataclass(frozen=True, slots=True)
class Plan:
    """Sites to capture and how (``Plan.of``, for ``gaff.capture``), or to edit and how (``Plan.edit``)."""

    requests: tuple[Request, ...] = ()
    options: Options = field(default_factory=Options)

    @classmethod
    def of(cls, *patterns: Any, **options: Any) -> Plan:
        """``patterns`` as ``gaff.capture`` takes them; ``options`` are the fields of ``Options``."""
        if len(patterns) == 1 and isinstance(patterns[0], Plan):
            if not options:
                return patterns[0]
            return replace(patterns[0], options=replace(patterns[0].options, **read_options(options)))
        return cls(tuple(_requests(patterns)), Options(**read_options(options)))

    @classmethod
    def edit(cls, changes: Any, **options: Any) -> Plan:
        """``changes``: a dict from pattern to edit, as ``gaff.edit`` takes it; ``options``: check_finite, threads."""
        if isinstance(changes, Plan):
            return replace(changes, options=replace(changes.options, **read_options(options))) if options else changes
        if not isinstance(changes, Mapping) or not changes:
            raise PlanError(f"edits {changes!r:.60} are no dict: expected {{'layer3': gaff.edits.scale(0.5)}}")
        unknown = [name for name in options if name not in ("check_finite", "threads")]
        if unknown:
            raise PlanError(f"option {unknown[0]!r} is not known to an edit: expected check_finite or threads")
        requests = []
        for pattern, edit in changes.items():
            asked = [Request(pattern)] if isinstance(pattern, Tensor) else _requests([pattern])
            requests += [replace(request, edit=as_edit(edit)) for request in asked]
        return cls(tuple(requests), Options(**read_options(options)))

    @property
    def is_edit(self) -> bool:
        """Whether the plan changes what passes."""
        return any(request.edit is not None for request in self.requests)

    @property
    def digest(self) -> str:
        """SHA-256 of what the plan says, tensors included; equal for equal plans."""
        found: str = _files().digest_of(self)
        return found

    def __str__(self) -> str:
        rows = [
            (str(request), _edit_text(request.edit), "maybe" if request.optional else "") for request in self.requests
        ]
        return table(("pattern", "edit", ""), rows)

    def attach(self, model: nn.Module) -> Any:
        """Edit ``model`` until ``.remove()`` of the handle that is returned; see ``gaff.edit`` for the rest.

        Unlike a session it sees the runs of every thread, and stays when the calling code returns: for a Trainer, a
        pipeline, ``generate``.
        """
        from gaff.editing import attach  # the plan is what the verbs are built on

        return attach(model, self)

    def check(self, model: nn.Module) -> list[Resolved]:
        """Every site that the plan names in ``model``. Installs nothing. Raises SiteError or PlanError."""
        resolved = []
        for number, request in enumerate(self.requests):
            if isinstance(request.target, Tensor):
                continue  # itself: nothing to look up
            try:
                found = resolve(model, request.target)
            except SiteError:  # names nothing; what cannot be done (PlanError) is never forgiven
                if not request.optional:
                    raise
                found = []
            is_exact = isinstance(request.target, (Site, nn.Module))
            resolved += [Resolved(item, number, is_exact) for item in found]
        return resolved

    def to_json(self, tensors: dict[str, Tensor] | None = None) -> str:
        """The plan as text; tensors that edits hold are put into ``tensors``, and named in the text.

        Raises PlanError, naming the request, when the plan holds a function, a capture or a module object, or tensors
        and no place for them.
        """
        text: str = _files().to_json(self, tensors)
        return text

    @classmethod
    def from_json(cls, text: str, tensors: dict[str, Tensor] | None = None) -> Plan:
        """Inverse of ``to_json``. Raises RecordError when ``text`` is no plan."""
        plan: Plan = _files().from_json(text, tensors or {})
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON to ``path``, and tensors that edits hold to ``path`` + ``.safetensors``."""
        _files().save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Inverse of ``save``. Raises RecordError when a file is missing, is no plan, or is of another plan."""
        plan: Plan = _files().load(path)
        return plan


def _files() -> Any:
    """What writes and reads plans; loaded when it is needed."""
    return importlib.import_module("gaff.plan_files")


def parse_bytes(size: int | str) -> int:
    """``2_000_000``, ``"500MB"``, ``"4 GB"`` (powers of 1000) or ``"4 GiB"`` (powers of 1024) as bytes."""
    if isinstance(size, int):
        if size <= 0:
            raise PlanError(f"budget={size!r} leaves no room: expected a positive number of bytes, or '4GB'")
        return size
    units = {
        "KB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
        "B": 1,
    }
    text = size.strip().upper()
    for unit, factor in units.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * factor)
    raise PlanError(f"budget={size!r} is no size: expected bytes as a number, or text such as '500MB' or '4GiB'")


def _edit_text(edit: Edit | None) -> str:
    """``scale(factor=0.5)``: an edit as it would be written, tensors by their shape."""
    if edit is None:
        return ""
    parts = []
    for name, value in ((part.name, getattr(edit, part.name)) for part in fields(edit) if part.init):  # type: ignore[arg-type]
        if isinstance(value, Tensor):
            text = "x".join(map(str, value.shape)) or "scalar"
        elif isinstance(value, tuple) and value and isinstance(value[0], Edit):
            text = f"[{', '.join(map(_edit_text, value))}]"
        elif isinstance(value, Edit) and is_dataclass(value):
            text = _edit_text(value)
        else:
            text = getattr(value, "__name__", None) or f"{value!r:.40}".partition("\n")[0]
        if value is not None:
            parts.append(f"{name}={text}")
    return f"{type(edit).__name__.lower()}({', '.join(parts)})"


def _requests(patterns: Iterable[Any], optional: bool = False) -> Iterable[Request]:
    for pattern in patterns:
        if isinstance(pattern, Maybe):
            yield from _requests(pattern.patterns, optional=True)
        elif isinstance(pattern, dict):
            for name, reduce in pattern.items():
                if not callable(reduce):
                    raise PlanError(f"{name!r}: {reduce!r} cannot be called: expected gaff.keep.rows(0) or a function")
                yield from (replace(request, reduce=reduce) for request in _requests([name], optional))
        elif isinstance(pattern, (list, tuple, set, frozenset)):
            yield from _requests(pattern, optional)
        elif isinstance(pattern, str):
            yield Request(parse(pattern), optional)
        elif isinstance(pattern, Tensor):
            raise PlanError(
                "a tensor was given as a pattern: expected it by keyword, gaff.capture(model, b=b), to name it"
            )
        elif isinstance(pattern, (Site, Pattern, nn.Module)) or callable(pattern):
            yield Request(pattern, optional)
        else:
            raise PlanError(
                f"pattern {pattern!r} is a {type(pattern).__name__}: "
                "expected an address, a module of the model, a predicate on a site, or a list of these"
            )


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the user writes them, as ``Options`` holds them. Raises PlanError for what is not known."""
    known = dict(options)
    unknown = [name for name in known if name not in Options.__dataclass_fields__]
    if unknown:
        raise PlanError(
            f"option {unknown[0]!r} is not known: expected {', '.join(Options.__dataclass_fields__)}, "
            "or a tensor to capture under this name"
        )
    tensors = [name for name, value in known.items() if isinstance(value, Tensor)]
    if tensors:
        raise PlanError(f"{tensors[0]!r} is an option of capture, but was given a tensor: name the tensor differently")
    if known.get("budget") is not None:
        known["budget"] = parse_bytes(known["budget"])
    if isinstance(known.get("to"), torch.device):
        known["to"] = str(known["to"])
    if isinstance(known.get("dtype"), str):
        known["dtype"] = _dtype(known["dtype"])
    return known


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"dtype={name!r} is no type of torch: expected 'float16', 'bfloat16', 'float32' or 'float64'")
    return dtype
