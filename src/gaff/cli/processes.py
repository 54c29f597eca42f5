"""Which process of a launched run was gone first: a launcher then stops all others, and none of them can say so.

Read from ``/proc``; where there is none (not on Linux) nothing is told.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_UNSEEN = "?"
_STOPS = ("SIGTERM", "SIGINT", "SIGHUP")  # with which launchers stop those that are left


class Processes:
    """The ranks below one process, as ``torchrun`` and the like name them to their workers by ``RANK``."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._ranks: dict[int, int] = {}  # by process
        self._has_missed = False  # one has ended unseen: it may be why others were stopped
        self.gone: dict[str, Any] | None = None  # the first that ended otherwise than well

    def look(self) -> None:
        """To be called often: what has ended is to be seen for a moment only."""
        if self.gone is None:
            self._find(self._parent)
            ended = [(pid, how) for pid in self._ranks if (how := _ended(pid)) is not None]
            for pid, how in ended:
                rank = self._ranks.pop(pid)
                self._has_missed = self._has_missed or how == _UNSEEN
                is_first = not self._has_missed or how not in _STOPS
                if how not in ("", _UNSEEN) and is_first and self.gone is None:
                    self.gone = {"rank": rank, "how": how}

    def _find(self, pid: int) -> None:
        """Workers of workers, such as those of a DataLoader, are not ranks."""
        for child in _children(pid):
            if child not in self._ranks:
                rank = _rank_of(child)
                if rank is None:
                    self._find(child)
                else:
                    self._ranks[child] = rank


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError, ValueError):
        for task in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _rank_of(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        for entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return None


def _ended(pid: int) -> str | None:
    """How a process has ended: the name of a signal, its exit code, or empty if well; None while it runs."""
    try:
        told = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if (_PROC / str(pid)).exists() else _UNSEEN
    if told[0] not in ("Z", "X"):
        return None
    status = int(told[-1]) if os.geteuid() == _owner(pid) else 0
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}" if os.WEXITSTATUS(status) else ""


def _owner(pid: int) -> int:
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return -1
