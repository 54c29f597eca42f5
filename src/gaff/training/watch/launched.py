"""Inside a watched command: begins to watch when torch has been imported, ends when the process does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "GAFF_WATCH"  # the settings, as JSON; children inherit it


def start() -> None:
    """Called once torch is imported. Whatever goes wrong here is told once and stops nothing."""
    try:
        settings = json.loads(os.environ[VARIABLE])
        _watch(settings)
    except Exception as error:  # noqa: BLE001  # the command is not ours to stop
        sys.stderr.write(f"gaff: this process is not watched: {type(error).__name__}: {error}\n")


def _watch(settings: dict[str, Any]) -> None:
    from gaff.training.rules import registry, steps, values  # noqa: F401  # the last two register theirs
    from gaff.training.watch.watcher import Settings, Watcher

    tell = None if settings["quiet"] or os.environ.get("RANK", "0") != "0" else _Told(settings["plain"])
    watcher = Watcher(
        Settings(
            out=Path(settings["out"]),
            only=tuple(settings["only"]),
            skip=tuple(settings["skip"]),
            every=settings["every"],
            budget=settings["budget"],
            rules=tuple(registry.select(settings["rules_off"])),
            tell=tell,
            interval_s=settings["interval_s"],
            keep_batch=settings["keep_batch"],
            rank=int(os.environ.get("RANK", "0")),
            is_lazy=True,
        )
    )
    watcher.open()


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
