"""Holds ``gaff.clip_gradients``: gradients limited and guarded when the optimizer is about to use them.

With ``when="step"`` all gradients are looked at in a hook before the optimizer's own step: they are complete then
(accumulated, reduced over processes, unscaled), so limits mean what they say. Norms and factors are tensors on the
gradients' device from end to end; the host waits once a step, to see whether the norm is finite, and not even then
where the optimizer can skip a step by itself. With ``when="backward"`` each gradient is changed as it comes
(``clipping_backward``).

``Limits`` says what was asked for, ``LimitedParameters`` of what, ``Clipping`` does it, ``Audit`` keeps what was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.resolve import need_module
from gaff.compat import distributed, elements, flat_shards, foreach
from gaff.engine.process.optimizer import StepGuard, is_inner_step, unwrap_optimizer, watch_accumulation
from gaff.engine.process.training_loop import tell_clipped
from gaff.errors import NonFiniteError, PlanError
from gaff.sessions.receipt import CHANGING
from gaff.training.clipping_audit import Audit
from gaff.training.clipping_backward import BackwardClipping
from gaff.training.clipping_limits import Limits
from gaff.training.clipping_parameters import TINY, LimitedParameters, any_each


class Clipping:
    """Limits on an optimizer's gradients, until ``remove`` or the end of a ``with`` block.

    Acts from the moment it is made, and changes ``parameter.grad`` in place. ``audit`` tells how often and by how much;
    ``views(name)`` the last step's gradient in its four states. Parameters that are added to the optimizer later are
    limited too. Several of one optimizer act in the order in which they were made.
    """

    def __init__(self, optimizer: Any, limits: Limits, model: nn.Module | None, views: Sequence[str]) -> None:
        """Check everything, then install.

        Raises PlanError for an optimizer, limits or names that do not go together, before anything is installed. Where
        parameters are spread over processes, all of these must ask for the same limits: it is an error too where one of
        them has not within five minutes.
        """
        real = _need_optimizer(optimizer, limits)
        if model is not None:
            need_module(model)
        if limits.when == "backward" and views:
            raise PlanError("views= shows the stations of a step: expected when='step'")
        every = [one for group in real.param_groups for one in group["params"]]
        flat = flat_shards.flat_shards(every)
        if flat and (limits.adaptive is not None or limits.when == "backward" or limits.per == "layer"):
            asked = {"when='backward'": limits.when == "backward", "adaptive=": limits.adaptive is not None}
            what = next((name for name, is_asked in asked.items() if is_asked), "per='layer'")
            raise PlanError(f"{what} of parts of flat parameters: {flat_shards.FLAT}, or norm=, value=")
        if any(one.is_meta for one in every):
            raise PlanError("gradients on the meta device hold no numbers: expected parameters whose weights are there")
        distributed.refuse_localized(every)
        spread_over = [one for one in every if distributed.is_spread(one)]
        if spread_over and limits.when == "backward" and model is None:
            raise PlanError("when='backward' on parameters of several processes needs model=: expected the model")
        ranks = {rank for mesh in flat.values() for rank in mesh.mesh.flatten().tolist()}
        ranks.update(distributed.ranks_of(spread_over))
        ranks.update(distributed.processes_of(model) if model is not None else ())
        distributed.agree(tuple(sorted(ranks)), f"clip_gradients {limits}")
        self.audit = Audit()
        self._limits = limits
        self._parameters = LimitedParameters(real, limits, model)
        self.audit.names = self._parameters.names
        self._norms = _Window(limits.window) if limits.deviations is not None else None
        named = [(name, self._parameters.named(name)) for name in ((views,) if isinstance(views, str) else views)]
        self._views = _Views(named)
        backward = BackwardClipping(self._parameters, limits, self.audit) if limits.when == "backward" else None
        before = self._before if backward is None else backward.step
        self._guard = StepGuard(real, before, self._begin, self._end)
        with ExitStack() as opening:
            opening.callback(self._guard.close)
            self._guard.open()
            for name, inner in _inner_optimizers(real):
                opening.callback(inner.register_step_pre_hook(_Refusal(type(real).__name__, name)).remove)
            if backward is not None:
                opening.callback(backward.close)
                backward.open(self._guard.is_overflow_of_scaler)
            opening.enter_context(self._views.watch())
            self._handles = opening.pop_all()
        self._is_open = True
        CHANGING.add(self)

    def remove(self) -> None:
        """Take the limits away; the audit stays readable. May be called twice."""
        self._handles.close()
        self._is_open = False

    def __enter__(self) -> Clipping:
        if not self._is_open:
            raise PlanError("these limits were removed: expected a new gaff.clip_gradients(...)")
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def views(self, name: str) -> dict[str, Tensor | None]:
        """The last step's gradient of a parameter named in ``views=``, at each station of the step.

        ``scaled``: as it arrives, with DistributedDataParallel this process's share before the average; ``unscaled``:
        as it came to the step; ``clipped``: as the optimizer got it; ``applied``: by how much the step changed the
        parameter. Copies, of the parameter's shape, on its device; None where there was no gradient, or no such
        station. Raises PlanError for a name that was not asked for.
        """
        return self._views.read(name)

    def __repr__(self) -> str:
        return f"<gaff clip_gradients, {'open' if self._is_open else 'removed'}>\n{self.audit}"

    def _begin(self) -> None:
        """Begin a step: the optimizer calls this before it evaluates a closure or uses a gradient."""
        self._parameters.look()
        self.audit.names = self._parameters.names
        self._parameters.evaluations = 0
        self._views.begin()

    def _end(self) -> None:
        """End a step. Raises PlanError after the first of an optimizer that cannot be left out in its middle."""
        self._views.note_applied()
        if self._guard.has_moved and "skip" in (self._limits.nonfinite, self._limits.spike):
            raise PlanError(_MOVED)

    @torch.no_grad()
    def _before(self) -> bool | Tensor:
        """Clip all gradients that there are, and tell whether the step is to be skipped.

        Called at every step, or after each evaluation of a closure. In order: what is not finite is dealt with as
        ``nonfinite`` says, then limits apply. An infinite norm has three causes: a GradScaler's overflow (its own
        business: it skips the step itself), elements that are not finite, or finite ones whose squares overflow, for
        which the norm is computed again in float64. With ``nonfinite="skip"``, where the optimizer reads ``found_inf``,
        nothing of this waits for the device: the answer is a tensor. Raises NonFiniteError, and then nothing was
        stepped, but for what a closure's earlier evaluations in this step have (LBFGS).
        """
        self._parameters.evaluations += 1
        flat = self._parameters.flat  # of which all processes must tell all, also those that have no part
        all_of = enumerate(self._parameters.all)
        given = [(number, one) for number, one in all_of if one.grad is not None or id(one) in flat]
        self._views.note("unscaled")
        if not given:
            self.audit.add(None)
            return False
        if self._limits.adaptive is not None and any(one.grad.is_sparse for _, one in given if one.grad is not None):
            raise PlanError("adaptive= cannot tell the units of a sparse gradient: expected norm= or value=")
        gradients = [flat_shards.as_spread(one, flat[id(one)]) if id(one) in flat else _dense(one) for _, one in given]
        numbers = [number for number, _ in given]
        norms, total = foreach.norms_of(gradients, self._limits.norm_type)
        is_told = self._guard.can_tell() and "skip" in (self._limits.nonfinite, self._limits.spike)
        bad: tuple[str, ...] = ()
        if not (is_told and self._limits.nonfinite == "skip") and not bool(total.isfinite()):
            if self._guard.is_overflow_of_scaler():
                self.audit.add(total, skipped=True)
                return True  # as the scaler would; a fused optimizer would make its state then, of SGD for nothing
            bad = self._parameters.nonfinite(gradients, numbers)
            if bad and self._limits.nonfinite == "skip":
                self.audit.add(total, skipped=True, nonfinite=bad)
                return True
            for gradient in gradients if bad else ():
                local = distributed.local_of(gradient)
                local.masked_fill_(~local.isfinite(), 0)
            norms, total = foreach.norms_of(gradients, self._limits.norm_type)
            if not bool(total.isfinite()):  # of finite numbers whose squares are too large
                exact = [one.to(elements.wide_type(one)) for one in gradients]
                norms, total = foreach.norms_of(exact, self._limits.norm_type)
                if not bool(total.isfinite()) and self._limits.value is None:
                    raise NonFiniteError(f"the norm of finite gradients overflows float64; {self._parameters.stepped}")
        skip = self._clip(gradients, numbers, norms, total, bad, is_told)
        self._views.note("clipped")
        return skip

    def _clip(
        self,
        gradients: list[Tensor],
        numbers: list[int],
        norms: list[Tensor],
        total: Tensor,
        bad: tuple[str, ...],
        is_told: bool,
    ) -> bool | Tensor:
        """Apply the limit that was asked for to ``gradients``, in place; returns whether to skip the step.

        ``numbers``: places of the gradients among all parameters; ``norms``, ``total``: of each and of all together;
        ``bad``: names of those that were not finite; ``is_told``: whether a skip may stay a tensor. For a global norm
        with ``deviations`` the window takes in the norm as limited, so that one spike does not raise the limit for the
        next. The audit is told of all of it.
        """
        limits = self._limits
        skip: bool | Tensor = ~total.isfinite() if limits.nonfinite == "skip" and is_told else False
        factor: Tensor | None = None
        smallest: Tensor | None = None  # of several
        limit: Any = None  # to which gradients are scaled down
        told: Any = None  # what the audit tells
        if limits.value is not None:
            changed = any_each([distributed.local_of(one).abs() > limits.value for one in gradients], gradients)
            foreach.clamp_all(gradients, limits.value)
            self.audit.add_each(numbers, changed)
        elif limits.adaptive is not None:
            self.audit.add_each(numbers, list(map(self._parameters.clip_units, numbers, gradients)))
        elif limits.per != "global" and limits.norm is not None:
            each = self._parameters.norms_together(numbers, norms)
            factors = [(limits.norm / (one + TINY)).clamp(max=1.0) for one in each]
            foreach.scale_each(gradients, factors)
            self.audit.add_each(numbers, [one < 1 for one in factors])
            smallest = torch.stack([one.to(factors[0].device) for one in factors]).min()
        elif limits.norm is not None or self._norms is not None:
            limit = told = limits.norm
            if self._norms is not None:
                usual = self._norms.limit(limits.deviations or 0.0, limits.warmup, total)
                self._norms.add(torch.minimum(total, usual), total)
                if limits.spike == "skip":
                    skip = (skip | (total > usual)) if is_told else bool(skip) or bool(total > usual)
                    told = usual if told is None else torch.where(total > usual, usual, told)
                else:
                    limit = told = usual if limit is None else usual.clamp(max=limit)
            if limits.norm is not None:
                tell_clipped(total, limits.norm, limits.norm_type)  # to who watches the training
            if limit is not None:
                factor = (limit / (total + TINY)).clamp(max=1.0)
                is_left = torch.as_tensor(skip, device=factor.device)  # what is skipped is left as it is
                factor = torch.where(is_left, 1.0, factor)
                foreach.scale_all(gradients, factor)
        is_apart = len({one.device for one in norms}) > 1
        near = [one.to(norms[0].device) for one in norms] if is_apart else norms
        largest = torch.stack(near).argmax() if factor is not None else None
        told_factor = smallest if factor is None else factor
        self.audit.add(total, told_factor, told, largest, numbers=numbers, skipped=skip, nonfinite=bad)
        return skip


def _need_optimizer(optimizer: Any, limits: Limits) -> Any:
    """The torch optimizer inside what was given; raises PlanError where there is none, or none that limits act on."""
    real = unwrap_optimizer(optimizer)
    if not isinstance(real, torch.optim.Optimizer):
        raise PlanError(
            f"expected a torch optimizer, got a {type(optimizer).__name__}; gradients of single layers are edited: "
            "gaff.edit(model, {'conv1.*:grad': gaff.edits.clamp(-1, 1)})"
        )
    if "_optimizer_step_pre_hooks" not in vars(real):
        raise PlanError(
            f"a {type(real).__name__} that has not called Optimizer.__init__ takes no hooks: expected the optimizer "
            "that it steps by"
        )
    if isinstance(real, torch.optim.LBFGS) and "skip" in (limits.nonfinite, limits.spike):
        raise PlanError("LBFGS evaluates several times within a step and keeps state of each: it cannot be skipped")
    return real


_MOVED = (
    "this optimizer changes its parameters before it evaluates its closure, as SAM does: a step that is skipped from "
    "there on would leave them changed; expected nonfinite='raise' or 'zero' (this step was made)"
)


class _Refusal:
    """Raises PlanError where an optimizer that another one holds is stepped by itself: limits of the other do not act.

    So it is with a SAM whose ``second_step`` a training loop calls.
    """

    def __init__(self, outer: str, name: str) -> None:
        self._told = (
            f"these limits are on a {outer}, and its {name!r} was stepped outside of its own step, so that they do not "
            f"act: expected gaff.clip_gradients(optimizer.{name}, ...); nothing was stepped"
        )

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_inner_step(optimizer):
            raise PlanError(self._told)


def _inner_optimizers(optimizer: Any) -> list[tuple[str, Any]]:
    """The optimizers that one holds, by its attributes' names, which step parameters of its own and take hooks."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    held = [(name, one) for name, one in vars(optimizer).items() if isinstance(one, torch.optim.Optimizer)]
    return [
        (name, one)
        for name, one in held
        if "_optimizer_step_pre_hooks" in vars(one)
        and any(id(parameter) in own for group in one.param_groups for parameter in group["params"])
    ]


