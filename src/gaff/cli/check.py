"""``gaff check acts/``: whether a harvest still holds what was written, byte by byte."""

from __future__ import annotations

import argparse

from gaff.cli.options import add_debug
from gaff.errors import RecordError

SUMMARY = "compare every file of a harvest with its checksums"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the folder."""
    parser.add_argument("store", metavar="FOLDER", help="the folder that gaff harvest --out has written")
    parser.epilog = "example: gaff check acts"
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Read everything; 0 where all of it is as it was written and complete, 3 where it is not."""
    from gaff.harvesting import manifest
    from gaff.harvesting.folder import location_of
    from gaff.harvesting.store import Store
    from gaff.views.text import bytes_text, counted

    manifest.read(location_of(options.store))
    try:
        store = Store(options.store)
    except RecordError as error:  # a harvest, whose shards are not what they were
        print(error)
        return 3
    wrong = store.check()
    for text in wrong:
        print(text)
    for text in store.changes:
        print(f"{text}: written after a change")
    for site, count in store.nonfinite.items():
        print(f"{site}: {counted(count, 'row')} with a NaN or an infinity")
    if not store.is_complete:
        print("not complete: the same gaff harvest again goes on")
    if not wrong:
        print(f"{counted(store.rows, 'row')} in {counted(len(store.shards), 'shard')}, {bytes_text(store.nbytes)}: "
              "as they were written")  # fmt: skip
    return 3 if wrong or not store.is_complete else 0
