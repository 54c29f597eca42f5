"""The structure of a value as text, which a compiled graph can hold: written while Dynamo compiles, read as it runs.

An op of a graph takes tensors, numbers and text, but modules return tuples, dicts and objects. So the tensors go as a
list, and the text says how they were nested, and of each whether it requires grad and is a view. Its first character
is the grad mode; the rest is a Python literal.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import Opaque, children
from gaff.engine.compiled.tracing import CALLER, GIVEN, LEAF, WRITTEN

_KINDS: dict[Any, str] = {tuple: "tuple", list: "list", dict: "dict"}
BY_STANCE = "open the session under torch.compiler.set_stance('force_eager')"


def structure_of(value: Any, tensors: list[Tensor]) -> str:
    """The text of ``value``; its tensors are appended to ``tensors``. While Dynamo compiles only constants decide.

    What is no tensor and no container is written by the name of its type.
    """
    return ("1" if torch.is_grad_enabled() else "0") + _write(value, tensors)


def has_grad_mode(what: str) -> bool:
    """Whether grad mode was on where the text was written; compiled code itself runs without."""
    return what.startswith("1")


def has_gradients(what: str) -> bool:
    """Whether a tensor of the value requires grad; also answers while Dynamo compiles."""
    return ",True," in what


def rebuild(what: str, tensor_of: Callable[[int], Any]) -> Any:
    """The value of which ``what`` is the text, with ``tensor_of(number)`` for its tensors.

    Numbers and other objects are told by type only (``Opaque``). A container that cannot be made of its parts is a
    dict.
    """
    return _build(_read(what), tensor_of)


def stand_ins(what: str, odd: Mapping[int, str] = MappingProxyType({})) -> list[Tensor]:
    """Small tensors on which hooks can be set in the place of those of the value, in their order.

    They are empty, and require grad as those did; what stands for a view, or for one of the tensors with the numbers
    in ``odd`` (see ``tracing.oddity``), says by an attribute why its gradient is not told, or that it is a leaf.
    """
    found: dict[int, Any] = {}
    with torch.inference_mode(False), torch.enable_grad():
        for number, requires_grad, is_view in _leaves(_read(what)):
            kind = odd.get(number, "") or VIEW * is_view
            stand = found[number] = torch.empty(0, requires_grad=requires_grad, device="cpu")
            if requires_grad and not kind:
                found[number] = stand.clone()
            elif requires_grad:
                vars(stand).update(why_untold=WHY_UNTOLD.get(kind, ""), is_of_any_run=kind == LEAF)
    return [found[number] for number in sorted(found)]


VIEW = "view"
WHY_UNTOLD = {
    VIEW: "compiled code does not tell the gradient of a view, which may be changed in place later: capture the layer "
    f"that makes it, or {BY_STANCE}",
    WRITTEN: f"compiled code does not tell the gradient of what came into it and was written to in place: {BY_STANCE}",
    GIVEN: "a module in compiled code returned what the graph was given (after a graph break, say): edits of its "
    f"gradient by other addresses may be in another graph, and their order is not kept: {BY_STANCE}",
    CALLER: "inside compiled code a module under a checkpoint returned what the checkpoint was given, whose gradient "
    f"belongs to the code around it: ask for it there, or {BY_STANCE}",
}


def _write(value: Any, tensors: list[Tensor]) -> str:
    """The text of one value: a tuple for a tensor, a list for a container, a name for anything else."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"({len(tensors) - 1},{value.requires_grad},{value._base is not None})"
    if value is None:
        return "None"
    inside = children(value)
    if inside is None:
        return f"'{type(value).__name__}'"
    if isinstance(value, Mapping):
        inside = [(key if _is_literal(key) else told, child) for (told, child), key in zip(inside, value, strict=True)]
    kind = type(value)
    name = _KINDS.get(kind)
    if name is None:
        name = f"{kind.__module__}:{kind.__qualname__}"
    parts = [f"({key!r},{_write(child, tensors)})" for key, child in inside]
    return f"['{name}',{','.join(parts)}]"


def _is_literal(key: Any) -> bool:
    """Whether Python's own text of a key, as of a number or of a tuple of texts, reads as that key again."""
    if isinstance(key, tuple):
        for one in key:  # a generator is a frame, which Dynamo would come upon
            if not _is_literal(one):
                return False
        return type(key) is tuple
    return key is None or type(key) in (int, bool, str) or (type(key) is float and key - key == 0)


@lru_cache(maxsize=1024)
def _read(what: str) -> Any:
    """The literal of a text, without the grad mode; remembered, since a graph tells the same text each time."""
    return ast.literal_eval(what[1:])


def _leaves(tree: Any) -> list[tuple[int, bool, bool]]:
    """All tensors of a literal: number, whether it requires grad, whether it is a view."""
    if isinstance(tree, tuple):
        return [tree]
    if isinstance(tree, list):
        return [leaf for _, part in tree[1:] for leaf in _leaves(part)]
    return []


def _build(tree: Any, tensor_of: Callable[[int], Any]) -> Any:
    if isinstance(tree, tuple):
        return tensor_of(tree[0])
    if not isinstance(tree, list):
        return None if tree is None else Opaque(tree)
    keys = [key for key, _ in tree[1:]]
    parts = [_build(part, tensor_of) for _, part in tree[1:]]
    if tree[0] in ("tuple", "list"):
        return tuple(parts) if tree[0] == "tuple" else parts
    named = dict(zip(keys, parts, strict=True))
    return named if tree[0] == "dict" else _make(_class_of(tree[0]), named)


def _class_of(name: str) -> Any:
    """The class that was written as module and qualified name; None if it is not to be found here."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _make(kind: Any, named: dict[Any, Any]) -> Any:
    """An object of the class, or a dict where that cannot be made of its parts."""
    if not isinstance(kind, type):
        return named
    try:
        made = _made(kind, named)
    except TypeError:
        return named
    held = [part for _, part in children(made) or ()]
    return made if len(held) == len(named) and all(map(is_, held, named.values())) else named


def _made(kind: type, named: dict[Any, Any]) -> Any:
    """An object of the class, which may hold other things than the parts, if its constructor makes something of them.

    That is called for mappings and lists alone. Raises TypeError where it wants other arguments.
    """
    if issubclass(kind, Mapping):
        return kind(**named)
    if is_dataclass(kind):
        made = object.__new__(kind)
        for field in fields(kind):
            object.__setattr__(made, field.name, named.get(field.name))
        return made
    if issubclass(kind, tuple) and kind.__module__ != "torch.return_types":
        return tuple.__new__(kind, named.values())
    return kind(named.values()) if issubclass(kind, (tuple, list)) else named