class _Window:
    """The last global norms, on their device; what was not finite never enters the mean.

    A ring of ``size`` places, NaN where nothing is yet, so that adding and reading wait for nothing.
    """

    def __init__(self, size: int) -> None:
        self._norms: Tensor | None = None
        self._size = size
        self._count = 0

    def add(self, norm: Tensor, raw: Tensor) -> None:
        """Take in ``norm``, the norm after limiting; left out where the ``raw`` one is not finite.

        On the CPU such a norm takes no place. On other devices it takes one as NaN, since leaving it out would mean
        waiting.
        """
        norm = torch.where(raw.isfinite(), norm, float("nan"))
        if self._norms is None:
            wide = torch.promote_types(norm.dtype, torch.float32)
            self._norms = torch.full((self._size,), float("nan"), dtype=wide, device=norm.device)
        if self._norms.device.type != "cpu" or bool(norm.isfinite()):
            self._norms[self._count % self._size] = norm
            self._count += 1

    def limit(self, deviations: float, warmup: int, like: Tensor) -> Tensor:
        """The largest norm that is usual: the window's mean + ``deviations`` * standard deviation.

        It is inf before ``warmup`` finite norms have been seen. ``like``: a tensor whose dtype the answer has. The
        deviation is that of a sample (n - 1).
        """
        if self._norms is None:
            return torch.full_like(like, float("inf"))
        is_seen = self._norms.isfinite()
        count = is_seen.sum()
        known = torch.where(is_seen, self._norms, 0.0)
        mean = known.sum() / count
        deviation = (torch.where(is_seen, known - mean, 0.0).square().sum() / (count - 1)).sqrt()
        return torch.where(count >= warmup, mean + deviations * deviation, float("inf")).to(like.dtype)


