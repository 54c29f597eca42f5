"""The optimizers' side of a step: where the loop is, who steps, what steps change, whether gradients were cleared."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

from gaff.training.watch.models import Models
from gaff.training.watch.optimizers import Optimizers
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.step_state import LoopEvent, StepState
from gaff.training.watch.updates import Clearing, Update

_MOMENTS = 4  # what an optimizer keeps is read at every fourth look


class OptimizerSteps:
    """Follows the optimizers that count; ``at``: where the loop is.

    ``updates``: what each optimizer that stepped in the sampled step changes, by identity. ``skipped``: steps that a
    GradScaler left out, ``in_a_row`` those since the last one that was made.
    """

    def __init__(self, optimizers: Iterable[Any], models: Models, *, is_any: bool) -> None:
        self.at = StepState()
        self.optimizers = Optimizers(optimizers, models, is_any=is_any)
        self.clearing = Clearing()
        self.updates: dict[int, Update] = {}
        self.skipped = 0
        self.in_a_row = 0
        self.looks = -1  # how many sampled steps there were before this one
        self._models = models
        self._skipper: int | None = None  # whose skipped steps count: others of the step skip theirs, too
        self._stepped: set[int] = set()  # optimizers that made theirs in the step in progress

    def has_stepped(self, optimizer: Any) -> bool:
        """Whether it made its step already in the step in progress: the next one belongs to another."""
        return id(optimizer) in self._stepped

    def look(self) -> None:
        """A sampled step begins: gradients of optimizers that have just made a step must be cleared in it."""
        for optimizer in self.optimizers.counts:
            if not self._stepped or id(optimizer) in self._stepped:
                self.clearing.stepped(optimizer)
        self.looks += 1

    def begins(self, optimizer: Any, sampled: SampledStep | None, *, has_closure: bool) -> None:
        """An optimizer is about to step; in a sampled step what it changes is looked at."""
        if sampled is None:
            return
        began = perf_counter()
        has_moments = self.looks % _MOMENTS == 0
        update = Update(optimizer, self._models, sampled.numbers, has_closure=has_closure, has_moments=has_moments)
        update.was_cleared = has_closure or self.clearing.was_cleared(optimizer)
        update.begin()
        self.updates[id(optimizer)] = update
        sampled.cost_s += perf_counter() - began

    def ends(self, optimizer: Any, sampled: SampledStep | None) -> bool:
        """An optimizer has made its step. Whether that ends the step of the run; others may still follow."""
        is_end = self.optimizers.stepped(optimizer)
        self.in_a_row = 0
        if sampled is not None:
            began = perf_counter()
            update = self.updates.get(id(optimizer))
            if update is not None:
                update.end()
            sampled.cost_s += perf_counter() - began
        if is_end:
            self._skipper = None
            self._stepped = {id(optimizer)}
            self.at.ended_at = perf_counter()
        elif self.at.ended_at is not None:
            self._stepped.add(id(optimizer))
        self.at.enter(LoopEvent.STEP_ENDS if is_end else LoopEvent.OTHER_STEP_ENDS)
        return is_end

    def skips(self, optimizer: Any) -> bool:
        """A GradScaler has left out a step of ``optimizer``. Whether it is the first of its step of the run."""
        if self._skipper not in (None, id(optimizer)):
            return False
        self._skipper = id(optimizer)
        self.skipped += 1
        self.in_a_row += 1
        return True

    def is_alone(self) -> bool:
        """Whether there is one optimizer, as far as is known: its step ends that of the run for certain."""
        return self.optimizers.known == 1

    def over(self) -> None:
        """The step of the run is complete."""
        self.updates.clear()
        self._stepped = set()

    def forget(self) -> None:
        """Watching has ended: hold nothing of the user's."""
        self.updates.clear()
        self.optimizers.forget()
        self.clearing.forget()
