"""Tables of numbers in frames: columns side by side, compressed. Needs no torch.

A LAYOUT frame names the rows and columns of the tables that refer to it. A MATRIX frame is one table of one step: its
layout and phase, then zlib of the columns in order, each an array of float32 or float64, and after them, if the layout
has magnitudes, 64 columns of one byte. A SERIES frame is a table whose rows are steps: a line of JSON with the names of
its columns, then zlib of the columns, all float64.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gaff.errors import RecordError
from gaff.record.statistics import BUCKETS

PHASES = ("train", "eval")
_START = struct.Struct("<IB3x")
_TYPES = {"f": 4, "d": 8}
_OCTAVES = 24  # a byte tells shares from 2**-24 to 1, on a logarithmic scale
_LEVEL = 1  # of compression: the fastest
_MOST = 1 << 22  # rows or columns
_LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True)
class Layout:
    """What the lines and columns of a table are, as a LAYOUT frame tells it.

    ``rows``: (model, address) of each row; ``columns``: name and type code, ``f`` or ``d``, of each column. A layout
    is written once, before the first table that refers to its ``number``, and never changes: where new sites turn up,
    the recorder makes another. ``group``: activations or parameters, see ``gaff.record.statistics``.
    """

    number: int
    group: str
    rows: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]
    has_magnitudes: bool

    def to_json(self) -> dict[str, Any]:
        """The payload of a LAYOUT frame, as JSON takes it."""
        return {
            "number": self.number,
            "group": self.group,
            "rows": [list(row) for row in self.rows],
            "columns": [list(column) for column in self.columns],
            "magnitudes": self.has_magnitudes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Inverse of ``to_json``. Raises RecordError for anything that does not fit.

        Every layout has a column ``count`` of float64, at most 64 columns and at most 2**22 rows: a damaged file must
        not make a reader ask for any amount of memory.
        """
        try:
            rows = tuple((str(model), str(address)) for model, address in value["rows"])
            columns = tuple((str(name), str(code)) for name, code in value["columns"])
            layout = cls(int(value["number"]), str(value["group"]), rows, columns, bool(value["magnitudes"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RecordError(f"a layout cannot be read: {type(error).__name__}: {error}") from None
        if (
            any(code not in _TYPES for _, code in columns)
            or ("count", "d") not in columns
            or len(columns) > 64
            or len(rows) > _MOST
        ):
            raise RecordError(f"a layout of {len(rows)} rows and columns {columns[:3]} ... is none of gaff's")
        return layout

    @cached_property
    def index(self) -> dict[tuple[str, str], int]:
        """The place of each row, by model and address."""
        return {row: at for at, row in enumerate(self.rows)}

    @property
    def size_bytes(self) -> int:
        """Bytes of a table of this layout, its magnitudes included, before compression."""
        return len(self.rows) * (sum(_TYPES[code] for _, code in self.columns) + BUCKETS * self.has_magnitudes)


@dataclass(frozen=True, slots=True)
class Table:
    """One table as it was read.

    ``columns``: an array for each name, with a number for each row of the layout. ``magnitudes``: one byte for each
    row, bucket after bucket, see ``share_of``; empty where the layout has none or they were not wanted.
    """

    layout: Layout
    phase: str
    columns: dict[str, array[float]]
    magnitudes: bytes

    def shares(self, row: int) -> list[float]:
        """The shares of a row's finite elements in the 64 buckets of magnitude, within 3.3 %; empty without magnitudes.

        A byte tells 24 octaves in 254 steps: half a step is a factor of 2**(12 / 254).
        """
        if not self.magnitudes:
            return []
        count = len(self.layout.rows)
        return [share_of(self.magnitudes[bucket * count + row]) for bucket in range(BUCKETS)]


def pack(number: int, phase: str, columns: Sequence[bytes]) -> bytes:
    """The payload of a MATRIX frame; ``columns`` as little-endian bytes in the order of the layout."""
    return _START.pack(number, PHASES.index(phase)) + zlib.compress(b"".join(columns), _LEVEL)


def number_of(payload: bytes) -> int:
    """The number of the layout that a table refers to, without decompressing it. Raises RecordError for one cut off."""
    if len(payload) < _START.size:
        raise RecordError(f"a table of {len(payload)} bytes is cut off")
    return int(_START.unpack_from(payload)[0])


def unpack(layout: Layout, payload: bytes, *, with_magnitudes: bool = True) -> Table:
    """The table in the payload of a MATRIX frame, whose layout is this one.

    Raises RecordError where the payload is not of this layout; never makes more than the layout's size of it.
    """
    phase, data = raw(layout, payload, with_magnitudes=with_magnitudes)
    columns: dict[str, array[float]] = {}
    at = 0
    for name, code in layout.columns:
        end = at + _TYPES[code] * len(layout.rows)
        columns[name] = to_array(code, data[at:end])
        at = end
    return Table(layout, phase, columns, data[at:])


def raw(layout: Layout, payload: bytes, *, with_magnitudes: bool = True) -> tuple[str, bytes]:
    """The phase of a table, and its columns as they are stored, one after the other, then the magnitudes."""
    _, phase = _START.unpack_from(payload)
    has_rest = layout.has_magnitudes and not with_magnitudes
    wanted = layout.size_bytes - BUCKETS * len(layout.rows) * has_rest
    data = _decompress(payload[_START.size :], wanted + (not has_rest), f"a table of layout {layout.number}")
    if len(data) != wanted or phase >= len(PHASES):
        raise RecordError(f"a table of layout {layout.number} has {len(data)} bytes, expected {wanted}")
    return PHASES[phase], data


def phase_of(payload: bytes) -> str:
    """The phase of a table, ``train`` or ``eval``, without decompressing it. Raises RecordError for any other."""
    phase = _START.unpack_from(payload)[1] if len(payload) >= _START.size else len(PHASES)
    if phase >= len(PHASES):
        raise RecordError(f"a table of phase {phase} is none of gaff's")
    return PHASES[phase]


def pack_series(columns: Mapping[str, Sequence[float]]) -> bytes:
    """The payload of a SERIES frame: numbers of consecutive steps by name, all of one length."""
    head = json.dumps({"columns": list(columns), "rows": len(next(iter(columns.values()), ()))}).encode()
    return head + b"\n" + zlib.compress(b"".join(to_bytes("d", values) for values in columns.values()), _LEVEL)


def unpack_series(payload: bytes) -> dict[str, array[float]]:
    """The columns of a SERIES frame by name. Raises RecordError for what ``pack_series`` has not made."""
    head, line, packed = payload.partition(b"\n")
    try:
        told = json.loads(head)
        names, rows = [str(name) for name in told["columns"]], int(told["rows"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise RecordError(f"a series cannot be read: {type(error).__name__}: {error}") from None
    if not line or rows < 0 or rows * max(1, len(names)) > _MOST:
        raise RecordError(f"a series of {rows} rows and {len(names)} columns is none of gaff's")
    data = _decompress(packed, 8 * rows * len(names) + 1, "a series")
    if len(data) != 8 * rows * len(names):
        raise RecordError(f"a series has {len(data)} bytes, expected {8 * rows * len(names)}")
    return {name: to_array("d", data[8 * rows * at : 8 * rows * (at + 1)]) for at, name in enumerate(names)}


def _decompress(packed: bytes, size: int, what: str) -> bytes:
    """At most ``size`` bytes, whatever the data says: a small file could stand for any amount of memory."""
    try:
        return zlib.decompressobj().decompress(packed, max(1, size))[:size]  # 0 would be no limit
    except zlib.error as error:
        raise RecordError(f"{what} cannot be decompressed: {error}") from None


def to_array(code: str, data: bytes) -> array[float]:
    """An array from little-endian numbers, whatever the machine's order is. ``code``: ``f`` or ``d``."""
    values: array[float] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def to_bytes(code: str, values: Sequence[float]) -> bytes:
    """Little-endian numbers that ``to_array`` reads; what is beyond float32 becomes infinite in it, as by a cast."""
    if code == "f":  # beyond float32: inf, as a cast does
        values = [one if not math.isfinite(one) or abs(one) <= _LARGEST else math.copysign(math.inf, one)
                  for one in values]  # fmt: skip
    packed: array[float] = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def share_of(byte: int) -> float:
    """The share that a byte stands for: 0 is none, 1 to 255 go from 2**-24 to 1 on a logarithmic scale."""
    return 0.0 if byte == 0 else 2.0 ** ((byte - 255) * _OCTAVES / 254)
