"""What CI runs of the slow tests that have many cases: with ``SHARE=3`` every third, others after each commit.

``TURN`` tells which: any number that each commit changes.
"""

import os
import zlib

_SHARE = int(os.environ.get("SHARE", "1"))
_TURN = int(os.environ.get("TURN", "0")) % _SHARE


def is_due(name):
    """Whether the case of this name belongs to the share whose turn it is."""
    return zlib.crc32(name.encode()) % _SHARE == _TURN
