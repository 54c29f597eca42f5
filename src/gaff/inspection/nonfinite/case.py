"""An op that made a NaN or inf, with what it was given; and what it gives when it is run again in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import iter_tensors, map_tensors
from gaff.engine.ops.names import is_in_place
from gaff.inspection.nonfinite.ranges import can_hold, plain, range_of
from gaff.inspection.nonfinite.report import Range


@dataclass(frozen=True, slots=True)
class Case:
    """An op that made a NaN or inf. ``ranges``: of its tensors, in the order of its arguments.

    ``args``, ``kwargs``: as the op had them, of tensors on several processes the part of this one. An op in place has
    changed its arguments already: ``ranges`` are of before.
    """

    op: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranges: tuple[Range, ...]
    output: Range

    @property
    def is_written(self) -> bool:
        """Whether the op has written into one of its arguments, which is not what it was any more."""
        is_in = is_in_place(self.op, self.func, self.args, self.kwargs)
        return is_in or self.kwargs.get("out") is not None

    @property
    def first(self) -> Range | None:
        """The range of the first tensor that came in."""
        return self.ranges[0] if self.ranges else None

    def range_of(self, value: Any) -> Range | None:
        """The range of one of the arguments, as it was before the op; None of a number, and of what holds no floats."""
        tensors = [one for _, one in iter_tensors((self.args, self.kwargs)) if can_hold(one)]
        known = zip(tensors, self.ranges, strict=False) if len(tensors) == len(self.ranges) else ()
        return next((given for tensor, given in known if tensor is value), None)

    def argument(self, position: int, name: str) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


def in_float64(case: Case) -> list[Tensor] | None:
    """What the op returns when it is run again in float64; None where it cannot be, or would write to the user's."""
    if case.is_written:
        return None
    try:
        with _same_draws(case):
            wide = case.func(*_wide(case.args), **_wide(case.kwargs))
    except (RuntimeError, TypeError, ValueError):  # no float64 kernel, or arguments that do not go with it
        return None
    return [tensor for _, tensor in iter_tensors(wide) if can_hold(tensor)]


def is_finite_in_float64(case: Case) -> bool:
    """Whether the op gives nothing but finite numbers in float64, so that only the type was too narrow."""
    tensors = in_float64(case)
    return tensors is not None and all(range_of(tensor.double(), "").is_finite for tensor in tensors)


@contextmanager
def _same_draws(case: Case) -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again by the program, from torch's generators and its own."""
    own = [one for one in (*case.args, *case.kwargs.values()) if isinstance(one, torch.Generator)]
    states = [one.get_state() for one in own]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for one, state in zip(own, states, strict=True):
                one.set_state(state)


def _wide(value: Any) -> Any:
    """Arguments with floating tensors in float64, copied, and without a dtype that would undo it."""
    if isinstance(value, dict):
        value = {name: one for name, one in value.items() if name != "dtype"}
    return map_tensors(value, _wide_copy)


def _wide_copy(tensor: Tensor) -> Tensor:
    """A floating tensor in float64, which the op may write to; others as they are."""
    is_wanted = can_hold(tensor) and tensor.is_floating_point()
    return tensor.detach().to(torch.float64, copy=True) if is_wanted else tensor


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude in a tensor."""
    return float(plain(tensor).abs().max())
