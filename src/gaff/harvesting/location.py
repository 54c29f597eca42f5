"""Where a harvest lies: a folder of this machine (``folder``), or a prefix in an object store (``bucket``).

Both hold the same files under the same names, so that one can be copied to the other. Every file is made as a whole,
once, and never changed; a shard is there when its ``shard.json`` is.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from torch import Tensor

from gaff.errors import RecordError
from gaff.harvesting.tensor_file import WrittenTensor

SHARDS, OPEN, TOLD = "shards", "open", "shard.json"


class StoredRows(Protocol):
    """The rows of one file. Each method raises RecordError where they are not what was written."""

    nbytes: int

    def run(self, first: int, last: int) -> Tensor:
        """Copies of the rows ``first`` to ``last - 1``."""

    def row(self, number: int) -> Tensor:
        """A copy of one row."""

    def gather(self, numbers: Tensor) -> Tensor:
        """Copies of the rows of these numbers (int64), in their order."""

    def check(self) -> None:
        """Read everything and compare it with its checksums."""


class Location(Protocol):
    """Where files are; their paths are told from there, with ``/`` between the parts."""

    def __str__(self) -> str:
        """As the user has given it."""

    def holds(self, path: str) -> bool:
        """Whether there is a file of that path."""

    def names(self) -> list[str]:
        """What is there at the top, files and folders, without what begins with a dot."""

    def shards(self) -> list[int]:
        """The numbers of the shards that are there, in ascending order."""

    def read(self, path: str) -> bytes:
        """The content of a file. Raises RecordError where it cannot be read."""

    def create(self, path: str, content: bytes) -> bool:
        """Write a file as a whole, where none of that path is there; whether it was written now."""

    def send(self, draft: Path, name: str) -> None:
        """Put a finished file of this machine at the top, in the place of one of the same name and content."""

    def rows(self, path: str, name: str, written: WrittenTensor) -> StoredRows:
        """The rows in a file, of which ``written`` tells what it holds; ``name``: of the tensor in it."""

    def drafts(self) -> Path:
        """A folder of this machine in which shards are written until they are whole."""

    def named(self, written: WrittenTensor) -> WrittenTensor:
        """The same, under the name that the file will have here."""

    def commit(self, draft: Path, number: int, files: dict[str, str]) -> bool:
        """Have a shard there whole: ``files`` tells names of files in ``draft`` and their names here.

        ``shard.json`` is the last of them. Whether it was made now; False: one of that number was there.
        """


def shard_path(number: int, file: str = "") -> str:
    """Where the shard of that number is, or a file in it."""
    return f"{SHARDS}/{number:06d}" + (f"/{file}" if file else "")


@contextmanager
def draft_in(drafts: Path, number: int) -> Iterator[Path]:
    """A new folder for what is being written, gone afterwards; its name tells the process, for ``sweep``."""
    folder = drafts / f"{number:06d}-{os.getpid()}-{uuid4().hex[:8]}-{socket.gethostname()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(place: object) -> Iterator[None]:
    """What the system says against writing (a full disk, no right to) becomes a RecordError that tells how to go on."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{place}: cannot be written: {error.strerror or error}; shards that are whole stay, and the same call "
            "goes on there"
        ) from error


def sweep(drafts: Path) -> None:
    """Take away what processes of this machine that are gone have left."""
    for folder in drafts.glob("*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def leave(drafts: Path) -> None:
    """Take the folder of drafts away, where it is empty."""
    with suppress(OSError):  # another process writes in it, or has taken it away
        drafts.rmdir()


def _is_abandoned(folder: Path) -> bool:
    """Whether the process of this machine that began to write in that folder is gone."""
    _, process, _, host = (*folder.name.split("-", 3), "", "", "")[:4]
    if host != socket.gethostname() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
