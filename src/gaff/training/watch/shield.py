"""The wall between a watched program and gaff: one thread is listened to, and no error of gaff's gets out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gaff.compat import modes
from gaff.engine.process import stack_room

FRAMES = 500  # more than anything behind the wall needs


class Shield:
    """Calls what is told by the program, as long as it is open and on the thread that trains.

    That is the first thread from which anything was told. A failure closes the shield, and is handed to ``failed``,
    once: from then on nothing of gaff's does anything.

    Behind it the program sees nothing: not by modes and subclasses of its own, which torch would tell of every
    operation, nor by its recursion limit, against which frames of gaff's would count.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.is_open = False
        self.is_quiet = threading.RLock()  # held while something is done: who closes it waits for that
        self._failed = failed
        self._thread = 0

    def is_mine(self) -> bool:
        """Whether this is the thread that trains: the first one that has ever asked."""
        here = threading.get_ident()
        self._thread = self._thread or here
        return self._thread == here

    def run(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Call ``action``, if the shield is open and this is the thread that trains; no error of it gets out."""
        if self.is_open and self.is_mine():
            self.run_on_any_thread(action, *arguments)

    def run_on_any_thread(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Call ``action``, if the shield is open: for gradients, which autograd may bring on a thread of its own."""
        if not self.is_open:
            return
        room = stack_room.widen(FRAMES)
        try:
            with self.is_quiet, torch._C.DisableTorchFunction():
                if not self.is_open:  # it was closed while this thread waited
                    return
                if torch._C._len_torch_dispatch_stack():
                    with modes.outside_modes():
                        action(*arguments)
                else:
                    action(*arguments)
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self.is_open = False
            self._failed(error)
        finally:
            stack_room.narrow(room)

    def around(self, action: Callable[..., Any]) -> Callable[..., None]:
        """``action``, called through the shield."""
        return partial(self.run, action)
