"""A callback for the Trainer of transformers that watches a training run."""

from __future__ import annotations

import os
import sys
from typing import Any

from gaff.compat.extras import need
from gaff.compat.modes import frames_from
from gaff.engine.process.stack_room import RunningFunction
from gaff.record.finding import Finding
from gaff.training.watch.handle import make_watch, options_of
from gaff.training.watch.settings import Settings

_Callback: Any = need("transformers", "transformers").TrainerCallback
_LOOP = "transformers.trainer"  # the module of the Trainer's loop


class TransformersWatch(_Callback):  # type: ignore[misc]  # a Trainer calls all methods of its base
    """``TransformersWatch(out="a")`` among a Trainer's callbacks is ``gaff.watch(model, out="a")`` in ``train``.

    ``gaff_findings``, how many there are that are not over, goes beside what the Trainer has logged, into
    ``state.log_history``, and nowhere else: what ``evaluate`` returns, of which a search makes its objective, is not
    written to. Waits there for looks still to be judged; what is computed stays the same, bit for bit. The Trainer
    tells of no exception: after one, call ``remove()``. A copy of the callback watches nothing until it is in a
    training.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None, *, every: int | None = None, **options: Any) -> None:
        """Take the options of ``gaff.watch``, all of them; nothing is opened before ``train``.

        Raises TypeError for an option that ``gaff.watch`` does not know, and PlanError for a value that cannot be
        meant, at once and not when training begins.
        """
        super().__init__()
        self._options = {"out": out, "every": every, **options}
        Settings.of(**self._options)
        self.watch: Any = None  # the latest gaff.Watch
        self._trainings = 0  # begun
        self._loop: RunningFunction | None = None  # the Trainer's, of the training in progress

    @property
    def findings(self) -> list[Finding]:
        """The findings of the latest training, worst first; waits for looks still to be judged."""
        return [] if self.watch is None else list(self.watch.findings)

    def __getstate__(self) -> dict[str, Any]:
        """What copies are made of: a watch belongs to the process and the training that it was opened in."""
        return {**self.__dict__, "watch": None, "_loop": None}

    def remove(self) -> None:
        """Stop watching; nothing of gaff's stays. What was found stays readable.

        After an exception that has ended the training, the record tells so: of the exception itself where this is
        called while it is handled.
        """
        self._end(was_left=self._loop is not None and not self._loop.is_running())

    def _end(self, *, was_left: bool) -> None:
        """Close the watch; ``was_left``: an exception has ended the training."""
        if self.watch is None:
            return
        left = RuntimeError("the Trainer's loop was left before the training was over")
        error = (sys.exc_info()[1] or left) if was_left else None
        self._loop = None
        self.watch.__exit__(type(error) if error is not None else None, error, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Open a watch of the model; one that an exception has left open is closed before.

        A second training, also one that the Trainer begins by itself with smaller batches, has a record of its own, in
        a folder beside ``out``: ``a-2``.
        """
        self._end(was_left=self._loop is not None)
        self._trainings += 1
        frames = list(frames_from(sys._getframe()))
        level = next((at for at, one in enumerate(frames) if one.f_globals.get("__name__") == _LOOP), 1)
        self._loop = RunningFunction.of(level)
        self.watch = make_watch({"model": model}, None, options_of(self._options, self._trainings))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **kwargs: Any) -> None:
        """Add ``gaff_findings`` to the last entry of the Trainer's history, and not to ``logs``, which may be what
        ``evaluate`` is about to return."""
        if self.watch is not None and logs is not None:
            for told in state.log_history[-1:]:
                told["gaff_findings"] = sum(not one.is_over for one in self.findings)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the watch; what was found stays readable."""
        self._end(was_left=False)
