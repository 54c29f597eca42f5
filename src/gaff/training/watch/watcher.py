"""Watching a process that trains: which step is looked at, and who gets to know what it has shown.

What hooks tell goes one way: ``ModelCalls`` and ``Outer`` (hooks) -> the methods of ``Watcher`` (events, whose order
``step_state`` holds as a table) -> ``Looks`` (the sampled step) -> ``Reporter`` (judge and record, on another thread).
All that is called from the user's code goes through a ``Shield``: a failure of ours ends the watching, is told once,
and never reaches the training.

A step in order: runs begin and end (``_run_begins``, ``_run_ends``), backward passes begin from losses, which are named
and checked there (``_backward_begins``), optimizers step (``_step_begins``, ``_step_ended``) or a GradScaler leaves a
step out (``_step_skipped``). When something else begins, the step is over (``_complete``): what was seen of it is
handed on, and it is decided whether to look at the next one. With a single optimizer its step is over at once.

The watcher itself counts nothing and keeps nothing but the number of the step: that is done by the objects that it
makes, each with one concern, and it decides which of them hears of an event.
"""

from __future__ import annotations

import atexit
import math
import sys
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from gaff.compat import compiler
from gaff.engine.process.optimizer import is_told_to_skip
from gaff.engine.process.training_loop import Outer, Told
from gaff.training.watch import forks, incidents, ownership
from gaff.training.watch.batches import StepBatches
from gaff.training.watch.flight_recorder import FlightRecorder
from gaff.training.watch.looks import Looks
from gaff.training.watch.losses import Losses, Noted
from gaff.training.watch.model_calls import CallsTold, ModelCalls
from gaff.training.watch.models import Model, Models
from gaff.training.watch.optimizer_steps import OptimizerSteps, rate_of
from gaff.training.watch.origin import Origin
from gaff.training.watch.pace import Alone, Pace
from gaff.training.watch.reporter import Reporter
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.settings import Settings
from gaff.training.watch.setup_facts import SetupFacts
from gaff.training.watch.shield import Shield
from gaff.training.watch.step_state import LoopEvent

_STUCK = 17  # skipped steps in a row: sixteen halvings lead a GradScaler from its first scale to 1


