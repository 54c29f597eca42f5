"""Compiled code that runs eagerly while a session is open: ``torch.compiler.set_stance("force_eager")``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from gaff.compat.compiler import has_asked_to_compile, is_loaded

EAGER = "compiled code ran eagerly while the session was open (torch.compiler.set_stance('force_eager'))"


class _Stance:
    """Process-wide ``force_eager``, held as long as any session needs it; sessions may close in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stance: AbstractContextManager[Any] | None = None

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    def __enter__(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


forced_eager = _Stance()


def keep_eager(opening: ExitStack, at_end: list[Callable[[Any, Any], None]], notes: list[str]) -> None:
    """What is compiled while the session is open, as ``generate`` does, runs eagerly; told once somebody has asked."""
    if not is_loaded():
        return
    opening.enter_context(forced_eager)

    def tell(run: Any, output: Any) -> None:
        if has_asked_to_compile() and EAGER not in notes:
            notes.append(EAGER)

    at_end.append(tell)
