"""Compiled code that runs eagerly while a session is open: ``torch.compiler.set_stance("force_eager")``.

Compiled code calls no hooks that came after it was compiled. Where a session cannot put hooks into the code itself
(see ``compiled``), it lets the modules run eagerly, and says so in its receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from gaff.compat.compiler import has_asked_to_compile, is_loaded
from gaff.engine.replacements import Held

EAGER = "compiled code ran eagerly while the session was open (torch.compiler.set_stance('force_eager'))"


forced_eager = Held(lambda: torch.compiler.set_stance("force_eager"))


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
