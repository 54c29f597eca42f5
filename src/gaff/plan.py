"""A plan: what was asked for, as a frozen value. Checked against a model before anything is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff import keep as keep_part
from gaff.address import Address, Pattern, Site, parse
from gaff.errors import GaffError, PlanError, RecordError, SiteError
from gaff.select import Found, resolve

Reducer = Callable[[Tensor], Tensor]
Target = Address | nn.Module | Callable[[Site], bool]

_THREADS = ("own", "all")
_EVICT = ("raise", "oldest")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Maybe:
    """Patterns that may match nothing or stay silent without an error."""

    patterns: tuple[Any, ...]


def maybe(*patterns: Any) -> Maybe:
    """Allow these patterns to match nothing, or never to fire; the receipt still says so."""
    return Maybe(patterns)


@dataclass(frozen=True, slots=True)
class Request:
    """One pattern of a plan. ``reduce`` overrides the plan's own for its sites."""

    target: Target
    optional: bool = False
    reduce: Reducer | None = None

    def __str__(self) -> str:
        if isinstance(self.target, (Site, Pattern)):
            return str(self.target)
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

    def __post_init__(self) -> None:
        for name in ("clone", "reference", "graph"):
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
    """Sites to capture and how. Build one with ``Plan.of``; give it to ``gaff.capture`` in place of patterns."""

    requests: tuple[Request, ...] = ()
    options: Options = field(default_factory=Options)

    @classmethod
    def of(cls, *patterns: Any, **options: Any) -> Plan:
        """``patterns`` as ``gaff.capture`` takes them; ``options`` are the fields of ``Options``."""
        if len(patterns) == 1 and isinstance(patterns[0], Plan):
            if not options:
                return patterns[0]
            return replace(patterns[0], options=replace(patterns[0].options, **_options(options)))
        return cls(tuple(_requests(patterns)), Options(**_options(options)))

    def check(self, model: nn.Module) -> list[Resolved]:
        """Every site that the plan names in ``model``. Installs nothing. Raises SiteError or PlanError."""
        resolved = []
        for number, request in enumerate(self.requests):
            try:
                found = resolve(model, request.target)
            except SiteError:  # names nothing; what cannot be done (PlanError) is never forgiven
                if not request.optional:
                    raise
                found = []
            is_exact = isinstance(request.target, (Site, nn.Module))
            resolved += [Resolved(item, number, is_exact) for item in found]
        return resolved

    def to_json(self) -> str:
        """Raises PlanError, naming the request, when the plan holds a function or a module object."""
        requests = []
        for request in self.requests:
            if not isinstance(request.target, (Site, Pattern)):
                raise PlanError(f"plan cannot be saved: {request} is no address; name its sites by text")
            row: dict[str, Any] = {"pattern": str(request.target)}
            if request.optional:
                row["optional"] = True
            if request.reduce is not None:
                row["reduce"] = keep_part.to_dict(request.reduce)
            requests.append(row)
        return json.dumps(
            {"gaff_plan": _FORMAT, "requests": requests, "options": _options_dict(self.options)}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of ``to_json``. Raises RecordError when ``text`` is no plan."""
        try:
            data = json.loads(text)
            if data["gaff_plan"] != _FORMAT:
                raise ValueError(f"format {data['gaff_plan']!r}, expected {_FORMAT}")
            requests = tuple(
                Request(parse(row["pattern"]), bool(row.get("optional")), _maybe_keep(row.get("reduce")))
                for row in data["requests"]
            )
            options = dict(data["options"])
            options["reduce"] = _maybe_keep(options.get("reduce"))
            return cls(requests, Options(**_options(options)))
        except (ValueError, KeyError, TypeError, AttributeError, GaffError) as error:
            raise RecordError(f"plan cannot be read: {error!r}; expected what Plan.to_json wrote") from None

    def save(self, path: str | PathLike[str]) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


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


def _options(options: dict[str, Any]) -> dict[str, Any]:
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


def _options_dict(options: Options) -> dict[str, Any]:
    row = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    row["dtype"] = str(options.dtype).removeprefix("torch.") if options.dtype is not None else None
    row["reduce"] = keep_part.to_dict(options.reduce) if options.reduce is not None else None
    return {name: value for name, value in row.items() if value != getattr(Options(), name)}


def _maybe_keep(data: dict[str, Any] | None) -> Reducer | None:
    return None if data is None else keep_part.from_dict(data)
