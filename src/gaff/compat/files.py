"""Files that take the place of others in one move, so that nobody reads half of one, and an older one is not lost."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBERS = itertools.count()  # of files in this process, also on several threads


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside ``path`` whose file takes its place at the end, with its mode, and is removed after an error.

    A link is followed, and stays. What has several names, and what is no ordinary file, such as a pipe, is written to
    itself.
    """
    target = Path(os.path.realpath(path))
    known = target.stat() if target.exists() else None
    if known is not None and not target.is_dir() and (not target.is_file() or known.st_nlink > 1):
        yield target
        return
    made = target.with_name(f".gaff-{os.getpid()}-{next(_NUMBERS)}")
    try:
        yield made
        if known is not None and target.is_file():
            made.chmod(stat.S_IMODE(known.st_mode))
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
