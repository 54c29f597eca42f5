"""Inside a watched command: begins to watch when torch has been imported, ends when the process does.

``gaff watch`` starts the command with its settings in an environment variable, which the command's own children
inherit, too. ``inject/sitecustomize.py`` calls ``start`` in each of these processes once torch is there.
"""

from __future__ import annotations

import json
import os
from typing import Any

from gaff.training.watch.settings import PROCESSES, VARIABLE, to_stderr


def start() -> None:
    """Begin to watch this process; called once, right after its first import of torch.

    Whatever goes wrong here is told in one line on the standard error, and stops nothing: the command runs unwatched.
    """
    try:
        settings = json.loads(os.environ[VARIABLE])
        _watch(settings)
    except Exception as error:  # noqa: BLE001  # the command is not ours to stop
        to_stderr(f"gaff: this process is not watched: {type(error).__name__}: {error}", is_first=True)


def _watch(told: dict[str, Any]) -> None:
    """Open a watcher with the settings ``told``; the exit of the process closes it.

    Only rank 0 tells anything on the terminal. The record is made with the first model, since many processes of a
    command import torch and train nothing.
    """
    from gaff.training.watch.settings import Settings
    from gaff.training.watch.watcher import Watcher

    rank = os.environ.get("RANK", "0")
    tell = None if told["quiet"] or rank != "0" else _Told(told["plain"])
    before = os.environ.get(PROCESSES, "").split()
    os.environ[PROCESSES] = " ".join([*before, str(os.getpid())])
    started_by = tuple(int(one) for one in before if one.isdigit())
    watcher = Watcher(Settings.from_json(told, tell=tell, rank=int(rank), started_by=started_by, is_lazy=True))
    watcher.open()
    if "trial" in told:  # of gaff try
        from gaff.training.diagnosis.trial import begin

        begin(told["trial"], watcher)


class _Told:
    """Writes lines for the terminal to the standard error of the command; ``plain`` keeps to ASCII.

    Called on the writer's thread and on the one that trains.
    """

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def __call__(self, text: str) -> None:
        from gaff.views.run_text import to_ascii

        to_stderr(to_ascii(text) if self._plain else text, is_first=True)
