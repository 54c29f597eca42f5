"""Signals for a command that another process has started: who sends them knows only the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from gaff.cli.processes import Processes
from gaff.training.watch.settings import to_stderr

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGQUIT")


class HandedOn:
    """A block in which the signals that would end this process, or ask it for something, go to its command instead.

    One that comes before the command is known is kept for it. What this process was started to ignore, as under
    ``nohup``, is ignored until then: the command inherits that, and could not inherit a handler. Until then Ctrl-C ends
    this process.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # what was there before, by signal
        self._early: list[int] = []
        self._send: Callable[[int], None] = self._early.append

    def __enter__(self) -> HandedOn:
        self._hear(lambda number: number != signal.SIGINT and signal.getsignal(number) != signal.SIG_IGN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._known.items():
            signal.signal(number, before)

    def to(self, child: subprocess.Popen[Any], processes: Processes) -> None:
        """Send everything to ``child``, the first of ``processes``, from now on, with what has come already."""

        def send(number: int) -> None:
            name = signal.Signals(number).name
            processes.are_told = processes.are_told or name in _ENDING
            if name == "SIGUSR1" and (takers := processes.taking(number)) is not None:
                _ask(takers, number)
            elif number != signal.SIGINT or not _is_in_foreground():  # a terminal interrupts the command by itself
                child.send_signal(number)

        self._send = send
        self._hear(lambda number: number not in self._known)
        while self._early:
            send(self._early.pop(0))

    def _hear(self, is_meant: Callable[[int], bool]) -> None:
        for number in (getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)):
            if is_meant(number):
                self._known[number] = signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._send(number)


def _ask(takers: list[int], number: int) -> None:
    """Send a signal that asks for something to processes that have a handler for it; others would end by it."""
    for pid in takers:
        with suppress(OSError):
            os.kill(pid, number)
    if not takers:
        to_stderr(f"gaff: {signal.Signals(number).name} is not handed on: nothing in the command takes it yet")


def _is_in_foreground() -> bool:
    """Whether a terminal interrupts this process and, as it is of the same group, the command."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
