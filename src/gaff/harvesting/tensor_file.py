"""One tensor in one safetensors file, written block by block and read row by row.

The file is ordinary: a header, then the elements. While it is written its header is only reserved, since nobody knows
yet how many rows will come; ``TensorFile.close`` fills it in. The checksum of each block (CRC32C) is told to whoever
writes the file, and ``StoredTensor`` compares it with what lies on the disk before it hands out a row of that block.
"""

from __future__ import annotations

import ctypes
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.compat.extras import need
from gaff.errors import PlanError, RecordError

# How safetensors spells the dtypes that it knows.
_SPELLED = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {spelled: dtype for dtype, spelled in _SPELLED.items()}
ALIKE = (
    "rows of one site or label must be alike; rows='token' or 'position' takes the positions of a sequence apart, "
    "reduce= makes one size of many"
)
_PAGE = 4096  # bytes; the elements begin at a multiple, so that they can be mapped
_LONGEST = 200  # characters of a file's name; most file systems take 255 bytes
_DIGITS = 48  # bytes that the numbers of a header may grow by, from 0 rows to as many as a disk holds


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """What was written: the file's name, the dtype as safetensors spells it, the shape of a row, rows and checksum of
    each block."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Of all blocks."""
        return sum(rows for rows, _ in self.blocks)

    @property
    def nbytes(self) -> int:
        """Of all rows, without the header."""
        return self.rows * math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {
            "file": self.file,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "blocks": [list(one) for one in self.blocks],
        }

    @classmethod
    def from_dict(cls, told: Any) -> WrittenTensor:
        """What ``to_dict`` has told. Raises ValueError, KeyError or TypeError for anything else."""
        blocks = tuple((int(rows), int(checksum)) for rows, checksum in told["blocks"])
        shape = tuple(int(size) for size in told["shape"])
        if told["dtype"] not in _DTYPES or min((*shape, *(rows for rows, _ in blocks)), default=0) < 0:
            raise ValueError(f"{told['dtype']} {shape}")
        name = str(told["file"])
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a file")
        return cls(name, told["dtype"], shape, blocks)


class TensorFile:
    """Writes a tensor of shape ``[rows, *shape]``, of which blocks of rows come one after another.

    ``name`` is the tensor's name in the file. The first block decides dtype and shape of a row. A context
    manager; without ``close`` the file is none that could be read.
    """

    def __init__(self, path: Path, name: str, first: Tensor) -> None:
        if first.dtype not in _SPELLED:
            raise PlanError(
                f"{name}: is of {first.dtype}, which safetensors does not know: expected another dtype=, or reduce="
            )
        self._name, self._path = name, path
        self._dtype, self._shape = first.dtype, tuple(first.shape[1:])
        self._blocks: list[tuple[int, int]] = []
        self._begin = _PAGE * math.ceil((8 + len(header_of(name, self._written)) + _DIGITS) / _PAGE)
        self._file = path.open("xb", buffering=0)
        self._file.seek(self._begin)

    def append(self, rows: Tensor) -> None:
        """Write a block of rows. Raises PlanError where dtype or shape are not those of the first block."""
        if (rows.dtype, tuple(rows.shape[1:])) != (self._dtype, self._shape):
            raise PlanError(
                f"{self._name}: a row was {told(self._dtype, self._shape)} and is {told(rows.dtype, rows.shape[1:])} "
                f"in a later batch: {ALIKE}"
            )
        rows = rows.resolve_conj().resolve_neg().contiguous()
        left = memoryview(bytes_of(rows))
        while left:
            left = left[self._file.write(left) :]
        self._blocks.append((len(rows), checksum_of_rows(rows)))

    def close(self) -> WrittenTensor:
        """Fill in the header, have the system put everything on the disk, and say what was written."""
        written = self._written
        header = header_of(self._name, written).ljust(self._begin - 8)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        sync(self._file)
        self._file.close()
        return written

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # without ``close`` before, it is none that could be read

    @property
    def _written(self) -> WrittenTensor:
        return WrittenTensor(self._path.name, _SPELLED[self._dtype], self._shape, tuple(self._blocks))


