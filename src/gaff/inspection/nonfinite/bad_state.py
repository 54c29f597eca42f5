"""Parameters, buffers and what optimizers keep, around a step that is examined: which are not finite, since when."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.compat import distributed, elements
from gaff.engine.ops.calls import OpCall
from gaff.inspection.nonfinite.attribution import Now, before, is_mask, only_written
from gaff.inspection.nonfinite.provenance import ADDED, ARRIVED, KEPT, KEPT_BEFORE, UPDATED, WRITTEN, Made, Marks
from gaff.inspection.nonfinite.ranges import has_nan, has_nonfinite, nonfinite_elements, range_of
from gaff.inspection.op_log import iter_state

_SOME = Site("", port="param")  # a parameter of no model
_RUNNING = ("running_mean", "running_var")  # each step adds to them: what was bad once stays, and evaluation uses it


def _has_added_up(gradient: Tensor) -> bool:
    """Whether a gradient that is not finite can be a sum of finite ones: without NaN, and of this process alone."""
    return distributed.place()[1] == 1 and not has_nan(gradient)


def _unseen(gradient: Tensor, site: Site) -> Made:
    """What made a gradient bad of which no op and no backward pass has shown a bad value."""
    direction, cause = ("added", ADDED) if _has_added_up(gradient) else ("arrived", ARRIVED)
    return Made(site, direction, None, cause, range_of(gradient, "value"))


def _has_memory(known: tuple[Tensor, Site]) -> bool:
    """Whether a tensor still has its memory: what FSDP2 has gathered for a forward is freed after it."""
    tensor = known[0]
    return elements.is_plain(tensor) and tensor.untyped_storage().nbytes() >= tensor.nbytes


class BadState:
    """What of parameters and buffers was not finite, by identity.

    ``before``: they themselves, before the step or an optimizer's; ``gradients``: theirs, before the step, with the
    elements that were bad; ``used``: theirs as an optimizer was given them, with what made them so; ``made``:
    parameters that were bad right after an optimizer's step; ``kept``: what an optimizer keeps of a parameter, such as
    a mean of squares, by the parameter, where that is bad. ``sites``: where they are. ``others``: parameters and
    running statistics that are no part of the model, or of which there is none, as ops and optimizers have shown them.
    """

    def __init__(self) -> None:
        self.sites: dict[int, Site] = {}
        self.others: dict[int, tuple[Tensor, Site]] = {}
        self.before: dict[int, Made] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self.used: dict[int, Made] = {}
        self.made: set[int] = set()
        self.kept: dict[int, Made] = {}

    def meet(self, tensor: Tensor, site: Site = _SOME) -> None:
        """A parameter, or statistics, came by: they are asked for after the step, too, if the model does not have them.

        What they held is looked at when they are first met.
        """
        if id(tensor) not in self.sites and id(tensor) not in self.others:
            self.others[id(tensor)] = tensor, site
            if has_nonfinite(tensor):
                self.before[id(tensor)] = before(tensor, site)

    def note_before(self, around: nn.Module, marks: Marks, now: Now, *, is_again: bool) -> None:
        """Mark parameters and buffers that are bad before the step: what comes of them began there."""
        for tensor, site in iter_state(around):
            self.sites.setdefault(id(tensor), site)
            now.is_spread |= distributed.is_spread(tensor)
            if has_nonfinite(tensor):
                is_meant = site.port == "buffer" and is_mask(tensor)
                self.before[id(tensor)] = before(tensor, site, is_meant=is_meant, is_again=is_again)
                marks.put(tensor, self.before[id(tensor)])
            if tensor.grad is not None and has_nonfinite(tensor.grad):
                self.gradients[id(tensor)] = tensor.grad, nonfinite_elements(tensor.grad)

    def meet_all(self, call: OpCall, given: Collection[Tensor]) -> None:
        """An op is called: the parameters among the tensors that it is given come by, and statistics that it writes.

        Gradients that it clears are no longer those of before the step.
        """
        if self.gradients and (call.site.op or "").endswith("zero_"):
            cleared = {id(tensor) for tensor in given}
            self.gradients = {which: one for which, one in self.gradients.items() if id(one[0]) not in cleared}
        for tensor in given:
            if isinstance(tensor, nn.Parameter):
                self.meet(tensor)
        for at, tensor in enumerate(only_written(call)):
            if isinstance(tensor, Tensor):
                self.meet(tensor, Site(_RUNNING[at % 2], port="buffer"))

    def note_used(self, optimizer: Any, marks: Marks) -> Made | None:
        """An optimizer's step begins: note what of its parameters and gradients is not finite, and what made it so.

        Returns the first that was not known. Waits for the device.
        """
        found: list[Made] = []
        for one, name, kept in _kept_of(optimizer):
            if has_nonfinite(kept) and id(one) not in self.kept:
                cause = KEPT_BEFORE.format(name)
                self.kept[id(one)] = Made(_SOME, "kept", None, cause, range_of(kept, name))
        for one in [one for group in optimizer.param_groups for one in group["params"]]:
            self.meet(one)
            if id(one) not in self.before and has_nonfinite(one):
                self.before[id(one)] = marks.of_memory(one) or self._of_parameter(one)
                found.append(self.before[id(one)])
            if one.grad is not None and has_nonfinite(one.grad):
                made = marks.of(one.grad)
                is_seen = made is not None and made.direction == "forward"  # by an op that wrote to it
                self.used[id(one)] = made if made and is_seen else _unseen(one.grad, replace(_SOME, port="grad"))
                found.append(self.used[id(one)])
        return found[0] if found else None

    def note_made(self, optimizer: Any, marks: Marks) -> None:
        """An optimizer's step is over: note which of its parameters, and of what it keeps, are not finite. Waits."""
        for one in [one for group in optimizer.param_groups for one in group["params"]]:
            is_bad = has_nonfinite(one)
            (self.made.add if is_bad else self.made.discard)(id(one))
            if is_bad:
                marks.put(one, self.before.get(id(one)) or self._of_parameter(one))
        for one, name, kept in _kept_of(optimizer):
            if id(one) in self.used or id(one) in self.kept or not has_nonfinite(kept):
                continue
            given = () if one.grad is None else (range_of(one.grad, "gradient"),)
            cause = KEPT.format(name, f" up to {given[0].largest:.4g}" if given else "")
            self.kept[id(one)] = Made(_SOME, "update", None, cause, range_of(kept, name), given)

    def _has_stayed(self, tensor: Tensor) -> bool:
        """Whether the gradient that was bad before the step is still there: nobody has cleared it, and what a backward
        pass adds leaves a NaN, and mostly an infinity, bad."""
        held, bad = self.gradients.get(id(tensor), (None, None))
        if held is None or bad is None or held is not tensor.grad:
            return False
        now = nonfinite_elements(held)
        return now.shape != bad.shape or bool(now[bad].all())  # a sparse gradient has grown

    def after(self, around: nn.Module, marks: Marks, *, is_scaled: bool, is_again: bool) -> Made | None:
        """What made the first parameter, gradient or buffer that is bad after the step; None where none is.

        An op that was seen to write it; else it was so before the step; or its gradient came to be bad by what is not
        seen here; or the optimizer made it so; or it was written to past torch. ``is_scaled``: a GradScaler multiplies
        the loss, and leaves steps out whose gradients overflow. ``is_again``: the step has run before, and may have
        spoiled running statistics then.
        """
        for tensor, site in (*iter_state(around), *filter(_has_memory, self.others.values())):
            grad = tensor.grad if site.port == "param" and tensor.is_leaf else None
            if grad is not None and has_nonfinite(grad):
                made = marks.of_memory(grad)
                if self._has_stayed(tensor):
                    return before(grad, replace(site, port="grad"))
                if made is not None and made.direction == "forward" and not made.is_scaling:
                    return made
                is_new = (distributed.has_others() and not distributed.is_spread(tensor)) or _has_added_up(grad)
                if not is_scaled and id(tensor) not in self.used and is_new:
                    return _unseen(grad, replace(site, port="grad"))
            if id(tensor) in self.kept and not has_nonfinite(tensor):
                return replace(self.kept[id(tensor)], site=site)
            if not has_nonfinite(tensor) or self._is_as_before(tensor, site, is_again=is_again):
                continue
            is_stepped = id(tensor) in self.made
            known = self.before.get(id(tensor)) or (None if is_stepped else marks.of_memory(tensor))
            if known is not None and (site.port == "param" or not known.is_meant):
                return known
            if site.port == "param":
                return self._of_parameter(tensor)
        return None

    def _is_as_before(self, tensor: Tensor, site: Site, *, is_again: bool) -> bool:
        """Whether what is not finite in a parameter or buffer was there before the step, and may be meant.

        Of buffers all but running statistics; of parameters as many -inf as there are: transitions that are never to
        be taken. Waits for the device.
        """
        known = self.before.get(id(tensor))
        if known is None or site.port == "buffer":
            return known is not None and (is_again or not site.path.endswith(_RUNNING))
        was, now = known.output, range_of(tensor, "value")
        is_same = known.direction == "before" and was.negative_inf == now.negative_inf
        return is_same and not (now.nan or now.positive_inf)

    def _of_parameter(self, parameter: Tensor) -> Made:
        """What made a parameter bad that no op was seen to write."""
        site = self.sites.get(id(parameter), _SOME)
        used = self.used.get(id(parameter))
        if used is not None:
            return replace(used, site=replace(site, port="grad")) if used.cause in (ARRIVED, ADDED) else used
        kept = self.kept.get(id(parameter))
        if kept is not None and kept.direction == "kept" and id(parameter) in self.made:
            return replace(kept, site=site)
        direction, cause = ("update", UPDATED) if id(parameter) in self.made else ("written", WRITTEN)
        return Made(site, direction, None, cause, range_of(parameter, "value"))


def _kept_of(optimizer: Any) -> Iterable[tuple[Tensor, str, Tensor]]:
    """What an optimizer keeps of each element of its parameters from step to step: parameter, name and tensor."""
    for one, kept in optimizer.state.items():
        for name, value in kept.items() if isinstance(one, Tensor) and isinstance(kept, dict) else ():
            if isinstance(value, Tensor) and value.shape == one.shape:
                yield one, str(name), value
