"""What does nothing until it is opened says so where that was forgotten."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


class Unopened:
    """Warns when it is let go of without ever having been opened, as Python does of a coroutine that nobody awaits.

    ``_session`` is what it opens; one that was refused when it was made has none, and has raised.
    """

    _session: Any = None

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._session is not None and not is_exiting() and not self._session.was_opened:
            what = repr(self).partition("\n")[0]
            told = f"gaff: {what} was never opened, and has done nothing: expected it in a with block"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
