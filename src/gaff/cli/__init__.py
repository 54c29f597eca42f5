"""The command line. Importing it, ``gaff --help`` and the help of every command load neither torch nor any model.

Each command is a file of this folder, with its one-line summary, its parser and its run: see ``Command``. A new
command is such a file and a line in ``COMMANDS``. The other files hold what several commands need: ``parser`` reads
words, ``options`` declares what commands share, ``models``, ``inputs`` and ``tensors`` make what words name,
``printing`` prints, ``launch``, ``processes``, ``signals`` and ``script`` run programs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from gaff.cli import (
    anatomy,
    apply,
    check,
    diff,
    doctor,
    export,
    harvest,
    nan,
    replay,
    report,
    runs,
    sites,
    take,
    trace,
    try_,
    watch,
)
from gaff.cli.options import columns_of
from gaff.cli.parser import Parser, did_you_mean
from gaff.cli.printing import data_alone, is_unread, terminal_width
from gaff.errors import GaffError
from gaff.training.watch.settings import to_stderr
from gaff.version import FOLDER, __version__
from gaff.views.text import fitting


class Command(Protocol):
    """What the file of a command holds.

    It imports neither torch nor numpy before ``run`` is called, so that help and slips of the keyboard are answered at
    once; ``run`` imports what it needs.
    """

    SUMMARY: str  # one line, for the list of commands

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command, and end its help with an example, the parser's ``epilog``."""

    def run(self, options: argparse.Namespace) -> int:
        """Do what was asked, and return the exit code. What it raises is told in one line, with exit code 1."""


COMMANDS: Mapping[str, Command] = {
    "trace": trace,
    "take": take,
    "harvest": harvest,
    "check": check,
    "sites": sites,
    "apply": apply,
    "anatomy": anatomy,
    "nan": nan,
    "watch": watch,
    "try": try_,
    "report": report,
    "runs": runs,
    "diff": diff,
    "export": export,
    "doctor": doctor,
    "replay": replay,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` asks for, by default that of this process.

    Returns the exit code. 0: done; 1: an error, told in one line; 3: a command that looks for something has found it;
    2: nothing was asked for. Leaves by SystemExit, with 2, where the words were not understood. ``gaff watch`` returns
    the code of the command that it ran.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    top = _top()
    if words[:1] == ["help"]:
        words = [*(word for word in words[1:2] if word != "help"), "--help"]
    if not words or words[0].startswith("-"):
        top.read(words)
        top.print_help()
        return 2
    name, *rest = words
    if name not in COMMANDS:
        top.error(
            f"{name!r} is no command: expected one of {', '.join(COMMANDS)}{did_you_mean(name, [*COMMANDS, 'help'])}"
        )
    parser = parser_of(name)
    return _run(COMMANDS[name], parser.read(rest), is_process=argv is None)


def parser_of(name: str) -> Parser:
    """The parser of one command, by its name in ``COMMANDS``; nothing of other commands is made."""
    parser = Parser(prog=f"gaff {name}", description=COMMANDS[name].SUMMARY)
    COMMANDS[name].add_to(parser)
    return parser


def _top() -> Parser:
    """What is understood before a command, and the list of commands."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {command.SUMMARY}" for name, command in COMMANDS.items()]
    parser = Parser(
        prog="gaff",
        usage="gaff [-h] [--version] COMMAND ...",
        description="See, keep and change any tensor that flows through any PyTorch model,\nwithout editing the model.",
        epilog="\n".join(["commands:", *lines, "", "gaff COMMAND --help tells of one, with an example"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gaff {__version__}")
    return parser


def _run(command: Command, options: argparse.Namespace, *, is_process: bool) -> int:
    """The exit code: that of the command, 0 where the reader of a pipe has seen enough, 130 after Ctrl-C, else 1.

    ``is_process``: the command is all that this process was started for.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and command is not nan:  # which runs a script of the user's in here
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that its encoding does not have
    is_data = command is not watch and bool(getattr(options, "json", False) or getattr(options, "plain", False))
    code = 0
    try:
        alone = data_alone(is_asked=is_data, until_exit=is_process)
        with fitting(terminal_width(), columns_of(options)) as tables, alone:
            code = command.run(options)
        if tables.complaint:
            to_stderr(f"gaff: {tables.complaint}")
            code = code or 1
        if sys.stdout is not None:  # a shell may start a program without any
            sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        if sys.stdout is None or not is_unread(sys.stdout):  # of somebody's code, in another pipe
            to_stderr(_one_line(error))
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # whatever a model or a file does, the user gets one line
        if options.debug:
            raise
        to_stderr("\n".join([_one_line(error), *_more(error)]))
        return 1


def _more(error: Exception) -> list[str]:
    """What is known besides of an error: the module that raised it, and, of somebody else's code, its file and line."""
    told = [note for note in getattr(error, "__notes__", ()) if note.startswith("gaff: ")]
    place = "" if isinstance(error, GaffError) else _users_place(error)
    return [*told, f"gaff: at {place}; --debug shows all of it"] if place else told


def _users_place(error: Exception) -> str:
    """File and line of the user's own code nearest to where an error was raised; empty where there is none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((FOLDER, "<")) and "site-packages" not in file and not file.startswith(sys.base_prefix):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _one_line(error: Exception) -> str:
    """An error as one line that a terminal can show; the kind of the error is told where it is not gaff's own."""
    kind = "" if isinstance(error, GaffError) else f"{type(error).__name__}: "
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or "no message"
    return f"gaff: {kind}{text if len(text) <= 500 else text[:499] + '~'}"
