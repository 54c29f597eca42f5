"""Writing what ``gaff`` tells to a file that the user names."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path

from gaff.errors import RecordError


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8, in place of what the file held. Raises RecordError where it cannot be written.

    Characters that UTF-8 cannot hold (lone surrogates in the name of a file) are written as ``?``.
    """
    try:
        Path(path).write_bytes(text.encode(errors="replace"))
    except OSError as error:
        raise RecordError(f"{fspath(path)!r} cannot be written: {error.strerror}") from None
