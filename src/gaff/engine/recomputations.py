"""Whoever must know that a non-reentrant checkpoint is about to recompute, and may refuse it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gaff.compat import checkpoints
from gaff.engine.replacements import Replacements

_ASKED: dict[object, Callable[[Any], None]] = {}


def before_each(ask: Callable[[Any], None]) -> ExitStack:
    """Until what this returns is closed ``ask`` is called with the frame of each checkpoint that is to recompute.

    What it raises comes out of the program's backward pass, before anything is computed.
    """
    key, asking = object(), ExitStack()
    asking.enter_context(_PLACE)
    _ASKED[key] = ask
    asking.callback(_ASKED.pop, key)
    return asking


def _ask(region: Any) -> None:
    for ask in list(_ASKED.values()):
        ask(region)


_PLACE = Replacements(checkpoints.before_recomputations(_ask))
