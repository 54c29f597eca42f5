"""What torch's functions are heard doing while a model is evaluated: dropouts that are active, and losses."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.compat.compiler import has_asked_to_compile
from gaff.engine.process.functions import DROPOUTS, LOSSES, FunctionCalls, calling_module, drops
from gaff.training.watch.models import Models
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.shield import Shield
from gaff.training.watch.target_facts import OVER_CLASSES

_OFTEN = 3  # steps: what runs more often is a rollout or a teacher, which has no loss without gradients


class EvaluationCalls:
    """Listens in one run of an evaluation for dropouts, and from its beginning to the next training run for losses.

    A line such as ``F.cross_entropy(model(x), y)`` looks its function up before the run begins that tells of the
    evaluation. So what hears of losses stands there from ``stand_by`` to ``close``, and listens during evaluations.

    ``told`` gets the means of these, by the name of the function, which may be on a device, as ``Reporter.tell`` takes
    an event "evaluated". Nothing is heard where code is compiled. Used on the thread that trains.
    """

    def __init__(self, models: Models, shield: Shield, told: Callable[..., None]) -> None:
        self._models = models
        self._told = told
        self._sampled: SampledStep | None = None  # the run of an evaluation that is looked at
        self._dropouts = FunctionCalls(DROPOUTS, shield.around(self._dropped))
        self._losses = FunctionCalls(LOSSES, shield.around(self._loss_returned), is_after=True)
        self._sums: dict[str, tuple[Any, int]] = {}
        self._among: dict[str, int] = {}  # of losses over classes, how many there are
        self._step: int | None = None  # since which losses are listened for
        self._latest = -_OFTEN  # step of the latest run without gradients
        self.is_wrong = False  # the latest run without gradients was of a model in training mode
        self._wrong = 0  # losses that followed such a run

    def stand_by(self) -> None:
        """Be ready for evaluations, whose losses come from functions that are looked up before these are noticed."""
        self._losses.switch(is_on=not has_asked_to_compile())

    def close(self) -> None:
        """Hand over what was heard, and leave torch's functions as they were."""
        self.over()
        self._losses.switch(is_on=False)

    def run_begins(self, sampled: SampledStep, *, is_training: bool) -> None:
        """A run of an evaluation begins that is looked at; ``is_training``: the model's mode, wrong as that may be.

        In training mode a dropout is listened for where nothing else tells yet that the mode matters.
        """
        if has_asked_to_compile():
            return
        self._sampled = sampled
        self._dropouts.switch(is_on=not is_training or sampled.facts.get("train_mode") == [])

    def listen(self, step: int) -> None:
        """A run without gradients begins at this step: listen for losses, where none has run for some steps."""
        since, self._latest = step - self._latest, step
        if since >= _OFTEN and self._step is None and not has_asked_to_compile() and not torch.is_grad_enabled():
            self._step = step
            self.stand_by()

    def run_ends(self) -> None:
        """That run is over: dropouts are not listened for any more."""
        self._dropouts.switch(is_on=False)
        self._sampled = None

    def over(self) -> None:
        """Training goes on, or all is over: hand over what the evaluation came to, and listen for nothing."""
        if self._sampled is not None:
            self.run_ends()
        if self._step is None:
            return
        step, sums, among, wrong = self._step, self._sums, self._among, self._wrong
        self._step, self._sums, self._among, self._wrong = None, {}, {}, 0
        if sums:
            means = {name: total / count for name, (total, count) in sums.items()}
            self._told("evaluated", step, losses=means, among=among, in_training_mode=wrong)

    def _dropped(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A dropout is called in an evaluation: if it is active, the result is uncertain, whatever the mode is."""
        module, sampled = calling_module(), self._sampled
        entry = self._models.entries.get(module) if module is not None and drops(name, args, kwargs) else None
        if sampled is None or entry is None:
            return
        if sampled.facts["training"]:
            sampled.facts["train_mode"] = [entry.model]
        else:
            sampled.facts.setdefault("dropout_in_eval", []).append([entry.model, entry.path])

    def _loss_returned(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A loss was computed without gradients: add it up, to become a mean over targets."""
        if self._step is None or torch.is_grad_enabled():
            return
        if isinstance(output, Tensor) and output.numel() == 1:
            self._wrong += self.is_wrong
            total, count = self._sums.get(name, (0.0, 0))
            value = output.detach().to(elements.wide_type(output))
            targets, is_sum = _targets(name, args, kwargs)
            if not is_sum:
                value = value * targets if isinstance(targets, int) else torch.where(targets > 0, value * targets, 0.0)
            self._sums[name] = total + value, count + targets
            scores = args[0] if args else kwargs.get("input")
            if name in OVER_CLASSES and isinstance(scores, Tensor) and scores.dim():
                self._among[name] = scores.shape[1 if scores.dim() > 1 else 0]


def _targets(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Of how many targets a loss is, perhaps as a tensor, and whether it is a sum over them; else it is their mean.

    Of targets that are numbers of classes those count that are not to be ignored, each by the weight of its class,
    which torch's mean divides by; where they are probabilities each example has one. 1 and no sum where it cannot be
    told.
    """
    try:
        given = signature(getattr(torch.nn.functional, name)).bind_partial(*args, **kwargs).arguments
    except (AttributeError, TypeError, ValueError):  # another function of this name, or none that has a signature
        return 1, False
    is_sum = given.get("reduction") == "sum" or given.get("size_average") is False
    target = given.get("target", given.get("targets", next(iter(args), None)))
    if not isinstance(target, Tensor) or not target.numel():
        return 1, False
    if name in OVER_CLASSES and not target.is_floating_point():
        counts, weight = target != given.get("ignore_index", -100), given.get("weight")
        if not isinstance(weight, Tensor):
            return counts.sum(), is_sum
        return (weight[target.clamp(0, len(weight) - 1)] * counts).sum(), is_sum
    if name in (*OVER_CLASSES, "multilabel_margin_loss") and target.dim() > 1:
        return target.numel() // target.shape[1], is_sum
    return target.numel(), is_sum
