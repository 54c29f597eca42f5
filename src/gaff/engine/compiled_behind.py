"""What compiled code a function may come upon: read from what it closes over, names, is given, and holds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.compat import compiler

_MOST = 5000  # objects that are looked at
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, Tensor, torch.dtype, torch.device, torch.Generator)


class InSight(NamedTuple):
    """All ``modules`` that were come upon, of these the ones that are ``compiled``; whether a function is, too.

    ``is_whole``: everything was looked at.
    """

    modules: set[nn.Module]
    compiled: list[nn.Module]
    has_function: bool
    is_whole: bool

    @property
    def may_run_compiled(self) -> bool:
        """Whether anything in sight is compiled; what was not looked at may be, in a process that has compiled."""
        return bool(self.compiled) or self.has_function or (not self.is_whole and compiler.has_compiled())


def behind(*given: Any) -> InSight:
    """Look at functions and whatever else they are ``given``, as deep as they hold one another."""
    waiting, seen = list(given), dict[int, Any]()
    modules: set[nn.Module] = set()
    compiled, has_function = [], False
    wrapper = compiler.wrapper_class() or ()
    while waiting and len(seen) < _MOST:
        one = waiting.pop()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, nn.Module):
            modules.add(one)
            is_own = compiler.is_compiled_function(vars(one).get("forward"))
            if is_own or getattr(one, "_compiled_call_impl", None) is not None or isinstance(one, wrapper):
                compiled.append(one)
        else:
            has_function |= compiler.is_compiled_function(one)
        waiting += _held_by(one)
    return InSight(modules, compiled, has_function, not waiting)


def _held_by(one: Any) -> Iterator[Any]:
    """What an object holds that it may call: of torch's own and of gaff's, what they close over alone.

    Runs nothing of the program's own: neither properties nor what a mapping of its own does to tell its values.
    """
    if isinstance(one, FunctionType):
        yield from _held_by_function(one)
    elif isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, dict):
        yield from list(dict.values(one))
    elif isinstance(one, (list, tuple, set, frozenset)):
        yield from list(one)
    elif isinstance(one, nn.Module):
        yield from one.children()
        yield from (value for name, value in vars(one).items() if not name.startswith("_"))
        yield getattr(type(one), "forward", None)
    elif not isinstance(one, ModuleType) and not _is_ours(type(one)):
        yield from getattr(one, "__dict__", {}).values()
        yield vars(type(one)).get("__call__")


def _held_by_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty one
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not _is_ours(function):
        for name in function.__code__.co_names:
            found = function.__globals__.get(name)
            if not isinstance(found, ModuleType):
                yield found
            elif not found.__name__.startswith(("torch", "gaff")):  # what the function calls of it
                yield from map(vars(found).get, function.__code__.co_names)


def _is_ours(one: Any) -> bool:
    """Whether a class or a function is torch's or gaff's own: its globals lead everywhere."""
    return str(getattr(one, "__module__", "")).partition(".")[0] in ("torch", "gaff")
