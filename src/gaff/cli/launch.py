"""A watched command from start to end: a folder for the record, the process of the command, what is told of it.

The command is started as it was given, with the same folder, input and outputs. Its environment has two things more:
the settings as JSON, and a folder with a ``sitecustomize`` first on the path of imports, which begins to watch in every
Python process of the command that imports torch.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaff.cli.printing import show, terminal_width
from gaff.cli.processes import Processes
from gaff.cli.signals import HandedOn
from gaff.errors import GaffError, PlanError, RecordError
from gaff.record.experiments import FOLDER, TRIED
from gaff.record.flight import ENDING as RING
from gaff.record.run import ENDING, HEAD, VERSION, Record
from gaff.training.watch.settings import VARIABLE, Settings, to_stderr
from gaff.version import __version__
from gaff.views import run_text
from gaff.views.text import fitting, printable

_IDLE_S = 600


def launch(
    command: list[str],
    program: str,
    settings: Settings,
    *,
    out: str | None,
    force: bool,
    live: bool,
    quiet: bool,
    plain: bool,
) -> int:
    """Run ``command``, whose first word is found at ``program``, and tell on standard error what watching it has shown.

    ``out``: a new folder for the record, by default one of its own under ``gaff-runs``; ``force``: a run that is there
    is removed; ``live``: serve a page of it.
    Returns the exit code of the command; where a signal ended it, the same signal ends this process.
    """
    _check_kernel()
    folder = make_folder(out, command, force=force)
    _build_kernel(is_told=not quiet)
    told = replace(settings, out=folder.resolve()).to_json()
    inherited = environment({**told, "quiet": quiet, "plain": plain})
    if live:
        _serve(folder)
    with HandedOn() as signals:
        child = start(command, program, env=inherited)
        processes = Processes(child.pid)
        signals.to(child, processes)
        code = _wait(child, processes)
    is_known = processes.gone is not None and (processes.gone["how"] or code)  # else it may have ended well
    gone = {"gone": processes.gone} if is_known else {}
    _note(folder, {"code": code, **gone})
    _tell(folder, quiet=quiet, plain=plain)
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL has no handler to be taken back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def start(command: list[str], program: str, **more: Any) -> subprocess.Popen[Any]:
    """Start a command as a shell would: with what this process has inherited itself, and a text without ``#!`` by a
    shell. ``more`` is for ``subprocess.Popen``. Raises PlanError where it cannot be started."""
    try:
        child = subprocess.Popen(command, executable=program, close_fds=False, **more)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise PlanError(f"{program!r} cannot be started: {error.strerror}") from None
        child = subprocess.Popen(["sh", program, *command[1:]], close_fds=False, **more)
    if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else its exit code is thrown away
    return child


def command_of(words: list[str], name: str) -> tuple[list[str], str]:
    """The command after ``--`` of ``gaff NAME``, and where its program is. Raises PlanError where there is none.

    A script of Python that is no program by itself is run by the Python that runs gaff.
    """
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise PlanError(f"no command: expected gaff {name} [options] -- python train.py")
    program = shutil.which(command[0])
    if program is None and command[0].endswith(".py") and Path(command[0]).is_file():
        return [sys.executable, *command], sys.executable
    if program is None and Path(command[0]).is_file():
        raise PlanError(f"{command[0]!r} is no program: expected one before it, as in python {command[0]}, or chmod +x")
    if program is None:
        raise PlanError(f"{command[0]!r} is not found: expected a program, such as python")
    return command, program


def make_folder(out: str | None, command: list[str], *, force: bool = False) -> Path:
    """A new folder with what the run is; raises RecordError where there is one already, unless ``force`` removes it.

    The head is written by whoever makes its file: of two commands that begin at once with one folder, one is refused.
    """
    if out == "":
        raise PlanError("--out is empty: expected the name of a folder, or no --out for one of its own")
    folder = Path(out) if out is not None else _own_folder(command)
    try:
        there = [one for what in (HEAD, f"*{ENDING}", f"*{RING}", "batches/*.safetensors") for one in folder.glob(what)]
    except OSError as error:  # such a name cannot be
        raise RecordError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{str(folder)!r} is no folder: expected a new one for the record")
    if there and not force:
        free = next(one for number in itertools.count(2) if not (one := Path(f"{folder}-{number}")).exists())
        raise RecordError(
            f"{str(folder)!r} holds a run already ({_what(folder)}): expected a new folder, such as --out {free}, or "
            "--force to remove that run"
        )
    try:
        for file in (*there, *(folder.glob(TRIED) if there else ())):
            file.unlink()
        if there:
            shutil.rmtree(folder / FOLDER, ignore_errors=True)  # experiments of a run that is removed
        folder.mkdir(parents=True, exist_ok=True)
        head = {"version": VERSION, "gaff": __version__, "command": command, "began": time.time()}
        with (folder / HEAD).open("x") as new:
            new.write(json.dumps(head, indent=1))
    except OSError as error:
        raise RecordError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    return folder


def _own_folder(command: list[str]) -> Path:
    """A folder below ``gaff-runs`` that nobody else has, made just now: by time and script, numbered where it must be.

    Raises RecordError where none can be made.
    """
    script = next((Path(word).stem for word in command[1:] if word.endswith(".py")), Path(command[0]).name)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{script}"
    for number in itertools.count(1):
        folder = Path("gaff-runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue  # of a command that began in the same second
        except OSError as error:
            raise RecordError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    raise AssertionError("numbers do not end")


def _what(folder: Path) -> str:
    """The run in a folder in a few words, for a message: its command or its steps."""
    if not any(folder.glob(f"*{ENDING}")):
        return "nothing is recorded yet"
    try:
        record = Record(folder)
    except RecordError as error:
        return str(error)
    command = record.head.get("command")
    words = f"{' '.join(map(str, command))}, " if isinstance(command, list) else ""
    return f"{words}{record.steps} steps"


def _check_kernel() -> None:
    """Raise PlanError where ``GAFF_KERNEL`` names no kernel: what is watched would end its looks with that."""
    from gaff.training.statistics import kernel

    choice, known = os.environ.get("GAFF_KERNEL", ""), (kernel.NATIVE, kernel.PLAIN, *kernel.LEVELS)
    if choice and choice not in known:
        raise PlanError(f"GAFF_KERNEL={choice!r}: expected one of {', '.join(known)}")


def _build_kernel(*, is_told: bool) -> None:
    """Once a machine: a few seconds that make every look cheaper. Without a compiler plain torch counts."""
    from gaff.training.statistics import kernel

    is_packed = any(kernel.packed(level).is_file() for level in kernel.LEVELS)
    choice = os.environ.get("GAFF_KERNEL", "")
    if choice not in ("", kernel.NATIVE) or (is_packed and not choice) or kernel.path_of_build().is_file():
        return
    if is_told:
        to_stderr("gaff: building the statistics kernel, once for this machine")
    try:
        kernel.build()
    except GaffError as error:
        to_stderr(f"gaff: no kernel, looks are slower: {error}")


def environment(told: Mapping[str, Any]) -> dict[str, str]:
    """The environment of the command: ``told`` in a variable, and what reads it there first on the path of imports."""
    inject = str(Path(__file__).parent.parent / "training" / "watch" / "inject")
    known = os.environ.get("PYTHONPATH", "")
    paths = [inject, *([known] if known else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(told)}


def _serve(folder: Path) -> None:
    """A page of its own process: it outlives the run until nobody has looked for ten minutes, and holds no pipe."""
    command = [sys.executable, "-m", "gaff", "report", "--live", "--idle", str(_IDLE_S), str(folder)]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert server.stderr is not None
    to_stderr(server.stderr.readline().decode(errors="replace").rstrip("\n"))  # its address, or why there is none
    server.stderr.close()


def _note(folder: Path, told: dict[str, Any]) -> None:
    """Add to what is known of the run. Where it cannot be written, the record lacks it, and that is said."""
    head = folder / HEAD
    try:
        head.write_text(json.dumps({**json.loads(head.read_text()), **told}, indent=1))
    except (OSError, ValueError) as error:
        to_stderr(f"gaff: {head} cannot be written: {error}")


def _wait(child: subprocess.Popen[Any], processes: Processes) -> int:
    """Until the command ends."""
    try:
        while (code := child.poll()) is None:
            processes.wait()
            processes.look()
        return code
    finally:
        processes.close()


def _tell(folder: Path, *, quiet: bool, plain: bool) -> None:
    """The report, on standard error: standard output is the command's."""
    try:
        record = Record(folder)
    except RecordError:
        to_stderr(f"gaff: {_why_none(folder)}")
        return
    if not quiet:
        with suppress(OSError, ValueError):  # nobody reads it, or not these characters
            with fitting(terminal_width(sys.stderr)):
                text = run_text.report(record, plain=plain, brief=True)
            told = printable(f"{text}\ngaff report {shlex.quote(str(folder))} tells more of each finding")
            print(told, file=sys.stderr, flush=True) if plain else show(told, stream=sys.stderr)


def _why_none(folder: Path) -> str:
    """Why there is no record in ``folder``, as far as can be seen there after the command has ended."""
    if not (folder / HEAD).is_file():
        return f"nothing is recorded: {folder} was removed, or what was in it, while the command ran"
    if list(folder.glob(f"*{ENDING}")):
        return f"nothing is recorded: a record was begun in {folder}, and could not be written"
    probe = folder / ".room"
    try:
        probe.write_bytes(bytes(1 << 16))
    except OSError as error:
        return f"nothing is recorded: {folder} cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return (
        "nothing was watched: gaff saw no torch model being trained (it sees none in a process that was forked, as "
        "multiprocessing does without set_start_method('spawn'), nor in a Python that was started with -I, -E or -S); "
        f"{folder} holds no record"
    )
