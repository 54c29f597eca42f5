"""A callback for Lightning, as ``lightning.pytorch`` or as ``pytorch_lightning``, that watches a fit."""

from __future__ import annotations

import math
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gaff.compat.distributed import whole_of
from gaff.compat.extras import need
from gaff.record.finding import Finding
from gaff.record.run import HEAD, Record
from gaff.training.watch.handle import make_watch, options_of
from gaff.training.watch.settings import Settings


def _installed() -> ModuleType:
    """The Lightning package whose ``Callback`` is to be subclassed: ``lightning.pytorch`` or ``pytorch_lightning``.

    Either has a class of its own, and a Trainer takes only its own: so that which the user has imported already is
    chosen, else that which is there. Raises PlanError where there is neither.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    found = loaded or [name for name in names if find_spec(name.partition(".")[0]) is not None]
    module: ModuleType = need(found[0] if found else names[1], "lightning")
    return module


_Callback: Any = _installed().Callback
_BEGAN = [time.time()]  # this process, as far as it watches: where a Trainer starts several, before any of them does
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _BEGAN.__setitem__(0, time.time()))


class LightningWatch(_Callback):  # type: ignore[misc]  # a Trainer calls all methods of its base
    """``LightningWatch(out="a")`` among a Trainer's callbacks is ``gaff.watch(model, out="a")`` during ``fit``.

    To your loggers it gives, as often as the Trainer logs, ``gaff/findings``: how many there are that are not over,
    and ``gaff/grad_norm``: of the gradients of all optimizers that stepped in it before they are clipped, summed up in
    float64; none where no optimizer did. That reads one number from the device for each of them, and waits for looks
    still to be judged; what is computed stays the same, bit for bit. A copy of it, as other processes are given
    (``strategy="ddp_spawn"``), watches nothing until it is in a fit.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None, *, every: int | None = None, **options: Any) -> None:
        """Take the options of ``gaff.watch``, all of them; nothing is opened before ``fit``.

        Raises TypeError for an option that ``gaff.watch`` does not know, and PlanError for a value that cannot be
        meant, at once and not when the fit begins.
        """
        super().__init__()
        self._options = {"out": out, "every": every, **options}
        Settings.of(**self._options)
        self.watch: Any = None  # the latest gaff.Watch
        self._norms: dict[int, float] = {}  # of the step in progress, by optimizer
        self._made = time.time()
        self._fits = 0  # begun
        self._logged = -1  # step

    @property
    def findings(self) -> list[Finding]:
        """The findings of the latest fit, worst first, during it and after it; waits for looks still to be judged.

        Where other processes have trained (``strategy="ddp_spawn"``) they are read from the record of the latest one,
        if there is an ``out``; empty where there is none.
        """
        if self.watch is None:
            records = self._records(time.time())
            return list(records[-1].findings) if records else []
        return list(self.watch.findings)

    def __getstate__(self) -> dict[str, Any]:
        """What copies are made of: a watch belongs to the process and the fit that it was opened in."""
        return {**self.__dict__, "watch": None, "_norms": {}}

    def _records(self, until: float) -> list[Record]:
        """The records of this callback's fits that began before ``until``, in whatever process, from the first on."""
        found: list[Record] = []
        while self._options["out"] is not None:
            head = Path(options_of(self._options, len(found) + 1)["out"]) / HEAD
            if not head.exists() or not self._made < head.stat().st_mtime < until:
                break
            found.append(Record(head.parent))
        return found

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open a watch of the model as the strategy has wrapped it; called when ``fit`` begins to train.

        A second ``fit`` has a record of its own, in a folder beside ``out``: ``a-2``.
        """
        self._fits = max(self._fits, len(self._records(_BEGAN[0]))) + 1
        self._logged = _batches_stepped(trainer) - 1
        self._norms.clear()
        self.watch = make_watch({"model": trainer.strategy.model}, None, options_of(self._options, self._fits))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Compute the norm of an optimizer's gradients, in steps that will be logged; Lightning calls this before it
        clips them.

        Only there is the device waited for, once; without loggers never.
        """
        if trainer.loggers and self.watch is not None and _is_logged(trainer):
            held = (one for group in optimizer.param_groups for one in group["params"])
            norms = [_norm(one.grad.detach()) for one in held if one.grad is not None]
            self._norms[id(optimizer)] = _norm(torch.stack([one.to(norms[0].device) for one in norms])).item() \
                if norms else 0.0  # fmt: skip

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, once in each step that the Trainer logs. With accumulated gradients several batches are of one step."""
        step = _batches_stepped(trainer)
        is_new = step != self._logged and self.watch is not None and not trainer.fit_loop._should_accumulate()
        if is_new and _is_logged(trainer):
            self._log(trainer, step)
            self._norms.clear()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the watch, and log the findings once more: the last looks have been judged by then."""
        if self.watch is not None:
            self.watch.remove()
            self._norms.clear()
            self._log(trainer, max(0, _batches_stepped(trainer) - 1))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the watch with the exception, so that the record tells what ended the run."""
        if self.watch is not None:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)

    def _log(self, trainer: Any, step: int) -> None:
        """Give the numbers to every logger, with the step that they are of, as Lightning counts them."""
        self._logged = step
        numbers = {"gaff/findings": float(sum(not one.is_over for one in self.findings))} if trainer.loggers else {}
        if self._norms:
            numbers["gaff/grad_norm"] = math.hypot(*self._norms.values())
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)


def _batches_stepped(trainer: Any) -> int:
    """After how many batches an optimizer has made a step, which is Lightning's step for its loggers, from 0.

    ``trainer.global_step`` counts the steps of each optimizer.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _is_logged(trainer: Any) -> bool:
    """Whether Lightning logs at the step in progress."""
    every = trainer.log_every_n_steps  # 0: never
    return bool(every) and (_batches_stepped(trainer) + 1) % every == 0


def _norm(gradient: Tensor) -> Tensor:
    """The L2 norm of a gradient, summed up in float64 where the device has that; it may be sparse, or spread."""
    elements = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    wide = torch.float32 if elements.device.type == "mps" else torch.float64
    return whole_of(torch.linalg.vector_norm(elements, dtype=torch.promote_types(elements.dtype, wide)))
