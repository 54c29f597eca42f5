"""The last steps of a process, in a file that is memory: what was written is there whatever ends the process.

A flight recorder of 64 rows of a fixed size. Each row begins and ends with its number, so that a torn one is seen.
A row holds what is known of every step, looked at or not: when it ended, the losses, a checksum of its batch, and the
state of torch's random numbers on the CPU before its first run. Needs no torch.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaff.errors import RecordError

ENDING = ".ring"
ROWS = 64
LOSSES = 8
STATE = 5056  # bytes of a state of torch's generator on the CPU
_MAGIC = b"GAFFRNG1"
_NAMES = 1792  # bytes for the names of losses, as JSON
_LAST = 256  # bytes for why the log beside it was not written any further
# number, step, time, seconds, lr, scale, samples, checksum, which losses are known, losses
_ROW = struct.Struct(f"<qqddddqII{LOSSES}d")
_NUMBER = struct.Struct("<q")
_SIZE = _ROW.size + STATE + _NUMBER.size
_NAN = float("nan")
_BEGIN = len(_MAGIC) + _NAMES + _LAST


@dataclass(slots=True)  # not frozen, which takes long to make: there is one of each step
class Flight:
    """One of the last steps. ``time``: when it ended, in seconds since 1970; ``batch``: a checksum of its inputs.

    ``seconds``: how long the step took; ``scale``: a GradScaler's factor; ``samples``: that the models were given;
    ``losses``: by name, NaN where a value on a GPU would have had to be waited for; ``random``: the state of torch's
    generator on the CPU, empty where it is not known.
    """

    step: int
    time: float
    seconds: float
    lr: float
    scale: float
    samples: int
    batch: str
    losses: dict[str, float]
    random: bytes = field(default=b"", repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them, without the random state, which is bytes."""
        return {"step": self.step, "time": self.time, "seconds": self.seconds, "lr": self.lr, "scale": self.scale,
                "samples": self.samples, "batch": self.batch, "losses": self.losses}  # fmt: skip


class RingWriter:
    """Writes rows over the oldest ones. Never waits for the disk.

    The file is mapped into memory: a row is copied there, and the system writes it out in its own time, also after the
    process was killed. The file must not be there yet; its full size is taken at once, and OSError raised where there
    is no room, since a full disk would otherwise end the process by a signal later. Who opens it calls ``close``.
    """

    def __init__(self, path: Path) -> None:
        size = _BEGIN + ROWS * _SIZE
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)  # a full disk is told now, not by a signal later
            else:
                os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        self._memory[: len(_MAGIC)] = _MAGIC
        self._names: list[str] = []
        self._count = 0

    def write(self, flight: Flight, random: Any = None) -> None:
        """Write a row over the oldest one. Of all losses that ever come the first eight names are kept.

        ``random``: the memory of the random state, which is copied from there, in place of the bytes in ``flight``.
        The number at the row's end is cleared first and set last: a row that a kill interrupts has different numbers
        at its ends, and is left out when the ring is read.
        """
        there, losses = 0, [_NAN] * LOSSES
        for name, value in flight.losses.items():
            if name not in self._names and len(self._names) < LOSSES:
                self._name(name)
            if name in self._names:
                place = self._names.index(name)
                there, losses[place] = there | 1 << place, value
        self._count += 1
        at = _BEGIN + (self._count % ROWS) * _SIZE
        end = at + _SIZE - 8
        _NUMBER.pack_into(self._memory, end, 0)  # torn, until all of it is there
        _ROW.pack_into(self._memory, at, self._count, flight.step, flight.time, flight.seconds, flight.lr, flight.scale,
                       flight.samples, int(flight.batch or "0", 16), there, *losses)  # fmt: skip
        state = flight.random if random is None else random
        self._memory[at + _ROW.size : end] = state if len(state) == STATE else bytes(STATE)
        _NUMBER.pack_into(self._memory, end, self._count)

    def leave(self, text: str) -> None:
        """Write why the log beside this file is not written any further: here is room, also where the disk is full."""
        told = text.encode("utf-8", "replace")[: _LAST - 1]
        self._memory[_BEGIN - _LAST : _BEGIN] = told.ljust(_LAST, b"\0")  # over a longer one before, too

    def close(self) -> None:
        """Give the memory back; the file stays."""
        self._memory.close()

    def _name(self, name: str) -> None:
        """Write the names of the losses into the head, with one more; one that has no room there is not kept."""
        told = json.dumps([*self._names, name]).encode()
        if len(told) < _NAMES:
            self._names.append(name)
            self._memory[len(_MAGIC) : len(_MAGIC) + len(told)] = told


def read_ring(path: Path) -> list[Flight]:
    """The rows that are whole, oldest first. Raises RecordError for what is no ring."""
    data = _read(path)
    names = _names(data[len(_MAGIC) : len(_MAGIC) + _NAMES], path)
    found = []
    for row in range(ROWS):
        at = _BEGIN + row * _SIZE
        number, *rest = _ROW.unpack_from(data, at)
        if number > 0 and int.from_bytes(data[at + _SIZE - 8 : at + _SIZE], "little") == number:
            found.append((number, _flight(rest, names, data[at + _ROW.size : at + _ROW.size + STATE])))
    return [flight for _, flight in sorted(found, key=lambda one: one[0])]


def read_left(path: Path) -> str:
    """Why the log beside this file was not written any further; empty where it was. Raises RecordError as above."""
    return _read(path)[_BEGIN - _LAST : _BEGIN].partition(b"\0")[0].decode("utf-8", "replace")


def _read(path: Path) -> bytes:
    """The whole file. Raises RecordError for what is no ring."""
    try:
        if not path.is_file():
            raise RecordError(f"{path}: is no file")
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    if data[: len(_MAGIC)] != _MAGIC or len(data) != _BEGIN + ROWS * _SIZE:
        raise RecordError(f"{path}: is no ring of last steps: {len(data)} bytes, expected {_BEGIN + ROWS * _SIZE}")
    return data


def _names(data: bytes, path: Path) -> Sequence[str]:
    """The names of losses from a ring's head. Raises RecordError for what is no list of texts."""
    told = data.partition(b"\0")[0]
    try:
        names = json.loads(told) if told else []
    except (ValueError, RecursionError):
        raise RecordError(f"{path}: the names of its losses cannot be read") from None
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise RecordError(f"{path}: the names of its losses are no list of texts")
    return names


def _flight(row: Sequence[Any], names: Sequence[str], random: bytes) -> Flight:
    """A row as it was unpacked, without its number; ``there`` has a bit for each loss that the step had."""
    step, time, seconds, lr, scale, samples, checksum, there, *losses = row
    known = {name: losses[at] for at, name in enumerate(names[:LOSSES]) if there >> at & 1}
    return Flight(step, time, seconds, lr, scale, samples, f"{checksum:08x}", known, random if any(random) else b"")
