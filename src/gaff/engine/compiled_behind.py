"""Which modules code that is compiled may come upon: read from what it closes over, names, is given, and holds."""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from opcode import opmap
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gaff.compat import compiler

_MOST = 20_000  # objects that are looked at
_IMPORT = opmap["IMPORT_NAME"]
_PLAIN = (str, bytes, int, float, complex, bool, type(None), Tensor, torch.dtype, torch.device, torch.Generator,
          logging.Logger)  # fmt: skip


def _compiled_in(module: nn.Module) -> Iterator[Any]:
    forward = type(module).forward
    if compiler.left_alone(forward) is forward or not _is_ours(vars(module).get("forward", forward)):
        yield module
        return
    for child in module.children():
        yield from _compiled_in(child)
    yield from (value for name, value in vars(module).items() if not name.startswith("_") and name != "forward")


class InSight:
    """Looks for the modules that are ``wanted``, as deep as things hold one another, or name what is held by others."""

    def __init__(self, wanted: Container[nn.Module]) -> None:
        self._wanted = wanted
        self._begin()

    def _begin(self) -> None:
        self._waiting: list[Any] = []
        self._seen: dict[int, Any] = {}  # and no wanted module in them
        self._names = {"forward"}  # that code in sight uses
        self._named: dict[str, list[Any]] = {}  # what goes by a name that no code in sight has used

    def may_run(self, function: Any) -> bool:
        """Whether a wanted module may be a part of the graph of a compiled function.

        Of a container of torch's own, which Dynamo does not compile, what lies in it counts.
        """
        module = getattr(function, "__self__", None)
        if isinstance(module, nn.Module) and _is_ours(getattr(function, "__func__", None)):  # its call, as torch has it
            return self.finds(_compiled_in(module))
        return self.finds([function])

    def finds(self, given: Iterable[Any]) -> bool:
        """Whether what is given is, holds or names a wanted module, or there is too much to look at."""
        self._waiting += given
        while self._waiting and len(self._seen) < _MOST:
            one = self._waiting.pop()
            if isinstance(one, _PLAIN) or id(one) in self._seen:
                continue
            if isinstance(one, nn.Module) and any(inner in self._wanted for inner in one.modules()):
                self._begin()  # what was seen holds it perhaps
                return True
            self._seen[id(one)] = one
            self._waiting += self._held_by(one)
        return bool(self._waiting)

    def _held_by(self, one: Any) -> Iterable[Any]:
        """What an object holds that it may call: of torch's own and of gaff's, what they close over alone.

        Runs nothing of the program's own: neither properties nor what a mapping of its own does to tell its values.
        """
        if isinstance(one, FunctionType):
            return self._held_by_function(one)
        if isinstance(one, (ModuleType, type)):
            return self._held_by_name(one)
        for kinds, read in _HELD:
            if isinstance(one, kinds):
                return read(one)
        kind = type(one)
        return [kind] if _is_ours(kind) and not isinstance(one, nn.Module) else [kind, *_attributes(one)]

    def _held_by_name(self, one: ModuleType | type) -> Iterator[Any]:
        """What a module or a class holds is in sight once code in sight uses its name; methods such as ``__call__``."""
        for of in one.__mro__ if isinstance(one, type) else (one,):
            for name, value in [] if _is_known(of) else list(vars(of).items()):
                if name in self._names or (isinstance(one, type) and name.startswith("__")):
                    yield value
                else:
                    self._named.setdefault(name, []).append(value)

    def _held_by_function(self, function: FunctionType) -> Iterator[Any]:
        yield from gc.get_referents(*(function.__closure__ or ()))
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield from vars(function).values()
        if not _is_known(function):
            names = _names_in(function.__code__)
            yield from (function.__globals__[name] for name in names if name in function.__globals__)
            if _IMPORT in function.__code__.co_code[::2]:
                yield from (sys.modules[name] for name in names if name in sys.modules)
            for name in names - self._names:
                yield from self._named.pop(name, ())
            self._names |= names


def _names_in(code: CodeType) -> set[str]:
    """The names that a function's code and that of the functions inside it use, or may look up."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    looked_up = (one for one in code.co_consts if isinstance(one, str) and "getattr" in code.co_names)
    return set(code.co_names).union(looked_up, *inner)


def _attributes(one: Any) -> Iterator[Any]:
    for of in type(one).__mro__:
        for name, slot in list(vars(of).items()):
            if isinstance(slot, MemberDescriptorType) or name == "__dict__":
                with suppress(AttributeError, TypeError):  # an empty one
                    found = slot.__get__(one)
                    yield from list(found.values()) if name == "__dict__" else [found]


_HELD: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (MethodType, lambda one: (one.__self__, one.__func__)),
    (partial, lambda one: (one.func, *one.args, *one.keywords.values())),
    ((staticmethod, classmethod), lambda one: (one.__func__,)),
    (property, lambda one: (one.fget, one.fset)),
    (dict, lambda one: [*dict.keys(one), *dict.values(one)]),
    ((list, tuple, set, frozenset, deque), list),
    (MappingProxyType, lambda one: [*one, *one.values()]),
    (ref, lambda one: (one(),)),
)


def _is_known(one: Any) -> bool:
    """Whether what a class, a function or a module names leads everywhere, and to no module of a model.

    So do torch's, gaff's and Python's own, and installed packages that do not know torch.
    """
    top = _top_of(one)
    return _is_ours(one) or top in sys.stdlib_module_names or _is_unaware(top)


@cache
def _is_unaware(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    parts = (one for name, one in list(sys.modules.items()) if name.partition(".")[0] == package)
    return "site-packages" in file and not any("torch" in getattr(one, "__dict__", ()) for one in parts)


def _is_ours(one: Any) -> bool:
    return _top_of(one) in ("torch", "gaff")


def _top_of(one: Any) -> str:
    name = one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", "")
    return str(name).partition(".")[0]
