"""Exceptions of the program's own signal handlers, which Python raises in whatever code runs at that moment."""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it, as of a timeout by ``signal.alarm``: it is meant for the program."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in handlers:
        trace = trace.tb_next
    return trace is not None


def _code_of(handler: Any) -> CodeType | None:
    """The code that runs when a signal comes; None for one that Python does not run."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__") and callable(handler) and not isinstance(handler, signal.Handlers):
        function = getattr(type(handler).__call__, "__func__", type(handler).__call__)
    return getattr(function, "__code__", None)
