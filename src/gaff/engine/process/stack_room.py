"""Room on the Python stack: frames that are not the program's do not count against its recursion limit.

A program must get as deep with somebody around its calls as without. So the limit is higher by the frames of others,
as long as they are there. One thread at a time has room; a limit that the program sets meanwhile is its own, and stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import _getframe, getrecursionlimit, setrecursionlimit
from threading import get_ident
from types import CodeType, FrameType
from typing import TypeVar

from gaff.compat.modes import frames_from

_Function = TypeVar("_Function")


def passed_over(function: _Function) -> _Function:
    """``function``, whose frames warnings do not count, so that a ``stacklevel`` leads to the line that it would.

    Python passes over the frames of its import system, which it knows by the names of their files.
    """
    code = function.__code__  # type: ignore[attr-defined]
    function.__code__ = code.replace(co_filename=f"<{code.co_filename}, passed over as importlib._bootstrap>")  # type: ignore[attr-defined]
    return function


# By how many frames the limit is higher now, what it was set to for that, and the thread that they are for.
_added, _limit, _thread = 0, 0, 0


@dataclass(frozen=True, slots=True)
class RunningFunction:
    """A function that runs, told by its code and by how deep it is on the stack: its frame is not held."""

    depth: int
    code: CodeType | None

    @classmethod
    def of(cls, level: int) -> RunningFunction:
        """The function ``level`` frames above the caller of this one, which is 0."""
        frame = _getframe(1 + level)
        return cls(_depth_of(frame), frame.f_code)

    def is_running(self) -> bool:
        """Whether it may still run: the function that is as deep on the stack now has the same code."""
        frame: FrameType | None = _getframe(1)
        for _ in range(_depth_of(frame) - self.depth):
            frame = frame.f_back if frame is not None else None
        return frame is not None and _depth_of(frame) == self.depth and frame.f_code is self.code


def _depth_of(frame: FrameType | None) -> int:
    """How many frames there are from this one outwards."""
    return sum(1 for _ in frames_from(frame))


def widen(frames: int) -> int:
    """Make room for so many frames, from the next call on; returns for how many room was made, to be taken back.

    That is 0 where another thread has some. Takes one frame itself, which must be there.
    """
    global _added, _limit, _thread
    here, limit = get_ident(), getrecursionlimit()
    if limit != _limit:
        _added = 0  # the program has set one of its own, or this is the first time
    if _added and _thread != here:
        return 0
    _added, _limit, _thread = _added + frames, limit + frames, here  # first: Ctrl-C may come
    setrecursionlimit(limit + frames)
    return frames


def narrow(frames: int) -> None:
    """Take back room that ``widen`` has made, on the same thread; what cannot be taken back here stays until later.

    Python refuses a limit below what is in use, as it may be in a frame of ours at the very end of the stack: then all
    but a few frames are taken back.
    """
    global _added, _limit
    limit = getrecursionlimit()
    if not frames or limit != _limit:
        return
    for back in range(min(frames, _added), 0, -2):
        try:
            setrecursionlimit(limit - back)
        except RecursionError:
            continue
        _added, _limit = _added - back, limit - back
        return


def settle() -> None:
    """Take back all room that this thread has, at the end of what it was made for, whatever was left unfinished."""
    if _thread == get_ident():
        narrow(_added)
