"""A record in a run of Weights & Biases, online or offline. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gaff.compat.extras import need
from gaff.integrations.partners import STATS, Sender, refuse_options
from gaff.record.run import Record

_STEP = "gaff/step"


class Wandb(Sender):
    """Sends what is new in a record with each ``send``, after a run or while it goes on. To be closed.

    Goes to your active run, which is left open, else to a new one, which ``close`` finishes; ``options`` are those of
    ``wandb.init``. Metrics are ``gaff/site/stat``, ``gaff/loss/NAME`` ... over ``gaff/step``, so the steps of your own
    metrics need not agree; findings are the table ``gaff/findings``. Each ``send`` adds rows to the run's history:
    where you give ``step=`` to ``wandb.log`` yourself, send after your last one, since these steps only grow.
    """

    def __init__(self, *, sites: Collection[str] = (), stats: Collection[str] = STATS, **options: Any) -> None:
        """Find the run to write to, or begin one with ``options``; its axis ``gaff/step`` is defined at once.

        Raises PlanError where wandb is not installed, or ``options`` are given and a run is active.
        """
        self._wandb = need("wandb", "wandb")
        own = self._wandb.run
        refuse_options("wandb", own, options)
        self.run = own if own is not None else self._wandb.init(**options)
        self._is_ours = own is None
        self.run.define_metric(_STEP, hidden=True)
        self.run.define_metric("gaff/*", step_metric=_STEP)
        super().__init__(sites, stats)

    def _send(self, record: Record) -> int:
        """As ``send``; findings go along where they have changed."""
        count = 0
        for point, named in self._points(record):
            self.run.log({_STEP: point.step, **named})
            count += len(named)

        def log(found: list[list[str]]) -> None:
            table = self._wandb.Table(columns=["severity", "rule", "site", "rank", "text"], data=found)
            self.run.log({_STEP: record.steps, "gaff/findings": table})

        self._findings.tell(record, log)
        return count

    def _close(self) -> None:
        """Finish the run if it was made here."""
        if self._is_ours:
            self.run.finish()
