"""Compiled code that runs eagerly while a session is open: ``torch.compiler.set_stance("force_eager")``.

Compiled code calls no hooks that came after it was compiled. Where a session cannot put hooks into the code itself
(see ``compiled``), it lets the modules run eagerly, and says so in its receipt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from gaff.compat.compiler import has_asked_to_compile, is_loaded

EAGER = "compiled code ran eagerly while the session was open (torch.compiler.set_stance('force_eager'))"


class _Stance:
    """Process-wide ``force_eager``, held as long as any session needs it; sessions may close in any order.

    torch's stance is one setting of the process, which its context manager puts back to what it found. So it is
    entered when the first holder comes and left when the last one goes; a lock guards the count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stance: AbstractContextManager[Any] | None = None

    @property
    def is_held(self) -> bool:
        """Whether a session holds the stance: ``force_eager`` may then be gaff's doing, and not the user's."""
        return self._holders > 0

    def __enter__(self) -> None:
        """Hold the stance; the first holder sets it."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def __exit__(self, *exc: object) -> None:
        """Hold it no longer; with the last holder the stance that was there before comes back."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


forced_eager = _Stance()


def keep_eager(opening: ExitStack, at_end: list[Callable[[Any, Any], None]], notes: list[str]) -> None:
    """Let code that is first compiled while the session is open run eagerly until ``opening`` closes.

    ``generate`` of transformers may compile a model by itself, in the middle of a session. ``at_end`` is the list of
    what a clock calls at the end of a run; there ``notes`` is told, once somebody has asked for a compilation. Does
    nothing in a process that has not loaded the compiler.
    """
    if not is_loaded():
        return
    opening.enter_context(forced_eager)

    def tell(run: Any, output: Any) -> None:
        if has_asked_to_compile() and EAGER not in notes:
            notes.append(EAGER)

    at_end.append(tell)
