"""Variants of compiled code that have hooks of ours inside: they take none of the room that a program has for its own.

torch keeps a limited number of compiled variants of one function (``torch._dynamo.config.recompile_limit``), and beyond
that runs it eagerly, or raises with ``fullgraph=True``. A program that needs nearly all of them must not lose any.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any

from gaff.compat import compiler

_NAME = "gaff"  # no argument of a function has this name and is ours: see ``_mark_all``
_lock = RLock()
_open: list[OwnVariants] = []
_unheard: list[Callable[[], None]] = []  # what ends being told of what is compiled, while some are open


class _Owner:
    """Whose variants are; lives as long as the process."""


_OURS, _LENT = _Owner(), _Owner()


class OwnVariants:
    """While open code is compiled with hooks of ours, and what is compiled then counts as none of the program's.

    The program's variants do not count either meanwhile, so that there is room for ours, and do again after ``close``.
    Sessions may be open at once, and close in any order. Does nothing in a process that has compiled nothing.
    """

    def __init__(self) -> None:
        self._before: set[Any] = set()  # code that Dynamo knew before

    def open(self) -> None:
        """Begin; does nothing where it has begun already. May be called again after ``close``."""
        with _lock:
            if self in _open or not compiler.is_loaded():
                return
            if not _open:
                _mark_all(_LENT)
                _unheard.append(compiler.on_compiling(_claim))
            self._before = {code for code, _ in _entries()}
            _open.append(self)

    def close(self, *, drops: bool = False) -> None:
        """End: what was compiled since ``open`` counts no more, whenever the program runs.

        ``drops``: it is thrown away, since graphs ended at what a hook of ours called, and begin anew behind it. Such a
        variant may fit the program's calls without hooks, too, or its code be left uncompiled for good.
        """
        with _lock:
            if self not in _open:
                return
            _claim()
            if drops:
                _drop(self._before)
            _open.remove(self)
            if _open:
                return
            while _unheard:
                _unheard.pop()()
            for one in _guards():
                if _owner_of(one) is _LENT:
                    del one.id_matched_objs[_NAME]


def most_variants() -> int:
    """How many compiled variants of one function torch keeps; beyond them it runs the function eagerly."""
    config = sys.modules.get("torch._dynamo.config")
    return int(getattr(config, "recompile_limit", 8))


def most_own() -> int:
    """How many variants there are that were compiled with hooks of ours, of the function that has the most."""
    return max((sum(_owner_of(one) is _OURS for one in each) for each in _by_code()), default=0)


def most_any() -> int:
    """How many variants there are, of anybody, of the function that has the most."""
    return max(map(len, _by_code()), default=0)


def is_full() -> bool:
    """Whether some function has as many variants of the program's own as torch keeps, so that others run eagerly."""
    most = most_variants()
    return any(sum(_owner_of(one) is not _OURS for one in each) >= most for each in _by_code())


def _claim() -> None:
    """What nobody has marked yet was compiled with hooks of ours: told as the next variant is about to be compiled."""
    with _lock:
        if _open:
            _mark_all(_OURS)


def _mark_all(owner: _Owner) -> None:
    """Let all variants that are not marked count against no limit.

    torch counts those alone whose modules among the arguments are those of the call: a mark says that an argument must
    be an object of ours, which it never is. Whether a variant fits a call is decided by its guards, not by this.
    """
    for one in _guards():
        one.id_matched_objs.setdefault(_NAME, weakref.ref(owner))


def _owner_of(guards: Any) -> Any:
    """Whose mark a variant has; None where it has none."""
    mark = guards.id_matched_objs.get(_NAME)
    return mark() if mark is not None else None


def _guards() -> Iterator[Any]:
    """The guards of all variants that torch keeps."""
    for each in _by_code():
        yield from each


def _by_code() -> Iterator[list[Any]]:
    """The guards of each variant that torch keeps, a list for each compiled function."""
    for _, entries in _entries():
        guards = [one.guard_manager for one in entries]
        yield [one for one in guards if isinstance(getattr(one, "id_matched_objs", None), dict)]


def _entries() -> Iterator[tuple[Any, list[Any]]]:
    """The code of each function that Dynamo has come upon, and the variants of it that torch keeps."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes: Any = getattr(getattr(frames, "input_codes", None), "seen", ())
    if not codes:
        return
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    for reference in list(codes):
        code = reference()
        if code is not None:
            yield code, _debug_get_cache_entry_list(code)


def _drop(before: set[Any]) -> None:
    """Throw away all variants with hooks of ours, of code that Dynamo did not know ``before`` or had compiled, and let
    it be compiled again where Dynamo has given it up since."""
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo import types
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    usual: Any = types.FrameAction.DEFAULT  # type: ignore[attr-defined]
    for code, entries in list(_entries()):
        ours = [one for one in entries if _owner_of(one.guard_manager) is _OURS]
        if code in before and len(ours) == len(entries):
            continue
        for one in ours:
            guards: Any = one.guard_manager
            guards.extra_state.invalidate(one, DeletedGuardManagerWrapper("a session of gaff was closed"))
        set_code_exec_strategy(code, types.FrameExecStrategy(usual, usual))  # type: ignore[attr-defined]
