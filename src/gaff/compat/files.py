"""Files that take the place of others in one move, so that nobody reads half of one, and an older one is not lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside ``path`` whose file takes its place at the end, and is removed after an error.

    A link is followed, and stays. Raises OSError where something is there that is no ordinary file, such as a pipe.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no ordinary file")
    made = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield made
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
