"""``gaff report RUN``: what was found in a watched run."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from gaff.record.run import Record, load
from gaff.views import watch_text


def run(options: Namespace) -> int:
    record = load(options.run)
    if options.json:
        print(json.dumps(to_json(record), indent=1))
    else:
        print(watch_text.report(record, plain=options.plain))
    return 0


def to_json(record: Record) -> dict[str, Any]:
    """Everything that a program may want of a run; NaN is written as null."""
    return {
        "run": str(record.path),
        "verdict": watch_text.verdict(record),
        "steps": record.steps,
        "ranks": record.ranks,
        "complete": record.is_complete,
        "overhead": record.overhead,
        "findings": [_finite(one.to_dict()) for one in record.findings],
        "sites": [_site(record, name) for name in record.sites],
        "scalars": {name: _pairs(record.scalar(name)) for name in record.scalars},
        "notes": record.notes,
    }


def _site(record: Record, name: str) -> dict[str, Any]:
    """The latest numbers of one site."""
    latest = record.latest(name)
    return {"site": name, **_finite(latest)}


def _pairs(series: Any) -> list[list[Any]]:
    return [[step, _finite(value)] for step, value in series]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value - value != 0 else value
