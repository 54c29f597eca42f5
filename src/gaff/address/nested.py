"""Nested values: what a module takes and returns, walked and rebuilt by key.

Containers are tuples, lists, dicts, named tuples, dataclasses and Hugging Face's ModelOutput (a dict and a
dataclass at once). Everything else is a leaf. The root of a value has the key ``()``.

``children`` decides what is a container, and in which order its parts come; ``dig`` follows each key that
``iter_tensors`` tells, and attributes besides. Nothing here writes into a value that it is given: containers
that change are made anew, and tensors are passed on, not copied.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gaff.address.grammar import Key, print_key
from gaff.compat import distributed
from gaff.errors import PlanError

_PLAIN_LEAVES = (int, float, complex, str, bytes, bool, type(None), enum.Enum, range, slice, torch.Size,
                 torch.dtype, torch.device, torch.layout, torch.memory_format)  # fmt: skip

_SCALARS = frozenset((int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device))


_DEEPEST = 64
_ENDLESS = f"a value is nested deeper than {_DEEPEST} levels, or contains itself: address the tensors inside by key"


class Opaque:
    """Stands in a captured structure for an object whose inside gaff does not follow (a cache, a custom class).

    Address what is inside by key, such as ``:output[past_key_values][layers][0][keys]``: keys also read
    attributes.
    """

    __slots__ = ("type_name",)

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<not captured: {self.type_name}>"


class Arguments:
    """What a call is given, as one value: ``[1]`` is a position, ``[mask]`` a keyword, tensors come in that order.

    A keyword is found only where it was given as one: positions are not translated into names. ``after``: where it is a
    list, it takes what is to be called when the call is over, for lists and dicts that were made anew: it brings to the
    caller's own what was written into them (``put``).
    """

    __slots__ = ("after", "args", "kwargs")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], after: list[Callable[[], object]] | None = None
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.after = after


NO_ARGUMENTS = Arguments((), {})


def children(value: Any) -> list[tuple[int | str, Any]] | None:
    """What is directly inside a container, with its keys; None for a leaf.

    A dict's keys that are no integers, as truth values are none, are told as text, fields of named tuples and
    dataclasses by name. A ``torch.Size`` is a leaf: it is a tuple, but holds no tensors.
    """
    if isinstance(value, Tensor):
        return None
    if type(value) is Arguments:
        return [*enumerate(value.args), *value.kwargs.items()]
    if isinstance(value, Mapping):
        return [(key if type(key) is int else str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return None


def iter_tensors(value: Any, key: Key = ()) -> Iterator[tuple[Key, Tensor]]:
    """Every tensor in ``value`` with the key that leads to it, in order. Raises PlanError for endless nesting.

    Sees containers only, not attributes of other objects (``iter_deep`` does). ``key`` is put before the keys told.
    """
    if isinstance(value, Tensor):
        yield key, value
        return
    if len(key) > _DEEPEST:
        raise PlanError(_ENDLESS)
    for name, child in children(value) or ():
        yield from iter_tensors(child, (*key, name))


def flat_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
    """The tensors among a call's arguments where none of these is a container or unknown; else None.

    They are those of ``iter_tensors((args, kwargs))``, for the calls that come most, in a tenth of the time.
    """
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) not in _SCALARS:
            return None
    return found


def iter_deep(value: Any, depth: int = 6, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in ``value``, also in attributes of unknown objects (caches, batches), ``depth`` levels down.

    For questions about memory and gradients, where a tensor counts however it came in; no key leads back to it. Modules
    are not entered: their parameters are no arguments. ``seen`` holds the identities of objects already visited, so
    that one that contains itself ends.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (*_PLAIN_LEAVES, type, torch.nn.Module)):
        return
    seen.add(id(value))
    inside = list(enumerate(value)) if isinstance(value, (set, frozenset, deque)) else children(value)
    if inside is None:
        inside = list(getattr(value, "__dict__", {}).items())
    for _, child in inside:
        yield from iter_deep(child, depth - 1, seen)


def holds_code(value: Any, depth: int = 6) -> bool:
    """Whether ``value``, or a container in it, holds something that computes later: a function, a generator."""
    if isinstance(value, (Tensor, *_PLAIN_LEAVES, type, torch.nn.Module)) or depth == 0:
        return False
    inside = children(value)
    if inside is None:
        return callable(value) or isinstance(value, (Iterator, AsyncIterator, Awaitable))
    return any(holds_code(child, depth - 1) for _, child in inside)


def computes_later(value: Any, depth: int = 6) -> bool:
    """Whether ``value``, or a container in it, computes later by what is there now: a generator, a coroutine, a method
    of a module, a function that has closed over something. A plain function or an object may be called as well, but
    says nothing of that."""
    if isinstance(value, (Iterator, AsyncIterator, Awaitable)):
        return True
    if isinstance(value, MethodType):
        return isinstance(value.__self__, torch.nn.Module)
    if isinstance(value, partial):
        return computes_later((value.func, *value.args, *value.keywords.values()), depth)
    if isinstance(value, FunctionType):
        return bool(value.__closure__)
    if isinstance(value, (Tensor, *_PLAIN_LEAVES, type, torch.nn.Module)) or depth == 0:
        return False
    return any(computes_later(child, depth - 1) for _, child in children(value) or ())


def dig(value: Any, key: Key) -> Any:
    """What ``key`` leads to, itself and not a copy. Raises KeyError with the keys that were there.

    Keys also read attributes, by which the inside of objects that are no containers can be named.
    """
    for depth, part in enumerate(key):
        found = _step(value, part)
        if found is _MISSING and type(value) is Arguments:
            there = ", ".join(print_key((name,)) for name, _ in children(value) or ()) or "none"
            raise KeyError(f"the call has no argument {print_key((part,))}: it was given {there}")
        if found is _MISSING:
            at = print_key(key[:depth]) or "the value"
            raise KeyError(f"{at} has no {print_key((part,))}: {_what_is_there(value)}")
        value = found
    return value


def map_tensors(
    value: Any, change: Callable[[Tensor], Any], opaque: Callable[[Any], Any] | None = None, depth: int = 0
) -> Any:
    """A copy of ``value`` with every tensor replaced by ``change(tensor)``; containers are new, of the same type.

    Leaves that cannot change (numbers, strings, None ...) are kept; other objects go through ``opaque``, or are kept
    without it. A container that cannot be made anew goes through ``opaque`` as a whole; without it the TypeError
    passes. Raises PlanError for endless nesting.
    """
    if isinstance(value, Tensor):
        return change(value)
    inside = children(value)
    if inside is None:
        return value if opaque is None or isinstance(value, _PLAIN_LEAVES) else opaque(value)
    if depth > _DEEPEST:
        raise PlanError(_ENDLESS)
    parts = [map_tensors(child, change, opaque, depth + 1) for _, child in inside]
    try:
        return _rebuild(value, parts, opaque)
    except TypeError:  # a container that cannot be made anew, such as a read-only mapping
        if opaque is None:
            raise
        return opaque(value)


def opaque_in(value: Any) -> str:
    """The class of the first object in ``value`` into which gaff does not look, such as a set; empty without one."""
    if isinstance(value, Tensor):
        return ""
    inside = children(value)
    if inside is None:
        name = value.type_name if isinstance(value, Opaque) else type(value).__name__
        return "" if isinstance(value, _PLAIN_LEAVES) else name
    return next((name for _, child in inside if (name := opaque_in(child))), "")


def first_tensor(value: Any) -> tuple[Key, Tensor] | None:
    """The first tensor in ``value`` with its key, None where there is none; of arguments, what ``:input`` means."""
    return next(iter_tensors(value), None)


def put(value: Any, key: Key, new: Tensor, after: list[Callable[[], object]] | None = None) -> Any:
    """A copy of ``value`` with ``new`` at ``key``; only the containers on the way are made anew.

    Of each list and dict among them a function is added to ``after``, if one is given: it brings to the old one what
    has been written into the new one since. Raises PlanError where a container cannot be made anew, such as an object
    whose attribute the tensor is.
    """
    if not key:
        return new
    after = value.after if type(value) is Arguments else after
    inside = children(value)
    if inside is not None:
        names = [name for name, _ in inside]
        head: Any = key[0]
        if type(value) is Arguments and isinstance(head, int) and head < 0:
            head += len(value.args)
        elif isinstance(head, int) and isinstance(value, (tuple, list)) and -len(names) <= head < len(names):
            head = names[head]  # of a named tuple: the field
        elif isinstance(head, str) and head not in names:  # a key that is no text, or a field of torch.return_types
            fields_ = getattr(type(value), "__match_args__", ()) if isinstance(value, tuple) else ()
            head = fields_.index(head) if head in fields_ else next((name for name in names if str(name) == head), head)
        if head in names:
            at = names.index(head)
            parts = [child for _, child in inside]
            parts[at] = put(parts[at], key[1:], new, after)
            try:
                made = _rebuild(value, parts)
            except TypeError:
                pass  # a container that cannot be made anew
            else:
                is_settable = is_dataclass(value) and not getattr(value, "__dataclass_params__").frozen  # noqa: B009
                if after is not None and (is_settable or isinstance(value, (list, MutableMapping))):
                    after.append(partial(_bring_back, value, made, _items(made)))
                return made
    raise PlanError(
        f"a {type(value).__name__} cannot be given another tensor at {print_key(key)}: edit it where a module returned "
        "it, before it was put in (names:attn.k.N and attn.v.N of a cache)"
    )


def _items(container: Any) -> dict[Any, Any]:
    """What a list, dict or dataclass holds, by position, key or field."""
    if isinstance(container, Mapping):
        return dict(container.items())
    return dict(enumerate(container)) if isinstance(container, list) else dict(children(container) or ())


def _bring_back(old: Any, made: Any, before: dict[Any, Any]) -> None:
    """Write into a list, dict or dataclass ``old`` what was changed in ``made`` since that held ``before``.

    What stands in ``made`` as it did stays in ``old`` as it is; an item of a list that has moved is the one of ``old``,
    at its first place, and what a dict holds under another key, too, is that of ``made`` there.
    """
    now, missing = _items(made), object()
    changed = {key: item for key, item in now.items() if before.get(key, missing) is not item}
    if isinstance(old, list):
        if changed or len(now) != len(before):
            known = list(zip(before.values(), old, strict=False))
            old[:] = [_own(item, known) for item in now.values()]
        return
    for key, item in changed.items():
        if isinstance(old, MutableMapping):
            old[key] = item
        else:
            setattr(old, key, item)
    if isinstance(old, MutableMapping):
        for key in [key for key in before if key not in now]:
            old.pop(key, None)
        if list(old) != list(now) and set(old) == set(now):
            for key in now:
                old[key] = old.pop(key)


def _own(item: Any, known: list[tuple[Any, Any]]) -> Any:
    """What a list held in the place of ``item``, by pairs of which each serves once; else ``item`` itself."""
    at = next((at for at, (one, _) in enumerate(known) if one is item), None)
    return item if at is None else known.pop(at)[1]


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one as if it were dense.

    Of a tensor that is spread over processes the part of this one counts, of a subclass that wraps other tensors
    (quantised ones, say) what is inside.
    """
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    tensor = distributed.local_of(tensor)  # of what is spread over processes: this one's part
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return sum(size_bytes(part) for part in inner if isinstance(part, Tensor) and part is not tensor)
    is_plain = tensor.layout == torch.strided and not tensor.is_nested
    return tensor.nbytes if is_plain else tensor.numel() * tensor.element_size()


