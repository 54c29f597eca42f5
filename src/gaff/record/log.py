"""An append-only file of frames: nothing but the last frame can be torn, and that is seen. Needs no torch.

Layout: eight bytes ``GAFFLOG1``; then frames, each a header of 32 bytes (magic, kind, three bytes of nothing, length
of the payload, CRC-32 of all the rest, step, time in seconds since 1970) and a payload. One ``write`` a frame and one
writer a file, so that a reader needs no lock. Kinds that a reader does not know are skipped.

What was written survives the process, however it ends; it is not forced to the disk, and so may be lost with the
machine.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaff.errors import RecordError

MAGIC = b"GAFFLOG1"
LAYOUT, MATRIX, SERIES, EVENT = range(1, 5)
_FRAME = b"GFRM"
_HEADER = struct.Struct("<4sB3xIIqd")  # magic, kind, length, CRC, step, time
_LARGEST = 1 << 30  # bytes of one payload


@dataclass(frozen=True, slots=True)
class LogFrame:
    """One frame as it was read: its kind, the optimizer step it is of, when it was written, and what it holds.

    ``time``: seconds since 1970. ``payload`` is as it was written: JSON of an EVENT or LAYOUT, see
    ``gaff.record.matrix`` for the others.
    """

    kind: int
    step: int
    time: float
    payload: bytes

    def json(self) -> dict[str, Any]:
        """The payload of an EVENT or LAYOUT frame. Raises RecordError for what is no JSON object."""
        try:
            found = json.loads(self.payload)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"a frame of step {self.step} holds no JSON: {error}") from None
        if not isinstance(found, dict):
            raise RecordError(f"a frame of step {self.step} holds a {type(found).__name__}, expected an object")
        return found


class LogWriter:
    """Appends frames to a new file. Each is handed to the system before ``write`` returns; none is kept back.

    Raises FileExistsError for a file that is there: no two writers share one. ``size_bytes``: written so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _above_standard(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644))
        self._identity = _identity_of(os.fstat(self._file))
        try:
            self._write(MAGIC)
        except OSError:
            os.close(self._file)
            raise
        self.size_bytes = len(MAGIC)

    def write(self, kind: int, payload: bytes, step: int = 0) -> None:
        """Append one frame, stamped with the time.

        Raises OSError when the disk is full, where what is there stays readable, and when the file was removed, or
        closed by others: its number may be another file's by now, which is not written to.
        """
        told = os.fstat(self._file)
        if _identity_of(told) != self._identity:
            raise OSError(errno.EBADF, "the program has closed the file of the record", str(self.path))
        if not told.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written", str(self.path))
        now = time.time()
        header = _HEADER.pack(_FRAME, kind, len(payload), _crc(kind, step, now, payload), step, now)
        self._write(header + payload)
        self.size_bytes += len(header) + len(payload)

    def write_json(self, kind: int, value: dict[str, Any], step: int = 0) -> None:
        """Append one frame whose payload is ``value`` as JSON; see ``write``."""
        self.write(kind, json.dumps(value, separators=(",", ":")).encode(), step)

    def close(self) -> None:
        """Close the file, if nobody else has. Nothing can be written after it."""
        with suppress(OSError):
            if _identity_of(os.fstat(self._file)) == self._identity:
                os.close(self._file)

    def _write(self, data: bytes) -> None:
        at = 0
        while at < len(data):  # a system may take less than all of it, before it says that the disk is full
            at += os.write(self._file, data[at:])


def _identity_of(told: os.stat_result) -> tuple[int, int]:
    """What tells one open file from another."""
    return told.st_dev, told.st_ino


def _above_standard(file: int) -> int:
    """The same open file under a number that is none of standard input, output and error.

    Where a program was started without one of these, the next file takes its number, and what is printed.
    """
    low = []
    while file < 3:
        low.append(file)
        file = os.dup(file)
    for one in low:
        os.close(one)
    return file


class LogReader:
    """The frames of one file. May be read on while the file grows: ``frames`` goes on where it stopped.

    Holds no open file between calls. Raises RecordError for a file that is missing, cannot be read or is no log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # places inside the file at which bytes had to be passed over
        self._at = 0
        try:
            if not path.is_file():
                raise RecordError(f"{path}: is no file")
            with path.open("rb") as file:
                self._identity = os.fstat(file.fileno()).st_ino
                start = file.read(len(MAGIC))
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
        if start != MAGIC:
            raise RecordError(f"{path}: is no record of gaff: it begins with {start!r}, expected {MAGIC!r}")

    def frames(self) -> Iterator[LogFrame]:
        """Yield the frames that are complete and were not yielded before.

        A torn frame at the end is waited for: the next call begins at it. Damage elsewhere is passed over, up to the
        next frame with a right checksum, and counted in ``damaged``. What is new in the file is read into memory at
        once. Raises RecordError where the file was replaced or cut since it was opened, for then the place to go on
        from means nothing.
        """
        begin, at = self._at or len(MAGIC), 0
        with self.path.open("rb") as file:
            told = os.fstat(file.fileno())
            if told.st_ino != self._identity or told.st_size < begin:
                raise RecordError(f"{self.path}: was replaced or cut since it was opened; open the record anew")
            file.seek(begin)
            data = file.read()
        while at + _HEADER.size <= len(data):
            frame, after = _read(data, at)
            if frame is None:
                following = _resume(data, at)
                if following is None:
                    break  # the end: still being written, or torn by a kill
                self.damaged += 1
                at = following
                continue
            at = after
            self._at = begin + after  # before it is handed out: whoever stops there has had it
            yield frame


def _read(data: bytes, at: int) -> tuple[LogFrame | None, int]:
    """The frame at ``at`` and where it ends; None and ``at`` where there is no whole frame with a right checksum."""
    magic, kind, length, crc, step, when = _HEADER.unpack_from(data, at)
    begin = at + _HEADER.size
    if magic != _FRAME or length > _LARGEST or begin + length > len(data):
        return None, at
    payload = data[begin : begin + length]
    if _crc(kind, step, when, payload) != crc:
        return None, at
    return LogFrame(kind, step, when, payload), begin + length


def _crc(kind: int, step: int, when: float, payload: bytes) -> int:
    """The checksum of a frame: of its header, so that a damaged step or length is seen as well, then of its payload."""
    return zlib.crc32(payload, zlib.crc32(struct.pack("<BIqd", kind, len(payload), step, when)))


def _resume(data: bytes, at: int) -> int | None:
    """Where the next whole frame begins; None also where the file is made so that looking takes too long.

    Each place that looks like the beginning of a frame costs a checksum over the length that it claims. A file full of
    such places would take time with the square of its size; all of them together may read four times what there is.
    """
    found = data.find(_FRAME, at + 1)
    room = 4 * len(data)
    while found != -1 and room > 0:
        if found + _HEADER.size <= len(data):
            if _read(data, found)[0] is not None:
                return found
            room -= min(_HEADER.unpack_from(data, found)[2], len(data) - found)
        found = data.find(_FRAME, found + 1)
    return None
