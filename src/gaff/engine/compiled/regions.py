"""Checkpoints around compiled code: a session that has hooks in that code must be open in forward and recomputation.

With hooks and without them code is compiled apart, and saves other tensors, or the same ones in another order. What a
checkpoint recomputes is known by its place in that order alone, so that one tensor would be taken for another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any, ClassVar
from weakref import WeakSet

from torch import nn

from gaff.compat import checkpoints
from gaff.compat.compiler import compiled_calls
from gaff.engine.compiled_behind import InSight
from gaff.errors import ExactnessError

_APART = (
    "compiled code in a checkpoint would be recomputed with other hooks than its forward had, and what it saves would "
    "be taken for something else: the session was {}. Expected it around both forward and backward, or around neither"
)


class Regions(AbstractContextManager["Regions"]):
    """The checkpoints that begin while a session has hooks on ``modules``, in compiled code; open as long as it is.

    A checkpoint in which code was called that was compiled with such hooks raises ExactnessError when it recomputes and
    the session has closed, and one that calls such code then if the session was not open yet when it began. One in
    which the session itself is opened must open another on the same modules when it recomputes.
    """

    _open: ClassVar[WeakSet[Regions]] = WeakSet()

    def __init__(self) -> None:
        self.modules: WeakSet[nn.Module] = WeakSet()
        self._known: WeakSet[Any] = WeakSet()
        self._hooked: WeakSet[Any] = WeakSet()  # of these, those that have called compiled code with hooks
        self._around: WeakSet[Any] = WeakSet()
        self._in_sight = InSight(self.modules)
        self._asked: dict[int, tuple[Any, bool]] = {}  # what was called, and whether it has hooks
        self._opened, self._is_open = ExitStack(), False

    def __enter__(self) -> Regions:
        for one in checkpoints.enclosing():
            self._around.add(one.frame)
            if not one.is_again:
                checkpoints.wrap_recomputation(one.frame, self._again)
        self._open.add(self)
        self._opened.callback(checkpoints.follow_regions(self._while_open, self._known))
        self._opened.enter_context(compiled_calls.at_each(self._called))
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_open = False
        self._open.discard(self)
        self._asked.clear()
        self._in_sight = InSight(self.modules)
        self._opened.close()

    def _called(self, function: Any, args: tuple[Any, ...]) -> None:
        """Compiled code is called: note it of the checkpoints around it, or refuse to recompute them so."""
        for one in checkpoints.enclosing():
            is_new = one.frame not in (self._around if one.is_again else self._hooked)
            if is_new and (not one.is_again or one.frame not in self._known) and self._has_hooks(function, args):
                if one.is_again:
                    raise ExactnessError(_APART.format("opened after its forward"))
                self._hooked.add(one.frame)

    def _while_open(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(recompute)
        def run(*args: Any, **kwargs: Any) -> Any:
            hooked = (one for one in checkpoints.enclosing() if one.is_again and one.frame in self._hooked)
            if not self._is_open and any(hooked):
                raise ExactnessError(_APART.format("closed before its backward"))
            return recompute(*args, **kwargs)

        return run

    def _again(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(recompute)
        def run(*args: Any, **kwargs: Any) -> Any:
            with compiled_calls.at_each(self._need_another):
                return recompute(*args, **kwargs)

        return run

    def _need_another(self, function: Any, args: tuple[Any, ...]) -> None:
        has_another = any(not self.modules.isdisjoint(set(one.modules)) for one in self._open)
        if not has_another and self._has_hooks(function, args):
            raise ExactnessError(_APART.format("opened inside of it, and not again when it recomputed"))

    def _has_hooks(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Whether hooks of this session may be in the code of a compiled function, which is looked at once."""
        if id(function) not in self._asked:
            self._asked[id(function)] = function, self._in_sight.may_run(function)
        return self._asked[id(function)][1] or InSight(self.modules).finds(args)
