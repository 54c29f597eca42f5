"""A callback for Lightning, as ``lightning.pytorch`` or as ``pytorch_lightning``, that watches a fit."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

import torch

from gaff.api import watch
from gaff.integrations.partners import need
from gaff.record.finding import Finding


def _installed() -> ModuleType:
    """That which the user has imported already, else that which is there; either has a class of its own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    found = loaded or [name for name in names if find_spec(name.partition(".")[0]) is not None]
    module: ModuleType = need(found[0] if found else names[1], "lightning")
    return module


_Callback: Any = _installed().Callback


class LightningWatch(_Callback):  # type: ignore[misc]  # a Trainer calls all methods of its base
    """``LightningWatch(out="runs/a")`` among a Trainer's callbacks is ``gaff.watch(model, out="runs/a")`` during ``fit``.

    To your loggers it gives, as often as the Trainer logs, ``gaff/findings``: how many there are that are not over,
    and ``gaff/grad_norm``: of all gradients of the module before they are clipped, at that step. That reads one number
    from the device, and waits for looks still to be judged; what is computed stays the same, bit for bit.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None, *, every: int | None = None, **options: Any) -> None:
        """``options``: as ``gaff.watch`` takes them. Raises TypeError for others at once."""
        super().__init__()
        signature(watch).bind_partial(out=out, every=every, **options)
        self._options = {"out": out, "every": every, **options}
        self.watch: Any = None  # the latest gaff.Watch
        self._norm: float | None = None
        self._logged = -1  # step

    @property
    def findings(self) -> list[Finding]:
        """Of the latest fit, worst first; also after it."""
        return [] if self.watch is None else list(self.watch.findings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._norm, self._logged = None, trainer.global_step
        self.watch = watch({"model": trainer.strategy.model}, **self._options)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.loggers and self.watch is not None and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            gradients = [one.grad.detach() for one in pl_module.parameters() if one.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients).item()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step != self._logged and step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch is not None:
            self.watch.remove()
            self._norm = None
            self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.watch is not None:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)

    def _log(self, trainer: Any) -> None:
        """With the step that its numbers are of, as Lightning counts them."""
        self._logged = trainer.global_step
        numbers = {"gaff/findings": float(sum(not one.is_over for one in self.findings))} if trainer.loggers else {}
        if self._norm is not None:
            numbers["gaff/grad_norm"] = self._norm
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=max(0, trainer.global_step - 1))