class StoredTensor:
    """The rows of one file, mapped into memory: none is read before it is asked for.

    Raises RecordError, when made, where the file is not there or not as long as ``written`` says; from reading, where
    a block is not what was written. What is returned is a copy: whoever writes into it changes no later answer.
    """

    def __init__(self, folder: Path, name: str, written: WrittenTensor) -> None:
        self._path, self._name, self._written = folder / written.file, name, written
        self._ends = list(accumulate(rows for rows, _ in written.blocks))
        self._unseen = set(range(len(written.blocks)))  # blocks whose checksum was not compared yet
        self._rows: Tensor | None = None
        self._dtype = _DTYPES[written.dtype]
        size, expected = self._length(), written.nbytes
        if size is None:
            raise RecordError(f"{self._path}: is not there, or cannot be read: expected {expected} bytes of rows")
        if size < expected + _PAGE or (size - expected) % _PAGE:
            raise RecordError(f"{self._path}: has {size} bytes: expected {expected} of rows and its header")
        self._begin = size - expected
        self.nbytes = expected

    def run(self, first: int, last: int) -> Tensor:
        """Copies of the rows ``first`` to ``last - 1``, shape ``[last - first, *shape]``."""
        if self._unseen:
            self._check(first, last)
        return self._mapped()[first:last].clone()

    def row(self, number: int) -> Tensor:
        """A copy of one row, of ``shape``."""
        if self._unseen:
            self._check(number, number + 1)
        return self._mapped()[number].clone()

    def gather(self, numbers: Tensor) -> Tensor:
        """Copies of the rows of these numbers (int64), in their order."""
        if self._unseen and len(numbers):
            ends = torch.tensor(self._ends, device="cpu")
            for block in torch.bucketize(numbers, ends, right=True).unique().tolist():
                self._check_block(block)
        mapped = self._mapped()
        return elements.signed(mapped).index_select(0, numbers).view(mapped.dtype)

    def check(self) -> None:
        """Read the whole file and compare it with its header and checksums. Raises RecordError."""
        self._unseen = set(range(len(self._ends)))
        self._rows = None
        self._check(0, self._ends[-1] if self._ends else 0)

    def _length(self) -> int | None:
        try:
            return self._path.stat().st_size
        except OSError:
            return None

    def _mapped(self) -> Tensor:
        """All rows as a tensor over the file, its header compared. Raises RecordError where that is another."""
        if self._rows is None:
            size = self._begin + self._written.nbytes
            header = header_of(self._name, self._written).ljust(self._begin - 8)
            try:
                with self._path.open("rb") as file:
                    is_right = file.read(self._begin) == (self._begin - 8).to_bytes(8, "little") + header
                is_right = is_right and self._length() == size
                everything = torch.from_file(str(self._path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                told = str(error).splitlines()[0]
                raise RecordError(f"{self._path}: cannot be read just now, whatever it holds: {told}") from error
            if not is_right:
                raise RecordError(f"{self._path}: its header is not what was written: the file is another, or damaged")
            self._rows = everything[self._begin :].view(self._dtype).view(self._written.rows, *self._written.shape)
        elif self._length() != self._begin + self._written.nbytes:  # reading on would end the process
            raise RecordError(f"{self._path}: has been cut short, or written to, since it was opened")
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        """All but the mapping of the file, which another process makes for itself."""
        return {**self.__dict__, "_rows": None}

    def _check(self, first: int, last: int) -> None:
        """Compare the checksums of the blocks in which rows ``first`` to ``last - 1`` lie."""
        block = bisect_right(self._ends, first)
        while block < len(self._ends) and (self._ends[block - 1] if block else 0) < last:
            self._check_block(block)
            block += 1

    def _check_block(self, block: int) -> None:
        """Compare the checksum of one block, once. Raises RecordError, with the rows that cannot be trusted."""
        if block not in self._unseen:
            return
        rows, expected = self._written.blocks[block]
        first = self._ends[block] - rows
        found = self._mapped()[first : first + rows]
        if checksum_of_rows(found) != expected:
            raise RecordError(f"{self._path}: rows {first} to {first + rows - 1} are not what was written: damaged")
        self._unseen.discard(block)


def header_of(name: str, written: WrittenTensor) -> bytes:
    """What a safetensors file begins with, behind the eight bytes of its length: the same wherever it is written."""
    told = {
        "dtype": written.dtype,
        "shape": [written.rows, *written.shape],
        "data_offsets": [0, written.nbytes],
    }
    return json.dumps({"__metadata__": {"gaff_harvest": "1"}, name: told}).encode()


def file_name(name: str, ending: str) -> str:
    """A name for the file of a site or a label, of which every file system approves."""
    quoted = quote(name, safe="")
    if not quoted.strip("."):  # "." and ".." are folders everywhere
        quoted = quoted.replace(".", "%2E")
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[:_LONGEST]}-{sha256(name.encode()).hexdigest()[:8]}"
    return quoted + ending


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, without a copy; only as long as somebody holds the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def checksum_of_rows(rows: Tensor) -> int:
    """CRC32C of the elements of a contiguous CPU tensor; 0 where it has none."""
    if not rows.numel():
        return 0
    return int(need("google_crc32c", "harvest", for_="a harvest").value(bytes_of(rows)))


def checksum_of(tensors: Sequence[Tensor], start: int = 0) -> int:
    """CRC32C over dtypes, shapes and elements, going on from ``start``. Copies what lies on a device to the CPU.

    Of what has no plain memory (sparse, quantised, not made yet) only the kind and the shape count.
    """
    extend = need("google_crc32c", "harvest", for_="a harvest").extend
    for tensor in tensors:
        if not elements.is_plain(tensor):
            start = extend(start, f"{type(tensor).__name__} {tensor.layout} {tuple(tensor.shape)}".encode())
            continue
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        start = extend(start, f"{plain.dtype}{tuple(plain.shape)}".encode())
        start = extend(start, bytes_of(plain))
    return int(start)


def dtype_of(written: WrittenTensor) -> torch.dtype:
    """The dtype of the rows, as torch names it."""
    return _DTYPES[written.dtype]


def sync(file: Any) -> None:
    """Have the system put a file on the disk now: it is there after a power loss, too."""
    import os

    os.fsync(file.fileno())


def told(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """The kind of a row as text, such as ``float32 [384]``."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
