"""``gaff report RUN``: what was found in a watched run, as text, data, a page, or a page that follows it."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gaff.errors import PlanError, RecordError
from gaff.record.run import Record, load
from gaff.views import run_text
from gaff.views.text import printable


def run(options: Namespace) -> int:
    if options.live:
        return _live(options)
    records = [load(one) for one in options.run]
    if options.html:
        return _html(records, options)
    for record in records:
        if options.json:
            print(json.dumps(to_json(record), indent=1))
        else:
            print(printable(run_text.report(record, plain=options.plain, most=10**6 if options.all else None)))
    return 0


def need_numpy(what: str) -> None:
    """Raises PlanError where it is not installed."""
    if find_spec("numpy") is None:
        raise PlanError(f"{what} needs numpy, which is not installed: pip install 'gaff[page]'")


def _html(records: list[Record], options: Namespace) -> int:
    need_numpy("--html")
    from gaff.views.page.run import document

    for record in records:
        if options.rank not in record.ranks:
            raise RecordError(f"no rank {options.rank} in {record.path}: expected one of {record.ranks}")
    size = document(records, rank=options.rank).save(options.html)
    print(f"{options.html}: {size / 1e6:.1f} MB, open it in a browser; it needs no network")
    return 0


def _live(options: Namespace) -> int:
    """Serve until Ctrl-C; with ``--idle`` until the run is over and nobody looks any more."""
    need_numpy("--live")
    from gaff.views.page.live import Board, Server

    if options.idle is None:
        for one in options.run:
            load(one)  # what is no run is told before anything is served
    with suppress(OSError):  # a system that has no such thing: then the page is as important as the training
        os.nice(10)
    board = Board([Path(one) for one in options.run], options.rank)
    try:
        server = Server(board, options.port)
    except (OSError, OverflowError) as error:
        raise PlanError(f"port {options.port} cannot be used: {error}; leave --port out for any that is free") from None
    sys.stderr.write(f"gaff: live page at {server.url}\n")
    sys.stderr.flush()
    if options.idle is not None:  # beside a watched command: nothing more is said, and nobody's pipe is held open
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with suppress(KeyboardInterrupt):
        server.follow(options.idle)
    return 0


def to_json(record: Record) -> dict[str, Any]:
    """Everything that a program may want of a run; NaN is written as null."""
    return {
        "run": str(record.path),
        "verdict": run_text.verdict(record),
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
