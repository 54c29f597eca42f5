"""What gaff raises. Everything derives from ``GaffError``, so one ``except`` catches all of it and nothing else."""

from __future__ import annotations

import operator
from typing import Any


class GaffError(Exception):
    """Base of everything that gaff raises on purpose."""


class SiteError(GaffError):
    """An address that cannot be read, or that names nothing in this model."""


class PlanError(GaffError):
    """Something was asked for that cannot be done on this model or in this situation."""


class NeverFiredError(GaffError):
    """A pattern whose sites all stayed silent until the session closed.

    ``receipt`` tells what did happen; the captures of the other patterns stay readable.
    """

    def __init__(self, message: str, receipt: Any = None) -> None:
        super().__init__(message)
        self.receipt = receipt


class ExactnessError(GaffError):
    """A value that can no longer be trusted; gaff refuses to hand it out."""


class NonFiniteError(GaffError):
    """A NaN or inf where that was not allowed; ``report`` tells its origin where that was looked for."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class RecordError(GaffError):
    """A file that cannot be read or written: missing, torn, of another format, or hostile."""


def note(error: BaseException, text: str) -> None:
    """Add a line below the message of an exception, as ``add_note`` of Python 3.11 does; its arguments stay."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]  # of Python 3.11


def whole_number(value: Any, least: int | None = None) -> int | None:
    """A whole number of Python's, NumPy's or of a tensor that holds one, as Python's own.

    None for anything else, truth values among it, and for what lies below ``least``.
    """
    is_truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        number = None if is_truth else operator.index(value)
    except TypeError:
        return None
    return None if number is None or (least is not None and number < least) else number


def need_truth(value: object, name: str) -> bool:
    """A truth value. Raises PlanError for anything else, text among it, which Python would take for true."""
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r:.60} is no truth value: expected True or False")
    return value
