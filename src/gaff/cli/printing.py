"""How results are printed: as data, as cells for other programs, or as a table that fits the terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any


def print_data(told: Any) -> None:
    """Print JSON, for ``--json``."""
    print(json.dumps(told, indent=1))


def print_cells(rows: Iterable[Sequence[str]]) -> None:
    """Print a line for each row, its cells separated by tabs, for ``--plain``."""
    for row in rows:
        print("\t".join(row))


def terminal_width(stream: Any = None) -> int | None:
    """Columns to fit into; None where the output, ``stream`` or standard output, is a file or a pipe, or is none."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def show(text: str, *, stream: Any = None) -> None:
    """Print a text for people, in colours where it goes to a terminal, the package rich is there, and none forbids it.

    ``stream``: where to, else standard output. Colours only tell again what words say; NO_COLOR in the environment
    keeps them out.
    """
    stream = sys.stdout if stream is None else stream
    if stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and find_spec("rich") is not None:
        from gaff.cli.colors import paint

        paint(text, stream)
    else:
        print(text, file=stream)
