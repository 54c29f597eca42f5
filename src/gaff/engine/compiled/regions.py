"""Checkpoints around compiled code: a session that has hooks in that code must be open in forward and recomputation.

With hooks and without them code is compiled apart, and saves other tensors, or the same ones in another order. What a
checkpoint recomputes is known by its place in that order alone, so that one tensor would be taken for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

from torch import nn

from gaff.compat import checkpoints, compiler
from gaff.engine import recomputations
from gaff.errors import ExactnessError

_MOST = 1000  # objects that are looked at behind what a checkpoint calls
_APART = (
    "compiled code in a checkpoint would be recomputed with other hooks than its forward had, and what it saves would "
    "be taken for something else: the session was {}. Expected it around both forward and backward, or around neither"
)


class Regions(AbstractContextManager["Regions"]):
    """The checkpoints that begin while a session has hooks on ``modules``, in compiled code; open as long as it is.

    A checkpoint around such a module raises ExactnessError when it recomputes and the session has closed, or was not
    open yet when it began.
    """

    def __init__(self) -> None:
        self.modules: WeakSet[nn.Module] = WeakSet()
        self._known: WeakSet[Any] = WeakSet()
        self._opened, self._is_open = ExitStack(), False

    def __enter__(self) -> Regions:
        self._opened.callback(checkpoints.follow_regions(self._while_open, self._known))
        self._opened.enter_context(recomputations.before_each(self._need))
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_open = False
        self._opened.close()

    def _need(self, region: Any) -> None:
        """Raises ExactnessError for a checkpoint around compiled modules that began before this session."""
        if region not in self._known and self._concerns(region.recompute_fn):
            raise ExactnessError(_APART.format("opened after its forward"))

    def _while_open(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(recompute)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._is_open and self._concerns(recompute):
                raise ExactnessError(_APART.format("closed before its backward"))
            return recompute(*args, **kwargs)

        return run

    def _concerns(self, recompute: Any) -> bool:
        """Whether what a checkpoint calls has compiled modules, and hooks of this session on them or inside them.

        Also where nothing tells what it calls, in a process that has compiled.
        """
        found = list(_behind(recompute))
        inner = {one for module in found if isinstance(module, nn.Module) for one in module.modules()}
        if not inner:
            return compiler.has_compiled()
        wrapper = compiler.wrapper_class() or ()
        is_compiled = any(map(compiler.is_compiled_function, found)) or any(
            getattr(one, "_compiled_call_impl", None) is not None or isinstance(one, wrapper) for one in inner
        )
        return is_compiled and any(one in self.modules for one in inner)


def _behind(function: Any) -> Iterator[Any]:
    """The modules and functions that a function is, is a method of, or closes over."""
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield one
        elif isinstance(one, MethodType):
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, FunctionType):
            yield one
            waiting += [*map(_held, one.__closure__ or ()), *(one.__defaults__ or ())]
        elif type(one) in (list, tuple):
            waiting += one
        elif type(one) is dict:
            waiting += one.values()


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty one
        return None
