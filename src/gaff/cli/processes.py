"""Which process of a launched run was gone first: a launcher then stops all others, and none of them can say so.

Read from ``/proc``; where there is none (not on Linux) nothing is told. How a process ended is to be read until its
launcher asks for it, often within milliseconds: its end wakes whoever waits (``pidfd_open``), nothing is polled for.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_UNSEEN = "?"
_SEARCH_S = 0.5  # how long to wait for a process to end, before processes are looked for again
_FIRST_S = 0.02  # where only looking tells that one has ended: torchrun takes notice of it within a tenth of a second
_AFTER = ("SIGTERM", "SIGINT", "SIGHUP", "SIGABRT")  # by which those end that are left, rather than the first


class Processes:
    """The ranks below one process, as ``torchrun`` and the like name them to their workers by ``RANK``.

    ``gone``: the first of them that ended otherwise than well, with how, which is empty where it had gone before that
    was read, so that it may have ended well; None while there is none. ``are_told``: the command was given a signal by
    which they end, all of them.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self.are_told = False
        self._ranks: dict[int, int] = {}  # by process
        self._has_missed = False  # several have ended unseen: any may be why others were stopped
        self._ends: dict[int, int] = {}  # what tells of the end of a process, by process
        self.gone: dict[str, Any] | None = None  # the first that ended otherwise than well

    def wait(self) -> None:
        """Until the parent or one of the ranks that were seen at the last look has ended, or half a second."""
        is_enough = self.gone is not None or self._has_missed
        asked = {self._parent} if is_enough else {self._parent, *self._ranks}
        for pid in self._ends.keys() - asked:
            os.close(self._ends.pop(pid))
        can_be_told = all(self._can_tell(pid) for pid in asked)
        if can_be_told:
            ends = select.poll()
            for end in self._ends.values():
                ends.register(end, select.POLLIN)
            ends.poll(_SEARCH_S * 1000)
        else:
            time.sleep(_FIRST_S)

    def close(self) -> None:
        """Let go of what tells of ends."""
        for end in self._ends.values():
            os.close(end)
        self._ends.clear()

    def _can_tell(self, pid: int) -> bool:
        """Whether the end of a process wakes whoever waits for it: not on old kernels, nor of one that has gone."""
        if pid not in self._ends and hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._ends[pid] = os.pidfd_open(pid)
        return pid in self._ends

    def look(self) -> None:
        """Look which ranks there are, and which have ended. To be called at once when one has: it is seen for a moment.

        Of several that have ended since the last time the one that was killed counts as the first: those that talk
        to it then fail by themselves. One that can no longer be seen has gone before all that still can: a launcher
        asks how one has ended before it stops the others.
        """
        if self.gone is not None or self._has_missed:
            return
        self._find(self._parent)
        ended = {pid: how for pid in self._ranks if (how := _ended(pid)) is not None}
        ranks = {pid: self._ranks.pop(pid) for pid in ended}
        unseen = [ranks[pid] for pid, how in ended.items() if how == _UNSEEN]
        self._has_missed = len(unseen) > 1
        well = ("", *(_AFTER if self.are_told else ()))
        badly = [pid for pid, how in ended.items() if how not in well]
        if len(unseen) == 1 and not self.are_told:
            self.gone = {"rank": unseen[0], "how": ""}
        elif badly and not unseen:
            first = min(badly, key=lambda pid: (ended[pid] in _AFTER, not ended[pid].startswith("SIG")))
            self.gone = {"rank": ranks[first], "how": ended[first]}

    def taking(self, number: int) -> list[int] | None:
        """The command's processes that have a handler for a signal, by which others would end; None where nothing tells
        (not on Linux)."""
        if not (_PROC / str(self._parent) / "status").is_file():
            return None
        found, waiting = [], [self._parent]
        while waiting:
            pid = waiting.pop()
            waiting += _children(pid)
            with suppress(OSError, ValueError):
                told = dict(line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines())
                if int(told["SigCgt"], 16) >> (number - 1) & 1:
                    found.append(pid)
        return found

    def _find(self, pid: int) -> None:
        """Add the ranks below one process. Workers of workers, such as those of a DataLoader, are not ranks.

        What is no rank is asked each time: until a new process runs its program it has its launcher's environment.
        """
        for child in _children(pid):
            if child in self._ranks:
                continue
            rank = _rank_of(child)
            if rank is None:
                self._find(child)
            else:
                self._ranks[child] = rank


def _children(pid: int) -> list[int]:
    """The processes that the main thread of one has made."""
    with suppress(OSError, ValueError):
        return [int(one) for one in (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]
    return []


def _rank_of(pid: int) -> int | None:
    """The ``RANK`` in the environment of a process; None where it has none, or cannot be read."""
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
        number = os.WTERMSIG(status)
        known = {one.value: one.name for one in signal.Signals}
        return known.get(number, f"signal {number}")
    return f"exit code {os.WEXITSTATUS(status)}" if os.WEXITSTATUS(status) else ""


def _owner(pid: int) -> int:
    """The user that a process belongs to; -1 where it has gone."""
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return -1
