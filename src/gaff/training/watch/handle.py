"""What ``gaff.watch`` returns: a handle on a watcher that is also a context, and how it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gaff.address.resolve import need_initialised, need_module
from gaff.engine.process.optimizer import unwrap_optimizer
from gaff.errors import PlanError
from gaff.training.watch.live_cell import LiveCell
from gaff.training.watch.settings import Settings
from gaff.training.watch.watcher import Watcher
from gaff.views.run_html import FindingList


class Watch:
    """A training run that is being watched; see ``gaff.watch``, which makes it.

    It watches from when it is made until ``remove()``, or the end of a ``with`` block; the block tells it the exception
    that ended the run, ``remove`` does not. What was found stays readable after that. Holding it is not needed: the
    watcher lives until it is closed, or until the process ends.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._is_over = False
        watcher.open()

    def __enter__(self) -> Watch:
        if self._is_over:
            raise PlanError("this watch is over: expected a new gaff.watch(...), with another folder")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._watcher.close(error)

    def remove(self) -> None:
        """Stop watching and finish the record: no hook or wrapper of gaff's stays. What was found stays readable.

        Waits until the looks taken so far are judged and written. May be called twice.
        """
        self._is_over = True
        self._watcher.close()

    @property
    def findings(self) -> FindingList:
        """What has been found so far, worst first. Waits until the looks taken so far are judged."""
        return FindingList(self._watcher.reporter.findings)

    @property
    def step(self) -> int:
        """How many steps of the run are completed; of several optimizers those of the leading one count."""
        return self._watcher.steps_made

    @property
    def overhead(self) -> float:
        """The share of the time since the first step that went into watching, such as 0.01; 0 before it was over.

        All that gaff does in the process counts, on this thread and on its own. What came until the first step was over
        is told apart, as ``startup_s``: it is the same for a long run as for a short one.
        """
        return self._watcher.pace.overhead

    @property
    def startup_s(self) -> float:
        """Seconds that went into watching until the first step was over: the record, the models, the first look."""
        return self._watcher.pace.startup_s

    @property
    def failure(self) -> str | None:
        """Why watching has stopped by itself, or a look was lost, as a line of text; None where neither happened."""
        return self._watcher.reporter.failure

    def _repr_html_(self) -> str:
        return LiveCell().update(self.step, self._watcher.reporter.progress.latest, self.findings, self.overhead)

    def _ipython_display_(self) -> None:
        """For Jupyter: one output that changes as the training goes on, about once a second, until it is over."""
        from IPython.display import HTML, display  # IPython is what calls

        handle = display(HTML(self._repr_html_()), display_id=True)
        if handle is not None:  # nothing is displayed where there is no kernel
            live = LiveCell(lambda html: handle.update(HTML(html)))
            self._watcher.reporter.progress.viewers.append(live.update)

    def __repr__(self) -> str:
        return f"<gaff watch: {self.step} steps, {len(self.findings)} findings, overhead {self.overhead:.1%}>"


def make_watch(model: nn.Module | Mapping[str, nn.Module] | None, optimizer: Any, options: Mapping[str, Any]) -> Watch:
    """Do what ``gaff.watch`` promises: check everything, then open.

    ``options`` are the keywords of ``WatchOptions``. An optimizer may be wrapped, as accelerate does. Raises TypeError
    for an unknown keyword, PlanError, SiteError or RecordError for what cannot be done, before anything is installed.
    """
    settings = Settings.of(rank=rank_of_process(), **options)
    if settings.keep_batch and settings.out is None:
        raise PlanError("keep_batch=True keeps batches in the folder of the record: expected out= with it")
    models = _named(model)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    optimizers = [unwrap_optimizer(one) for one in given]
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise PlanError(f"optimizer={type(one).__name__}: expected a torch.optim.Optimizer, or a list of them")
    began = perf_counter()
    watcher = Watcher(settings, models, optimizers)
    watcher.shield.note(perf_counter() - began)
    return Watch(watcher)


def options_of(options: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The options of the training of this number, from 1, that somebody watches by one callback.

    Each has a record of its own: later ones beside the first, in ``out-2`` and so on.
    """
    out = options.get("out")
    return options if out is None or number == 1 else {**options, "out": f"{os.fspath(out)}-{number}"}


def rank_of_process() -> int:
    """The number of this process among those that train together: torch's if it knows one, else of ``RANK``, else 0."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    told = os.environ.get("RANK", "")
    return int(told) if told.isdigit() else 0


def _named(model: nn.Module | Mapping[str, nn.Module] | None) -> dict[str, nn.Module] | None:
    """The models by name, as a new dict; a single one is named after the variable that holds it, else ``model``.

    None stands for whatever is trained in this process. Raises PlanError for what is no module.
    """
    from gaff.training.watch.variable_names import name_of_variable

    if model is None:
        return None
    named = dict(model) if isinstance(model, Mapping) else {name_of_variable(model) or "model": model}
    if not named:
        raise PlanError("no model was given: expected one, several by name, or none at all, for whatever is trained")
    for name, one in named.items():
        if not isinstance(name, str):
            raise PlanError(f"name {name!r} of a model: expected a text, such as {{'generator': model}}")
        need_module(one)
        need_initialised(one)
    return named
