"""The files of a record: what ``run.json`` says, and the logs of its processes in their order. Needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gaff.errors import RecordError
from gaff.record.groups import helpers
from gaff.record.log import MAGIC, LogReader
from gaff.record.part import RankPart


def with_new(parts: list[RankPart], files: Iterable[Path]) -> list[RankPart]:
    """Processes of a record with those whose logs are not among them yet, in the order of their numbers: their ranks.

    Later logs that are still too short to be one wait for the next time. Of several with one rank, as processes without
    ranks are, or those of groups that came one after another, later ones get the next free numbers.
    """
    found, known = list(parts), {part.reader.path for part in parts}
    unknown = [one for one in files if one not in known and one.is_file()]
    before = Counter(part.own for part in parts)
    new: list[tuple[int, int, Path]] = []
    for file in _in_order([one for one in unknown if not known or one.stat().st_size >= len(MAGIC)]):
        own = rank_of(file)
        new.append((before[own], own, file))
        before[own] += 1
    for generation, own, file in sorted(new, key=lambda one: one[:2]):
        is_free = all(part.rank != own for part in found)
        number = own if is_free else 1 + max(part.rank for part in found)
        found.append(RankPart(number, LogReader(file), own, generation))
    return sorted(found, key=lambda part: part.rank)


def _in_order(files: list[Path]) -> list[Path]:
    """Logs by their rank; of those without one, which all are 0, first the processes that train, where others only call
    a model, then those that no other one of them has started, then the main one, and then as they began."""
    if len(files) < 2:
        return files
    parts = [RankPart(0, LogReader(file)) for file in files]
    for one in parts:
        if one.reader.path.stat().st_size >= len(MAGIC):
            one.read()
    aside = {one.reader.path for one in helpers(parts)}
    told = {one.reader.path: (not one.trains, one.reader.path in aside, "-" in one.reader.path.stem, one.began_at)
            for one in parts}  # fmt: skip
    return sorted(files, key=lambda one: (rank_of(one), *told[one]))


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
