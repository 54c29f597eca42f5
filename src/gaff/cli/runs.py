"""``gaff runs [FOLDER]``: the runs of a folder, a line each."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from gaff.errors import RecordError
from gaff.record.run import ENDING, Record
from gaff.views import run_text
from gaff.views.text import printable, table


def run(options: Namespace) -> int:
    folder = Path(options.folder)
    if not folder.is_dir():
        raise RecordError(f"{options.folder!r} is no folder: expected one that holds runs of gaff watch")
    rows = [_told(one) for one in sorted(folder.iterdir()) if one.is_dir() and list(one.glob(f"*{ENDING}"))]
    if not rows:
        raise RecordError(f"{options.folder!r} holds no run: expected folders that gaff watch has written")
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        head = ("run", "began", "steps", "findings", "ended", "verdict")
        cells = [tuple(printable(str(row[name]), keep="") for name in head) for row in rows]
        print(table(head, cells, right=("steps", "findings")))
    return 0


def _told(path: Path) -> dict[str, Any]:
    """One that cannot be read is told as such: it must not hide the others."""
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
