"""Files that take the place of others in one move, so that nobody reads half of one, and an older one is not lost."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gaff.errors import RecordError

_NUMBERS = itertools.count()  # of files in this process, also on several threads


@contextmanager
def replacing(path: str | os.PathLike[str], *failures: type[Exception]) -> Iterator[Path]:
    """A name beside ``path`` whose file takes its place at the end, with its mode, and is removed after an error.

    A link is followed, and stays. What has several names, and what is no ordinary file, such as a pipe, is written to
    itself. Raises RecordError for what the system says against it, and for ``failures`` of whoever writes.
    """
    made = None
    try:
        target = Path(os.path.realpath(path))
        known = target.stat() if target.exists() else None
        if known is not None and not target.is_dir() and (not target.is_file() or known.st_nlink > 1):
            yield target
            return
        made = target.with_name(f".gaff-{os.getpid()}-{next(_NUMBERS)}")
        yield made
        if known is not None and target.is_file():
            made.chmod(stat.S_IMODE(known.st_mode))
        os.replace(made, target)
    except (OSError, *failures) as error:  # type: ignore[misc]
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"{os.fspath(path)!r} cannot be written: {reason}") from error
    finally:
        if made is not None:
            with suppress(OSError):  # it could not be made, which has been told
                made.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> int:
    """Write ``text`` as UTF-8, in place of what the file held; returns its bytes. Raises as ``replacing``.

    Characters that UTF-8 cannot hold (lone surrogates in the name of a file) are written as ``?``.
    """
    with replacing(path, ValueError) as made:  # a name with a NUL
        return made.write_bytes(text.encode(errors="replace"))
