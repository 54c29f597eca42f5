"""Losses: the numbers on which backward is called, under the names that they have in the script.

A tensor of one element from which a backward pass begins is a loss; where a GradScaler has multiplied it, the number
before that is meant. Values are added up over the backward passes of a step, since gradients may be accumulated.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaff.compat import autograd, distributed, elements
from gaff.inspection.nonfinite.unsafe_ops import UnsafeOp, steep_ops
from gaff.training.watch.kept_graphs import LossGraphs
from gaff.training.watch.loss_graph import facts_of_graph, teaches_targets
from gaff.training.watch.loss_terms import factor_of
from gaff.training.watch.mixing_axis import mistaken
from gaff.training.watch.scaled_losses import ScaledLosses, scale_of
from gaff.training.watch.variable_names import caller, name_of_loss

_LENGTH = 128  # losses that a spike is compared with, as in OLMo-core's SkipStep
_LEAST = 32
_FEW, _FAR = 3, 100  # losses before an early spike, and how many times the largest of them it is
_DEVIATIONS = 6.0
_BY_HAND = "by_hand"  # what attention by hand sees, by its length
_EARLY = 32  # backward passes in which attention by hand is looked for: how it is written stays
# Facts of what a loss is given, and of what it may be.
_OF_VALUE = ("classes", "mean_of", "logistic", "scores", "summed", "bounded")
_EUCLIDEAN = 2.0
_HIGH = 3.0  # deviations above which a loss has left what it was lately
_MOST = 1e300  # of a variance: an infinite one would stay NaN


@dataclass(frozen=True, slots=True)
class Spike:
    """A loss far above those before it."""

    name: str
    value: float
    mean: float
    deviation: float
    is_early: bool = False  # too few losses came before to tell what is usual: only an odd batch makes it a spike


class Noted(NamedTuple):
    """What was noted of one loss.

    ``scale``: the factor by which its gradients are too large, a GradScaler's or 1; a tensor where it is on a device.
    """

    name: str
    is_nonfinite: bool
    scale: Any
    spike: Spike | None


class StepNumbers(NamedTuple):
    """What the losses of a step tell, at one moment; values and scale may be tensors on a device.

    ``lr``: the highest learning rate of the leading optimizer's parameter groups when it stepped last, NaN before that;
    ``unclipped``: the norm that ``clip_grad_norm_`` has found in this step, None where it was not called; ``passes``:
    of how many backward passes a loss is the mean, by name, where they are several.
    """

    lr: float
    losses: dict[str, Any]
    scale: Any
    unclipped: Any = None
    passes: Mapping[str, int] = MappingProxyType({})


def _at_once(what: str, action: Callable[..., Any], *arguments: Any) -> Any:
    return action(*arguments)


class Losses:
    """The losses of the step in progress, by name, and what is remembered of those before it.

    Values on the CPU are read at once; those on a device are copied there and read later, by another thread, so that
    nothing waits. ``names`` stay for the whole run; ``facts`` are what the autograd graphs behind losses have told
    rules so far. Used on the thread that trains.
    """

    def __init__(self, rises: Callable[[], None] = lambda: None, attempt: Callable[..., Any] = _at_once) -> None:
        """``rises`` is called when a loss leaves what it was lately, by three deviations from the mean, upwards.

        ``attempt``: that of a ``Shield``, through which graphs are read.
        """
        self._rises = rises
        self._attempt = attempt
        self.names: dict[Any, str] = {}  # by place in the code and model
        self.lr = math.nan
        self.unclipped: Any = None  # the norm that this step's gradients had before they were clipped
        self.scale: Any = None  # of a GradScaler, when it was last used; a tensor where it is on a device
        self.facts: dict[str, Any] = {}
        self.steep: list[UnsafeOp] = []  # ops just behind the losses of a sampled step that may have an infinite slope
        self.count = 0  # backward passes from losses, in the whole run
        self._graphs = LossGraphs()  # of this step and of earlier ones
        self._now: dict[str, tuple[Any, int]] = {}  # sum and number of this step's
        self.partial: dict[str, int] = {}  # by loss of which each process has a summand: how many in this step
        self._latest: tuple[Any, ...] = (self, 0, 0, "", "")  # place, model and name of the last one
        self._past: dict[str, PastLosses] = {}
        self.scaled = ScaledLosses()

    def clipped(self, norm: Any, most: Any, kind: Any = 2.0, *, is_stale: bool = False) -> None:
        """``clip_grad_norm_`` has found this norm, and scales gradients to ``most`` where it is more. Never waits.

        What was clipped in parts, with no backward pass in between, has one norm, the root of the sum of squares, if
        they are Euclidean ones (``kind``). What is only measured, by an endless limit, is no part. ``is_stale``: they
        are those of the step before. Without a norm ``clip_grad_value_`` has limited each element. A norm of which each
        process has a part (FSDP2, tensor parallelism) is left out, too: it takes all of them to tell.
        """
        if norm is None:
            self.facts["clipped_by_value"] = float(most)
            return
        known = distributed.known_here(norm.detach()) if isinstance(norm, Tensor) else float(norm)
        earlier = self.facts.get("clipped")
        if known is None or (earlier is not None and math.isinf(float(most))):
            return
        if float(kind) == _EUCLIDEAN:
            is_part = earlier is not None and earlier["passes"] == self.in_step and not math.isinf(earlier["most"])
            self.unclipped = _hypot(self.unclipped, known) if is_part and self.unclipped is not None else known
        factor = self.factor_on()
        self.facts["clipped"] = {
            "norm": known,
            "most": float(most),
            "factor": 1.0 if factor is None else factor,
            "passes": self.in_step,
            "is_stale": is_stale,
        }

    def factor_on(self, optimizer: Any = None) -> Any:
        """By what gradients are too large now, by a GradScaler, if an ``optimizer`` does not take that off itself."""
        is_scaled = self.scaled.scaler is not None and getattr(optimizer, "grad_scale", None) is None
        return self.scale if is_scaled and not _has_unscaled(self.scaled.scaler) else None

    def note(
        self, tensor: Tensor, at: int = 0, *, whose: str = "", is_sampled: bool = False, is_trial: bool = False
    ) -> Noted:
        """Backward is about to run from ``tensor``. Tells a spike where the value can be read without waiting.

        ``at``: its place, where backward runs from several; ``whose``: the models that ran before it, for a loop over
        several has one line for all of their losses. ``is_sampled``: what the autograd graph behind it tells is of
        interest, see ``facts``; ``is_trial``: it is a closure's, which is tried at other weights after the first time.
        """
        self.count += 1
        loss, known = self.scaled.begins_at(tensor)
        named = tensor if known is None else loss
        name = self._name(named, at, whose)
        if self.scaled.scaler is not None:
            self.scale = scale_of(self.scaled.scaler)
        scale = 1.0 if self.scaled.scaler is None else self.scale
        if is_sampled:
            self._attempt("the graphs behind losses", self._note_graph, tensor, named, name, scale)
        self._graphs.add(tensor if named is None else named)
        if known is None:
            known = tensor.detach() if self.scaled.scaler is None else tensor.detach() / scale
        value = distributed.known_here(known)
        if value is None:  # it takes all processes to tell
            self.partial[name] = self.partial.get(name, 0) + 1
            return Noted(name, False, scale, None)
        total, count = self._now.get(name, (0.0, 0))
        if value.device.type != "cpu":
            self._now[name] = total + value.to(elements.wide_type(value)), count + 1
            return Noted(name, False, scale, None)
        number = float(value)
        self._now[name] = total + number, count + 1
        is_finite = math.isfinite(number)
        is_told = is_finite and not (is_trial and count)
        return Noted(name, not is_finite, scale, self._spike(name, number, _weight(named)) if is_told else None)

    def _note_graph(self, tensor: Tensor, named: Tensor | None, name: str, scale: Any) -> None:
        """Note what the graph behind a loss tells; ``named`` is what a GradScaler has multiplied, None if it is gone.

        What its value is, and by what it was multiplied, is known where all of its passes in the step say the same: a
        loop over several losses has one line, and one name, for all of them.
        """
        found = facts_of_graph(tensor if named is None else named, name)
        self.steep += steep_ops(tensor)
        if named is None and "factor" in found:
            by = found["factor"]["by"] / scale if isinstance(scale, float) else 1.0
            found["factor"] = {"loss": name, "by": by, "weight": 1.0, "scale": None}
        if name in self._now:
            self._unlike(name, found)
        elif self._graphs.are_held(tensor, name):
            found["held"] = name
        if self.count <= _EARLY:
            found |= mistaken(tensor)
            before = self.facts.get(_BY_HAND, {})
            for length, told in found.get(_BY_HAND, {}).items():
                known = before.get(length, told)
                found[_BY_HAND][length] = {how: elements.both(one, known[how]) for how, one in told.items()}
            found[_BY_HAND] = {**before, **found.get(_BY_HAND, {})}
        if self._graphs.are_inside(tensor if named is None else named):
            found["holds"] = name
        if teaches_targets(tensor):
            found["own_targets"] = name
        self.facts.update(found)

    def _unlike(self, name: str, found: dict[str, Any]) -> None:
        """Take out of what is known, and of what was ``found`` in a further pass of a loss, what not all passes say."""
        known = self.facts.get("factor", {"loss": ""})
        if known["loss"] == name and known != found.get("factor"):
            found["factor"] = {"loss": name, "by": 1.0, "weight": 1.0, "scale": None}
        for kind in _OF_VALUE:
            before = self.facts.get(kind)
            is_known = before is not None and name == (before["loss"] if isinstance(before, dict) else before)
            is_other = kind != "summed" and before != found.get(kind)
            if kind == "summed" and is_known and kind in found:
                found[kind] = _of_passes(self._now[name][1], before, found[kind])
            if is_known != (kind in found) or (is_known and is_other):
                found.pop(kind, None)
                if is_known:
                    del self.facts[kind]

    def values(self) -> dict[str, Any]:
        """The mean of each loss, by name, over the backward passes of this step so far; tensors where on a device."""
        return {name: total / count for name, (total, count) in self._now.items()}

    @property
    def latest(self) -> str:
        """The name of the loss that was noted last; empty before the first."""
        return str(self._latest[-1])

    @property
    def in_step(self) -> int:
        """Backward passes from losses in the step in progress."""
        return sum(count for _, count in self._now.values()) + sum(self.partial.values())

    def numbers(self) -> StepNumbers:
        """The losses, the learning rate and the factor of a GradScaler as they are now, for the row of this step."""
        passes = {name: count for name, (_, count) in self._now.items() if count > 1}
        return StepNumbers(self.lr, self.values(), self.scale, self.unclipped, passes)

    def drop_rest(self, steps: int) -> int:
        """Forget the losses since the last of ``steps`` steps, where they are more than twice as many as a step has had
        on average, and return how many; else 0. They are no step then, and their mean is no loss of one."""
        rest = self.in_step
        if not steps or rest <= 2 * (self.count - rest) / steps + 1:
            return 0
        self.forget()
        return rest

    def forget(self) -> None:
        """Begin a new step: the sums of this one are dropped, while names and past values stay."""
        self._now, self.partial = {}, dict.fromkeys(self.partial, 0)
        self._graphs.step_ends()
        self.unclipped = self.scale = None
        self.scaled.step_ends()
        self.facts = {name: self.facts[name] for name in (_BY_HAND, "ctc_axis") if name in self.facts}  # it stays so
        self.steep = []

    def _name(self, loss: Tensor | None, at: int, whose: str) -> str:
        """What a loss is called that comes from the place in the code that leads here, as it was at the first time.

        Most come from where the last one came from: that is asked first, since the hash of code takes long.
        """
        code, instruction = caller()
        last_code, *last, known = self._latest
        name = str(known)
        if code is not last_code or last != [instruction, at, whose]:
            place = code, instruction, at, whose
            if place not in self.names:
                self.names[place] = self._new_name(name_of_loss(loss) if loss is not None else "loss")
            name = self.names[place]
            self._latest = (*place, name)
        return name

    def _new_name(self, name: str) -> str:
        """A name for a loss that comes from another place in the code than all others: numbered where it is taken."""
        taken = set(self.names.values())
        numbered = (name if not number else f"{name}#{number + 1}" for number in range(len(taken) + 1))
        return next(one for one in numbered if one not in taken)

    def _spike(self, name: str, value: float, weight: float) -> Spike | None:
        """The spike that ``value`` is, or None; it is remembered for later ones either way, without its ``weight``.

        A spike is six standard deviations above the mean of the last 128 values (as in OLMo-core's SkipStep), above
        three times that mean, above half of the first value, and above twice the largest of these values: the
        conditions leave out jumps that are small beside the loss itself. Its logarithm must be five standard deviations
        above those of the last 32, too, which leaves out noise with a heavy tail. With fewer than 32 values none is
        told, nor where one of the last 32 was not positive; but from the fourth on an early one: a hundred times the
        largest so far.
        """
        value /= weight
        past = self._past.get(name)
        if past is None:
            past = self._past[name] = PastLosses(value)
        found = None
        if len(past.values) >= _LEAST:
            if past.rises(value):
                self._rises()
            if value > 2 * past.values[-1]:  # as it is if it is above twice the largest; to ask the rest takes long
                mean, deviation = past.moments()
                is_far = value > mean + _DEVIATIONS * deviation and value > 3 * abs(mean)
                if is_far and value > max(0.5 * abs(past.first), 2 * max(past.values)) and not past.is_restless(value):
                    found = Spike(name, value * weight, mean * weight, deviation * weight)
        elif len(past.values) >= _FEW and value > _FAR * max(map(abs, past.values)):
            mean, deviation = past.moments()
            found = Spike(name, value * weight, mean * weight, deviation * weight, is_early=True)
        past.add(value)
        return found


class PastLosses:
    """The last 128 values of one loss, and the first.

    Moments of these are made anew each time: sums that are kept up would keep the rounding of a jump, long after that.
    What is asked at each step, ``rises``, is by a mean and a variance that forget older values by and by.
    """

    def __init__(self, first: float) -> None:
        self.first = first
        self.values: deque[float] = deque(maxlen=_LENGTH)
        self._is_above = False  # the newest value is three deviations above the mean of those before
        self._mean = self._variance = 0.0

    def add(self, value: float) -> None:
        """Remember a value, in place of the oldest one where there are enough.

        Mean and variance are brought up to date by Welford's formula, as if there were never more than 64 values.
        """
        self.values.append(value)
        count = min(len(self.values), _LENGTH // 2)
        gap = value - self._mean
        self._mean += gap / count
        self._variance = min(self._variance + (gap * (value - self._mean) - self._variance) / count, _MOST)

    def rises(self, value: float) -> bool:
        """Whether such a value is three deviations above the mean of those before, and the newest of them was not."""
        was_above, self._is_above = self._is_above, value > self._mean + _HIGH * math.sqrt(self._variance) > self._mean
        return self._is_above and not was_above

    def is_restless(self, value: float) -> bool:
        """Whether such a value is within five deviations of the latest 32, by their logarithms.

        Logarithms, since a factor is what tells noise with a heavy tail from a jump. A loss that was not positive
        lately has none, and is taken for restless: a policy's is about zero.
        """
        latest = list(self.values)[-_LEAST:]
        if min(latest) <= 0:
            return True
        logs = [math.log(one) for one in latest]
        return math.log(value) < statistics.fmean(logs) + 5 * statistics.pstdev(logs)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation (of the population) of the values held; there must be one at least."""
        count = len(self.values)
        mean = sum(self.values) / count
        return mean, math.dist(self.values, repeat(mean, count)) / math.sqrt(count)


def _of_passes(count: int, before: Any, found: dict[str, Any]) -> dict[str, Any]:
    """How many times its mean a loss is that was ``summed``, as one more pass after ``count`` of a step has ``found``.

    The mean over the passes, which may divide by what they have together; perhaps a tensor, which nobody waits for.
    """
    return {**found, "by": (count * before["by"] + found["by"]) / (count + 1)}


def _weight(loss: Tensor | None) -> float:
    """By what a loss was multiplied as the last thing, where that makes it smaller: what accumulates gradients divides
    by the number of batches, which is another one at the end of an epoch."""
    factor = factor_of(maker) if loss is not None and (maker := autograd.maker_of(loss)) is not None else None
    return factor if factor is not None and 0 < factor < 1 else 1.0


def _hypot(one: Any, other: Any) -> Any:
    """The root of the sum of two squares, of numbers or of tensors, on the device of the first of these."""
    given = next((part for part in (one, other) if isinstance(part, Tensor)), None)
    if given is None:
        return math.hypot(one, other)
    return torch.hypot(*(torch.as_tensor(part, dtype=torch.float32, device=given.device) for part in (one, other)))


def _has_unscaled(scaler: Any) -> bool:
    """Whether a GradScaler has divided the gradients of an optimizer by its factor since its last step."""
    states = getattr(scaler, "_per_optimizer_states", None)
    return states is None or any(one.get("found_inf_per_device") for one in states.values())


def read(value: Any) -> float:
    """A loss or a factor as a number; waits for its device, so it is called on the writer's thread."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def read_all(values: Iterable[Any]) -> list[float]:
    """Numbers and tensors of one number each as numbers; waits once for each device and type, not for every tensor."""
    known = list(values)
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, value in enumerate(known):
        if elements.is_opaque(value):
            known[at] = read(value)
        elif isinstance(value, torch.Tensor):
            by_kind.setdefault((value.device, value.dtype), []).append(at)
    for places in by_kind.values():
        together = torch.stack([known[at].detach().reshape(()) for at in places])
        for at, number in zip(places, together.tolist(), strict=True):
            known[at] = number
    return [float(one) for one in known]
