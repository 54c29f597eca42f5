"""Which calls of models train: by their modes, and by the steps that followed calls in eval mode."""

from __future__ import annotations

import torch
from torch import nn

from gaff.compat import checkpoints
from gaff.training.watch import step_facts
from gaff.training.watch.models import Model


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
        self.has_acted = False  # a single example was given to a call that does not train, since the last that does

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

    def stepped(self, owners: set[str]) -> None:
        """An optimizer has ended a step of the run: what is called from now on belongs to the next one.

        ``owners``: the models whose parameters it holds, as far as they are known. Others that ran do not train, as a
        frozen encoder before a head.
        """
        ran = self._ran & owners if owners else self._ran
        if self._is_any_in_training:
            self._trained = set()
        elif self._ran:
            self._trained = (self._trained or set()) | ran
            self._in_eval |= {name for name in ran if self._matters[name]}
        self._ran.clear()
        self._is_any_in_training = False

    def take_in_eval(self) -> list[str]:
        """The models with a dropout or BatchNorm that were trained in eval mode since this was last asked, in order."""
        found = sorted(self._in_eval)
        self._in_eval.clear()
        self._matters = {name: self._matters[name] for name in self._ran}  # modes may change
        return found
