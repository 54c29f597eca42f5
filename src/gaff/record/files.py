"""The files of a record: what ``run.json`` says, and the logs of its processes in their order. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gaff.errors import RecordError
from gaff.record.log import MAGIC, LogReader
from gaff.record.part import RankPart


def in_order(files: list[Path]) -> list[Path]:
    """Logs by their rank; of those without one, which all are 0, first the processes that train, where others only call
    a model, then the main one."""
    return sorted(files, key=lambda one: (rank_of(one), len(files) > 1 and not _trains(one), len(one.name)))


def _trains(file: Path) -> bool:
    """Whether a process has written a step of an optimizer so far."""
    part = RankPart(0, LogReader(file))
    if file.stat().st_size >= len(MAGIC):
        part.read()
    return "lr" in part.logged


def rank_of(file: Path) -> int:
    """The rank in the name of a file: 3 of ``rank3.gaff``, whatever follows a hyphen; 0 of any other."""
    digits = file.stem.removeprefix("rank").partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def read_head(path: Path, latest: int) -> dict[str, Any]:
    """What ``run.json`` says; empty where there is none. Raises RecordError for one that a later gaff
    has written, of a version above ``latest``."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from None
    version = found.get("version") if isinstance(found, dict) else None
    if not isinstance(version, int) or version > latest:
        raise RecordError(f"{path}: version {version!r} of the format: this gaff reads up to {latest}; install a later")
    return dict(found)
