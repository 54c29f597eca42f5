"""``gaff diff A B``: where two runs, or two traces, first part.

Two trainings part at the first step and site at which they differ by more than noise, two traces at the first call.
Neither needs torch: what is compared was written by ``gaff watch --out`` and ``gaff trace --out``.
"""

from __future__ import annotations

import argparse

from gaff.cli.options import add_columns, add_debug, add_json
from gaff.cli.parser import number
from gaff.errors import PlanError

SUMMARY = "tell where two runs, or two traces, first part"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the two that are compared, and how much they may differ."""
    parser.description = f"{SUMMARY}; exit code 3 where they do"
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a watched run, or a file of gaff trace --out")
    parser.add_argument("--tolerance", type=number, metavar="SHARE", help="the relative difference that is allowed")
    parser.add_argument(
        "--pair",
        action="append",
        default=[],
        metavar="A=B",
        help="of two traces: a module of A and its name in B, with all that is inside; repeatable",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    add_columns(parser)
    add_json(parser)
    add_debug(parser)
    parser.epilog = "example: gaff diff runs/a runs/b --html diff.html"


def run(options: argparse.Namespace) -> int:
    """Compare, and print where they part; exit code 3 where they do."""
    from gaff.cli.printing import print_text, show
    from gaff.cli.report import need_page
    from gaff.inspection.diff.compare import diff
    from gaff.views.text import printable

    if options.html:
        need_page("--html", options.html)
    pairs = dict(one.split("=", 1) for one in options.pair if "=" in one)
    if len(pairs) < len(options.pair):
        raise PlanError(f"--pair {', '.join(options.pair)}: expected A=B, each A once, such as encoder.layer=blocks")
    found = diff(options.a, options.b, tolerance=options.tolerance, pairs=pairs)
    if options.html:
        found.save(options.html)
    (print_text if options.json else show)(found.to_json() if options.json else printable(str(found)))
    return 3 if found else 0
