"""Values as text and plain tensors, and back: what the file of a saved capture is made of.

``Packing`` takes values apart: the text says how they are put together again, the tensors are such as safetensors can
hold. ``unpacked`` reads both; nothing is executed, and what is read may be hostile.
"""

from __future__ import annotations

import base64
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import Site
from gaff.address.nested import Opaque, children
from gaff.compat import distributed, elements, memory
from gaff.errors import ExactnessError, PlanError
from gaff.sessions.exact import Refused, read

# Types that every version of safetensors knows; others are written as bytes, complex numbers as pairs of real ones.
_KNOWN = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2))  # fmt: skip
_PLAIN = (type(None), bool, int, float, str)
# What else stands in a structure: by its class a name, what is written of it, and how it is made again.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: ("complex", lambda value: [value.real, value.imag], lambda told: complex(*told)),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode(), lambda told: base64.b64decode(told)),
    range: ("range", lambda value: [value.start, value.stop, value.step], lambda told: range(*told)),
    torch.Size: ("size", list, torch.Size),
    torch.device: ("device", str, torch.device),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), elements.dtype_named),
    Opaque: ("opaque", lambda value: value.type_name, lambda told: Opaque(str(told))),
}
_MAKERS = {name: make for name, _, make in _LEAVES.values()}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class Packing:
    """Takes values apart. ``tensors`` holds what goes into the file, copied to the CPU, by address where there is one.

    A tensor that lies in the same memory as another, in the same way, is written once. Raises PlanError, with the site,
    for what no file can hold.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def kept(self, kept: Any, site: Site, name: str, when: str = "") -> Any:
        """What was kept of one event, as JSON; a value that can no longer be trusted stays one, with its reason.

        ``name`` is how the site was asked for, ``when`` stands behind the names of tensors where there are more events.
        """
        if type(kept) is Refused:
            return ["refused", kept.reason]
        try:
            value = read(kept, site)
        except ExactnessError as error:
            return ["refused", str(error).removeprefix(f"{site}: ")]
        return self._packed(value, site, lambda inside: (str(inside) if inside != site else name) + when)

    def _packed(self, value: Any, site: Site, name_of: Callable[[Site], str]) -> Any:
        """A value as JSON: a list whose first item says what it is. ``site`` leads to it, ``name_of`` names tensors."""
        if isinstance(value, Tensor):
            return ["tensor", self._tensor(value.detach(), site, name_of(site))]
        if isinstance(value, _PLAIN):  # also of a class of numbers or texts, as numpy and enumerations have them
            return ["plain", value if type(value) in _PLAIN else _plain(value)]
        if type(value) in _LEAVES:
            kind, write, _ = _LEAVES[type(value)]
            return [kind, write(value)]
        inside_of = children(value)
        if inside_of is None:
            raise PlanError(f"{site}: holds a {type(value).__name__} {value!r:.40}, which no file can hold")
        parts = [self._packed(child, replace(site, key=(*site.key, part)), name_of) for part, child in inside_of]
        if isinstance(value, Mapping):
            keys = [self._packed(one, site, name_of) for one in value]
            return ["dict", [list(pair) for pair in zip(keys, parts, strict=True)]]
        if isinstance(value, list):
            return ["list", parts]
        fields = _fields(value)
        if not fields:
            return ["tuple", parts]
        try:
            _named(type(value).__name__, fields)
        except ValueError as error:
            raise PlanError(f"{site}: holds a {type(value).__name__}, which no file can hold: {error}") from None
        return ["named", type(value).__name__, list(fields), parts]

    def _tensor(self, tensor: Tensor, site: Site, name: str) -> dict[str, Any]:
        """One tensor as JSON, in which its parts have the names under which ``tensors`` holds them."""
        tensor = distributed.arrived(tensor)
        layout = str(tensor.layout).removeprefix("torch.")
        if tensor.layout == torch.sparse_coo:
            parts = [self._tensor(one, site, f"{name} {what}") for one, what in (
                (tensor._indices(), "indices"), (tensor._values(), "values"))]  # fmt: skip
            return {layout: parts, "size": list(tensor.shape), "is_coalesced": tensor.is_coalesced()}
        if tensor.layout in _COMPRESSED:
            names = (*_COMPRESSED[tensor.layout], "values")
            parts = [self._tensor(getattr(tensor, one)(), site, f"{name} {one}") for one in names]
            return {layout: parts, "size": list(tensor.shape)}
        if not elements.is_plain(tensor):
            is_spread = distributed.is_spread(tensor)
            way = "to_padded_tensor(0.0)" if tensor.is_nested else "dequantize()"
            plainly = "got.full() of it" if is_spread else f"reduce=, such as lambda t: t.{way}"
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.device)
            raise PlanError(
                f"{site}: is a {type(tensor).__name__} ({kind}), which no file can hold: expected a tensor with plain "
                f"memory: {'save ' if is_spread else 'capture it with '}{plainly}"
            )
        place = (memory.memory_of(tensor), tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype,
                 tensor.device, tensor.is_conj(), tensor.is_neg())  # fmt: skip
        if place not in self._known:
            self._known[place] = self._dense(tensor, name)
        return self._known[place]

    def _dense(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """A dense tensor: its elements in the order of its memory, what is expanded only once."""
        told: dict[str, Any] = {}
        once = [stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        if any(once):
            told["expand"] = list(tensor.shape)
            tensor = tensor[tuple(slice(0, 1) if is_once else slice(None) for is_once in once)]
        if not tensor.is_contiguous():
            told["order"] = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
            tensor = tensor.permute(told["order"])
        tensor = tensor.as_subclass(Tensor).resolve_conj().resolve_neg()
        if tensor.is_complex():
            told["is_complex"], tensor = True, torch.view_as_real(tensor)
        if tensor.dtype not in _KNOWN:  # taken as bytes first: torch copies no elements below a byte
            told["bytes"] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            tensor = elements.words(tensor)
        plain = tensor.cpu().clone(memory_format=torch.contiguous_format)
        told["name"] = next(one for one in _names(name) if one not in self.tensors)
        self.tensors[told["name"]] = plain
        return told


def _plain(value: Any) -> Any:
    """The number or text that a value of a class of them is."""
    kinds: tuple[Any, ...] = (int, float, str)
    return next(kind.__new__(kind, value) for kind in kinds if isinstance(value, kind))


def unpacked(told: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value of which ``Packing.kept`` wrote ``told``; its tensors are those of the file, not copies.

    Objects of other classes come back as what can be read in the same way: dataclasses and named tuples as named
    tuples, mappings as dicts, tuples and lists as Python's own. Raises ValueError, KeyError and others for what is none
    of its results.
    """
    kind, *rest = told
    if kind == "named":
        return _named(str(rest[0]), tuple(map(str, rest[1])))(*(unpacked(one, tensors) for one in rest[2]))
    [what] = rest
    if kind == "tensor":
        return _whole(what, tensors)
    if kind == "refused":
        return Refused(str(what))
    if kind == "plain" and isinstance(what, _PLAIN):
        return what
    if kind in ("tuple", "list"):
        parts = [unpacked(one, tensors) for one in what]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {unpacked(key, tensors): unpacked(value, tensors) for key, value in what}
    return _MAKERS[kind](what)


