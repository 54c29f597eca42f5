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
def data_alone(*, is_asked: bool) -> Iterator[None]:
    """Where data ``is_asked`` for, nothing else reaches standard output: what a model prints goes to standard error."""
    if not is_asked or sys.stdout is None:
        yield
        return
    _DATA.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _DATA.pop()


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
