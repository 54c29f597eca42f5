"""Arrays as a page carries them: small, compressed each by itself, decoded in the browser when a view needs them.

``log16``: int16, 200 steps an octave of the magnitude for numbers of one sign, 100 for those of both, so that a value
is told within 0.18 % or 0.35 %; exact are zero, infinities, NaN and ones. ``u8``: bytes. ``f64``: numbers as they are.
Every chunk is ``deflate`` without a header (RFC 1951) of byte planes; of log16 the differences along the last axis.

Why codes: a thousand sites and two thousand looks are 26 million numbers, 104 MB as float32 and about 9 MB as
differences of codes, while a factor of 1.0017 is less than a line of a chart is wide. ``decode.ts`` reads what is
written here; the constants below stand there as well.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MISSING, ZERO, INF, NEGATIVE_INF = -32768, -32767, 32767, -32766
PER_OCTAVE = 200  # steps of a code, for numbers that are never negative
PER_OCTAVE_SIGNED = 100
_SHIFT = 15001  # makes the codes of every positive float32 positive where the sign is needed
_LEVEL = 6
_LEVEL_OF_MANY = 3  # of compression, where there is much: the time counts
_MANY = 1 << 21


@dataclass
class Chunks:
    """The arrays of one page, in the order in which they were added: a chunk is known by its number.

    Made when a document is put together, and only added to. ``told``: for each chunk its encoding and shape, as the
    page's head has it; ``packed``: its bytes; ``is_large``: whether there is so much that a faster, weaker compression
    is chosen for what is added from then on.
    """

    told: list[dict[str, Any]] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)
    is_large: bool = False

    def log16(self, values: Any) -> int:
        """Add a float array as logarithmic codes, and return its number.

        ``values``: any shape, the last axis is time; NaN for what is not there. Neighbours in time are alike, so their
        differences compress better than the codes do.
        """
        codes, is_signed = to_log16(values)
        step = np.diff(codes, axis=-1, prepend=np.int16(0))  # wraps, as the sum in the browser does
        return self._add("log16s" if is_signed else "log16", codes.shape, _planes(step.astype("<i2")))

    def shares(self, values: Any) -> int:
        """Add a uint8 array as it is, and return its number: for magnitudes and pictures."""
        return self._add("u8", values.shape, np.ascontiguousarray(values).tobytes())

    def numbers(self, values: Any) -> int:
        """Add a float array in float64, and return its number: for counts, steps and losses, which are told exactly."""
        return self._add("f64", np.shape(values), _planes(np.ascontiguousarray(values, dtype="<f8")))

    def _add(self, encoding: str, shape: tuple[int, ...], data: bytes) -> int:
        """Compress one array's bytes and return its number."""
        level = _LEVEL_OF_MANY if self.is_large else _LEVEL
        deflate = zlib.compressobj(level, zlib.DEFLATED, -15)
        self.told.append({"encoding": encoding, "shape": list(shape)})
        self.packed.append(deflate.compress(data) + deflate.flush())
        return len(self.packed) - 1


def to_log16(values: Any) -> tuple[Any, bool]:
    """The int16 codes of a float array, in the same shape, and whether they tell signs.

    A code is the binary logarithm of the magnitude in steps of a 200th of an octave, or of a 100th, moved up so that
    its sign is free to tell the value's sign. Steps divide an octave, so powers of two are exact. Values are read as
    float32, whose whole range leaves the four codes free that stand for zero, infinities and NaN.
    """
    values = np.asarray(values, np.float32)
    is_signed = bool((values < 0).any())
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = PER_OCTAVE_SIGNED if is_signed else PER_OCTAVE
        size = np.log2(np.abs(values, dtype=np.float32))
        size *= scale
        np.rint(size, out=size)
        if is_signed:
            size += _SHIFT
            size *= np.sign(values)
        size[~np.isfinite(size)] = 0
    codes = size.astype(np.int16)
    codes[values == 0] = ZERO
    is_odd = ~np.isfinite(values)
    if is_odd.any():
        codes[np.isnan(values)] = MISSING
        codes[np.isposinf(values)] = INF
        codes[np.isneginf(values)] = NEGATIVE_INF
    return codes, is_signed


def _planes(values: Any) -> bytes:
    """The bytes of an array in planes: all first bytes of its elements, then all second ones, and so on.

    Bytes of one place are alike, above all the high ones, and so compress.
    """
    table = values.reshape(-1).view(np.uint8).reshape(-1, values.itemsize)
    return bytes(np.ascontiguousarray(table.T).data)