def _whole(told: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the file, put together as ``Packing`` has taken it apart."""
    if "sparse_coo" in told:
        indices, values = (_whole(part, tensors) for part in told["sparse_coo"])
        return torch.sparse_coo_tensor(
            indices, values, told["size"], check_invariants=True, is_coalesced=bool(told["is_coalesced"])
        )
    for layout in _COMPRESSED:
        parts = told.get(str(layout).removeprefix("torch."))
        if parts is not None:
            outer, inner, values = (_whole(part, tensors) for part in parts)
            return torch.sparse_compressed_tensor(
                outer, inner, values, told["size"], layout=layout, check_invariants=True
            )
    tensor = tensors[told["name"]]
    if "bytes" in told:
        tensor = tensor.view(elements.dtype_named(told["bytes"][0])).view(told["bytes"][1])
    if told.get("is_complex"):
        tensor = torch.view_as_complex(tensor)
    if "order" in told:
        tensor = tensor.permute([told["order"].index(dim) for dim in range(tensor.dim())])
    return tensor.expand(told["expand"]) if "expand" in told else tensor


def _fields(value: Any) -> tuple[str, ...]:
    """The names of the parts of a named tuple, a dataclass or what torch returns from ``max``; none of a tuple."""
    if not isinstance(value, tuple):
        return tuple(str(name) for name, _ in children(value) or ())
    return tuple(getattr(value, "_fields", ()) or getattr(type(value), "__match_args__", ()))


@cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    """The named tuple of that name. Raises ValueError where a field cannot be one, such as ``_hidden``."""
    return namedtuple(name, fields)


def _names(name: str) -> Any:
    """Names for a tensor in the file: its address, with a number behind it where that is taken."""
    yield from ([name] if name and name != "__metadata__" else [])
    number = 1
    while True:
        number += 1
        yield f"{name} ({number})"