def shape_text(tensor: Tensor) -> str:
    """The shape of a tensor as texts show it: ``1x3x8x8``, ``scalar`` without dimensions, ``nested`` if it is."""
    return "nested" if tensor.is_nested else "x".join(map(str, tensor.shape)) or "scalar"


def describe(value: Any) -> str:
    """A short text of what a value is: ``2x3 float32``, ``tuple of 2``, ``DynamicCache``."""
    if isinstance(value, Tensor):
        return f"{shape_text(value)} {str(value.dtype).removeprefix('torch.')}"
    inside = children(value)
    return type(value).__name__ if inside is None else f"{type(value).__name__} of {len(inside)}"


_MISSING: Any = object()


def _step(value: Any, part: int | str) -> Any:
    """What one part of a key leads to, or ``_MISSING``: an item, else an attribute of that name.

    Keys never index into a tensor. A key of a dict that is neither text nor integer is found by its text, as
    ``children`` tells it.
    """
    if isinstance(value, Tensor):  # a key never indexes into a tensor; slices are options of a capture
        return _MISSING
    if type(value) is Arguments:
        is_position = isinstance(part, int) and -len(value.args) <= part < len(value.args)
        return value.args[part] if is_position else value.kwargs.get(part, _MISSING)  # type: ignore[index, arg-type]
    if isinstance(value, Mapping):
        if part in value:
            return value[part]
        named = {str(key): child for key, child in value.items()}
        if part in named:
            return named[str(part)]
    elif isinstance(part, int) and isinstance(value, (tuple, list)):
        return value[part] if -len(value) <= part < len(value) else _MISSING
    return getattr(value, part, _MISSING) if isinstance(part, str) and part.isidentifier() else _MISSING


