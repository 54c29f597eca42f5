"""Forks of a watched process: children of it are not watched, and find no lock held.

A forked child has the memory of its parent, but only the thread that forked. A lock that the writer's thread held at
that moment would be held in the child for ever. So that thread does all that is waiting and ends before each fork, and
the child gives up what it has inherited: the record is the parent's.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """One that is told of forks of this process, on the thread that forks; a ``Watcher`` is one."""

    def pause(self) -> None:
        """Let go of every lock and thread: the process is about to fork. Called in the parent."""

    def abandon(self) -> None:
        """Give up what was inherited, and write nothing that the parent also writes to. Called in the child."""


_FOLLOWED: weakref.WeakSet[Forked] = weakref.WeakSet()
_IS_REGISTERED: list[bool] = []


def follow(watcher: Forked) -> None:
    """Tell ``watcher`` of forks, as long as it lives. Registered once a process, for that cannot be taken back."""
    _FOLLOWED.add(watcher)
    if not _IS_REGISTERED:
        _IS_REGISTERED.append(True)
        os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    """Pause whoever follows; Python calls this in the parent before each fork."""
    for one in list(_FOLLOWED):
        one.pause()


def _in_child() -> None:
    """Let whoever follows give up; Python calls this in the child after each fork."""
    for one in list(_FOLLOWED):
        one.abandon()
