"""What an experiment changes about optimizers, modes, precision and random numbers; nothing of it edits the script.

Each change is told of steps and outermost calls by ``Trial``, which also decides when the run has come to its end.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gaff.training.watch.idle_optimizers import objects_of

Given = tuple[tuple[Any, ...], dict[str, Any]]


class Change:
    """One thing that is changed, in a process that belongs to the experiment; this one changes nothing.

    ``acted``: how often the run has become another by it. ``why_not``: said where that is never. A change is opened
    once, before the script has run, and never closed: the process ends with the experiment.
    """

    why_not = "it has never acted"

    def __init__(self) -> None:
        self.acted = 0

    def install(self) -> None:
        """Put something in place of a function of torch's, if the change needs that."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, with gradients that are complete."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """What an outermost call is to be given that trains; ``stack`` is left when it has returned."""
        return given

    def returned(self, output: Any) -> None:
        """Such a call has returned."""


class GroupOption(Change):
    """An option of every parameter group is another while its optimizer steps, and what it was after that.

    ``option``: the group's key. ``new``: from the value and the number of the optimizer's step, from 0, to another.
    """

    def __init__(self, option: str, new: Callable[[Any, int], Any], why_not: str) -> None:
        super().__init__()
        self.why_not = why_not
        self._option = option
        self._new = new
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._kept: list[tuple[dict[str, Any], Any]] = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the option of each group that has it; what a step that raised has left is put back first."""
        self._put_back()
        number = self._steps.get(optimizer, 0)
        self._steps[optimizer] = number + 1
        for group in optimizer.param_groups:
            if group.get(self._option) is not None:
                value = group[self._option]
                group[self._option] = new = self._new(value, number)
                self._kept.append((group, value))
                self.acted += bool(new != value)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each group its own value back, before a schedule reads it."""
        self._put_back()

    def _put_back(self) -> None:
        for group, value in self._kept:
            group[self._option] = value
        self._kept.clear()


class LimitNorm(Change):
    """The norm of all gradients of an optimizer is at most ``most`` at each of its steps (torch's clip_grad_norm_)."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.why_not = f"no norm of gradients was above {most:g} as the optimizer stepped, after what the script clips"
        self._most = most

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the gradients where their norm is above the limit."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, which a fused step takes off by itself
        most = self._most * (1.0 if scale is None else float(scale))
        self.acted += bool(nn.utils.clip_grad_norm_(parameters, most) > most)


class ClearGradients(Change):
    """Gradients are cleared after every step."""

    def __init__(self) -> None:
        super().__init__()
        self._due: WeakKeyDictionary[Any, None] = WeakKeyDictionary()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that they are to be cleared: a script may look at them first."""
        self._due[optimizer] = None
        self.acted += 1

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """Set them to None, as ``zero_grad`` does, before the next call that trains."""
        for optimizer in list(self._due):
            optimizer.zero_grad(set_to_none=True)
        self._due.clear()
        return given


class Unfreeze(Change):
    """Every parameter of a model that trains requires grad, and is stepped by the optimizer that has others of it."""

    why_not = "no parameter was frozen or left out of the optimizer"

    def __init__(self) -> None:
        super().__init__()
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many steps each has made

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """Let all parameters require grad before the call."""
        self._models[module] = None
        for parameter in module.parameters():
            if not parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(True)
                self.acted += 1
        return given

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put what is missing into the first group: schedules keep a list with one entry for each group.

        At the second step of an optimizer; of all that there are, also such as step less often. LBFGS keeps what it
        knows of its parameters as one vector, and takes no more of them.
        """
        self._optimizers[optimizer] = steps = self._optimizers.get(optimizer, 0) + 1
        if steps != 2 or isinstance(optimizer, torch.optim.LBFGS):
            return
        groups = (group for one in objects_of(torch.optim.Optimizer) for group in one.param_groups)
        owned = {id(one) for group in groups for one in group["params"]}
        for module in self._models:
            inside = list(module.parameters())
            missing = [one for one in inside if id(one) not in owned and one.requires_grad]
            if missing and len(missing) < len(inside):
                optimizer.param_groups[0]["params"].extend(missing)
                self.acted += len(missing)


class TrainMode(Change):
    """The model is in training mode during calls that train."""

    why_not = "the model was in training mode already"

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """Switch the modules over that are not, until the call has returned."""
        others = [one for one in module.modules() if not one.training]
        for one in others:
            one.training = True
            stack.callback(setattr, one, "training", False)
        self.acted += bool(others)
        return given


class FullPrecision(Change):
    """Autocast is off, whoever turns it on."""

    why_not = "autocast was never on"

    def install(self) -> None:
        """Make every autocast region one that is not enabled."""
        enter = torch.autocast.__enter__

        @wraps(enter)
        def entered(region: torch.autocast) -> Any:
            self.acted += bool(region._enabled)
            region._enabled = False
            return enter(region)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = entered  # type: ignore[method-assign]


class Seed(Change):
    """Random numbers of torch, NumPy and Python are others: ``add`` is added to every seed that the script sets."""

    def __init__(self, add: int) -> None:
        super().__init__()
        self._add = add

    def install(self) -> None:
        """Seed anew now, for scripts that set none, and change what functions that seed are given."""
        self.acted = 1
        torch.manual_seed(torch.initial_seed() + self._add)
        places: list[tuple[Any, str]] = [(torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed")]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            places += [(numpy.random, "seed"), (numpy.random, "default_rng")]
        for owner, name in places:
            setattr(owner, name, self._shifted(getattr(owner, name)))

    def _other(self, seed: Any) -> Any:
        """Another seed: this one and more, or less where there is none so large; what is no number stays."""
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            return seed
        known = int(seed)
        is_largest = any(limit - self._add <= known < limit for limit in (2**32, 2**64))
        return known - self._add if is_largest else known + self._add

    def _shifted(self, seed_by: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(seed_by)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            named = {name: self._other(one) for name, one in kwargs.items()}
            return seed_by(*map(self._other, args), **named)

        return seeded


def learning_rate(value: float, *, is_factor: bool) -> Change:
    """Learning rates times ``value``, or all of them ``value``."""

    def new(known: Any, step: int) -> Any:
        if is_factor:
            return known * value
        return torch.full_like(known, value) if isinstance(known, Tensor) else value

    return GroupOption("lr", new, "no optimizer has another learning rate by it")


def warmup(steps: int) -> Change:
    """Learning rates that rise evenly over the first ``steps`` of each optimizer."""
    return GroupOption("lr", lambda known, step: known * min(1.0, (step + 1) / max(1, steps)), "no step was made")


def weight_decay(value: float) -> Change:
    """The weight decay of every group that has the option; what a script adds to its loss by itself stays."""
    return GroupOption("weight_decay", lambda known, step: value, f"weight decay was {value:g} already")
