"""``gaff diff A B``: where two runs, or two traces, first part."""

from __future__ import annotations

from argparse import Namespace

from gaff.cli.report import need_numpy
from gaff.inspection.diff.compare import diff
from gaff.views.text import printable


def run(options: Namespace) -> int:
    """Exit code 3 where they part."""
    if options.html:
        need_numpy("--html")
    found = diff(options.a, options.b, tolerance=options.tolerance)
    if options.html:
        found.save(options.html)
    print(found.to_json() if options.json else printable(str(found)))
    return 3 if found else 0
