"""``gaff runs [FOLDER]``: the runs of a folder, a line each.

Needs no torch. What is no run is passed over; a run that cannot be read has the reason in its line.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gaff.cli.options import add_columns, add_debug, add_json
from gaff.errors import RecordError

if TYPE_CHECKING:
    from pathlib import Path

SUMMARY = "list the runs of a folder, with their verdicts"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the folder that holds the runs."""
    parser.add_argument("folder", nargs="?", default="gaff-runs", metavar="FOLDER", help="(default: gaff-runs)")
    add_json(parser, "print data instead of a table")
    add_columns(parser)
    add_debug(parser)
    parser.epilog = "example: gaff runs runs"


def run(options: argparse.Namespace) -> int:
    """Read every run of the folder, and print a line for each."""
    from pathlib import Path

    from gaff.cli.printing import print_data, show
    from gaff.record.run import ENDING
    from gaff.views.text import printable, table

    folder = Path(options.folder)
    if not folder.is_dir():
        raise RecordError(f"{options.folder!r} is no folder: expected one that holds runs of gaff watch")
    rows = [_told(one) for one in sorted(folder.iterdir()) if one.is_dir() and list(one.glob(f"*{ENDING}"))]
    if not rows:
        raise RecordError(f"{options.folder!r} holds no run: expected folders that gaff watch has written")
    if options.json:
        print_data(rows)
    else:
        head = ("run", "began", "steps", "findings", "ended", "verdict")
        cells = [tuple(printable(str(row[name]), keep="") for name in head) for row in rows]
        show(table(head, cells, right=("steps", "findings")))
    return 0


def _told(path: Path) -> dict[str, Any]:
    """The line of one run. One that cannot be read is told as such: it must not hide the others."""
    import time

    from gaff.record.run import Record
    from gaff.views import run_text

    try:
        record = Record(path)
        began = record.head.get("began")
        is_time = isinstance(began, (int, float)) and 0 <= began < 1e11
        return {
            "run": str(path),
            "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if is_time else "",
            "steps": record.steps,
            "findings": sum(not one.is_over for one in record.findings),
            "ended": "yes" if record.is_complete else "no",
            "verdict": run_text.verdict(record),
        }
    except Exception as error:  # noqa: BLE001  # whatever is wrong with one, the others are told
        return {"run": str(path), "began": "", "steps": "", "findings": "", "ended": "", "verdict": str(error)}
