"""A record in a run of MLflow, in whatever store it is set up with. Needs no torch.

The run is addressed by its id through ``MlflowClient``, never by MLflow's active run, so a run of the user's that
begins or ends meanwhile changes nothing.
"""

from __future__ import annotations

import os
import posixpath
import re
import zlib
from collections.abc import Collection
from typing import Any

from gaff.compat.extras import need
from gaff.errors import PlanError
from gaff.integrations.partners import STATS, Sender, as_text
from gaff.record.run import Record

_STORES = (
    "expected MLFLOW_TRACKING_URI with the address of a server; the client alone, which gaff[mlflow] installs, has no "
    "database (pip install mlflow has), and writes into a folder only with MLFLOW_ALLOW_FILE_STORE=true"
)
_AT_ONCE = 1000  # metrics of one request: what MLflow takes at most
_LONGEST = 250  # characters of a metric's name
_ALLOWED = re.compile(r"[/\w.\- :]*")


class MLflow(Sender):
    """Sends what is new in a record with each ``send``, after a run or while it goes on. To be closed.

    Goes to your active run, which is left open, else to a new one in ``experiment`` (None: $MLFLOW_EXPERIMENT_NAME,
    or ``gaff``), which ``close`` ends. Metrics are ``gaff/site/stat``, ``gaff/loss/NAME`` ... with the steps and times
    of the run; where MLflow does not allow a name, see ``name_of``. Findings are the artifact ``gaff/findings.md``.
    Stores in a database keep an infinite value as the largest number.
    """

    def __init__(
        self, *, sites: Collection[str] = (), stats: Collection[str] = STATS, experiment: str | None = None
    ) -> None:
        """Find the run to write to, or begin one. Waits for the store.

        Raises PlanError where mlflow is not installed, where its store cannot be used, and for an ``experiment`` though
        a run is active.
        """
        module = need("mlflow", "mlflow")
        self._metric = need("mlflow.entities", "mlflow").Metric
        own = module.active_run()
        if own is not None and experiment is not None:
            raise PlanError(f"experiment={experiment!r}: a run of mlflow is active and would be used; end it first")
        self._is_ours = own is None
        try:
            self._client = module.MlflowClient()
            self.run_id: str = own.info.run_id if own is not None else self._make_run(experiment)
        except (module.exceptions.MlflowException, ImportError) as error:  # a store may need a package of its own
            why = str(error).strip().partition("\n")[0].partition(". ")[0]
            advice = f": {_STORES}" if "URI" in why or "backend" in why else ""
            raise PlanError(f"the store of MLflow cannot be used: {why}{advice}") from error
        super().__init__(sites, stats)
        self._waiting: list[Any] = []  # metrics of the next request

    def _send(self, record: Record) -> int:
        """As ``send``, a thousand metrics a request."""
        count = 0
        for point, named in self._points(record):
            self._flush(_AT_ONCE)  # of points that are passed: this one comes again where it raises
            when = round(1000 * point.time)
            self._waiting += [self._metric(name_of(name), value, when, point.step) for name, value in named.items()]
            count += len(named)
        self._flush(1)
        self._findings.tell(
            record, lambda found: self._client.log_text(self.run_id, as_text(found), "gaff/findings.md")
        )
        return count

    def _close(self) -> None:
        """End the run if it was made here."""
        if self._is_ours:
            self._client.set_terminated(self.run_id)

    def _flush(self, least: int) -> None:
        """Send the metrics that wait, as long as there are at least ``least`` of them.

        Those of a request are forgotten only when it has succeeded.
        """
        while len(self._waiting) >= least:
            self._client.log_batch(self.run_id, self._waiting[:_AT_ONCE])
            del self._waiting[:_AT_ONCE]

    def _make_run(self, experiment: str | None) -> str:
        """Begin a run in an experiment, which is made if there is none of this name, and return its id."""
        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "gaff"
        known = self._client.get_experiment_by_name(name)
        number = known.experiment_id if known is not None else self._client.create_experiment(name)
        return str(self._client.create_run(number).info.run_id)


def name_of(wanted: str) -> str:
    """The name of a metric as MLflow allows it: letters, digits, ``_-.: /``, 250 characters, the plain form of a path.

    Any other is changed and ends in a checksum of what was wanted, so that two names which are changed alike stay two.
    """
    is_path = posixpath.normpath(wanted) == wanted != "." and not wanted.startswith(("/", ".."))
    if is_path and len(wanted) <= _LONGEST and _ALLOWED.fullmatch(wanted):
        return wanted
    parts = [one for one in re.sub(r"[^/\w.\- :]", "_", wanted).split("/") if one not in ("", ".", "..")]
    return f"{'/'.join(parts)[: _LONGEST - 9]}-{zlib.crc32(wanted.encode()):08x}"
