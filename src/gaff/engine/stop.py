"""Ending a forward early, from inside a hook."""

from __future__ import annotations


class StopForward(Exception):  # an Exception, not a BaseException: torch cleans up only after these
    """Raised at the last wanted site, caught by gaff outside of the model.

    It takes one string argument, so that torch can pass it on.
    """


class EarlyStop:
    """Catches a ``StopForward`` around a call of a model; ``is_stopped``: one came out.

    The frames of the call, which hold activations, are let go at once. A model that catches every ``Exception``
    swallows the stop and runs on: then none comes out.
    """

    is_stopped = False

    def __enter__(self) -> EarlyStop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.is_stopped = isinstance(error, StopForward)
        if error is not None and self.is_stopped:
            error.__traceback__ = None
        return self.is_stopped
