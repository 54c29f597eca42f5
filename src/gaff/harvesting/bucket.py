"""A harvest in an object store (S3, Google Cloud Storage, Azure, ...), by the package ``obstore``.

A shard is written on this machine, its files are sent, and then ``shard.json`` is created, which the store refuses
where one is there. The name of a file holds a checksum of its content: two writers of one shard do not overwrite
each other. Rows are read by ranges: the block in which a row lies is fetched as a whole and compared with its checksum.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.compat.extras import need
from gaff.errors import PlanError, RecordError
from gaff.harvesting.location import SHARDS, TOLD, StoredRows, shard_path
from gaff.harvesting.tensor_file import WrittenTensor, checksum_of_rows, dtype_of, header_of

_KEPT = 256 * 2**20  # bytes of blocks that are kept in memory, of those read last
_LENGTH = 8  # bytes in front of a header that say how long it is


class Bucket:
    """A prefix in an object store. Raises RecordError, with the URL of the file, for what the store refuses."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self._blocks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    @classmethod
    def of(cls, out: Any) -> Bucket:
        """For a URL, or a store that is made already. Raises PlanError for anything else.

        The settings of a URL come from the environment, such as ``AWS_ACCESS_KEY_ID``, ``AWS_REGION`` and
        ``AWS_ENDPOINT_URL``.
        """
        if isinstance(out, str):
            make = need("obstore.store", "objects", for_="a harvest in an object store").from_url
            try:
                return cls(make(out), out)
            except Exception as error:  # noqa: BLE001  # obstore's own kinds, and ValueError
                raise PlanError(f"{out!r} is no object store: {_first_line(error)}") from None
        if not type(out).__module__.startswith("obstore"):
            raise PlanError(
                f"{out!r:.60} is of type {type(out).__name__}: expected a path, a URL, or a store of obstore"
            )
        name = str(out)
        return cls(out, f"<obstore {type(out).__name__}>" if " at 0x" in name else name)

    def __str__(self) -> str:
        return self._name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": OrderedDict()}

    def holds(self, path: str) -> bool:
        """Whether there is a file of that path."""
        with self._told(path):
            try:
                self._store.head(path)
            except FileNotFoundError:
                return False
        return True

    def names(self) -> list[str]:
        """What is there at the top."""
        with self._told(""):
            found = self._store.list_with_delimiter()
        paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def shards(self) -> list[int]:
        """The numbers of all shards that have their ``shard.json``."""
        with self._told(SHARDS):
            paths = [one["path"] for page in self._store.list(SHARDS) for one in page]
        parts = [str(path).split("/") for path in paths]
        return sorted(int(one[-2]) for one in parts if one[-1] == TOLD and one[-2].isdigit())

    def read(self, path: str) -> bytes:
        """The content of a file. Raises RecordError where it cannot be read."""
        with self._told(path):
            return bytes(self._store.get(path).bytes())

    def create(self, path: str, content: bytes) -> bool:
        """Write a file, where none of that path is there; whether it was written now."""
        exists = need("obstore.exceptions").AlreadyExistsError
        with self._told(path):
            try:
                self._store.put(path, content, mode="create")
            except exists:
                return False
        return True

    def send(self, draft: Path, name: str) -> None:
        """Upload a file."""
        with self._told(name):
            self._store.put(name, draft)
        draft.unlink()

    def rows(self, path: str, name: str, written: WrittenTensor) -> StoredRows:
        """The rows in a file, fetched block by block."""
        return RemoteTensor(self, path, name, written)

    def drafts(self) -> Path:
        """A folder for temporary files of this machine."""
        return Path(tempfile.gettempdir()) / f"gaff-harvest-{sha256(self._name.encode()).hexdigest()[:12]}"

    def named(self, written: WrittenTensor) -> WrittenTensor:
        """The same, with a checksum of the content in the name."""
        content = sha256(json.dumps(written.to_dict()).encode()).hexdigest()[:12]
        return replace(written, file=f"{written.file.removesuffix('.safetensors')}-{content}.safetensors")

    def commit(self, draft: Path, number: int, files: dict[str, str]) -> bool:
        """Upload the files, and create ``shard.json``."""
        for name, here in files.items():
            if name != TOLD:
                self.send(draft / name, shard_path(number, here))
        return self.create(shard_path(number, TOLD), (draft / TOLD).read_bytes())

    def fetch(self, path: str, first: int, last: int) -> bytearray:
        """The bytes ``first`` to ``last - 1`` of a file."""
        with self._told(path):
            found = bytearray(self._store.get_range(path, start=first, end=last))
        if len(found) != last - first:
            raise RecordError(f"{self._name}/{path}: has {first + len(found)} bytes: expected more")
        return found

    def size(self, path: str) -> int:
        """The length of a file in bytes."""
        with self._told(path):
            return int(self._store.head(path)["size"])

    def kept(self, key: tuple[str, int]) -> Tensor | None:
        """A block that was fetched not long ago."""
        found = self._blocks.get(key)
        if found is not None:
            self._blocks.move_to_end(key)
        return found

    def keep(self, key: tuple[str, int], block: Tensor) -> None:
        """Keep a block, and let go of those that were not asked for the longest."""
        self._blocks[key] = block
        while sum(one.nbytes for one in self._blocks.values()) > _KEPT and len(self._blocks) > 1:
            self._blocks.popitem(last=False)

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        """Errors of the store as RecordError, with what they were about."""
        errors = (OSError, need("obstore.exceptions", "objects", for_="a harvest in an object store").BaseError)
        try:
            yield
        except FileNotFoundError:
            raise RecordError(f"{self._name}/{path}: is not there") from None
        except errors as error:
            raise RecordError(f"{self._name}/{path}: {_first_line(error)}") from error


