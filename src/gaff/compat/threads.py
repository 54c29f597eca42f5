"""Threads that the program around them does not find."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable

_TICK = 0.0005  # seconds


class UnlistedThread:
    """A thread that is not in ``threading.enumerate()``, where a program joins all it finds, and holds up no exit.

    ``run`` is given the thread itself. ``ident``: its number, None until it runs. ``is_over``: ``run`` has returned.

    It is made below ``threading``, and waited for without any lock: what a signal handler raises in the middle of
    ``Thread.start``, ``is_alive`` or ``join`` may end the thread, or leave its lock taken for good (seen with 3.11).
    What runs on it should not ask for ``threading.current_thread()``, which lists a stand-in until it is over.
    """

    def __init__(self, run: Callable[[UnlistedThread], None]) -> None:
        self._run = run
        self.ident: int | None = None
        self.is_over = False

    def start(self) -> None:
        """Start it. Raises RuntimeError where the interpreter is ending."""
        _thread.start_new_thread(self._begin, ())

    def _begin(self) -> None:
        self.ident = _thread.get_ident()
        try:
            self._run(self)
        finally:
            listed = getattr(threading, "_active", None)
            if isinstance(listed, dict):
                listed.pop(self.ident, None)
            self.is_over = True

    def wait(self) -> None:
        """Wait until it is over, by asking again and again."""
        while not self.is_over:
            time.sleep(_TICK)
