"""What an optimizer's step does: gradients as it is given them, weights before it, and what it changed.

``Update`` follows one step of one optimizer from its beginning to its end; ``Clearing`` asks whether gradients are
cleared between steps. Both are used in sampled steps only, on the thread that trains.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements, memory
from gaff.inspection.sketches import projections
from gaff.record.sample import Key, address_of
from gaff.training.statistics.plain import in_memory_order
from gaff.training.watch.accumulator import Accumulator, readable
from gaff.training.watch.models import Models

_DECOUPLED = (torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor)  # whose decay is taken off the weight
_WHOLE = 1 << 14  # elements; of larger tensors a sample of an odd stride is copied
_FEW = 1 << 12
_LEAST = 1 << 8
# of each parameter a few elements: as they were, and by how much they changed
Changed = list[tuple[Key, Tensor, Tensor]]
_PROBES = 8  # parameters asked whether their gradients were cleared


@dataclass(slots=True)
class Owned:
    """A parameter of an optimizer, as it is before a step.

    ``group``: the settings of its group then, which a scheduler may change before they are read. ``had_grad``: whether
    there was a gradient when the step was given it. ``adam_rms`` and ``momentum`` are those of
    ``gaff.record.sample.Parameter``; None where the optimizer keeps no such moments, or they were not read then.
    """

    model: str
    path: str
    parameter: Tensor
    group: dict[str, Any]
    before: Tensor | None  # a copy of some of its elements
    had_grad: bool = False
    adam_rms: Any = None  # 0-dim tensors until they are read
    momentum: Any = None


class Update:
    """One step of one optimizer in a sampled window. Adds rows to ``bank``; never synchronises.

    Reads gradients and weights once each, and copies some 16,384 elements of every larger weight, never twice as many,
    for the time of the step: the difference to what they are afterwards is the update. With a closure the gradients
    come during the step, and are read at its end. ``number``: how many steps there were before for its parameters.
    """

    def __init__(
        self,
        optimizer: Any,
        models: Models,
        bank: Accumulator,
        *,
        has_closure: bool,
        has_moments: bool = True,
        number: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.number = number
        self.owned: list[Owned] = []
        self.was_cleared: bool | Tensor = True
        self.marks: dict[Key, Tensor] = {}  # of its parameters before its first step, see ``projections``
        self.is_fed = False  # any of its parameters has a gradient, whether a watched model has it or not
        self.changed: Changed = []
        self.has_closure = has_closure  # it brings the gradients, during the step
        self._has_moments = has_moments  # whether to read what the optimizer keeps
        self._models = models
        self._bank = bank

    @property
    def keys(self) -> dict[Key, Owned]:
        """The parameters that this optimizer owns and a watched model has, by key: the model's name, and an address."""
        return {(one.model, address_of(one.path, "param")): one for one in self.owned}

    def begin(self) -> None:
        """Look at parameters and gradients before the step. Called from the optimizer's global hook, once.

        Parameters that no watched model has, and those whose numbers cannot be read, are left out.
        """
        with torch.no_grad():
            values = []
            settings = {id(group): _settings(group) for group in self.optimizer.param_groups}
            for group, parameter in parameters_of(self.optimizer):
                named = self._models.name_of(parameter)
                value = readable(parameter)
                if named is not None and value is not None:
                    self.owned.append(Owned(*named, parameter, settings[id(group)], some_of(value).clone()))
                    values.append(value)
            if not self.has_closure:
                self._read_gradients()
            self._observe("param", list(zip(self.owned, values, strict=True)))
            if not self.number:
                marks = zip(self.owned, projections(values), strict=True)
                self.marks = {
                    (one.model, address_of(one.path, "param")): mark for one, mark in marks if mark is not None
                }

    def _read_gradients(self) -> None:
        """Add the gradients as the step is given them: accumulated over backward passes, reduced over processes.

        Where a GradScaler leaves unscaling to a fused optimizer, which reads ``grad_scale`` itself, that is done here
        on a copy. What a sparse one stores of the same row several times is summed, as optimizers do, in a copy.
        """
        scale = getattr(self.optimizer, "grad_scale", None)
        pairs = []
        self.is_fed = any(one.grad is not None for _, one in parameters_of(self.optimizer))
        for one in self.owned:
            gradient = one.parameter.grad
            one.had_grad = gradient is not None
            if gradient is not None:
                value = readable(gradient.coalesce() if gradient.is_sparse else gradient)
                if value is not None and scale is not None:
                    value = value / scale.to(value.device)
                pairs.append((one, value))
        self._observe("grad", pairs)

    def end(self) -> None:
        """Look at what the step has changed, after it. Called once; the copies of weights are let go of here.

        A parameter that has got another type, size or device in the meantime has no update.
        """
        with torch.no_grad():
            if self.has_closure:
                self._read_gradients()
            pairs = [(one, readable(one.parameter)) for one in self.owned]
            same: list[tuple[Owned, Tensor, Tensor]] = []
            for one, value in pairs:
                now = _like(value, one.before)
                if now is not None and one.before is not None:
                    same.append((one, now, one.before))
            if same:
                changes = torch._foreach_sub([_wide(now) for _, now, _ in same], [_wide(one) for *_, one in same])
                self._observe("update", [(one, change) for (one, *_), change in zip(same, changes, strict=True)])
                befores = _copies([before[:_LEAST] for *_, before in same])
                few = _copies([change[:_LEAST] for change in changes])
                self.changed = [((one.model, one.path), before, change)
                                for (one, *_), before, change in zip(same, befores, few, strict=True)]  # fmt: skip
            for one in self.owned:
                one.before = None
            if self._has_moments:
                self._read_moments()

    def _read_moments(self) -> None:
        """Note how large the moments are that an optimizer keeps, under the names that torch's Adam and SGD give them.

        The norm of the first moment, and the root of the mean of g^2 / v (Wortsman et al., 2023, RMS_t), are taken from
        a sample of some 4,096 elements each; the norm is scaled up to all of them. The results stay on the device.
        """
        states = getattr(self.optimizer, "state", {})
        firsts: list[tuple[Owned, Tensor]] = []
        seconds: list[tuple[Owned, Tensor, Tensor, float]] = []
        for one in self.owned:
            state = states.get(one.parameter)
            if not isinstance(state, dict):
                continue
            first = _moment(state.get("exp_avg", state.get("momentum_buffer")))
            if first is not None:
                firsts.append((one, _wide(some_of(first, _FEW))))
            is_apart = is_decoupled(self.optimizer, one.group)
            known = _second_moment(state, one, 0.0 if is_apart else float(one.group.get("weight_decay") or 0.0))
            if known is not None:
                seconds.append((one, *known))
        if firsts:
            norms = torch._foreach_norm([first for _, first in firsts], dtype=elements.wide_type(firsts[0][1]))
            for (one, first), norm in zip(firsts, norms, strict=True):
                size = one.parameter.numel() * (2 if one.parameter.is_complex() else 1)  # as ``first`` has pairs
                one.momentum = norm * math.sqrt(size / max(1, first.numel()))
        if seconds:
            expected = torch._foreach_div([second for _, _, second, _ in seconds], [scale for *_, scale in seconds])
            smallest = [_least(one.group) ** 2 for one, *_ in seconds]
            torch._foreach_clamp_min_(expected, smallest)
            torch._foreach_sqrt_(expected)
            ratios = torch._foreach_norm(torch._foreach_div([gradient for _, gradient, _, _ in seconds], expected))
            for (one, gradient, _, _), ratio in zip(seconds, ratios, strict=True):
                one.adam_rms = ratio / math.sqrt(max(1, gradient.numel()))

    def _observe(self, port: str, pairs: Sequence[tuple[Owned, Tensor | None]]) -> None:
        """Add tensors to new rows under the address of ``port``, in one call for each device; None is left out.

        So is what another optimizer has stepped in this window, where this one has no gradient of it.
        """
        known = {
            key: value
            for one, value in pairs
            if value is not None
            and ((key := (one.model, address_of(one.path, port))) not in self._bank or one.had_grad or self.has_closure)
        }
        self._bank.observe_many(list(known), list(known.values()))


