"""A record in a run of trackio. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Any

from gaff.integrations.partners import STATS, Findings, as_text, need, points, prefix, refuse_options
from gaff.integrations.rows import Cursor
from gaff.record.run import Record


class Trackio:
    """Sends what is new in a record with each ``send``, after a run or while it goes on. To be closed.

    Goes to your active run, which is left open, else to a new one of the project ``gaff``, which ``close`` finishes;
    ``options`` are those of ``trackio.init``. Metrics are ``gaff/site/stat``, ``gaff/loss/NAME`` ... at the run's own
    steps; findings are the text ``gaff/findings``.
    """

    def __init__(self, *, sites: Collection[str] = (), stats: Collection[str] = STATS, **options: Any) -> None:
        """Raises PlanError where trackio is not installed, or ``options`` are given and a run is active."""
        self._trackio = need("trackio", "trackio")
        own = need("trackio.context_vars", "trackio").current_run.get()
        refuse_options("trackio", own, options)
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}  # of this process, not of the run
        self.run = own if own is not None else self._trackio.init(**{"project": "gaff", **quiet, **options})
        self._is_ours = own is None
        self._sites, self._stats = sites, stats
        self._cursor = Cursor()
        self._findings = Findings()

    def send(self, record: Record) -> int:
        """Returns how many numbers were new."""
        count = 0
        for point in points(record, self._sites, self._stats, self._cursor):
            start = prefix(record, point.rank)
            self.run.log({f"{start}{name}": value for name, value in point.values.items()}, step=point.step)
            count += len(point.values)
        found = self._findings.news(record)
        if found is not None:
            self.run.log({"gaff/findings": self._trackio.Markdown(as_text(found))}, step=record.steps)
        return count

    def close(self) -> None:
        """Finishes the run if it was made here."""
        if self._is_ours:
            self._trackio.finish()
            self._is_ours = False

    def __enter__(self) -> Trackio:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
