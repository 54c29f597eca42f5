"""How results are printed: as data, as cells for other programs, or as a table that fits the terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_data(told: Any) -> None:
    """Print JSON, for ``--json``."""
    print(json.dumps(told, indent=1))


def print_cells(rows: Iterable[Sequence[str]]) -> None:
    """Print a line for each row, its cells separated by tabs, for ``--plain``."""
    for row in rows:
        print("\t".join(row))


def terminal_width() -> int | None:
    """Columns to fit into; None where the output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