class _Views:
    """Copies of some parameters' gradients at the stations of a step, of the last step only."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = dict(named)
        self._kept: dict[str, dict[str, Tensor | None]] = {name: {} for name in self._parameters}
        self._scaled: dict[str, Tensor] = {}  # of the step to come
        self._before: dict[str, Tensor] = {}

    def watch(self) -> ExitStack:
        """Look at the gradients as they come, until what this returns closes."""
        return watch_accumulation(self._parameters.values(), self._accumulated)

    def begin(self) -> None:
        """A step begins: what is left of the last one goes, and the parameters are copied as they are before it."""
        for name, parameter in self._parameters.items():
            scaled = self._scaled.pop(name, None)  # of a step that was skipped, where this one has no gradient
            self._kept[name] = {"scaled": None if parameter.grad is None else scaled}
            self._before[name] = parameter.detach().clone()

    def note(self, station: str) -> None:
        """Copy the gradients as they are at a station: ``unscaled`` or ``clipped``."""
        for name, parameter in self._parameters.items():
            self._kept[name][station] = None if parameter.grad is None else parameter.grad.detach().clone()

    def note_applied(self) -> None:
        """The step is over: tell by how much it changed each parameter."""
        for name, parameter in self._parameters.items():
            if name in self._before:
                self._kept[name]["applied"] = parameter.detach() - self._before.pop(name)

    def read(self, name: str) -> dict[str, Tensor | None]:
        """The stations of one parameter, None for what did not come.

        Raises PlanError for a parameter that was not asked for.
        """
        if name not in self._kept:
            raise PlanError(f"{name!r} was not asked for: expected views=({name!r},) at gaff.clip_gradients")
        return {station: self._kept[name].get(station) for station in ("scaled", "unscaled", "clipped", "applied")}

    def _accumulated(self, parameter: Tensor) -> None:
        """Copy the gradient after each contribution: what the last one leaves is the ``scaled`` gradient."""
        for name, known in self._parameters.items():
            if known is parameter and parameter.grad is not None:
                self._scaled[name] = parameter.grad.detach().clone()


def _dense(parameter: Tensor) -> Tensor:
    """What is to be clipped in place: the gradient, or the values of a sparse one, summed up first.

    ``parameter.grad`` is replaced where it had to be made anew: a sparse gradient with repeated rows, or a DTensor
    whose parts are still to be summed over processes.
    """
    gradient = parameter.grad
    if gradient is not None and distributed.is_spread(gradient):
        parameter.grad = gradient = distributed.settled(gradient)
    if gradient is None or not gradient.is_sparse:
        return gradient  # type: ignore[return-value]
    parameter.grad = gradient.coalesce()
    return parameter.grad._values()
