"""Room for variants of compiled code that have hooks of ours inside, which take none of the program's own.

torch keeps a limited number of compiled variants of one function (``torch._dynamo.config.recompile_limit``), and beyond
that runs it eagerly, or raises with ``fullgraph=True``. A program that needs nearly all of them must not lose any.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from threading import Lock
from typing import Any

_ROOM = 64  # variants of one function that may be compiled while some of ours are
_NAME = "gaff"  # no argument of a function has this name and is ours: see ``_mark``
_lock = Lock()
_raised: list[int] = []  # the program's limit, once for each that is open


class _Owner:
    """Whose the variants are; lives as long as the process."""


_OWNER = _Owner()


class OwnVariants:
    """While open code is compiled with hooks of ours, and what is compiled then counts as none of the program's.

    The limit is higher meanwhile, and the program's own again after ``close``, unless somebody has set another.
    Sessions may be open at once, and close in any order. Does nothing in a process that has compiled nothing.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] | None = None

    def open(self) -> None:
        """Begin; may be called again after ``close``."""
        config: Any = sys.modules.get("torch._dynamo.config")
        if self._known is not None or not hasattr(config, "recompile_limit"):
            return
        with _lock:
            self._known = weakref.WeakSet(_guards())
            if not _raised:
                _raised.append(config.recompile_limit)
                config.recompile_limit += _ROOM
            else:
                _raised.append(_raised[0])

    def close(self) -> None:
        """End: what was compiled since ``open`` counts no more."""
        if self._known is None:
            return
        config: Any = sys.modules["torch._dynamo.config"]
        with _lock:
            for one in _guards():
                if one not in self._known:
                    _mark(one)
            self._known = None
            limit = _raised.pop()
            if not _raised and config.recompile_limit == limit + _ROOM:
                config.recompile_limit = limit


def most_variants() -> int:
    """How many compiled variants of one function torch keeps for the program; beyond them it runs it eagerly."""
    config = sys.modules.get("torch._dynamo.config")
    return _raised[0] if _raised else int(getattr(config, "recompile_limit", 8))


def most_own() -> int:
    """How many variants there are that were compiled with hooks of ours, of the function that has the most."""
    return max((sum(_NAME in one.id_matched_objs for one in each) for each in _by_code()), default=0)


def _mark(guards: Any) -> None:
    """Let a variant count against no limit.

    torch counts those alone whose modules among the arguments are those of the call: this one says that an argument
    must be an object of ours, which it never is. Whether the variant fits a call is decided by its guards, not by this.
    """
    guards.id_matched_objs[_NAME] = weakref.ref(_OWNER)


def _guards() -> Iterator[Any]:
    for each in _by_code():
        yield from each


def _by_code() -> Iterator[list[Any]]:
    """The guards of each variant that torch keeps, a list for each compiled function."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes: Any = getattr(getattr(frames, "input_codes", None), "seen", ())
    if not codes:
        return
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    for reference in list(codes):
        code = reference()
        if code is not None:
            guards = [one.guard_manager for one in _debug_get_cache_entry_list(code)]
            yield [one for one in guards if isinstance(getattr(one, "id_matched_objs", None), dict)]
