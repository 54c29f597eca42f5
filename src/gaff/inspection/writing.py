"""Writing what ``gaff`` tells: as JSON that any reader takes, and the names of files that it goes to."""

from __future__ import annotations

import math
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from gaff.errors import PlanError

_FORMATS = {".csv", ".gif", ".htm", ".html", ".jpeg", ".jpg", ".json", ".md", ".npy", ".npz", ".parquet", ".pdf",
            ".pkl", ".png", ".pt", ".pt2", ".pth", ".safetensors", ".svg", ".tsv", ".txt", ".xlsx"}  # fmt: skip


def ending(path: str | PathLike[str], *known: str) -> str:
    """How a name ends, as ``.json``, in lower case. Raises PlanError for a format that is not among the ``known``,
    and for what is no path."""
    if not isinstance(path, (str, PathLike)):
        raise PlanError(f"{path!r:.60} is no path: expected the name of a file")
    found = Path(path).suffix.lower()
    if found in _FORMATS and found not in known:
        choice = " or ".join(known)
        raise PlanError(f"{fspath(path)!r}: {found} cannot be written: expected a name that ends in {choice}")
    return found


def worded(value: Any) -> Any:
    """A copy of JSON data in which numbers that are not finite are objects with the number as text."""
    if isinstance(value, dict):
        return {name: worded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [worded(inner) for inner in value]
    return {"number": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def number_of(told: dict[str, Any]) -> Any:
    """Inverse of ``worded`` for one object of JSON. Raises ValueError where the text is no number."""
    return float(told["number"]) if told.keys() == {"number"} else told
