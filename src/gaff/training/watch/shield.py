"""The wall between a watched program and gaff: one thread is listened to, and no error of gaff's gets out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class Shield:
    """Calls what is told by the program, as long as it is open and on the thread that trains.

    That is the first thread from which anything was told. A failure closes the shield, and is handed to ``failed``,
    once: from then on nothing of gaff's does anything.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.is_open = False
        self._failed = failed
        self._thread = 0

    def is_mine(self) -> bool:
        """Whether this is the thread that trains: the first one that has ever asked."""
        here = threading.get_ident()
        self._thread = self._thread or here
        return self._thread == here

    def run(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Call ``action``, if the shield is open and this is the thread that trains; no error of it gets out."""
        if not self.is_open or not self.is_mine():
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self.is_open = False
            self._failed(error)

    def around(self, action: Callable[..., Any]) -> Callable[..., None]:
        """``action``, called through the shield."""
        return partial(self.run, action)