def _what_is_there(value: Any) -> str:
    """The end of a message about a key that leads nowhere: what the value is, and the first keys that it does have."""
    inside = children(value)
    if isinstance(value, Opaque):
        return f"a {value.type_name} is not kept whole: ask for what is inside by its own address, with this key"
    if inside is None:
        return f"it is a {describe(value)}" + (", keys do not index into tensors" if isinstance(value, Tensor) else "")
    keys = ", ".join(print_key((name,)) for name, _ in inside[:12])
    return f"it is a {type(value).__name__} with {keys or 'nothing in it'}" + (", ..." if len(inside) > 12 else "")


def _rebuild(value: Any, parts: list[Any], opaque: Callable[[Any], Any] | None = None) -> Any:
    """A container of the type of ``value`` with other parts, which come in the order of ``children``.

    Attributes that are no parts are carried over; those that hold tensors go through ``opaque``, if there is one.
    Raises TypeError where a container does not allow it, such as a read-only mapping or one that computes its items.
    """
    if type(value) is tuple:
        return tuple(parts)
    if type(value) is list:
        return parts
    if type(value) is dict:
        return dict(zip(value, parts, strict=True))
    if type(value) is Arguments:
        count = len(value.args)
        return Arguments(tuple(parts[:count]), dict(zip(value.kwargs, parts[count:], strict=True)), value.after)
    new = _container(value, parts)
    held = [part for _, part in children(new) or ()]
    if len(held) != len(parts) or any(one is not part for one, part in zip(held, parts, strict=True)):
        raise TypeError(f"a {type(value).__name__} made anew holds other things than what it was given")
    if opaque is not None:
        _hide(new, value, parts, opaque)
    return new


