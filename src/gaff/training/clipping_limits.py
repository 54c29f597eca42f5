"""The limits that ``gaff.clip_gradients`` is given, checked before anything is installed.

They are apart from ``clipping`` so that a mistake is told without looking at any optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypedDict

from gaff.errors import PlanError, whole_number


class ClippingLimits(TypedDict, total=False):
    """The keywords of ``gaff.clip_gradients``, which tells what each means; those left out are as in ``Limits``."""

    norm: float | None
    value: float | None
    adaptive: float | None
    deviations: float | None
    window: int
    warmup: int
    per: Literal["global", "group", "layer", "tensor"]
    spike: Literal["clip", "skip"]
    nonfinite: Literal["raise", "skip", "zero"]
    when: Literal["step", "backward"]
    norm_type: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What ``gaff.clip_gradients`` was asked for, frozen; the meaning of each field is told there.

    Making one checks it: first each field by itself, then whether they go together. Raises PlanError. Equal limits
    print alike, which is how several processes find out that they ask for the same.
    """

    norm: float | None = None
    value: float | None = None
    adaptive: float | None = None
    deviations: float | None = None
    window: int = 128
    warmup: int = 25
    per: str = "global"
    spike: str = "clip"
    nonfinite: str = "raise"
    when: str = "step"
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        self._check_each()
        if sum(limit is not None for limit in (self.norm, self.value, self.adaptive)) > 1:
            raise PlanError("norm, value and adaptive are three ways to clip: expected one, deviations may join norm")
        if not 2 <= self.warmup <= self.window:
            raise PlanError(f"warmup={self.warmup!r}, window={self.window!r}: expected 2 <= warmup <= window")
        if self.deviations is not None and (self.per != "global" or self.value or self.adaptive):
            raise PlanError("deviations limit the global norm: expected per='global', alone or with norm")
        if self.spike == "skip" and self.deviations is None:
            raise PlanError("spike='skip' needs deviations=, which tell what a spike is")
        if self.norm_type != 2.0 and self.norm is None and self.deviations is None:
            raise PlanError(f"norm_type={self.norm_type:g} is given and no norm is limited: expected norm= with it")
        if self.per != "global" and self.norm is None:
            raise PlanError(f"per={self.per!r} is given and no norm is limited: expected norm= with it")
        if self.when == "backward" and (
            (self.per != "tensor" and self.value is None) or self.adaptive or self.deviations
        ):
            raise PlanError("when='backward' sees one gradient at a time: expected value=, or norm= with per='tensor'")
        if self.when == "backward" and self.nonfinite == "skip":
            raise PlanError("when='backward' cannot skip a step: expected nonfinite='raise' or 'zero', or when='step'")

    def _check_each(self) -> None:
        """Check each field by itself, and make numbers floats. Raises PlanError with what is expected."""
        for name, known in (
            ("per", ("global", "group", "layer", "tensor")),
            ("spike", ("clip", "skip")),
            ("nonfinite", ("raise", "skip", "zero")),
            ("when", ("step", "backward")),
        ):
            if getattr(self, name) not in known:
                choice = ", ".join(map(repr, known))
                raise PlanError(f"{name}={getattr(self, name)!r} is not known: expected one of {choice}")
        for name in ("norm", "value", "adaptive", "deviations"):
            limit = getattr(self, name)
            is_number = isinstance(limit, Real) and not isinstance(limit, bool)  # NumPy's are, too
            if limit is not None and not (is_number and limit > 0):
                raise PlanError(f"{name}={limit!r} is no limit: expected a positive number")
            object.__setattr__(self, name, None if limit is None else float(limit))
        try:
            object.__setattr__(self, "norm_type", float(self.norm_type))
        except (TypeError, ValueError):
            raise PlanError(f"norm_type={self.norm_type!r} is no norm: expected a positive number, or inf") from None
        if not self.norm_type > 0:  # of others a NaN or inf may be finite
            raise PlanError(f"norm_type={self.norm_type:g} is no norm: expected a positive number, or inf")
        for name in ("warmup", "window"):
            if (steps := whole_number(getattr(self, name))) is None:
                raise PlanError(f"{name}={getattr(self, name)!r}: expected a number of steps")
            object.__setattr__(self, name, steps)