class RemoteTensor:
    """The rows of one file in an object store. Nothing is fetched before it is asked for."""

    def __init__(self, bucket: Bucket, path: str, name: str, written: WrittenTensor) -> None:
        self.nbytes = written.nbytes
        self._bucket, self._path, self._name, self._written = bucket, path, name, written
        self._ends = list(accumulate(rows for rows, _ in written.blocks))
        self._begin = 0  # where the rows begin in the file; 0: its header was not compared yet

    def run(self, first: int, last: int) -> Tensor:
        """Copies of the rows ``first`` to ``last - 1``, shape ``[last - first, *shape]``."""
        found = [self._empty(0)]
        block = bisect_right(self._ends, first)
        while first < last:
            start = self._ends[block] - self._written.blocks[block][0]
            end = min(last, self._ends[block])
            found.append(self._block(block)[first - start : end - start])
            first, block = end, block + 1
        return torch.cat(found)

    def row(self, number: int) -> Tensor:
        """A copy of one row, of ``shape``."""
        return self.run(number, number + 1)[0]

    def gather(self, numbers: Tensor) -> Tensor:
        """Copies of the rows of these numbers (int64), in their order."""
        found = self._empty(len(numbers))
        places = torch.bucketize(numbers, torch.tensor(self._ends, device="cpu"), right=True)
        for block in places.unique().tolist():
            here = (places == block).nonzero().flatten()
            start = self._ends[block] - self._written.blocks[block][0]
            elements.signed(found)[here] = elements.signed(self._block(block))[numbers[here] - start]
        return found

    def check(self) -> None:
        """Fetch everything and compare it with header and checksums. Raises RecordError."""
        self._begin = 0
        self._header()
        size, expected = self._bucket.size(self._path), self._begin + self.nbytes
        if size != expected:
            raise RecordError(f"{self._bucket}/{self._path}: has {size} bytes: expected {expected}")
        for block in range(len(self._ends)):
            self._fetched(block)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, *self._written.shape), dtype=dtype_of(self._written), device="cpu")

    def _block(self, block: int) -> Tensor:
        key = (self._path, block)
        found = self._bucket.kept(key)
        if found is None:
            found = self._fetched(block)
            self._bucket.keep(key, found)
        return found

    def _fetched(self, block: int) -> Tensor:
        """One block, compared with its checksum. Raises RecordError, with the rows that cannot be trusted."""
        if not self._begin:
            self._header()
        rows, expected = self._written.blocks[block]
        first, found = self._ends[block] - rows, self._empty(rows)
        if found.numel():
            start = self._begin + first * (found.nbytes // rows)
            content = self._bucket.fetch(self._path, start, start + found.nbytes)
            found = torch.frombuffer(content, dtype=found.dtype).view(found.shape)
        if checksum_of_rows(found) != expected:
            raise RecordError(
                f"{self._bucket}/{self._path}: rows {first} to {first + rows - 1} are not what was written: damaged"
            )
        return found

    def _header(self) -> None:
        """Compare the header. Raises RecordError where it is that of another file."""
        length = int.from_bytes(self._bucket.fetch(self._path, 0, _LENGTH), "little")
        expected = header_of(self._name, self._written)
        is_right = len(expected) <= length <= 2**20 and (
            self._bucket.fetch(self._path, _LENGTH, _LENGTH + length) == expected.ljust(length)
        )
        if not is_right:
            raise RecordError(f"{self._bucket}/{self._path}: its header is not what was written: the file is another, "
                              "or damaged")  # fmt: skip
        self._begin = _LENGTH + length


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition("<?xml")[0].strip(" :") or type(error).__name__
