"""Ops that a forward runs on other threads: noticed, since function modes see their own thread only.

Which number an op has on a worker thread depends on who is faster, so that such ops are no sites. While ops are asked
for, what a module's own forward gives to a thread or a pool of threads is run under a mode that only looks at names: an
op that somebody asked for raises there, and again at the end of the run, since whoever waits for a worker may not look
at what it raised; any other is told once, in the receipt.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from multiprocessing.pool import ThreadPool
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

from gaff.compat.modes import nearest_call
from gaff.compat.replacements import Replacements
from gaff.engine.ops.calls import CallShare
from gaff.engine.ops.mode import parts_of
from gaff.engine.ops.names import NAMES, name_of
from gaff.errors import PlanError

ON_A_WORKER = "a forward runs ops on another thread, where they are no sites"


class _OnWorker(TorchFunctionMode):
    """Looks at the ops that a worker runs for a call of a module; those of modules called there are their own."""

    is_gaffs = True

    def __init__(self, parts: list[CallShare]) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises PlanError where somebody asked for this op."""
        name = NAMES.get(func) or name_of(func)
        if name and nearest_call(sys._getframe(1)) is None:  # else it is an op of a module called there
            for part in self._parts:
                _meet(part, name)
        return func(*args, **(kwargs or {}))


def _meet(part: CallShare, name: str) -> None:
    """An op of this name runs on a worker: it raises if it is asked for, else the receipt tells of it once."""
    scope = part.scope
    if scope.owner.clock.closed:
        return
    row = scope.row(name)
    if row.wants:
        kind = type(scope.owner.module).__name__
        error = PlanError(
            f"{row.wants[0].site}: {kind} runs such an op on another thread, where ops are no sites: "
            "ask for the output of a module, or for ops that run on the thread of its forward"
        )
        if part.run is not None:
            part.run.fail(error)
        raise error
    if ON_A_WORKER not in scope.notes:
        scope.notes.append(ON_A_WORKER)


def _watched(function: Callable[..., Any], frame: FrameType) -> Callable[..., Any]:
    """``function``, to be run on another thread, under a mode if the call at ``frame`` is one whose ops are asked."""
    parts = parts_of(frame)
    if not parts or not callable(function):
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnWorker(parts):
            return function(*args, **kwargs)

    return run


def _start(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    def started(thread: Any) -> Any:
        own = thread.run
        run = _watched(own, sys._getframe(1))
        if run is not own:
            thread.run = run
        return start(thread)

    return started


def _submit(submit: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a pool that is given a function first, or as ``func``."""

    @wraps(submit)
    def submitted(pool: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_watched(args[0], sys._getframe(1)), *args[1:])
        elif "func" in kwargs:
            kwargs["func"] = _watched(kwargs["func"], sys._getframe(1))
        return submit(pool, *args, **kwargs)

    return submitted


# While open: what is given to threads is looked at. All maps of a ThreadPool that make a list go by one method.
worker_watch = Replacements(
    (threading.Thread, "start", _start),
    (ThreadPoolExecutor, "submit", _submit),
    *((ThreadPool, name, _submit) for name in ("apply_async", "_map_async", "imap", "imap_unordered")),
)
