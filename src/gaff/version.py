"""Which gaff this is, and where its own code lies."""

from __future__ import annotations

import os

__version__ = "0.1.0"

# The folder of gaff's own code, with a separator at its end: where a name of a file begins with it, the code is gaff's.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