class Clearing:
    """Whether an optimizer's gradients were None or zero at some time since its last step.

    A loop that forgets ``zero_grad`` adds all gradients up. Asked at the beginning of backward passes and steps in a
    sampled window; compares a few small gradients with those at the last step, on their device, and never waits for it.
    Holds these gradients until ``forget``.
    """

    def __init__(self) -> None:
        self._cleared: dict[int, Tensor | None] = {}  # whether any has been cleared; None before anybody has looked
        self._stepped: dict[int, list[_Probe]] = {}
        self._marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # a gradient at the step, with its version

    def mark(self, optimizer: Any) -> None:
        """An optimizer has made a step in the middle of one of the run: remember one gradient of it, weakly."""
        gradient = _first_gradient(optimizer)
        if gradient is not None:
            self._marks[id(optimizer)] = weakref.ref(gradient), memory.version_of(gradient)

    def is_as_marked(self, optimizer: Any) -> bool:
        """Whether nothing has touched that gradient since: it is neither cleared nor added to yet."""
        known, gradient = self._marks.pop(id(optimizer), None), _first_gradient(optimizer)
        if known is None or gradient is None:
            return False
        return known[0]() is gradient and known[1] == memory.version_of(gradient)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step: note a few small gradients that it had, which must be cleared next."""
        given = sorted((one for _, one in parameters_of(optimizer) if one.grad is not None), key=Tensor.numel)
        probes = [_Probe(one, one.grad, flag) for one in given[:_PROBES] if (flag := _is_nonzero(one)) is not None]
        first = [one for one in probes if one.was_nonzero.device == probes[0].was_nonzero.device]
        self._stepped[id(optimizer)] = first
        self._cleared[id(optimizer)] = None

    def look(self) -> None:
        """See whether the noted gradients have been cleared by now."""
        for which, probes in self._stepped.items():
            for probe in probes:
                now, known = probe.is_cleared(), self._cleared[which]
                self._cleared[which] = now if known is None else known | now

    def was_cleared(self, optimizer: Any) -> bool | Tensor:
        """Whether the gradients of ``optimizer`` have been cleared since its last step; asks about all that are noted.

        A tensor of one truth value on their device. True where nothing is known: no step has been seen, or there was no
        gradient but zeros, which nobody need clear.
        """
        self.look()
        probes, cleared = self._stepped.get(id(optimizer)), self._cleared.get(id(optimizer))
        if not probes or cleared is None:
            return True
        return cleared | ~torch.stack([one.was_nonzero for one in probes]).any()

    def forget(self) -> None:
        """Let go of the gradients that are noted: nothing is known any more."""
        self._cleared.clear()
        self._stepped.clear()
        self._marks.clear()


@dataclass(frozen=True, slots=True)
class _Probe:
    """A parameter whose gradient is asked for, the gradient that it had at a step, and whether that was not zero."""

    parameter: Tensor
    gradient: Tensor | None
    was_nonzero: Tensor

    def is_cleared(self) -> Tensor:
        """Whether a gradient that was not zero is another tensor, none, or zero by now; on its device."""
        now = _is_nonzero(self.parameter) if self.parameter.grad is self.gradient else None
        return self.was_nonzero if now is None else self.was_nonzero & ~now


def parameters_of(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Every parameter of an optimizer with its group, in the order of its groups, which are read anew each time."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters, as it is now: a learning rate that is a tensor is written to later."""
    return {name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items() if name != "params"}  # fmt: skip


