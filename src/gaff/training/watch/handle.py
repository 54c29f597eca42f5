"""``gaff.watch``: a handle on a watcher, and a context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gaff.address.resolve import need_module
from gaff.engine.process.optimizer import unwrap_optimizer
from gaff.errors import PlanError
from gaff.record.finding import Finding
from gaff.training.rules import registry as health_rules
from gaff.training.rules import steps, values
from gaff.training.rules.registry import Rule
from gaff.training.watch.watcher import Settings, Watcher

RULE_FILES = (steps, values)  # importing them registers what they hold


class Watch:
    """See ``gaff.watch``. Watches from when it is made until ``remove()``, or the end of a ``with`` block."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        watcher.open()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.close(error)

    def remove(self) -> None:
        """Stop watching; nothing of gaff's stays. What was found stays readable."""
        self._watcher.close()

    @property
    def findings(self) -> list[Finding]:
        """What has been found so far, worst first. Waits until the looks taken so far are judged."""
        return self._watcher.desk.findings

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self._watcher.step + (self._watcher.ended_at is not None)

    @property
    def overhead(self) -> float:
        """The share of the time since the beginning that watching took."""
        return self._watcher.pace.overhead

    @property
    def failure(self) -> str | None:
        """Why watching has stopped by itself; None: it has not."""
        return self._watcher.desk.failure

    def __repr__(self) -> str:
        return f"<gaff watch: {self.step} steps, {len(self.findings)} findings, overhead {self.overhead:.1%}>"


def make_watch(
    model: nn.Module | Mapping[str, nn.Module] | None,
    optimizer: Any,
    *,
    settings: Mapping[str, Any],
    rules_off: Iterable[str],
) -> Watch:
    """Check everything, then open."""
    models = _named(model)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    optimizers = [unwrap_optimizer(one) for one in given]
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise PlanError(f"optimizer={type(one).__name__}: expected a torch.optim.Optimizer, or a list of them")
    every, budget = settings["every"], settings["budget"]
    if every is not None and (not isinstance(every, int) or every < 1):
        raise PlanError(f"every={every!r}: expected a number of steps, 1 or more")
    if not 0 < budget < 1:
        raise PlanError(f"budget={budget!r}: expected a share of the time between 0 and 1, such as 0.01")
    rules: tuple[Rule, ...] = tuple(health_rules.select(rules_off))
    return Watch(Watcher(Settings(rules=rules, **settings), models, optimizers))


def rank_of_process() -> int:
    """As torch knows it, or launchers of several processes tell it."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    told = os.environ.get("RANK", "")
    return int(told) if told.isdigit() else 0


def settings_of(
    out: str | os.PathLike[str] | None,
    only: Iterable[str],
    skip: Iterable[str],
    every: int | None,
    budget: float,
    tell: Callable[[str], None] | None,
) -> dict[str, Any]:
    """As ``Settings`` takes them. Raises PlanError for a text in place of a list."""
    for name, value in (("only", only), ("skip", skip)):
        if isinstance(value, str):
            raise PlanError(f"{name}={value!r}: expected a list of patterns, such as [{value!r}]")
    return {"out": Path(out) if out is not None else None, "only": tuple(only), "skip": tuple(skip), "every": every,
            "budget": budget, "tell": tell, "rank": rank_of_process()}  # fmt: skip


def _named(model: nn.Module | Mapping[str, nn.Module] | None) -> dict[str, nn.Module] | None:
    from gaff.training.watch.variable_names import name_of_variable

    if model is None:
        return None
    named = dict(model) if isinstance(model, Mapping) else {name_of_variable(model) or "model": model}
    for one in named.values():
        need_module(one)
    return named
