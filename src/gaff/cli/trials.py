"""Runs of one command for ``gaff try``: as it is, and with one thing changed, each with a record of its own.

The run as it is lies in the folder itself, the others in ``try/NAME`` below it, each with ``output.txt``, what it has
printed. ``try.json`` names those that were made.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaff.cli.launch import environment, make_folder, start
from gaff.errors import RecordError
from gaff.record.experiments import AGAIN, FOLDER, TRIED
from gaff.record.run import HEAD, VERSION, Record
from gaff.training.watch.settings import Settings, to_stderr
from gaff.version import __version__

OUTPUT = "output.txt"
_GLANCE_S = 0.1
_TOLD_S = 1.0


class Trials:
    """All runs of ``command``, whose program is at ``program``, of ``steps`` steps each, below the new folder ``out``.

    ``seconds``: what the run as it is took, from the start of its process to its end.
    """

    def __init__(self, command: list[str], program: str, out: str | None, steps: int, *, force: bool) -> None:
        self.folder = make_folder(out, command, force=force)
        self.seconds = 0.0
        self._command = command
        self._program = program
        self._steps = steps
        self._order: list[str] = []  # as they were asked for
        self._runs: dict[str, dict[str, Any]] = {}

    def as_it_is(self) -> int:
        """Run the command with nothing changed, and return its exit code."""
        return self._wait([self._start("", self.folder)])[0]

    def run(self, names: Iterable[str], jobs: int) -> None:
        """Run the command once for each experiment, ``jobs`` at a time, and note what was made after each."""
        left = list(names)
        self._order += left
        while left:
            now, left = left[:jobs], left[jobs:]
            self._wait([self._start(name, self.folder / FOLDER / name) for name in now])

    def output(self) -> str:
        """The last lines that the run as it is has printed."""
        lines = (self.folder / OUTPUT).read_text(errors="replace").splitlines()
        return "\n".join(lines[-3:])

    def _start(self, name: str, folder: Path) -> _Running:
        """Start a run, and return what is to be waited for.

        The run as it is is looked at as ``gaff watch`` would; of the others the loss is all that is needed.
        """
        if name:
            folder.mkdir(parents=True)
            head = {"version": VERSION, "gaff": __version__, "command": self._command, "experiment": name}
            (folder / HEAD).write_text(json.dumps({**head, "began": time.time()}, indent=1))
        settings = replace(Settings(), out=folder.resolve(), every=self._steps if name else None)
        changed = "" if name == AGAIN else name
        told = {**settings.to_json(), "quiet": True, "plain": True,
                "trial": {"experiment": changed, "steps": self._steps}}  # fmt: skip
        with (folder / OUTPUT).open("wb") as output:
            child = start(self._command, self._program, stdin=subprocess.DEVNULL, stdout=output,
                          stderr=subprocess.STDOUT, env=environment(told))  # fmt: skip
        return _Running(name, folder, child)

    def _wait(self, running: Sequence[_Running]) -> list[int]:
        """Until all have ended; tells of each on standard error. Ends them where this process is interrupted, or ended
        by SIGTERM, as a job is that somebody cancels."""
        told = time.monotonic()
        left = list(running)
        before = signal.signal(signal.SIGTERM, _ended_by) if _is_main_thread() else None
        try:
            while left:
                time.sleep(_GLANCE_S)
                for one in [one for one in left if one.child.poll() is not None]:
                    left.remove(one)
                    self._ended(one)
                if left and sys.stderr is not None and sys.stderr.isatty() and time.monotonic() - told > _TOLD_S:
                    told = time.monotonic()
                    line = ", ".join(f"{one.name or 'as it is'}: {one.steps()} of {self._steps}" for one in left)
                    sys.stderr.write(f"\r\033[Kgaff: {line} steps")
                    sys.stderr.flush()
        finally:
            for one in left:
                one.child.terminate()
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        return [one.child.returncode for one in running]

    def _ended(self, one: _Running) -> None:
        """Note a run that has ended, and tell of it."""
        seconds = time.monotonic() - one.began
        code = one.child.returncode
        clear = "\r\033[K" if sys.stderr is not None and sys.stderr.isatty() else ""
        failed = f", exit code {code}: see {one.folder / OUTPUT}" if code else ""
        to_stderr(f"{clear}gaff: {one.name or 'as it is'}: {one.steps()} steps in {seconds:.1f} s{failed}")
        if not one.name:
            self.seconds = seconds
            head = self.folder / HEAD
            head.write_text(json.dumps({**json.loads(head.read_text()), "code": code}, indent=1))
            return
        self._runs[one.name] = {"folder": str(one.folder.relative_to(self.folder)), "code": code, "seconds": seconds}
        made = {name: self._runs[name] for name in self._order if name in self._runs}
        (self.folder / TRIED).write_text(json.dumps({"steps": self._steps, "runs": made}, indent=1))


class _Running:
    """A run in progress."""

    def __init__(self, name: str, folder: Path, child: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.folder = folder
        self.child = child
        self.began = time.monotonic()

    def steps(self) -> int:
        """How many steps are in its record so far."""
        try:
            return Record(self.folder).steps
        except RecordError:
            return 0


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # no other may set a handler


def _ended_by(number: int, frame: Any) -> None:
    """Leave as a program does that a signal has ended."""
    raise SystemExit(128 + number)
