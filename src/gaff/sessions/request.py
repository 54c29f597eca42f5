"""What is asked of a session: one pattern after another, and how values are kept.

Everything that a user may write as a pattern (text, module, predicate, list, dict, ``gaff.maybe``) is flattened into
``Request`` values here, and checked as far as that goes without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor, nn

from gaff.address.grammar import Address, Pattern, Site, parse
from gaff.address.resolve import Found
from gaff.edits.event import Edit
from gaff.errors import PlanError, need_truth, whole_number

Reducer = Callable[[Tensor], Tensor]
Threads = Literal["own", "all"]
Evict = Literal["raise", "oldest"]
Target = Address | nn.Module | Tensor | Callable[[Site], bool]
_THREADS, _EVICT = get_args(Threads), get_args(Evict)


@dataclass(frozen=True, slots=True)
class Maybe:
    """Patterns that may match nothing or stay silent without an error; made by ``gaff.maybe``."""

    patterns: tuple[Any, ...]


# What a user may write where a pattern is asked for; a dict goes from such a pattern to what of it is kept.
PatternLike = str | Address | nn.Module | Maybe | Callable[[Site], bool] | Mapping[Any, Reducer] | Iterable[Any]


def maybe(*patterns: PatternLike) -> Maybe:
    """Allow these patterns to match nothing, or never to fire; the receipt still says so.

    Raises PlanError without any.
    """
    if not patterns:
        raise PlanError("maybe was given no pattern: expected gaff.maybe('layer3')")
    return Maybe(patterns)


@dataclass(frozen=True, slots=True)
class Request:
    """One pattern of a plan. ``reduce`` overrides the plan's own for its sites; ``edit`` changes them.

    ``target`` is an address, a module of the model, a plain tensor (whose gradient is meant) or a predicate on a site.
    ``str`` of it is the pattern's name in receipts and messages; ``spelled`` is the address of one site as the user
    wrote it, by which its value is read. ``number``: which one this is of a plan's modules, tensors or predicates that
    would have the same name.
    """

    target: Target
    optional: bool = False
    reduce: Reducer | None = None
    edit: Edit | None = None  # of a plan to edit by
    spelled: str = field(default="", compare=False)
    number: int = field(default=0, compare=False)

    def __str__(self) -> str:
        target, which = self.target, f", {self.number + 1}" if self.number else ""
        if isinstance(target, (Site, Pattern)):
            return str(target)
        if isinstance(target, Tensor):
            return f"<tensor {'x'.join(map(str, target.shape)) or 'scalar'}{which}>"
        if isinstance(target, nn.Module):
            return f"<module {type(target).__name__}{which}>"
        return f"<predicate {getattr(target, '__name__', type(target).__name__)}{which}>"


@dataclass(frozen=True, slots=True)
class Options:
    """How values are kept; the meaning of each is told at ``gaff.capture``.

    Devices are text and sizes are bytes, so that a plan can be compared and saved. Raises PlanError, when made, for a
    value that makes no sense.
    """

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
            need_truth(getattr(self, name), name)
        if self.clone and self.reference:
            raise PlanError("clone=True copies every tensor, reference=True no parameter: expected one of the two")
        if self.last is not None and whole_number(self.last, 1) is None:
            raise PlanError(f"last={self.last!r}: expected a whole number of events per site, 1 or more")
        object.__setattr__(self, "last", whole_number(self.last))
        if self.threads not in _THREADS:
            raise PlanError(f"threads={self.threads!r} is not known: expected one of {', '.join(map(repr, _THREADS))}")
        if self.evict not in _EVICT:
            raise PlanError(f"evict={self.evict!r} is not known: expected one of {', '.join(map(repr, _EVICT))}")
        if self.to is not None:
            _need_device(self.to)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise PlanError(f"dtype={self.dtype!r} is no floating type: expected one, such as torch.float16")
        if self.reduce is not None and not callable(self.reduce):
            raise PlanError(f"reduce={self.reduce!r} cannot be called: expected gaff.keep.rows(0) or a function")


def _need_device(name: Any) -> None:
    """Raises PlanError for what is no device, and for one that is not here."""
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"to={name!r} is no device: {str(error).splitlines()[0]}") from None
    if kind in ("cpu", "meta"):
        return
    try:
        is_here = bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, ImportError, AttributeError):  # a kind that this build of torch does not know
        is_here = False
    if not is_here:
        raise PlanError(f"to={name!r}: torch finds no such device here: expected 'cpu', or one that is there")


_OF_CAPTURES = [name for name in Options.__dataclass_fields__ if name != "check_finite"]


class CaptureOptions(TypedDict, total=False):
    """``Options`` as a user may write them, for ``Plan.of``; ``gaff.capture`` tells what each means."""

    to: str | torch.device | None
    dtype: torch.dtype | str | None
    reduce: Reducer | None
    last: int | None
    budget: int | str | None
    evict: Evict
    clone: bool
    reference: bool
    graph: bool
    threads: Threads


class EditOptions(TypedDict, total=False):
    """Options of ``Plan.edit``; ``gaff.edit`` tells what each means."""

    check_finite: bool
    threads: Threads


class Resolved(NamedTuple):
    """One site that a request names in the checked model.

    ``is_exact`` decides what a miss is: an error for an address, for a pattern a reason in the receipt.
    """

    found: Found
    request: int  # position in the plan
    is_exact: bool  # asked for by its own address, not through a pattern


def parse_bytes(size: int | str) -> int:
    """Bytes as a number: of ``2_000_000``, ``"500MB"``, ``"4 GB"`` (powers of 1000) or ``"4 GiB"`` (powers of 1024).

    Raises PlanError for anything that is not positive, or no size.
    """
    if not isinstance(size, str):
        if (given := whole_number(size, 1)) is None:
            raise PlanError(f"budget={size!r}: expected a whole number of bytes, 1 or more, or a text such as '4GB'")
        return given
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 1024, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "B": 1}
    text = size.strip().upper()
    for unit, factor in units.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return int(float(number) * factor)
    raise PlanError(f"budget={size!r} is no size: expected bytes as a number, or text such as '500MB' or '4GiB'")


def edit_text(edit: Edit | None) -> str:
    """An edit as text, such as ``scale(factor=0.5)``: tensors by their shape, functions by their name."""
    if edit is None:
        return ""
    parts = []
    for name, value in ((part.name, getattr(edit, part.name)) for part in fields(edit) if part.init):  # type: ignore[arg-type]
        if isinstance(value, Tensor):
            text = "x".join(map(str, value.shape)) or "scalar"
        elif isinstance(value, tuple) and value and isinstance(value[0], Edit):
            text = f"[{', '.join(map(edit_text, value))}]"
        elif isinstance(value, Edit) and is_dataclass(value):
            text = edit_text(value)
        else:
            text = getattr(value, "__name__", None) or f"{value!r:.40}".partition("\n")[0]
        if value is not None:
            parts.append(f"{name}={text}")
    return f"{type(edit).__name__.lower()}({', '.join(parts)})"


def told_apart(requests: Iterable[Request]) -> Iterator[Request]:
    """The same requests, those of different modules, tensors or predicates by different names."""
    known: dict[str, list[Target]] = {}
    for one in requests:
        if isinstance(one.target, (Site, Pattern)):
            yield one
            continue
        alike = known.setdefault(str(replace(one, number=0)), [])
        number = next((at for at, target in enumerate(alike) if target is one.target), len(alike))
        if number == len(alike):
            alike.append(one.target)
        yield replace(one, number=number)


def requests_of(patterns: Iterable[Any], optional: bool = False) -> Iterable[Request]:
    """One request for each pattern in ``patterns``, in order; lists, dicts and ``gaff.maybe`` are opened, at any depth.

    ``optional`` marks them as allowed to stay silent. Raises PlanError for what is no pattern, such as a plain tensor,
    which needs a name; SiteError for a text that cannot be read.
    """
    for pattern in patterns:
        if isinstance(pattern, Maybe):
            yield from requests_of(pattern.patterns, optional=True)
        elif isinstance(pattern, dict):
            for name, reduce in pattern.items():
                if not callable(reduce):
                    raise PlanError(f"{name!r}: {reduce!r} cannot be called: expected gaff.keep.rows(0) or a function")
                yield from (replace(request, reduce=reduce) for request in requests_of([name], optional))
        elif isinstance(pattern, (list, tuple, set, frozenset)):
            yield from requests_of(pattern, optional)
        elif isinstance(pattern, str):
            address = parse(pattern)
            is_one = isinstance(address, Site) or address.is_single
            yield Request(address, optional, spelled=pattern if is_one else "")
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
    """Options as the user writes them, as ``Options`` holds them: ``"4GB"`` as bytes, ``"float16"`` as a dtype.

    Raises PlanError for what is not known, and for a tensor under the name of an option.
    """
    known = dict(options)
    unknown = [name for name in known if name not in Options.__dataclass_fields__]
    if unknown:
        raise PlanError(
            f"option {unknown[0]!r} is not known: expected {', '.join(_OF_CAPTURES)}, "
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
    """The dtype of that name, with or without ``torch.``. Raises PlanError where there is none."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"dtype={name!r} is no type of torch: expected 'float16', 'bfloat16', 'float32' or 'float64'")
    return dtype


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that are not as they are by default: what a plan in their place says, stays.

    Raises PlanError where one is a tensor: it was meant as the name of one.
    """
    tensors = [name for name, value in options.items() if isinstance(value, Tensor)]
    if tensors:
        raise PlanError(f"{tensors[0]!r} is an option of capture, but was given a tensor: name the tensor differently")
    return {name: value for name, value in options.items() if value != Options.__dataclass_fields__[name].default}
