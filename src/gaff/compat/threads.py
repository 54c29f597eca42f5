"""Threads that the program around them does not find."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class UnlistedThread(threading.Thread):
    """A daemon thread that is not in ``threading.enumerate()``: a program that joins all it finds there must end.

    Python lists a thread by its number when it starts, and takes it off when it ends; where it keeps its list otherwise
    the thread stays listed. What runs on it must not ask for ``threading.current_thread()``, which lists a stand-in.
    """

    def __init__(self, target: Callable[[], Any], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def start(self) -> None:
        """Start, and take it off the list as soon as it runs."""
        super().start()
        self._unlist(lambda listed: listed is self)  # else it has ended, and another thread has its number

    def _delete(self) -> None:
        """Python's own, which expects to find it listed."""
        self._unlist(lambda listed: True)  # a stand-in, too

    def _unlist(self, is_ours: Callable[[Any], bool]) -> None:
        listed, lock = getattr(threading, "_active", None), getattr(threading, "_active_limbo_lock", None)
        if isinstance(listed, dict) and lock is not None:
            with lock:
                if is_ours(listed.get(self.ident)):
                    listed.pop(self.ident, None)