def _container(value: Any, parts: list[Any]) -> Any:
    """As ``_rebuild``, for classes of others.

    They are copied and refilled instead of being called: their constructors may ask for anything, and make anything of
    it. For the same reason a dataclass is made without its ``__init__`` and ``__post_init__``.
    """
    new: Any
    if isinstance(value, tuple):
        try:
            new = tuple.__new__(type(value), parts)
        except TypeError:  # those of torch.return_types
            return type(value)(parts)
        getattr(new, "__dict__", {}).update(getattr(value, "__dict__", {}))
    elif isinstance(value, list):
        new = _refilled(copy.copy(value), parts)
    elif isinstance(value, Mapping):
        new = _in_order_of(value, _copied(value))
        for key, part in zip(value, parts, strict=True):
            if getattr(value, "__dict__", {}).get(key, _MISSING) is value[key]:  # read as an attribute, too
                vars(new)[key] = part
            new[key] = part
    else:  # a dataclass, frozen or with slots as it may be
        new = object.__new__(type(value))
        getattr(new, "__dict__", {}).update(getattr(value, "__dict__", {}))
        for field, part in zip(fields(value), parts, strict=True):
            object.__setattr__(new, field.name, part)
    return new


def _copied(value: Any) -> Any:
    """A copy of a mapping that shares nothing with it in which it keeps its items: itself, or its own dicts and lists.

    Raises TypeError where they lie elsewhere, such as one level deeper, or are computed when asked for.
    """
    new = copy.copy(value)
    own = getattr(value, "__dict__", {})
    if own is value:  # a dict whose keys are its attributes
        new.__dict__ = new
        return new
    stores: list[Any] = [dict(value)] if isinstance(value, dict) else []
    for name, inner in own.items():
        if isinstance(inner, (dict, list, set)):
            stores.append(inner)
            vars(new)[name] = copy.copy(inner)
    held = {id(item) for store in stores for item in (store.values() if isinstance(store, dict) else store)}
    if any(id(item) not in held for item in value.values()):
        raise TypeError(f"a {type(value).__name__} cannot be copied: its items lie out of reach")
    return new


def _in_order_of(value: Any, new: Any) -> Any:
    """The copy ``new`` of a mapping, with its keys in the order of ``value``: transformers' outputs are copied in the
    order of their fields, whenever a key was set."""
    if isinstance(value, dict) and list(new) != list(value) and set(new) == set(value):
        for key in value:
            if isinstance(new, OrderedDict):
                OrderedDict.move_to_end(new, key)
            else:
                dict.__setitem__(new, key, dict.pop(new, key))
    return new


def _hide(new: Any, old: Any, parts: list[Any], opaque: Callable[[Any], Any]) -> None:
    """Put ``opaque`` of it in the place of each attribute of ``new`` that holds tensors and none of its parts."""
    known = {id(part) for part in parts if not isinstance(part, _PLAIN_LEAVES)}
    for name, inner in list(getattr(new, "__dict__", {}).items()):
        inside = [inner, *(item for _, item in children(inner) or ())]
        is_kept = new is getattr(new, "__dict__", None) or any(id(one) in known for one in inside)
        if not is_kept and next(iter_deep(inner), None) is not None:
            vars(new)[name] = opaque(getattr(old, name, inner))


def _refilled(made: list[Any], parts: list[Any]) -> list[Any]:
    """The copied list ``made`` with other items; of a kind that cannot be written to, a new one of its class."""
    try:
        made[:] = parts
    except TypeError:  # fx's immutable_list
        return type(made)(parts)
    return made
