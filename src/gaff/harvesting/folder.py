"""A harvest in a folder of this machine, or of a disk that several share."""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path
from typing import Any

from gaff.errors import PlanError, RecordError
from gaff.harvesting.location import OPEN, SHARDS, Location, StoredRows, draft_in, shard_path, writing
from gaff.harvesting.tensor_file import StoredTensor, WrittenTensor, sync


def location_of(out: Any) -> Location:
    """The place for what a user gives: a path, a URL such as ``s3://bucket/acts``, or a store of ``obstore``."""
    if isinstance(out, (Folder, str, PathLike)) and "://" not in str(out):
        if not isinstance(out, Folder) and re.match(r"[a-z0-9+]{2,}:/", str(out)):
            raise PlanError(f"{str(out)!r} was a URL before it became a Path: expected the URL as text")
        return out if isinstance(out, Folder) else Folder(Path(out))
    from gaff.harvesting.bucket import Bucket

    return out if isinstance(out, Bucket) else Bucket.of(out)


class Folder:
    """A harvest in a folder of this machine, or of a disk that several share."""

    def __init__(self, path: Path) -> None:
        self._given = path
        self.path = path.absolute()  # whatever folder the program goes to later

    def __str__(self) -> str:
        return str(self._given)

    def holds(self, path: str) -> bool:
        """Whether there is a file of that path."""
        return os.path.exists(self.path / path)

    def names(self) -> list[str]:
        """What is there at the top. Raises PlanError where there is a file instead of a folder."""
        is_there = os.path.exists(self.path)
        if is_there and not self.path.is_dir():
            raise PlanError(f"{str(self)!r} is a file: expected a new folder, or that of a harvest")
        found = [one.name for one in self.path.iterdir()] if is_there else []
        return [name for name in found if not name.startswith(".")]

    def shards(self) -> list[int]:
        """The numbers of the folders below ``shards``: one gets its place by one renaming, when it is whole."""
        folder = self.path / SHARDS
        names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    def read(self, path: str) -> bytes:
        """The content of a file. Raises RecordError where it cannot be read."""
        try:
            return (self.path / path).read_bytes()
        except OSError as error:
            raise RecordError(f"{self.path / path}: cannot be read: {error.strerror}") from None

    def create(self, path: str, content: bytes) -> bool:
        """Write a draft, and give it its name by a link, which the file system refuses where one is there."""
        with writing(self):
            return self._create(self.path / path, content)

    def _create(self, place: Path, content: bytes) -> bool:
        place.parent.mkdir(parents=True, exist_ok=True)
        with draft_in(self.drafts(), 0) as folder:
            draft = folder / place.name
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                sync(file)
            try:
                os.link(draft, place)
            except FileExistsError:
                return False
        sync_folder(place.parent)
        return True

    def send(self, draft: Path, name: str) -> None:
        """Rename the file: the draft lies on the same disk."""
        draft.replace(self.path / name)

    def rows(self, path: str, name: str, written: WrittenTensor) -> StoredRows:
        """The rows in a file, mapped into memory."""
        return StoredTensor((self.path / path).parent, name, written)

    def drafts(self) -> Path:
        """A folder beside the shards, so that a renaming puts a shard in its place."""
        return self.path / OPEN

    def named(self, written: WrittenTensor) -> WrittenTensor:
        """The same: nobody else writes into the folder that is renamed."""
        return written

    def commit(self, draft: Path, number: int, files: dict[str, str]) -> bool:
        """Rename the folder, which the file system refuses where one of that name is there."""
        place = self.path / shard_path(number)
        place.parent.mkdir(exist_ok=True)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            return False
        sync_folder(place.parent)
        return True


def sync_folder(folder: Path) -> None:
    """Have the system put the names in a folder on the disk, where it can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
