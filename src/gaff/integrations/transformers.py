"""A callback for the Trainer of transformers that watches a training run."""

from __future__ import annotations

import os
from typing import Any

from gaff.compat.extras import need
from gaff.record.finding import Finding
from gaff.training.watch.handle import make_watch, options_of
from gaff.training.watch.settings import Settings

_Callback: Any = need("transformers", "transformers").TrainerCallback


class TransformersWatch(_Callback):  # type: ignore[misc]  # a Trainer calls all methods of its base
    """``TransformersWatch(out="a")`` among a Trainer's callbacks is ``gaff.watch(model, out="a")`` in ``train``.

    ``gaff_findings``, how many there are that are not over, goes beside what the Trainer logs: into
    ``state.log_history``, and to callbacks that come after this one. Waits there for looks still to be judged; what is
    computed stays the same, bit for bit. The Trainer tells of no exception: after one, call ``remove()``.
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

    @property
    def findings(self) -> list[Finding]:
        """The findings of the latest training, worst first; waits for looks still to be judged."""
        return [] if self.watch is None else list(self.watch.findings)

    def remove(self) -> None:
        """Stop watching; nothing of gaff's stays. What was found stays readable."""
        if self.watch is not None:
            self.watch.remove()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Open a watch of the model; one that an exception has left open is closed before.

        A second training, also one that the Trainer begins by itself with smaller batches, has a record of its own, in
        a folder beside ``out``: ``a-2``.
        """
        self.remove()
        self._trainings += 1
        self.watch = make_watch({"model": model}, None, options_of(self._options, self._trainings))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **kwargs: Any) -> None:
        """Add ``gaff_findings`` to what the Trainer is logging, and to the last entry of its history.

        Both are written to: callbacks that come after this one, the trackers among them, are given ``logs``.
        """
        if self.watch is None or logs is None:
            return
        count = sum(not one.is_over for one in self.findings)
        for told in (logs, *state.log_history[-1:]):
            told["gaff_findings"] = count

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the watch; what was found stays readable."""
        self.remove()
