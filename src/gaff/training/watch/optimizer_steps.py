"""The optimizers' side of a step: where the loop is, who steps, what steps change, whether gradients were cleared.

The watcher tells it of each step at its beginning and its end. What is counted of a step goes into the look in
progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from time import perf_counter
from typing import Any

from gaff.compat import memory
from gaff.inspection.nonfinite.rerun import Batch
from gaff.record.sample import Key
from gaff.training.watch import ownership, step_facts
from gaff.training.watch.idle_optimizers import IdleOptimizers
from gaff.training.watch.losses import Losses
from gaff.training.watch.lost_passes import LostPasses
from gaff.training.watch.models import Models
from gaff.training.watch.optimizers import Optimizers
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.schedules import Schedules
from gaff.training.watch.slips import set_for_nothing
from gaff.training.watch.step_state import LoopEvent, State, StepState
from gaff.training.watch.updates import Clearing, Update
from gaff.training.watch.written_back import WrittenBack

_SOME = 64  # parameters of a model that tell whether its weights were reset
_EACH = 16  # looks, the first ones and every so many, at which what hardly ever changes is read
_MOMENTS = 4  # what an optimizer keeps is read at every fourth look


class OptimizerSteps:
    """Follows the optimizers that count.

    ``at``: where the training loop is. ``updates``: what each optimizer that stepped in the sampled step changes, by
    the optimizer's identity. ``skipped``: steps that a GradScaler left out, ``in_a_row`` those since the last one that
    was made; ``idle``: optimizers that never step; ``lost``: backward passes for nothing. ``optimizers`` and ``is_any``
    are those of ``Optimizers``. Used on the thread that trains.
    """

    def __init__(self, optimizers: Iterable[Any], models: Models, *, is_any: bool) -> None:
        self.at = StepState()
        self.optimizers = Optimizers(optimizers, models, is_any=is_any)
        self.idle = IdleOptimizers(models, self.optimizers)
        self.schedules = Schedules()
        self.clearing = Clearing()
        self.lost = LostPasses()
        self.written = WrittenBack(models)
        self.updates: dict[int, Update] = {}
        self.skipped = 0
        self.in_a_row = 0
        self.looks = -1  # how many sampled steps there were before this one
        self._models = models
        self._skipper: int | None = None  # whose skipped steps count: others of the step skip theirs, too
        self._stepped: set[int] = set()  # optimizers that made theirs in the step in progress
        self._weights: dict[str, list[tuple[int, int]]] = {}  # by model: which they are, and how often written to

    def has_stepped(self, optimizer: Any) -> bool:
        """Whether it made its step already in the step in progress: the next one belongs to another."""
        return id(optimizer) in self._stepped

    def look(self) -> None:
        """A sampled step begins: note gradients of the optimizers that have just made a step, to be cleared in it."""
        for optimizer in self.optimizers.counts:
            if not self._stepped or id(optimizer) in self._stepped or self.clearing.is_as_marked(optimizer):
                self.clearing.stepped(optimizer)
        self.lost = LostPasses(self.optimizers.counts)
        self._weights = self._marks()
        self.looks += 1

    def backward_begins(self, count: int, losses: Any, batch: Batch | None, *, is_sampled: bool) -> None:
        """A backward pass begins, after so many: where there was no step yet, one may be missing.

        ``batch``: what the latest run of a model was given.
        """
        if not self.optimizers.counts:
            self.idle.passed(count)
        elif is_sampled:
            self.clearing.look()
            self.lost.begins(self.optimizers.counts, losses, batch)

    @property
    def are_begins_awaited(self) -> bool:
        """Whether a step that begins tells anything, outside of looks; asked outside the shield, at each step."""
        return self.at.state is not State.OPEN or self.written.is_awaiting or not self.optimizers.made

    @property
    def are_ends_awaited(self) -> bool:
        """Whether ``backward_ended`` is to be called; asked outside the shield, at each backward pass."""
        return self.lost.are_awaited or self.idle.is_due(self.optimizers.made)

    def backward_ended(self, name: str, factor: Any, *, is_plain: bool) -> None:
        """A backward pass from the loss ``name`` has ended; noted if it has begun in a sampled step.

        ``factor``: by what a GradScaler has multiplied the loss, None where it has not; ``is_plain``: surely not.
        """
        self.lost.ended(self.optimizers.counts, name, factor, is_plain=is_plain)
        if self.optimizers.counts:
            self.idle.passed(max(self.optimizers.counts.values()))

    def clipped(self, note: Callable[..., None]) -> Callable[[Any, Any, Any], None]:
        """What to call when gradients are clipped: ``note`` with all of that, and whether they are the last step's.

        The norm is None where each element was.
        """
        return lambda *told: note(*told, is_stale=self.lost.is_stale(self.optimizers.counts))

    def begins(self, optimizer: Any, sampled: SampledStep | None, losses: Losses, *, has_closure: bool) -> None:
        """An optimizer is about to step; in a sampled step its gradients and weights are counted now.

        ``losses``: those of the step so far. With a closure the gradients are still to come, and are counted at the
        end. What the optimizer keeps (its moments) is read at every fourth look only.
        """
        name = type(optimizer).__name__
        self.written.begins(optimizer, self.optimizers.counts.get(optimizer, 0))
        if sampled is None:
            return
        has_moments = self.looks % _MOMENTS == 0
        number = self.optimizers.number_of(optimizer, self._stepped)
        update = Update(optimizer, self._models, sampled.numbers, has_closure=has_closure, has_moments=has_moments,
                        number=number)  # fmt: skip
        is_repeated = not has_closure and self.lost.repeats(optimizer)
        if is_repeated:
            sampled.facts["repeated"] = name
        elif not has_closure:
            self._note_scaling(optimizer, sampled, losses)
        # what no backward pass has added to was written anew
        update.was_cleared = is_repeated or not self.lost.has_passed or self.clearing.was_cleared(optimizer)
        self.lost.used(optimizer)
        update.begin()
        self.updates[id(optimizer)] = update
        sampled.facts |= self.written.take()
        if optimizer not in self.optimizers.counts:
            now = self._marks()
            same = {model for model, marks in self._weights.items() if marks and now.get(model) == marks}
            owned = {one.model for one in update.owned}
            if _averages(optimizer):
                sampled.facts.setdefault("begun", {}).update(dict.fromkeys(same & owned, name))
            if not owned <= same:
                self.optimizers.begin_elsewhere()
        if any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__):
            sampled.facts["searches"] = True

    def _note_scaling(self, optimizer: Any, sampled: SampledStep, losses: Losses) -> None:
        """Note where a GradScaler's factor is still on what ``optimizer`` uses, or off what never had it."""
        name, divided = type(optimizer).__name__, losses.scaled.divides(optimizer)
        if losses.factor_on(optimizer) is not None and (factor := self.lost.factor_left(optimizer)) is not None:
            sampled.facts["scaled"] = {"optimizer": name, "factor": factor}
        if divided != 1 and (loss := self.lost.plain_loss(optimizer)) is not None:
            sampled.facts["divided"] = {"optimizer": name, "loss": loss, "factor": divided}

    def ends(self, optimizer: Any, sampled: SampledStep | None) -> bool:
        """Count a step that an optimizer has made; whether that ends the step of the run. Others may still follow.

        In a sampled step what it has changed is counted now.
        """
        is_end = self.optimizers.stepped(optimizer, self._stepped)
        self.at.is_left_out = False
        self.idle.stepped(optimizer)
        self.in_a_row = 0
        if sampled is not None:
            update = self.updates.get(id(optimizer))
            if update is not None:
                update.end()
                if update.has_closure:  # which had to clear before its backward pass
                    update.was_cleared = not self.lost.has_passed or self.clearing.was_cleared(optimizer)
                self.written.ended(optimizer, self.optimizers.counts.get(optimizer, 0) - 1, update)
        if is_end:
            self._skipper = None
            self._stepped = {id(optimizer)}
            self.at.ended_at = perf_counter()
            self.written.self_loads.step_ended()
        elif self.at.ended_at is not None:
            self._stepped.add(id(optimizer))
        else:
            self.clearing.mark(optimizer)
        self.at.enter(LoopEvent.STEP_ENDS if is_end else LoopEvent.OTHER_STEP_ENDS)
        return is_end

    def skips(self, optimizer: Any) -> bool:
        """Count a step that a GradScaler has left out; whether it is the first of its step of the run.

        Several optimizers may share a GradScaler, which then leaves out a step of each: only those of the one that came
        first count, until the leading optimizer makes a step again.
        """
        self.idle.stepped(optimizer)
        self.at.is_left_out = self.at.ended_at is None
        if self._skipper not in (None, id(optimizer)):
            return False
        self._skipper = id(optimizer)
        self.updates.clear()
        self.skipped += 1
        self.in_a_row += 1
        return True

    def _marks(self) -> dict[str, list[tuple[int, int]]]:
        """Which parameters every model has, and how often each was written to: whether somebody has reset them."""
        roots = [(model.name, model.root()) for model in self._models.all]
        some = {name: islice(root.parameters(), _SOME) for name, root in roots if root is not None}
        return {name: [(id(one), memory.version_of(one)) for one in ones] for name, ones in some.items()}

    def facts(self, step: int, strays: Mapping[int, ownership.Stray]) -> dict[str, Any]:
        """What rules read of the optimizers in the sampled step of this number; ``strays``: see ``ownership``."""
        counts = self.optimizers.counts
        new = list(map(step_facts.optimizer, self.optimizers.take_new()))
        return {"optimizers": self.optimizers.in_use, "skipped": self.skipped, "settings": new,
                "idle": self.idle.facts(), "is_task": self.optimizers.are_of_tasks,
                "lost": self.lost.facts, "has_brought": self.lost.has_brought,
                "schedules": self.schedules.facts(step, counts),
                "for_nothing": set_for_nothing(self._models.all if _is_asked(self.looks) else (), counts),
                "is_raised": any(group.get("maximize") for one in counts for group in one.param_groups),
                "marks": {key: row for one in self.updates.values() for key, row in one.marks.items()},
                "has_closure": any(one.has_closure for one in self.updates.values()),
                **ownership.facts(self._models, self.updates.values(), counts, strays)}  # fmt: skip

    def parameters(self, called: set[Key]) -> dict[Key, dict[str, Any]]:
        """Every parameter of the models that train, see ``step_facts``; ``called``: the modules that ran."""
        return step_facts.parameters(self._models, self.updates.values(), self.optimizers.counts, called)

    def take_left_out(self) -> bool:
        """Whether a step was left out and no optimizer has made one since: asked once, when the next step begins."""
        is_left_out, self.at.is_left_out = self.at.is_left_out, False
        return is_left_out

    def over(self) -> None:
        """The step of the run is complete, with those of all optimizers: forget what was noted of it."""
        self.updates.clear()
        self._stepped = set()

    def forget(self) -> None:
        """Watching has ended: hold nothing of the user's."""
        self.updates.clear()
        self.optimizers.forget()
        self.clearing.forget()
        self.written.forget()


def _is_asked(looks: int) -> bool:
    """Whether what hardly ever changes is to be read at the look of this number."""
    return looks <= _EACH or looks % _EACH == 0


def rate_of(optimizer: Any) -> float:
    """The highest learning rate of an optimizer's parameter groups that have anything to train, now; NaN of none."""
    groups = [
        one for one in optimizer.param_groups if "lr" in one and any(each.requires_grad for each in one["params"])
    ]
    return max(map(step_facts.rate_in, groups), default=math.nan)


def _averages(optimizer: Any) -> bool:
    """Whether an optimizer keeps averages over steps, as Adam and momentum do."""
    return any(group.get("betas") or group.get("momentum") for group in optimizer.param_groups)