def _first_gradient(optimizer: Any) -> Tensor | None:
    """The gradient of the optimizer's first parameter that has one."""
    return next((one.grad for _, one in parameters_of(optimizer) if one.grad is not None), None)


def some_of(value: Tensor, most: int = _WHOLE) -> Tensor:
    """All elements of ``value``, flat, or every nth of a large tensor: a view where it can be one.

    n is odd, for an even distance would meet the same channels again and again. Of a large tensor about ``most``
    elements are taken, always less than twice as many.
    """
    elements = value.numel()
    if elements <= most:
        return value.reshape(-1)
    return in_memory_order(value)[:: (elements // most) | 1]


def _like(value: Tensor | None, before: Tensor | None) -> Tensor | None:
    """The elements of a parameter of which ``before`` is a copy, as they are now; None where they are others."""
    if value is None or before is None or value.device != before.device or value.dtype != before.dtype:
        return None
    now = some_of(value)
    return now if now.shape == before.shape else None


def _wide(value: Tensor) -> Tensor:
    """A tensor in a type in which differences of its elements are not rounded to its own few digits."""
    return value.float() if value.is_floating_point() and value.element_size() < 4 else value


def _copies(several: Sequence[Tensor]) -> list[Tensor]:
    """Copies of flat tensors: those of one device and type by one kernel, since a launch costs more than the copy."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, one in enumerate(several):
        by_kind.setdefault((one.device, one.dtype), []).append(at)
    copies: dict[int, Tensor] = {}
    for places in by_kind.values():
        some = [several[at] for at in places]
        copies.update(zip(places, torch.cat(some).split([len(one) for one in some]), strict=True))
    return [copies[at] for at in range(len(several))]


def _moment(value: Any) -> Tensor | None:
    """The numbers of something that an optimizer keeps, if it is a tensor that can be read."""
    return readable(value) if isinstance(value, Tensor) else None


def _second_moment(state: dict[str, Any], one: Owned, decay: float) -> tuple[Tensor, Tensor, float] | None:
    """Samples of the gradient and of Adam's second moment, and the factor by which the moment is too small.

    ``decay``: how much of the weight Adam has added to the gradient; of it as it is after the step, which is near.
    That is its bias, 1 - beta2 ** step (Kingma & Ba, "Adam", 2015, section 3). None where anything of it is not there,
    or is on a device and would have to be waited for.
    """
    grad = one.parameter.grad
    if grad is None or grad.is_sparse:
        return None  # of a sparse one what can be read are the rows that it stores
    second, gradient = _moment(state.get("exp_avg_sq")), _moment(grad)
    betas, count = one.group.get("betas"), state.get("step")
    if second is None or gradient is None or not betas or count is None:
        return None
    if second.shape != gradient.shape or (second.numel() > _FEW and _layout(second) != _layout(gradient)):
        return None  # samples of the two would be of other elements
    if isinstance(count, Tensor) and count.device.type != "cpu":
        return None  # of a capturable or fused optimizer: not worth waiting for
    some, weight = _wide(some_of(gradient, _FEW)), _moment(one.parameter)
    if decay and weight is not None and weight.shape == gradient.shape:
        some = some.add(_wide(some_of(weight, _FEW)), alpha=decay)
    return some, _wide(some_of(second, _FEW)), 1 - float(betas[1]) ** float(count)


def is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer takes weight decay off the weight, and does not add it to the gradient."""
    return isinstance(optimizer, _DECOUPLED) or bool(group.get("decoupled_weight_decay"))


def _least(group: dict[str, Any]) -> float:
    """What an optimizer adds to the root of the second moment, torch's own where the group tells none or several."""
    known = group.get("eps")
    return float(known) if isinstance(known, (int, float, Tensor)) else 1e-8


def _layout(value: Tensor) -> list[int]:
    """How elements follow each other in memory: the strides of dimensions that have several."""
    return [value.stride(dim) for dim, size in enumerate(value.shape) if size > 1]


def _is_nonzero(parameter: Tensor) -> Tensor | None:
    """Whether a parameter has a gradient that is not all zero, as a tensor on its device; None if none can be read."""
    gradient = readable(parameter.grad) if parameter.grad is not None else None
    if gradient is None or not gradient.numel():
        return None
    with torch.no_grad(), suppress(RuntimeError):
        return gradient.ne(0).any()
    return None
