"""Forks of a watched process: children of it are not watched, and find no lock held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Who is told of forks."""

    def pause(self) -> None:
        """The process is about to fork."""

    def abandon(self) -> None:
        """This is the child."""


_FOLLOWED: weakref.WeakSet[Forked] = weakref.WeakSet()
_IS_REGISTERED: list[bool] = []


def follow(watcher: Forked) -> None:
    """Tell ``watcher`` of forks, as long as it lives. Registered once a process, for that cannot be taken back."""
    _FOLLOWED.add(watcher)
    if not _IS_REGISTERED:
        _IS_REGISTERED.append(True)
        os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    for one in list(_FOLLOWED):
        one.pause()


def _in_child() -> None:
    for one in list(_FOLLOWED):
        one.abandon()
