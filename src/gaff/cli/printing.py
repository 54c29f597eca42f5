"""How results are printed: as data, as cells for other programs, or as a table that fits the terminal."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

_DATA: list[Any] = []  # the stream of data, where all else that is printed goes to standard error


@contextmanager
def data_alone(*, is_asked: bool, until_exit: bool = False) -> Iterator[None]:
    """Where data ``is_asked`` for, nothing else reaches standard output: what a model prints goes to standard error.

    So does what its extensions in C and its child processes print; with ``until_exit`` also what is printed when the
    process ends.
    """
    if not is_asked or sys.stdout is None:
        yield
        return
    aside = _set_aside(sys.stdout)
    _DATA.append(sys.stdout if aside is None else aside)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _DATA.pop()
        if aside is not None and not until_exit:
            sys.stdout.flush()
            os.dup2(aside.fileno(), sys.stdout.fileno())
            aside.close()


def _set_aside(stream: Any) -> Any:
    """Standard output by another descriptor, while its own leads to standard error; None for streams in memory."""
    try:
        own = stream.fileno()
        errors = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # ValueError: it is closed
        return None
    stream.flush()
    aside = os.fdopen(os.dup(own), "w", encoding=stream.encoding, errors=stream.errors)
    os.dup2(errors, own)
    return aside


def print_data(told: Any) -> None:
    """Print JSON, for ``--json``. A number that is not finite is an object, ``{"number": "nan"}``, as in a trace."""
    from gaff.inspection.writing import worded

    print_text(json.dumps(worded(told), indent=1, allow_nan=False))


def print_cells(rows: Iterable[Sequence[str]]) -> None:
    """Print a line for each row, its cells separated by tabs, for ``--plain``."""
    for row in rows:
        print_text("\t".join(row))


def print_text(text: str) -> None:
    """Print data as they are. A reader that has seen enough, such as head, ends it without an error."""
    _put(text, _DATA[-1] if _DATA else sys.stdout)


def is_unread(stream: Any) -> bool:
    """Whether the reader of a pipe, such as head, has seen enough and gone."""
    asked = select.poll()
    asked.register(stream.fileno(), 0)
    return bool(asked.poll(0))


def _put(text: str, stream: Any) -> None:
    """Print to a stream that nobody may read any more: what comes after that goes nowhere, and the command goes on."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        if not is_unread(stream):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def terminal_width(stream: Any = None) -> int | None:
    """Columns to fit into; None where the output, ``stream`` or standard output, is a file or a pipe, or is none."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def has_boxes(stream: Any) -> bool:
    """Whether a stream's encoding has the characters of boxes and curves; cp1252, of pipes on Windows, has not."""
    try:
        "┌─█".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def show(text: str, *, stream: Any = None) -> None:
    """Print a text for people, in colours where it goes to a terminal, the package rich is there, and none forbids it.

    ``stream``: where to, else standard output. Colours only tell again what words say; NO_COLOR in the environment
    keeps them out.
    """
    stream = sys.stdout if stream is None else stream
    if stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and find_spec("rich") is not None:
        from gaff.cli.colors import paint

        paint(text, stream)
    elif stream is not None:
        _put(text, stream)
