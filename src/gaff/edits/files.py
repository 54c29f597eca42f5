"""Edits as plain data: what a saved plan holds. Tensors are named, and go into a file beside it.

``to_dict`` writes the fields of the frozen values, ``from_dict`` gives them to the public functions of ``gaff.edits``,
which check them: what is read may be hostile. Functions and captures cannot be saved.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from gaff import edits, keep
from gaff.compat import elements
from gaff.edits import arithmetic, places, sources
from gaff.edits.event import Edit
from gaff.errors import PlanError

_KINDS: dict[str, Any] = {
    name.lower(): getattr(module, name)
    for module, names in (
        (arithmetic, "Scale Add Fill Clamp Clip Noise Project Reverse Stop Quantize"),
        (sources, "Replace Patch Ablate"),
        (places, "At Chain When Skip"),
    )
    for name in names.split()
}


def to_dict(edit: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """JSON-ready form; tensors are put into ``tensors`` and named. Raises PlanError for functions and captures.

    ``tensors`` gets the tensors themselves, not copies, under names such as ``factor.0``.
    """
    kind = type(edit).__name__.lower()
    if _KINDS.get(kind) is not type(edit):
        raise PlanError(f"edit {kind} is a function or a module: a plan that holds one cannot be saved; use gaff.edits")
    named = {field.name: getattr(edit, field.name) for field in fields(edit) if field.init}
    return {"kind": kind, **{name: _plain(value, name, tensors) for name, value in named.items()}}


def digest_of(edit: Any, has_numbers: Any) -> str:
    """The kind of an edit, and a text that is equal for equal numbers; tensors are read, which waits for their device.

    Only the kind is told of functions, of what puts values in place (of which each process may hold its part), of
    tensors without memory, and of all without ``has_numbers``.
    """
    tensors: dict[str, Tensor] = {}
    try:
        found = hashlib.sha256(json.dumps(to_dict(edit, tensors), sort_keys=True).encode())
    except PlanError:
        has_numbers = False
    if not has_numbers or places.is_placed(edit):
        return type(edit).__name__
    for tensor in tensors.values():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() if elements.is_plain(tensor) else None
        found.update(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat is not None and flat.numel() else b"")
    return f"{type(edit).__name__} of numbers {found.hexdigest()[:8]}"


def from_dict(row: dict[str, Any], tensors: dict[str, Tensor]) -> Edit:
    """The edit of which ``to_dict`` wrote ``row``; ``tensors`` holds the tensors that it names.

    Raises PlanError, KeyError, TypeError or ValueError for what is none of its results.
    """
    cls = _KINDS.get(str(row.get("kind")))
    if cls is None:
        raise PlanError(f"edit of kind {row.get('kind')!r} is not known: expected one of {', '.join(_KINDS)}")
    given = {name: _value(value, tensors) for name, value in row.items() if name != "kind"}
    make = getattr(edits, row["kind"])  # the public functions, which check what they are given
    if cls is places.Chain:
        return make(*given["edits"])  # type: ignore[no-any-return]
    for name in ("rows", "positions") if cls is sources.Patch else ():
        given[name] = dict(given[name]) if given.get(name) is not None else None
    return make(**given)  # type: ignore[no-any-return]


def tensors_of(edit: Any) -> Iterator[Tensor]:
    """Every tensor that an edit, or an edit inside it, was given; not what it has made of them since."""
    for field in fields(edit) if is_dataclass(edit) else ():
        value = getattr(edit, field.name) if field.init else None
        for inside in value if isinstance(value, tuple) else (value,):
            if isinstance(inside, Tensor):
                yield inside
            elif isinstance(inside, Edit):
                yield from tensors_of(inside)


def _plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A field's value as JSON can hold it; tensors, ranges, slices and edits as a dict whose one key tells the kind."""
    if isinstance(value, Tensor):
        label = f"{name}.{len(tensors)}"
        tensors[label] = value
        return {"tensor": label}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, tuple):
        return [_plain(item, name, tensors) for item in value]
    if isinstance(value, (keep.Part, keep.Heads)):
        return {"keep": keep.to_dict(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__name__.lower() in _KINDS:
        return {"edit": to_dict(value, tensors)}
    raise PlanError(
        f"{name}= is a {type(value).__name__}, which cannot be saved: expected a number, a tensor or one of gaff.edits"
    )


def _value(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """Inverse of ``_plain``. Raises ValueError for a dict of several entries, PlanError where a tensor is missing."""
    if isinstance(plain, list):
        return tuple(_value(item, tensors) for item in plain)
    if not isinstance(plain, dict):
        return plain
    [(kind, inside)] = plain.items()
    if kind == "tensor":
        if inside not in tensors:
            raise PlanError(f"tensor {inside!r} of the plan is missing: expected it in the .safetensors file beside it")
        return tensors[inside]
    if kind == "edit":
        return from_dict(inside, tensors)
    return range(*inside) if kind == "range" else keep.from_dict(inside)
