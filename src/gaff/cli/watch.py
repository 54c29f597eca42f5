"""``gaff watch -- COMMAND``: run a command as it is, watch what it trains, and tell what was found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from gaff.cli.processes import Processes
from gaff.cli.report import need_numpy
from gaff.errors import GaffError, PlanError, RecordError
from gaff.record.run import ENDING, HEAD, VERSION, load
from gaff.training.watch.settings import VARIABLE
from gaff.version import __version__
from gaff.views import run_text

_IDLE_S = 600
_GLANCE_S = 0.02  # torchrun takes notice of an ended process within a tenth of a second
_SEARCH_S = 0.5  # while there is none to look at
_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGQUIT")


def run(options: Namespace) -> int:
    """The exit code is the command's; where a signal ended it, the same signal ends this process."""
    command = options.rest[1:] if options.rest[:1] == ["--"] else options.rest
    if not command:
        raise PlanError("no command: expected gaff watch [options] -- python train.py")
    program = shutil.which(command[0])
    if program is None:
        raise PlanError(f"{command[0]!r} is not found: expected a program, such as python")
    _check(options)
    if options.live:
        need_numpy("--live")
    if options.keep_batch and find_spec("safetensors") is None:
        raise PlanError("--keep-batch needs safetensors, which is not installed: pip install 'gaff[files]'")
    out = _folder(options.out, command)
    _build_kernel(options)
    environment = _environment(options, out)
    if options.live:
        _serve(out)
    child = subprocess.Popen(command, executable=program, env=environment)
    processes = Processes(child.pid)
    code = _wait(child, processes)
    if processes.gone is not None:
        _note(out, {"gone": processes.gone})
    _tell(out, options)
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL has no handler to be taken back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _folder(out: str | None, command: list[str]) -> Path:
    """A new folder with what the run is; raises RecordError where there is one already."""
    name = next((Path(word).stem for word in command[1:] if word.endswith(".py")), Path(command[0]).name)
    folder = Path(out) if out else Path("gaff-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    if folder.exists() and (not folder.is_dir() or (folder / HEAD).exists() or list(folder.glob(f"*{ENDING}"))):
        raise RecordError(f"{str(folder)!r} holds a run already: expected a new folder; name another, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        head = {"version": VERSION, "gaff": __version__, "command": command, "began": time.time()}
        (folder / HEAD).write_text(json.dumps(head, indent=1))
    except OSError as error:
        raise RecordError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    return folder


def _check(options: Namespace) -> None:
    if not 0 < options.budget < 1:
        raise PlanError(f"--budget {options.budget}: expected a share of the time between 0 and 1, such as 0.01")
    if options.every is not None and options.every < 1:
        raise PlanError(f"--every {options.every}: expected a number of steps, 1 or more")
    if options.rules_off:
        from gaff.training.rules import registry, steps, values  # noqa: F401

        registry.select(options.rules_off)
    from gaff.address.grammar import parse

    for pattern in (*options.only, *options.skip):
        parse(pattern)


def _build_kernel(options: Namespace) -> None:
    """Once a machine: a few seconds that make every look cheaper. Without a compiler plain torch counts."""
    from gaff.training.statistics import kernel

    if os.environ.get("GAFF_NO_KERNEL") or kernel.path_of_build().is_file() or kernel.PACKED.is_file():
        return
    if not options.quiet:
        sys.stderr.write("gaff: building the statistics kernel, once for this machine\n")
    try:
        kernel.build()
    except GaffError as error:
        sys.stderr.write(f"gaff: no kernel, looks are slower: {error}\n")


def _environment(options: Namespace, out: Path) -> dict[str, str]:
    inject = str(Path(__file__).parent.parent / "training" / "watch" / "inject")
    known = os.environ.get("PYTHONPATH", "")
    settings = {
        "out": str(out.resolve()),
        "only": options.only,
        "skip": options.skip,
        "every": options.every,
        "budget": options.budget,
        "rules_off": options.rules_off,
        "quiet": options.quiet,
        "plain": options.plain,
        "interval_s": options.interval,
        "keep_batch": options.keep_batch,
    }
    paths = [inject, *([known] if known else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(settings)}


def _serve(out: Path) -> None:
    """A page of its own process: it outlives the run until nobody has looked for ten minutes, and holds no pipe."""
    command = [sys.executable, "-m", "gaff", "report", "--live", "--idle", str(_IDLE_S), str(out)]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert server.stderr is not None
    sys.stderr.write(server.stderr.readline().decode(errors="replace"))  # its address, or why there is none
    sys.stderr.flush()
    server.stderr.close()


def _note(out: Path, told: dict[str, Any]) -> None:
    """Add to what is known of the run. Where it cannot be written, the record lacks it, and that is said."""
    head = out / HEAD
    try:
        head.write_text(json.dumps({**json.loads(head.read_text()), **told}, indent=1))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"gaff: {head} cannot be written: {error}\n")


def _wait(child: subprocess.Popen[Any], processes: Processes) -> int:
    """Until the command ends. Ctrl-C reaches it from the terminal by itself; other signals are handed on."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    known = {signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None)}
    for name in _FORWARDED:
        if hasattr(signal, name):
            number = getattr(signal, name)
            known[number] = signal.signal(number, hand_on)
    try:
        while True:
            try:
                return child.wait(_GLANCE_S if processes.has_ranks else _SEARCH_S)
            except subprocess.TimeoutExpired:
                processes.look()
    finally:
        for number, before in known.items():
            signal.signal(number, before)


def _tell(out: Path, options: Namespace) -> None:
    """The report, on standard error: standard output is the command's."""
    try:
        record = load(out)
    except RecordError:
        sys.stderr.write(f"gaff: nothing was watched: the command trained no torch model; {out} holds no record\n")
        return
    if not options.quiet:
        text = run_text.report(record, plain=options.plain, brief=True)
        sys.stderr.write(f"{text}\ngaff report {out} tells more of each finding\n")