class Watcher:
    """Watches ``models``, by name, or whatever trains where there are none; ``optimizers``: only these count steps."""

    def __init__(
        self, settings: Settings, models: Mapping[str, nn.Module] | None = None, optimizers: Iterable[Any] = ()
    ) -> None:
        self.step = 0  # steps of the run that are complete
        self.pace = Pace(settings.budget, settings.every)
        self.shield = Shield(self._failed, self._moved)
        self._models = Models(settings.only, settings.skip, is_given=models is not None)
        self._flight = FlightRecorder(settings.out, keeps_batches=settings.keep_batch)
        self._alone, self._batches = Alone(), StepBatches()
        self._calls = ModelCalls(self._models, _calls_told(self), self.shield)
        setup = SetupFacts(self._models, self.shield, lambda *given: self._looks.attended(*given))
        self._losses = Losses(self.pace.want, self.shield.attempt)
        self.reporter = reporter = Reporter(settings, self._flight, lambda: self.steps_made)
        self._looks = Looks(self._models, self._calls, setup, self.shield, lambda one: reporter.look(one, {}, {}),
                            reporter.tell, scale_of=self._losses.scaled.factor)  # fmt: skip
        self._steps = OptimizerSteps(optimizers, self._models, is_any=models is None)
        for name, model in (models or {}).items():
            self._models.select(model)
            self._calls.know(self._models.add(name, model), model)
        self._outer = Outer(_told(self, self._steps, setup))
        self._origin = Origin(self._calls, self._batches, self._flight, self.reporter)
        self._exit = partial(_close, weakref.ref(self))

    def open(self) -> None:
        """Install hooks and wrappers: from now on what happens in this process is told. The first step is looked at."""
        self.shield.is_open = True
        self._steps.at.began = began = perf_counter()
        self._outer.open()
        forks.follow(self)
        atexit.register(self._exit)
        for model in self._models.all:
            self.reporter.model(model, 0)
        self._begin_look()
        self.shield.note(perf_counter() - began)

    def close(self, error: BaseException | None = None) -> None:
        """Take everything away and finish the record; a look at a step that has not ended is left out. What another
        thread, which may be training still, does for the record at this moment is waited for."""
        atexit.unregister(self._exit)
        with self.shield.is_quiet:
            if self.shield.is_open:
                self._finish(error)
            else:
                self._outer.close()  # a failure could not: torch was going through its hooks
                self.reporter.pause()  # that it happened may still have to be written

    def _finish(self, error: BaseException | None) -> None:
        self.shield.run(self._complete)
        has_steps = bool(self.step or self._steps.skipped or not self._losses.names)
        if not has_steps and error is None:
            self.shield.run(self._end_look)  # all that there will ever be
        self._looks.end()
        self._looks.tell_held(self.reporter.add, self.step)
        if error is not None and not isinstance(error, SystemExit):
            self._flight.keep(self.step, "exception", self._batches.kept)
        _tell_rest(self)
        self.shield.run(_tell_last, self)
        self._stop()
        self._outer.close()
        made = {"steps": self.steps_made, "backwards": self._losses.count, "others": self._steps.optimizers.others}
        self.reporter.tell("made", self.step, **made, has_modules=self._models.has_wanted)
        self.reporter.close(self.step, self.pace, _notes(self, self._models, has_steps=has_steps), error)
        self._flight.close()

    @property
    def steps_made(self) -> int:
        """Steps of the run that were made, the last one included, after which other optimizers may still follow."""
        return self.step + (self._steps.at.ended_at is not None)

    def pause(self) -> None:
        """Leave no thread of ours: the process is about to fork, and locks held by a thread stay held in the child."""
        self.reporter.pause()

    def abandon(self) -> None:
        """Stop watching in a forked child (a DataLoader's worker), and leave the record to the parent."""
        if self.shield.is_open:
            self.reporter.abandon()
            self._stop()
            self._outer.close()

    def _moved(self) -> None:
        """Another thread trains than the one that was seen before: what that did in the step at hand is left out."""
        self._complete()
        self._losses.forget()
        self._begin_anew()

    def _failed(self, error: Exception) -> None:
        self._stop()
        self.reporter.fail(error, self.step)

    def _stop(self) -> None:
        """Let go of everything: what is left of ours, as a wrapper inside somebody else's, does nothing any more."""
        self.shield.is_open = False
        self._looks.drop()
        self._calls.close()
        self._batches.clear()
        self._steps.forget()

    # runs of models

    def _run_begins(self, model: Model, module: nn.Module, args: Any, kwargs: Any, is_late: bool) -> None:
        """``is_late``: a model was found as it runs: its own hooks are past, those of the modules inside are not."""
        is_training = self._looks.modes.trains(model, module)
        self._enter(LoopEvent.RUN_BEGINS)
        if is_training:
            self._trains(model, module, args, kwargs)
        elif is_late:
            self._looks.pass_over(self.step)
        else:
            self._looks.evaluation_begins(self.step, model, module, (args, kwargs), self.pace.distance)
        if not is_late and not self._looks.is_idle():
            self._looks.follow(model)

    def _trains(self, model: Model, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._steps.take_left_out():
            self._losses.forget()
            self._calls.passing.take_samples()
        self._looks.run_begins(self.step, model, module, args, kwargs)
        if self._looks.is_endless and self._looks.sampled is not None:
            self._end_look()
        batch = self._batches.add(model, module, self._models.path_of(module), args, kwargs)
        self._alone.forward_begins()
        self._flight.begins(batch)
        counted = self._batches if self._looks.sampled is None else self._looks
        self._calls.count_only(counted.counted_only, trains=True)

    def _run_ends(self, model: Model, module: nn.Module, output: Any) -> None:
        self._looks.run_ends(self.step, model, module, output)

    # backward passes and steps

    def _enter(self, event: LoopEvent) -> None:
        """Go on to the next state; a step that has ended is over by whatever begins, and is completed first."""
        if self._steps.at.enter(event):
            self._complete()

    def _backward_begins(self, losses: Any) -> None:
        """A backward pass of ours begins: note its ``losses``, and tell a spike, or one that is not finite."""
        self._calls.left_model()
        owned = [(at, loss, self._batches.whose(self._models, loss)) for at, loss in _scalars(losses)]
        if owned and all(whose is None for *_, whose in owned):
            return
        self.shield.thread.has_trained = True
        self._enter(LoopEvent.BACKWARD_BEGINS)
        self._alone.backward_begins()
        sampled = self._looks.backward_begins()
        self._steps.backward_begins(self._losses.count, losses, self._batches.latest, is_sampled=sampled is not None)
        self._losses.scaled.is_told = bool(owned)
        is_trial = self._steps.at.is_in_closure
        for at, loss, whose in owned:
            noted = self._losses.note(loss, at, whose=whose or "", is_sampled=sampled is not None, is_trial=is_trial)
            _tell_loss(self, noted, loss)

    def _step_begins(self, optimizer: Any, has_closure: bool) -> None:
        """An optimizer is about to step: in a sampled step gradients and weights are counted, and NaN looked for."""
        self._calls.left_model()
        if not self._steps.optimizers.has(optimizer):
            return
        self.shield.thread.has_trained = True
        if self._steps.has_stepped(optimizer):
            self._complete()
        self._enter(LoopEvent.CLOSURE_BEGINS if has_closure else LoopEvent.STEP_BEGINS)
        sampled = self._looks.sampled
        self._steps.begins(optimizer, sampled, self._losses, has_closure=has_closure)
        if sampled is None or has_closure or is_told_to_skip(optimizer):
            return
        if bad := sampled.nonfinite_gradient():
            self._origin.find(f"the gradient {bad[1]}", self.step, sampled, steep=self._losses.steep)

    def _step_ended(self, optimizer: Any) -> None:
        """An optimizer has stepped; the leading one ends the step of the run, at once where there is no other."""
        if self._steps.optimizers.leaves_out(optimizer):
            return
        self.shield.thread.has_trained = True
        if self._looks.stepped(optimizer, self._steps):
            self._losses.lr, began = rate_of(optimizer), self._steps.at.began
            self._flight.ended(self.step, perf_counter() - began, self._losses.numbers(), self._batches.samples)
            self._looks.tell_held(self.reporter.add, self.step)
            if self._steps.optimizers.is_single:  # no other one follows
                self._complete()

    def _step_skipped(self, optimizer: Any) -> None:
        """A GradScaler has left a step out, for gradients that are not finite: the look begins anew with the next."""
        if not self._steps.optimizers.has(optimizer):
            return
        self._enter(LoopEvent.STEP_SKIPPED)
        if not self._steps.skips(optimizer):
            return
        if self._steps.in_a_row == _STUCK:
            self.reporter.add(incidents.of_stuck_scaler(self.step, self._losses.scale, _STUCK), self.step)
            self._origin.find("a gradient", self.step, self._looks.sampled, steep=self._losses.steep)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._calls.left_model()
        self._batches.clear()
        if self._looks.sampled is not None:
            self._looks.drop()
            self._begin_look()

    def _complete(self) -> None:
        """A step of the run is over, if one has ended, with those of other optimizers: hand on what was seen of it."""
        if self._steps.at.ended_at is None:
            return
        seconds = self._steps.at.complete()
        sampled = self._end_look() if self._looks.sampled is not None else None
        self._pulse(seconds)
        self.pace.spend(*self.reporter.take_spent())
        self.pace.stepped(self.step, seconds, self.shield.take_spent() + self._calls.passing.take_spent(),
                          sampled is not None)  # fmt: skip
        if not self.step:  # not before: others look whether the signal is free when they begin
            self._flight.follow_signal()
        self.step += 1
        self._batches.clear()
        self.pace.hear(self.step, self._looks.modes.are_news, self._steps.optimizers.has_begun)
        if self.pace.is_due(self.step) or self._flight.is_asked:
            self._begin_look()
        else:
            self._steps.clearing.forget()
        self._steps.over()
        self.reporter.tick(self.step, self.pace)

    def _pulse(self, seconds: float) -> None:
        samples, numbers = self._batches.take_samples() + self._calls.passing.take_samples(), self._losses.numbers()
        if samples and not seconds:  # the run has ended in the middle of a step
            self._flight.ended(self.step, seconds, numbers, samples)
        told = math.nan if self._batches.has_unseen else samples
        self.reporter.pulse(self.step, seconds, numbers, self._steps.skipped, told,
                            self._alone.take(self._steps.at.began))  # fmt: skip
        self._losses.forget()

    def _begin_look(self) -> None:
        self._steps.look()
        self._models.is_fresh = False
        self._looks.begin(self.step)

    def _end_look(self) -> SampledStep | None:
        """The sampled step is over: hand on what it has seen."""
        sampled, steps = self._looks.end(), self._steps
        if sampled is not None:
            sampled.facts.update(self._losses.facts, runs=sampled.runs.all, backwards=self._losses.in_step,
                                 scale=self._losses.scale, **steps.facts(self.step, sampled.runs.strays))  # fmt: skip
            self.reporter.look(sampled, steps.parameters(sampled.modules_called), self._losses.values())
        return sampled


def _tell_loss(watcher: Watcher, noted: Noted, loss: Tensor) -> None:
    """Tell of a loss that it jumps, or is not finite; not of one made of gradients that a GradScaler's factor is on, as
    a penalty is, which overflows until the scaler has found its factor."""
    if noted.spike is not None and not watcher._batches.is_rest():
        for spiked in incidents.of_spike(noted.spike, watcher.step, watcher._batches.kept):
            watcher.reporter.add(watcher._flight.keep_for(spiked, watcher._batches.kept), watcher.step)
    if noted.is_nonfinite and not watcher._losses.scaled.may_hold_gradients():
        watcher._origin.find(f"the loss {noted.name!r}", watcher.step, watcher._looks.sampled, loss=loss)


def _tell_rest(watcher: Watcher) -> None:
    """What came after the last step is told as a step that has not ended, unless it is far more than a step."""
    if count := watcher._losses.drop_rest(watcher.step):
        watcher._models.missed.note(
            f"{count} backward passes came after the last step of an optimizer that counts: their losses are left out; "
            "where the optimizer was given, and another one goes on with it, expected gaff.watch without an optimizer"
        )
    watcher._pulse(0.0)


def _found(watcher: Watcher, model: Model, root: nn.Module) -> None:
    """A model was found that nobody has named: follow its calls from now on.

    Where another training begins with it, its very first step is looked at, of which nothing is over yet.
    """
    watcher._calls.know(model, root)
    watcher.reporter.model(model, watcher.step)
    watcher._complete()
    is_begun = watcher._looks.sampled is not None or watcher._batches.latest is not None or watcher._losses.in_step
    if watcher.pace.begins_again(watcher.step) and not is_begun:
        watcher._begin_look()


def _calls_told(watcher: Watcher) -> CallsTold:
    """What of the watcher to call as models run."""

    def is_idle() -> bool:
        return watcher._looks.is_idle()

    def go_on() -> None:
        watcher._looks.go_on()

    def left(*given: Any) -> None:
        watcher._looks.left(*given)

    return CallsTold(watcher._run_begins, is_idle, watcher._run_ends, go_on, left)


def _told(watcher: Watcher, steps: OptimizerSteps, setup: SetupFacts) -> Told:
    """What of the watcher to call as the training goes on, each behind its shield."""
    shield, losses, looks = watcher.shield, watcher._losses, watcher._looks
    watcher._models.found = partial(_found, watcher)
    on, beside = shield.around, partial(partial, shield.run_beside)

    def tell_ended() -> None:
        is_plain = losses.scaled.is_told and losses.scaled.scaler is None
        steps.backward_ended(losses.latest, losses.factor_on(), is_plain=is_plain)

    def ended() -> None:
        if steps.are_ends_awaited:
            shield.run(tell_ended)

    def step_begins(optimizer: Any, has_closure: bool) -> None:
        if has_closure or looks.sampled is not None or steps.are_begins_awaited or not shield.is_mine():
            shield.run_step(steps.optimizers.has, watcher._step_begins, optimizer, has_closure)
        else:
            watcher._calls.left_model()

    return Told(
        backward_begins=on(watcher._backward_begins),
        step_begins=step_begins,
        step_ended=on(watcher._step_ended),
        step_skipped=on(watcher._step_skipped),
        loss_scaled=on(losses.scaled.note),
        compiled=on(looks.compiled),
        clipped=on(steps.clipped(losses.clipped)),
        iterated=beside(setup.iterated),
        saved=beside(watcher.reporter.saved),
        backward_ended=ended,
        loaded=beside(partial(_loaded, watcher, setup)),
    )


def _loaded(watcher: Watcher, setup: SetupFacts, module: nn.Module, state: Any, keys: Any) -> None:
    """``load_state_dict`` has run: note it for the rules, and what was loaded with what it holds already."""
    setup.loaded(module, keys)
    if watcher.steps_made:
        watcher._steps.written.self_loads.loaded(module, state, watcher.steps_made)


def _tell_last(watcher: Watcher) -> None:
    """The run is over: tell of a schedule that has hardly begun and a load that has brought nothing back, and take
    back what later steps have refuted."""
    if watcher._steps.idle.was_wrong:
        is_all = ownership.is_all_owned(watcher._models, watcher._steps.optimizers.counts)
        watcher.reporter.withdraw("never_stepped", *(["not_owned"] if is_all else []))
    if watcher._steps.schedules.has_stepped(watcher._steps.optimizers.counts):
        watcher.reporter.withdraw("schedule_not_stepped")
    if (step := watcher._steps.written.self_loads.told()) is not None:
        watcher.reporter.add(incidents.of_rule("loads_itself", step), watcher.step)
    found = watcher._steps.schedules.unfinished(watcher.steps_made, watcher._steps.optimizers.counts)
    if found is not None:
        kind, made, length = found
        told = f"the {kind} is {length} steps long, as the run was, and has made {made} of them"
        one = incidents.of_rule("schedule_not_finished", watcher.steps_made, told, made=made, length=length)
        watcher.reporter.add(one, watcher.step)


_UNTOLD = "the loss {!r} is a sum over processes that is still due (Partial): nobody has its value, and no rule asks it"


def _notes(watcher: Watcher, models: Models, *, has_steps: bool) -> list[str]:
    """What was not looked at, and why, as lines for the end of the record; asked once, when the run is over.

    A reader must be able to tell a layer without numbers that was healthy from one that nobody could see.
    """
    told = [*models.missed.lines(), *map(_UNTOLD.format, watcher._losses.partial), *watcher.shield.thread.notes()]
    told += [f"{what}: not looked at any more, by an error of gaff's own: {why}"
             for what, why in watcher.shield.given_up.items()]  # fmt: skip
    if watcher._looks.is_endless:
        told.append("no optimizer's step came for long: the first runs were looked at, then no more")
    elif not has_steps:
        told.append("no optimizer that is watched made a step: all runs count as one step, and its loss is their mean")
    is_unseen = compiler.has_compiled() and not any(model.has_run for model in models.all)
    if watcher._calls.has_compiled_function or (is_unseen and models.all and has_steps):
        told.append("a function was compiled: modules were not looked at, only parameters, gradients and losses")
    for model in models.all:
        if model.is_compiled and not compiler.traces_gradient_hooks():
            told.append(f"{model.name} is compiled: inside it only parameters and their gradients were looked at")
    return [*told, *watcher._flight.notes]


def _scalars(losses: Any) -> list[tuple[int, Tensor]]:
    """The losses of one element that backward begins from, each with its place; a generator is not ours to use up.

    On the meta device they have no value.
    """
    several = losses if isinstance(losses, (list, tuple)) else [losses]
    return [(at, one) for at, one in enumerate(several)
            if isinstance(one, Tensor) and one.numel() == 1 and not one.is_meta]  # fmt: skip


def _close(watcher: weakref.ref[Watcher]) -> None:
    """Close a watcher at the end of the process, if nobody has before; Python calls this at exit.

    Told by a weak reference, so that the list of what to call at exit does not keep a watcher alive. An exception that
    has ended the process is told to the record; none that training went on after, nor one at a prompt, which goes on.
    """
    found = watcher()
    if found is not None:
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        found.close(None if id(error) == found._steps.at.survived else error)
