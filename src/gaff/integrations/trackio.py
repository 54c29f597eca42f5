"""A record in a run of trackio. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gaff.compat.extras import need
from gaff.integrations.partners import STATS, Sender, as_text, refuse_options
from gaff.record.run import Record


class Trackio(Sender):
    """Sends what is new in a record with each ``send``, after a run or while it goes on. To be closed.

    Goes to your active run, which is left open, else to a new one of the project ``gaff``, which ``close`` finishes;
    ``options`` are those of ``trackio.init``. Metrics are ``gaff/site/stat``, ``gaff/loss/NAME`` ... at the run's own
    steps; findings are the text ``gaff/findings``.
    """

    def __init__(self, *, sites: Collection[str] = (), stats: Collection[str] = STATS, **options: Any) -> None:
        """Find the run to write to, or begin one with ``options``.

        Raises PlanError where trackio is not installed, or ``options`` are given and a run is active.
        """
        self._trackio = need("trackio", "trackio")
        own = need("trackio.context_vars", "trackio").current_run.get()
        refuse_options("trackio", own, options)
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}  # of this process, not of the run
        self.run = own if own is not None else self._trackio.init(**{"project": "gaff", **quiet, **options})
        self._is_ours = own is None
        super().__init__(sites, stats)

    def _send(self, record: Record) -> int:
        """As ``send``; findings go along where they have changed."""
        count = 0
        for point, named in self._points(record):
            self.run.log(named, step=point.step)
            count += len(named)
        markdown, step = self._trackio.Markdown, record.steps
        self._findings.tell(record, lambda found: self.run.log({"gaff/findings": markdown(as_text(found))}, step=step))
        return count

    def _close(self) -> None:
        """Finish the run if it was made here."""
        if self._is_ours:
            self._trackio.finish()
