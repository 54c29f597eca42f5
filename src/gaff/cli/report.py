"""``gaff report RUN``: what was found in a watched run, as text, data, a page, or a page that follows it.

Needs no torch; the pages need numpy. A run may be read while it goes on. Of a harvest the page tells what it holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gaff.cli.options import RUN_HELP, add_ascii, add_columns, add_debug, add_json
from gaff.cli.parser import number, whole
from gaff.errors import PlanError, RecordError

if TYPE_CHECKING:
    from gaff.record.run import Record

SUMMARY = "tell what was found in a watched run, or what a harvest holds"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the runs, and whether they are told as text, as data, or as a page, saved or served."""
    parser.add_argument("run", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--all", action="store_true", help="every site in the table, however many there are")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures instead; several runs in one")
    parser.add_argument("--data", metavar="DATA", help="of a harvest: its .txt file or folder of images, to be shown")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="names tokens: of a harvest, of kept batches on a page")
    parser.add_argument("--live", action="store_true", help="serve the page on this machine, and follow the run")
    parser.add_argument("--port", type=whole, default=0, metavar="N", help="of --live (default: any that is free)")
    parser.add_argument("--rank", type=whole, default=0, metavar="N", help="the process whose tables a page shows")
    parser.add_argument(
        "--idle", type=number, metavar="SECONDS", help="end --live after the run, when nobody has looked for so long"
    )
    add_columns(parser)
    add_json(parser)
    add_ascii(parser)
    add_debug(parser)
    parser.epilog = "example: gaff report runs/a --html a.html"


def run(options: argparse.Namespace) -> int:
    """Read the runs and tell of them; ``--live`` serves until it is stopped. Of several ``--json`` prints a list."""
    if options.live:
        _check_combination(options)
        return _live(options)
    from gaff.cli.printing import has_boxes, print_data, print_text, show
    from gaff.inspection.saved import load
    from gaff.record.run import Record
    from gaff.views import run_text
    from gaff.views.text import printable

    loaded = [load(one) for one in options.run]
    if len(loaded) == 1 and not isinstance(loaded[0], Record):
        from gaff.cli.store_page import report_harvest

        return report_harvest(loaded[0], options)
    _check_combination(options)
    if options.data:
        raise PlanError("--data is for one harvest: expected its folder, and nothing else")
    if options.tokenizer and not options.html:
        raise PlanError("--tokenizer is for a harvest, or for the page of a run: expected --html FILE beside it")
    records = [load(one, "run") for one in options.run]
    if options.html:
        return _html(records, options)
    if options.json:
        told = [to_json(record) for record in records]
        print_data(told[0] if len(told) == 1 else told)
        return 0
    for record in records:
        plain = options.plain or not has_boxes(sys.stdout)
        text = printable(run_text.report(record, plain=plain, most=10**6 if options.all else None))
        (print_text if options.plain else show)(text)
    return 0


def _check_combination(options: argparse.Namespace) -> None:
    """Raises PlanError for options of which one would be passed over."""
    ways = [f"--{one}" for one in ("html", "json", "live") if getattr(options, one)]
    if len(ways) > 1:
        raise PlanError(f"{' and '.join(ways)} are different ways to tell of a run: leave all but one out")
    for name in ("data", "tokenizer") if options.live else ():
        if getattr(options, name):
            raise PlanError(f"--{name} is of no use with --live: leave it out")
    for name, default, ways_of_it in (
        ("rank", 0, ("--html", "--live")),
        ("port", 0, ("--live",)),
        ("idle", None, ("--live",)),
    ):
        if getattr(options, name) != default and not set(ways) & set(ways_of_it):
            raise PlanError(f"--{name} is of no use without {' or '.join(ways_of_it)}: expected both, or none")


def need_numpy(what: str) -> None:
    """Raises PlanError where numpy, which every page needs, is not installed; does not import it."""
    if find_spec("numpy") is None:
        raise PlanError(f"{what} needs the package 'numpy', which is not installed: pip install 'gaff[page]'")


def need_page(what: str, path: str) -> None:
    """Raises PlanError, before anything is run, where ``path`` does not end as a page does, or without numpy."""
    need_numpy(what)
    if not path.endswith((".html", ".htm")):
        raise PlanError(f"{what} {path!r}: expected a name that ends in .html")


def _html(records: Sequence[Record], options: argparse.Namespace) -> int:
    """Write one page of all the runs; raises RecordError for a rank that one of them has not."""
    need_numpy("--html")
    from gaff.views.page.run import document

    for record in records:
        if options.rank not in record.ranks:
            raise RecordError(f"no rank {options.rank} in {record.path}: expected one of {record.ranks}")
    words = None
    if options.tokenizer:
        from gaff.cli.inputs import tokenizer_of

        words = tokenizer_of(options.tokenizer, "--tokenizer").convert_ids_to_tokens
    size = document(records, rank=options.rank, words=words).save(options.html)
    print(f"{options.html}: {size / 1e6:.1f} MB, open it in a browser; it needs no network")
    return 0


def _live(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; with ``--idle`` until the run is over and nobody looks any more."""
    need_numpy("--live")
    import os
    import sys
    from contextlib import suppress
    from pathlib import Path

    from gaff.inspection.saved import load
    from gaff.views.page.live import Board, Server

    if options.idle is None:
        for one in options.run:
            load(one, "run")  # what is no run is told before anything is served
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
    from gaff.record.trainings import teller_of
    from gaff.views import run_text

    return {
        "run": str(record.path),
        "verdict": run_text.verdict(record),
        **record.verdict.to_dict(),
        "steps": record.steps,
        "ranks": record.ranks,
        "complete": record.is_complete,
        "overhead": record.overhead,
        "findings": [_finite(one.to_dict()) for one in record.findings],
        "sites": [{"site": name, **_finite(_latest(record, name))} for name in record.sites],
        "scalars": {
            name: [[step, _finite(x)] for step, x in record.scalar(name, teller_of(record, name))]
            for name in record.scalars
        },
        "notes": record.notes,
    }


def _latest(record: Record, site: str) -> dict[str, float]:
    """The latest numbers of a site, of the first process that has any."""
    return next((found for rank in record.ranks if (found := record.latest(site, rank=rank))), {})


def _finite(value: Any) -> Any:
    """The same value with None in place of every NaN and inf, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value - value != 0 else value
