"""Which runs are looked at: those of a sampled step, and now and then one of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gaff.engine.process.functions import calling_module
from gaff.record.finding import Finding
from gaff.training.watch import step_facts
from gaff.training.watch.evaluation_calls import EvaluationCalls
from gaff.training.watch.incidents import of_held_evaluation
from gaff.training.watch.kept_graphs import EvaluationGraphs
from gaff.training.watch.model_calls import ModelCalls
from gaff.training.watch.models import Model, Models
from gaff.training.watch.optimizer_steps import OptimizerSteps
from gaff.training.watch.passes import PassListener
from gaff.training.watch.running_statistics import UnfilledCopies, running_statistics
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.setup_facts import SetupFacts
from gaff.training.watch.shield import Shield
from gaff.training.watch.training_modes import TrainingModes

_LOOKED_AT = (1, 10, 100, 1000, 10_000)  # runs of one evaluation
_EVER = 1 << 62
_FEW = 4
_OFTEN = 5  # steps: what runs without gradients more often than that is a rollout or a teacher, and no evaluation
_MOST_RUNS = 256  # without any step
_EACH = 8  # runs of a step of which each is looked at
_THEN = 32  # of so many one


@dataclass(slots=True)
class _Evaluations:
    """What ran without gradients of one model: how many ``runs`` since it last trained, and of these in training mode.

    ``began``: how many evaluations did; ``latest``: the step of the latest run; ``looked_at``: that of the latest first
    run that was looked at.
    """

    runs: int = 0
    in_training_mode: int = 0
    began: int = 0
    latest: int = -_OFTEN
    looked_at: int | None = None

    def add(self, runs: int, *, is_in_training_mode: bool) -> None:
        self.runs += runs
        self.in_training_mode += runs if is_in_training_mode else 0

    def may_be_looked_at(self, step: int, distance: int) -> bool:
        """Whether the last evaluation looked at is long enough ago, ten steps at least.

        A teacher that runs in every step is an evaluation, too, and must not be looked at each time. The first few are
        looked at when ten steps have passed.
        """
        self.began += 1
        distance = 10 if self.began <= _FEW else distance
        return self.looked_at is None or step - self.looked_at >= max(10, distance)


class Looks:
    """Decides which runs are looked at, and hands what hooks tell to the sampled step in progress.

    The watcher makes one, begins and ends looks at training steps by it, and tells it of each run. Looks at an
    evaluation it opens by itself, and closes with the run: ``evaluated`` gets each of them, ``heard`` what its losses
    came to. ``modes`` tells which runs train. ``is_endless``: so many runs came without an optimizer's step that nobody
    can be training with one. All on the thread that trains.
    """

    def __init__(
        self, models: Models, calls: ModelCalls, setup: SetupFacts, shield: Shield,
        evaluated: Callable[[SampledStep], None], heard: Callable[..., None], *, scale_of: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self.sampled: SampledStep | None = None  # of the step in progress, if it is looked at
        self.is_endless = False
        self._models = models
        self._calls = calls
        self._setup = setup
        self._shield = shield
        self._evaluated = evaluated
        self._target: SampledStep | None = None  # of what is called now
        self._evaluations: dict[str, _Evaluations] = {}  # by model
        self._counted: tuple[_Evaluations, bool] | None = None  # whose runs are only counted, if in training mode
        self.modes = TrainingModes()
        self._graphs = EvaluationGraphs()
        self._passes = PassListener(partial(self._pass_begins, scale_of), shield)
        self._heard = EvaluationCalls(models, shield, heard)
        self._copies = UnfilledCopies(models)

    @property
    def counted_only(self) -> int:
        """How many of the runs that come next in the step that is looked at need only be counted.

        None of the first step's, which has to find the models. A step of a policy has hundreds of small runs, of which
        some tell what all would.
        """
        sampled = self.sampled
        return _THEN - 1 if sampled is not None and sampled.step and sampled.runs.looked >= _EACH else 0

    def is_idle(self) -> bool:
        """Whether nobody looks at anything, and no hook of ours is on."""
        is_looked_at = self.sampled is not None or self._target is not None or self._graphs.is_on
        return not is_looked_at and not self._calls.is_on

    def begin(self, step: int) -> None:
        """Begin to look at step number ``step``: hooks are on from here until ``end``."""
        self.sampled = self._target = SampledStep(step, "train", self._models, self._shield)
        self._calls.passing.passed = 0
        self._calls.look(is_on=True)
        self._setup.look(is_on=True)
        self._heard.stand_by()
        self._passes.switch(is_on=True)

    def end(self) -> SampledStep | None:
        """Look at nothing any more, and leave no hook on; the look that was in progress, None where there was none."""
        self._count_passed()
        sampled, self.sampled, self._target = self.sampled, None, None
        self._calls.look(is_on=False)
        self._heard.over()
        self._setup.look(is_on=False)
        self._passes.switch(is_on=self._graphs.is_pending)
        if sampled is not None:
            sampled.facts.update(self._setup.take())
            if in_eval := self.modes.take_in_eval():
                sampled.facts["eval_mode"] = in_eval
        if sampled is not None:
            sampled.close()
        return sampled

    def drop(self) -> None:
        """Give up the look in progress: whatever its hooks still bring is seen by nobody. The hooks stay on."""
        self._heard.close()
        self._setup.look(is_on=False)
        self._passes.switch(is_on=False)
        if self.sampled is not None:
            self.sampled.is_open = False
        self.sampled = self._target = None

    def stepped(self, optimizer: Any, steps: OptimizerSteps) -> bool:
        """An optimizer has made a step, which ``steps`` is told; returns whether that has ended one of the run.

        Where gradients came late, steps end in the middle of what belongs together: this optimizer, which they were
        for, is to end them.
        """
        is_over = steps.ends(optimizer, self.sampled)
        if self._models.missed.late and steps.optimizers.leads_from_now(optimizer):
            self._models.missed.late.clear()
        return self.modes.stepped(self._models.stepped_by(optimizer), is_over=is_over)

    def run_begins(self, step: int, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A run that trains begins: in a sampled step its inputs, batch size and precision are noted.

        ``module`` is what was called, ``model`` the watched model it belongs to. Beyond 256 runs before the first step
        the look is called endless.
        """
        for one in self._evaluations.values():
            one.runs = one.in_training_mode = 0
        self._counted = None
        self._heard.over()
        self._graphs.is_on = False
        sampled = self._target = self.sampled
        model.has_run = True
        has_acted = self.modes.acting.trains(model.name, args, kwargs)
        if sampled is not None and sampled.runs.all >= _MOST_RUNS and step == 0:
            self.is_endless = True
            return
        if sampled is not None:
            self._count_passed()
            self._calls.switch(is_on=True)
            sampled.root_given(model.name, self._models.path_of(module), args, kwargs)
            sampled.facts.setdefault("batch", step_facts.batch_size(args, kwargs))
            sampled.facts.setdefault("acted", has_acted)
            sampled.facts.setdefault("precision", step_facts.precision(module))
            if sampled.facts["batch"] <= 2 and (norms := step_facts.batch_norms(module)):
                sampled.facts["batch_norm"] = {model.name: norms}
            self._setup.batch_given(module, args, kwargs)

    def backward_begins(self) -> SampledStep | None:
        """A backward pass from losses begins; returns the look in progress, which hears of recomputations."""
        if self.sampled is not None:
            self._calls.switch(is_on=True)
        return self.sampled

    def _pass_begins(self, scale_of: Callable[[Any], Any], outputs: Any) -> None:
        """Any backward pass begins."""
        if self.sampled is not None:
            self.sampled.gradients_come(scale_of(outputs))
        self._graphs.pass_begins(outputs)

    def tell_held(self, add: Callable[[Finding, int], None], step: int) -> None:
        """Add what is to be told of an evaluation whose graphs were held for nothing, once a step is over or all is."""
        found = self._graphs.take() if self._graphs.is_pending else ""
        self._passes.switch(is_on=self.sampled is not None)
        if found:
            add(of_held_evaluation(found, step), step)

    def evaluation_begins(
        self, step: int, model: Model, module: nn.Module, given: tuple[Any, Any], distance: int
    ) -> None:
        """A run that does not train begins: of each model the first of an evaluation is looked at, then ever fewer.

        ``given``: the positional and keyword arguments of the call; ``distance``: steps between looks at training.
        First runs of a model that are looked at are as many steps apart, and at least ten. Hooks are on for this run.

        A model that is in training mode though it runs without gradients is told to the rules (``train_mode``) only
        where it has a dropout or a BatchNorm, and was so ten times in a row or for the first time in five steps: a
        rollout or a teacher that runs in each step is no evaluation, nor is what renews BatchNorm's statistics.
        """
        self._count_passed()
        known = self._evaluations.setdefault(model.name, _Evaluations())
        if self._counted is not None:
            self._counted[0].add(self._calls.passing.passed, is_in_training_mode=self._counted[1])
        self._calls.passing.passed = 0
        self.modes.acting.asked(model.name, *given)
        self._heard.listen(step)
        since, known.latest = step - known.latest, step
        is_wrong = module.training and not torch.is_grad_enabled() and not step_facts.renews_statistics(module)
        known.add(1, is_in_training_mode=is_wrong)
        self._heard.is_wrong = is_wrong
        self._target = self._counted = None
        self._graphs.run_begins(is_asked=model.has_run and torch.is_grad_enabled())
        if known.runs in _LOOKED_AT and (known.runs > 1 or known.may_be_looked_at(step, distance)):
            known.looked_at = step
            sampled = self._target = SampledStep(step, "eval", self._models, self._shield)
            sampled.facts["training"] = module.training
            # a rollout or teacher in each step is no evaluation; a dropout that is a function is heard
            if known.in_training_mode >= 10 or (is_wrong and min(since, step) >= _OFTEN):
                sampled.facts["train_mode"] = [model.name] if step_facts.has_modes(module) else []
            sampled.facts["running"] = {model.name: running_statistics(module)}
            sampled.facts["unfilled"] = self._shield.attempt("copies", self._copies.facts, model.name, module)
            sampled.root_given(model.name, self._models.path_of(module), *given)
            self._calls.switch(is_on=True)
            self._heard.run_begins(sampled, is_training=module.training)
        elif self.sampled is None and not self._graphs.is_on:
            self._counted = known, is_wrong
            self._calls.count_only(next((one for one in _LOOKED_AT if one > known.runs), _EVER) - known.runs - 1,
                                   trains=False)  # fmt: skip

    def follow(self, model: Model) -> None:
        """A run of ``model`` begins: hooks inside its compiled code are on exactly where somebody looks."""
        self._calls.look_inside(model, is_on=self._target is not None or self.sampled is not None)

    def run_ends(self, step: int, model: Model, module: nn.Module, output: Any) -> None:
        """An outermost call has returned, or raised: a look at an evaluation is over with it.

        What a checkpoint recomputes later belongs to the training step in progress.
        """
        if self._graphs.is_on:
            self._graphs.run_ends(model.name, output)
            self._passes.switch(is_on=True)
        target, self._target = self._target, self.sampled  # for what a checkpoint recomputes
        if target is not None and target.phase == "eval":
            self._heard.run_ends()
            target.close()
            self._evaluated(target)
            self._calls.look_inside(model, is_on=self.sampled is not None)
        elif target is not None:
            target.run_ends()
        self._calls.switch(is_on=self.sampled is not None and not self._calls.passing.left)

    def pass_over(self, step: int) -> None:
        """Leave out a run that evaluates and was noticed too late: the hooks at its beginning are past."""
        self._heard.listen(step)
        self._target = None

    def go_on(self) -> None:
        """Let what comes belong to the training step in progress again, after a run that was noticed late."""
        self._target = self.sampled
        if self._target is not None:
            self._target.run_ends()

    def left(self, module: nn.Module, args: Any, output: Any, stands: dict[int, Tensor] | None) -> None:
        """A module has returned: tell whoever looks. ``stands`` is that of ``SampledStep.left``."""
        if self._target is not None:
            self._target.left(module, args, output, stands)
            if self._target is self.sampled and stands is None:
                self._setup.returned(module, output)

    def compiled(self, function: Any) -> None:
        """``torch.compile`` was called: from now on nothing may stand in the place of torch's functions."""
        self._heard.close()
        self._setup.look(is_on=False)
        self._calls.compiled(function)

    def attended(self, _: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Fused attention has run: tell the sampled step, unless an evaluation is under way in its middle."""
        if self._target is not None and self._target is self.sampled and not self._calls.passing.is_inside:
            self._target.attended(calling_module(), args, kwargs)

    def _count_passed(self) -> None:
        """Count the runs of the step that is looked at which were only counted since this was last asked."""
        if self.sampled is not None:
            self.sampled.runs.all += self._calls.passing.passed
            self._calls.passing.passed = 0
