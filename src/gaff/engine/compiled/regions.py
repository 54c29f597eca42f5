"""Checkpoints around compiled code: a session that has hooks in that code must be open in forward and recomputation.

With hooks and without them code is compiled apart, and saves other tensors, or the same ones in another order. What a
checkpoint recomputes is known by its place in that order alone, so that one tensor would be taken for another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import nn

from gaff.compat import checkpoints, compiler
from gaff.engine import recomputations
from gaff.engine.compiled_behind import behind
from gaff.errors import ExactnessError

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
        if region not in self._known and self._concerns(region.recompute_fn, region.get_inputs()):
            raise ExactnessError(_APART.format("opened after its forward"))

    def _while_open(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(recompute)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._is_open and self._concerns(recompute, args, kwargs):
                raise ExactnessError(_APART.format("closed before its backward"))
            return recompute(*args, **kwargs)

        return run

    def _concerns(self, *given: Any) -> bool:
        """Whether what a checkpoint calls, or is given, has compiled modules with hooks of this session inside them.

        Also where a compiled function is in sight, or not all of it, and a module with such hooks.
        """
        found = behind(*given)
        if any(one in self.modules for module in found.compiled for one in module.modules()):
            return True
        is_open = found.has_function or (not found.is_whole and compiler.has_compiled())
        return is_open and any(one in self.modules for one in found.modules)
