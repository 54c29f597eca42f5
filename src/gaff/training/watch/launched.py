"""Inside a watched command: begins to watch when torch has been imported, ends when the process does."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gaff.training.watch.settings import VARIABLE


def start() -> None:
    """Called once torch is imported. Whatever goes wrong here is told once and stops nothing."""
    try:
        settings = json.loads(os.environ[VARIABLE])
        _watch(settings)
    except Exception as error:  # noqa: BLE001  # the command is not ours to stop
        sys.stderr.write(f"gaff: this process is not watched: {type(error).__name__}: {error}\n")


def _watch(told: dict[str, Any]) -> None:
    from gaff.training.watch.settings import Settings
    from gaff.training.watch.watcher import Watcher

    rank = os.environ.get("RANK", "0")
    tell = None if told["quiet"] or rank != "0" else _Told(told["plain"])
    Watcher(Settings.from_json(told, tell=tell, rank=int(rank), is_lazy=True)).open()


class _Told:
    """Lines for the terminal, on the standard error of the command."""

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def __call__(self, text: str) -> None:
        from gaff.views.run_text import to_ascii

        try:
            sys.stderr.write((to_ascii(text) if self._plain else text) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError, UnicodeEncodeError):  # closed, or of a narrow encoding: nobody can be told
            pass
