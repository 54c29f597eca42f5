"""Which calls of models train: by their modes, and by the steps that followed calls in eval mode."""

from __future__ import annotations

import torch
from torch import nn

from gaff.compat import checkpoints
from gaff.training.watch import step_facts
from gaff.training.watch.acting import Acting
from gaff.training.watch.models import Model

_NEWS = 6  # looks


class TrainingModes:
    """Tells calls that train from those that evaluate, each when it begins.

    One with gradients trains if its model is in training mode. A model in eval mode trains where the step before was
    made with no call in training mode, and before the first step until there is one.
    """

    def __init__(self) -> None:
        self._in_eval: set[str] = set()  # models trained so whose mode matters, since these were last taken
        self._trained: set[str] | None = None  # in eval mode in the step before; None before the first
        self._ran: set[str] = set()  # with gradients in eval mode, in this step
        self._is_any_in_training = False
        self._matters: dict[str, bool] = {}  # by model, whether its mode does
        self._optimized: set[str] = set()  # models whose optimizers have stepped since the run's last step
        self._told = 0  # looks in a row that had such a model to tell of
        self.acting = Acting()

    def trains(self, model: Model, module: nn.Module) -> bool:
        """Whether a call of ``module``, which belongs to ``model``, is one that trains.

        The first pass of a reentrant checkpoint runs without grad mode, and is told by the functions around it.
        """
        if not (torch.is_grad_enabled() or checkpoints.enclosing_functions()):
            return False
        if module.training:
            self._is_any_in_training = True
            return True
        self._ran.add(model.name)
        if model.name not in self._matters:
            self._matters[model.name] = step_facts.is_all_in_eval(module)
        if self._trained is None:
            return not self._is_any_in_training
        return model.name in self._trained

    def stepped(self, owners: set[str], *, is_over: bool) -> bool:
        """An optimizer has made a step; returns whether it has ended one of the run (``is_over``), or others follow.

        What is called after the end of a step belongs to the next one. ``owners``: the models whose parameters the
        optimizer holds, as far as they are known. Models that ran and have no parameter in one that has stepped since
        the end before do not train, as a frozen encoder before a head.
        """
        self._optimized |= owners
        if not is_over:
            return False
        ran = self._ran & self._optimized if self._optimized else self._ran
        self._optimized.clear()
        if self._is_any_in_training:
            self._trained = set()
        elif self._ran:
            self._trained = (self._trained or set()) | ran
            self._in_eval |= {name for name in ran if self._matters[name]}
        self._ran.clear()
        self._is_any_in_training = False
        return True

    @property
    def are_news(self) -> bool:
        """Whether models are trained in eval mode that the looks since then have hardly told of yet."""
        return bool(self._in_eval) and self._told < _NEWS

    def take_in_eval(self) -> list[str]:
        """The models with a dropout or BatchNorm that were trained in eval mode since this was last asked, in order."""
        found = sorted(self._in_eval)
        self._told = self._told + 1 if found else 0
        self._in_eval.clear()
        self._matters = {name: self._matters[name] for name in self._ran}  # modes may change
        return found
