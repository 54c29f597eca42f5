"""Checkpoints around compiled code: a session that has hooks in that code must be open in forward and recomputation.

With hooks and without them code is compiled apart, and saves other tensors, or the same ones in another order. What a
checkpoint recomputes is known by its place in that order alone, so that one tensor would be taken for another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

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
    open yet when it began; not where all such modules in it ran eagerly, as layers of torch's own, which torch does not
    compile there.
    """

    def __init__(self) -> None:
        self.modules: WeakSet[nn.Module] = WeakSet()
        self._known: WeakSet[Any] = WeakSet()
        self._eager: WeakKeyDictionary[Any, WeakSet[nn.Module]] = WeakKeyDictionary()  # by region
        self._opened, self._is_open = ExitStack(), False

    def __enter__(self) -> Regions:
        self._opened.callback(checkpoints.follow_regions(self._while_open, self._known))
        self._opened.enter_context(recomputations.before_each(self._need))
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_open = False
        self._opened.close()

    def ran_eagerly(self, module: nn.Module) -> None:
        """The forward of a module with hooks of this session runs eagerly: note it of the checkpoints around it."""
        for found in checkpoints.enclosing():
            if not found.is_again:
                self._eager.setdefault(found.frame, WeakSet()).add(module)

    def _need(self, region: Any) -> None:
        """Raises ExactnessError for a checkpoint around compiled modules that began before this session."""
        if region not in self._known and self._concerns(region, region.recompute_fn, region.get_inputs()):
            raise ExactnessError(_APART.format("opened after its forward"))

    def _while_open(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(recompute)
        def run(*args: Any, **kwargs: Any) -> Any:
            region = next((one.frame for one in checkpoints.enclosing() if one.is_again), None)
            if not self._is_open and self._concerns(region, recompute, args, kwargs):
                raise ExactnessError(_APART.format("closed before its backward"))
            return recompute(*args, **kwargs)

        return run

    def _concerns(self, region: Any, *given: Any) -> bool:
        """Whether what a checkpoint calls, or is given, has compiled modules with hooks of this session inside them.

        Also where a compiled function is in sight, or not all of it, and a module with such hooks.
        """
        found, eager = behind(*given), self._eager.get(region, ())
        is_open = found.has_function or (not found.is_whole and compiler.has_compiled())
        inner = (one for module in found.compiled for one in module.modules())
        return any(one in self.modules and one not in eager for one in (found.modules if is_open else inner))
