"""How a data set is harvested, checked; and what of that is compared when the harvest is begun again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gaff.errors import PlanError, need_truth, whole_number
from gaff.harvesting.rows import Rows, is_reserved
from gaff.harvesting.values import Loss
from gaff.sessions.plan import Plan

NonFinite = Literal["count", "mark", "refuse"]
_FUNCTIONS = ("rows", "loss", "inputs", "labels", "reduce")


@dataclass(frozen=True, slots=True)
class HarvestOptions:
    """How a data set is harvested; the meaning of each is told at ``gaff.harvest``. Raises PlanError, when made."""

    rows: Rows | Callable[[Any], Tensor] = "sample"
    loss: Loss | None = None
    inputs: Callable[[Any], Any] | None = None
    mask: str | None = None
    labels: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = field(default_factory=dict)
    reduce: Callable[[Tensor], Tensor] | None = None
    top: int | None = None
    sample_norms: Sequence[str] | None = None
    dtype: torch.dtype | str | None = None
    nonfinite: NonFinite = "count"
    shard: int = 64
    training: bool = False
    accept_changes: bool = False

    def __post_init__(self) -> None:
        if not callable(self.rows) and self.rows not in get_args(Rows):
            raise PlanError(f"rows={self.rows!r} is not known: expected 'sample', 'token', 'position' or a function")
        if self.nonfinite not in get_args(NonFinite):
            raise PlanError(f"nonfinite={self.nonfinite!r} is not known: expected 'count', 'mark' or 'refuse'")
        if (shard := whole_number(self.shard, 1)) is None:
            raise PlanError(f"shard={self.shard!r} is no number of batches: expected 1 or more")
        object.__setattr__(self, "shard", shard)
        if self.top is not None and whole_number(self.top, 1) is None:
            raise PlanError(f"top={self.top!r} is no number of numbers: expected 1 or more, or None")
        object.__setattr__(self, "top", whole_number(self.top))
        if self.mask is not None and self.rows != "token":
            raise PlanError(f"mask={self.mask!r} is for rows='token': expected that, or no mask")
        self._check_kinds()
        taken = [name for name in (() if callable(self.labels) else self.labels) if is_reserved(name)]
        if taken:
            raise PlanError(f"label {taken[0]!r} is a name of gaff's own: expected another")

    def _check_kinds(self) -> None:
        """Raise PlanError for an option that is not of the kind that it has to be."""
        if not callable(self.labels) and not isinstance(self.labels, Mapping):
            raise PlanError(f"labels={self.labels!r} is no mapping: expected {{'name': key of the batch}}")
        for name, key in () if callable(self.labels) else self.labels.items():
            if not isinstance(name, str) or not isinstance(key, Hashable):
                raise PlanError(f"labels={{{name!r}: {key!r:.40}}}: expected {{'name': key of the batch}}")
        for name in ("training", "accept_changes"):
            need_truth(getattr(self, name), name)
        for name in ("loss", "inputs", "reduce"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise PlanError(f"{name}={getattr(self, name)!r} cannot be called: expected a function")

    @property
    def is_rounded(self) -> bool:
        """Whether rows are written as int8, each with a scale."""
        return str(self.dtype).removeprefix("torch.") == "int8"

    @property
    def small(self) -> torch.dtype | None:
        """The dtype of one byte in which rows are written, where what is too large may not show; None for others."""
        name = str(self.dtype).removeprefix("torch.")
        found = getattr(torch, name, None) if name.startswith("float8") else None
        return found if isinstance(found, torch.dtype) else None

    @property
    def after_top(self) -> torch.dtype | None:
        """The dtype in which the largest numbers are written, once they are picked; None where none is asked for, or in
        another way."""
        if self.top is None or self.dtype is None or self.is_rounded or self.small is not None:
            return None
        found = getattr(torch, str(self.dtype).removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else None

    def described(self) -> dict[str, Any]:
        """The options on which the rows depend, as JSON."""
        labels = self.labels if callable(self.labels) else {name: str(key) for name, key in self.labels.items()}
        return {
            **{name: _told(getattr(self, name)) for name in ("rows", "loss", "inputs", "mask", "reduce")},
            "labels": _told(labels), "dtype": str(self.dtype).removeprefix("torch."), "nonfinite": self.nonfinite,
            "top": self.top, "sample_norms": None if self.sample_norms is None else list(self.sample_norms),
            "shard": self.shard, "training": self.training,
        }  # fmt: skip

    def functions(self) -> dict[str, str]:
        """By option: a checksum of the user's function, of Python's instructions; what it calls is not looked at."""
        return _checksums({name: getattr(self, name) for name in _FUNCTIONS})


def plan_options(plan: Plan) -> list[Any]:
    """What a plan that was given ready-made says of how its values are kept."""
    return [str(plan.options.dtype), _told(plan.options.reduce), *(_told(one.reduce) for one in plan.requests)]


def plan_functions(plan: Plan) -> dict[str, str]:
    """As ``HarvestOptions.functions``, of the functions in a plan."""
    given = {"plan.reduce": plan.options.reduce, **{f"plan.{one}": one.reduce for one in plan.requests}}
    return _checksums(given)


def _checksums(given: Mapping[str, Any]) -> dict[str, str]:
    """By name: a checksum of what a function does; what is none is left out."""
    return {
        name: sha256(_code(one.__code__).encode()).hexdigest()[:16]
        for name, one in given.items()
        if isinstance(one, FunctionType)
    }


def _code(code: CodeType) -> str:
    """What a function does, as text: its instructions, names and constants, and those of functions inside it."""
    inner = [
        _code(one) if isinstance(one, CodeType) else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
        for one in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"


def _told(value: Any) -> Any:
    """An option as text that is the same in another process: a function by its name."""
    if value is None or isinstance(value, (str, int, float, dict)):
        return value
    if isinstance(value, partial):
        return f"partial({_told(value.func)}, {_inside(value.args)}, {_inside(value.keywords)})"
    name = getattr(value, "__qualname__", None)
    if name is None and " at 0x" in repr(value):  # an address of memory, which is another each time
        name = f"{type(value).__qualname__}()"
    return f"{value.__module__}.{name}" if name is not None else f"{value!r}"


def _inside(value: Any) -> str:
    """What a partial was given, as ``repr`` has it, but functions and objects at any depth by their names, and sets in
    order."""
    kind = type(value)
    if kind is dict:
        return f"{{{', '.join(f'{name!r}: {_inside(one)}' for name, one in value.items())}}}"
    if kind is list:
        return f"[{', '.join(map(_inside, value))}]"
    if kind is tuple:
        return f"({', '.join(map(_inside, value))}{',' if len(value) == 1 else ''})"
    if kind in (set, frozenset) and value:
        return f"{{{', '.join(sorted(map(_inside, value)))}}}"
    is_named = isinstance(value, partial) or callable(value) or " at 0x" in repr(value)
    return str(_told(value)) if is_named else repr(value)
