"""What a module keeps of what it was given: as an attribute, or anywhere that its code can reach.

A tensor that a module keeps may be used after the call, and what is made of it then belongs to the module's share.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import iter_deep
from gaff.compat import autograd

_HOLDERS = (Tensor, list, tuple, dict, deque, SimpleNamespace)  # of what a module keeps; others hold settings, mostly
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    ModuleType,
    CodeType,
    torch.dtype,
    torch.device,
    torch.Size,
)
# Of these Python's collector tells what they hold: of a generator its variables, which its frame would keep once it was
# asked for them, and of a cell that has no value yet nothing.
_TOLD = (FunctionType, CellType, MethodType, BuiltinMethodType, GeneratorType, partial)
_OF_TORCH = frozenset(vars(nn.Module()))  # tables of every module: parts, hooks of others
_MOST = 20_000  # objects that are looked at
_SOME = 500  # of a container, from either end


def kept_by(module: nn.Module) -> Iterable[Tensor]:
    """The tensors that a module keeps as attributes: a loss put aside during the call carries a share, too."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, _HOLDERS):
                yield from (tensor for tensor in iter_deep(value) if autograd.takes_gradient(tensor))


def is_kept(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a module's own code can reach ``tensor``: by attributes of it, its classes and parameters, by closures,
    generators and objects behind them, and by containers among the globals of its forward.

    Looks at 20,000 objects at the most, and at the ends of large containers. Asked only where somebody holds the tensor
    who did not before the call. What a hook of others, a checkpoint or an autograd node holds is not reached: no code
    of the module comes by it.
    """
    waiting = deque(_roots(module))
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        if value is tensor:
            return True
        if id(value) not in seen and not isinstance(value, _PLAIN):
            seen.add(id(value))
            waiting.extend(_inside(value))
    return False


def _roots(module: nn.Module) -> Iterator[Any]:
    """Where the search begins: what the modules and their classes have, and what their forwards see as globals."""
    for inner in module.modules():
        yield from _own(inner)
        yield from inner._parameters.values()
        kind = type(inner)
        if not kind.__module__.startswith("torch."):
            yield from vars(kind).values()
            known = getattr(kind.forward, "__globals__", {})
            yield from (one for one in known.values() if isinstance(one, (list, dict, set, deque)))
            yield from (one for one in known.values() if type(one).__module__ == kind.__module__)


def _own(module: nn.Module) -> list[Any]:
    """The attributes of a module that are its own, and no table that every module has."""
    return [value for name, value in vars(module).items() if name not in _OF_TORCH]


def _inside(value: Any) -> Iterable[Any]:
    """What is held by an object, as far as code that has the object can come by it."""
    if isinstance(value, dict):
        return [*_ends(dict.keys(value)), *_ends(dict.values(value))]
    if isinstance(value, (list, tuple, deque)):
        return _ends(value)
    if isinstance(value, (set, frozenset)):
        return islice(value, _SOME)
    if isinstance(value, _TOLD):
        seen = [id(getattr(value, name, None)) for name in ("__globals__", "__builtins__")]  # not held by a function
        return [one for one in gc.get_referents(value) if id(one) not in seen]
    if isinstance(value, nn.Module):
        return [*_own(value), *value._modules.values()]
    told = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in told for name in ((names,) if isinstance(names, str) else names)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _ends(values: Any) -> list[Any]:
    """The first of many values, and the last of them, which were added last.

    Of lists and tuples by these classes' own ways: a subclass may have others.
    """
    kinds: tuple[Any, ...] = (list, tuple)
    for kind in kinds:
        if isinstance(values, kind):
            last = kind.__getitem__(values, slice(-_SOME, None)) if kind.__len__(values) > _SOME else ()
            return [*kind.__getitem__(values, slice(_SOME)), *last]
    return [*islice(values, _SOME), *(islice(reversed(values), _SOME) if len(values) > _SOME else ())]
