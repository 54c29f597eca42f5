"""Where a NaN or inf began: plain values that print without torch.

A ``Report`` is made by an examination, or by a guard that could find no more; it may be sent to other processes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

BEFORE = 20
_OP = re.compile(r"(?:`(?:[^`]|``)*`|[^`/:\[])*/([^#@:\[]+)")  # of a site; a path may hold a slash in backticks


@dataclass(frozen=True, slots=True)
class Range:
    """What is in one tensor. ``min``, ``max``: of the finite elements, None where there are none.

    ``first``: the index of the first element that is not finite, None where all are.
    """

    name: str  # what it is to the op, and what made it
    shape: str
    dtype: str
    elements: int
    min: float | None
    max: float | None
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    zeros: int = 0
    first: tuple[int, ...] | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite element."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite, as far as they could be read."""
        return not (self.nan or self.positive_inf or self.negative_inf)

    @property
    def kinds(self) -> str:
        """How many elements are not finite, by kind: ``3 nan, 1 +inf``; empty where all is finite."""
        counts = ((self.nan, "nan"), (self.positive_inf, "+inf"), (self.negative_inf, "-inf"))
        return ", ".join(f"{count} {name}" for count, name in counts if count)

    def __str__(self) -> str:
        """Shape and type, the range of the finite elements, and what is not finite; ``name`` is for who prints it."""
        text = f"{self.shape} {self.dtype}"
        if self.min is not None and self.max is not None:
            text += f", {self.min:.4g} to {self.max:.4g}"
        if self.zeros:
            text += f", {self.zeros} zero"
        if not self.is_finite:
            text += f", {self.kinds} of {self.elements}"
        return text + (f", first at {list(self.first)}" if self.first is not None else "")


@dataclass(frozen=True, slots=True)
class Report:
    """The origin of a NaN or inf, as ``gaff.find_nonfinite`` and ``gaff.guard`` tell it. False where there is none.

    ``direction``: ``forward``, ``backward``, ``before`` for what was there before the step (a parameter, a buffer,
    an input), ``kept`` for what the optimizer kept of a parameter before it, ``update`` for a parameter that the
    optimizer spoiled, ``arrived`` for a gradient that came from another process, ``added`` for finite ones whose
    sum overflows, ``written`` for what code put into a parameter unseen. ``site``: the address of the op; in
    parentheses it is outside the model. ``line``: its place in the code.
    """

    found: bool
    site: str = ""
    module: str = ""  # path of the module in whose forward it is; empty for the model itself
    direction: str = ""
    line: str = ""
    code: str = ""
    cause: str = ""
    output: Range | None = None  # in backward: the gradient that was handed on
    inputs: tuple[Range, ...] = ()  # in backward: the gradient that came, and the op's inputs in forward
    passed: tuple[str, ...] = ()  # modules that only passed it on
    notes: tuple[str, ...] = ()
    ops: int = 0  # looked at, forward and backward
    before: tuple[str, ...] = ()  # of one made in a forward pass: the twenty ops that ran before, the last one last
    rank: int | None = None  # of the process that found it, where several have looked together
    position: int = 0  # how many ops ran before, forward and backward; the same on processes that share a model

    @property
    def op(self) -> str:
        """The name of the op, as ``site`` has it; empty where it was none."""
        found = _OP.match(self.site.removeprefix(self.module))
        return found[1] if found is not None else ""

    def __bool__(self) -> bool:
        return self.found

    def __str__(self) -> str:
        """What began where and why on the first lines, then what went in and came out, who passed it on, and notes."""
        if not self.found:
            return "\n".join([f"no NaN or inf in {self.ops} ops", *(f"note: {note}" for note in self.notes)])
        what = "NaN or inf" if self.output is None else "NaN" if self.output.nan else "inf"
        lines = [f"{what} {_BEGAN[self.direction]} {self.site}" + (f", {self.line}" if self.line else "")]
        lines[0] += f", on rank {self.rank}" if self.rank is not None else ""
        lines += [f"    {self.code}"] if self.code else []
        lines.append(f"  cause: {self.cause}")
        if self.output is not None:
            lines.append(f"  {self.output.name}: {self.output}")
        lines += [f"  {one.name}: {one}" for one in self.inputs]
        if self.passed:
            more = f" and {len(self.passed) - 8} more" if len(self.passed) > 8 else ""
            lines.append(f"  passed on by: {', '.join(self.passed[:8])}{more}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All fields and the op as plain values that JSON takes, the ranges as dicts."""
        return {"found": self.found, "site": self.site, "op": self.op, **asdict(self)}


_BEGAN = {
    "forward": "made by",
    "backward": "made in the backward pass of",
    "before": "was there before the step, in",
    "kept": "was there before the step, in what the optimizer keeps of",
    "update": "made by the optimizer's step, in",
    "arrived": "came from elsewhere to",
    "added": "came of adding gradients up in",
    "written": "was written past torch to",
}
