"""The mark of a number that a step does not have, in columns of numbers: a NaN that no computation gives.

A loss may itself be NaN, which must not be taken for a step in which it was not computed, nor the other way round.
"""

from __future__ import annotations

import math
import struct

_BITS = bytes.fromhex("666667000000f87f")  # a quiet NaN with a payload, little-endian
ABSENT: float = struct.unpack("<d", _BITS)[0]


def is_absent(value: float) -> bool:
    """Whether a number is the mark; any other NaN is not."""
    return math.isnan(value) and struct.pack("<d", value) == _BITS
