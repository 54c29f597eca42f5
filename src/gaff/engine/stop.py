"""Ending a forward early, from inside a hook."""

from __future__ import annotations


class StopForward(Exception):  # an Exception, not a BaseException: torch cleans up only after these
    """Raised at the last wanted site by ``EarlyStop.stop``, and caught by that one outside of the model.

    It takes one string argument, so that torch can raise it again from another thread, where ``by`` is lost.
    """

    by: object = None  # whose it is


class EarlyStop:
    """Ends a call of a model by ``stop``, from inside, and catches that around the call; ``is_stopped``: it came out.

    That of another, around a model in which this one is called, passes. The frames of the call, which hold activations,
    are let go at once. A model that catches every ``Exception`` swallows the stop and runs on: then none comes out.
    """

    is_stopped = False

    def stop(self) -> None:
        """Raises StopForward, which this one catches."""
        error = StopForward("gaff has all it wanted")
        error.by = self
        raise error

    def __enter__(self) -> EarlyStop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.is_stopped = isinstance(error, StopForward) and error.by in (None, self)
        if error is not None and self.is_stopped:
            error.__traceback__ = None
        return self.is_stopped
