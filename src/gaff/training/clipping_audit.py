"""What clipping did, step by step: kept on the device, read when somebody looks.

Reading a flag of each step at once would make the host wait for the device in every step. So counts are tensors that
are added to where they are, and become numbers when the audit is printed or asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaff.views.text import table

_ROWS = 1000  # steps told one by one; counts go on


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step as plain numbers: what the norm was, what it was limited to, and what came of that.

    ``norm``: of all gradients together, before limiting, None where each was limited as it came
    (``when="backward"``); ``limit``: the largest norm allowed, None where it was not that norm which was limited;
    ``factor``: what gradients were multiplied with, the smallest where each layer or tensor has its own, 1 for
    nothing and where elements were cut; ``largest``: name of the parameter whose gradient
    had the largest norm, empty where gradients were not scaled together; ``nonfinite``: names of those with NaN or inf.
    Names are those that parameters had at that step.
    """

    step: int
    norm: float | None
    limit: float | None
    factor: float
    largest: str
    is_clipped: bool
    is_skipped: bool
    nonfinite: tuple[str, ...]


class _Raw(NamedTuple):
    """One step as it was told: its numbers may still be tensors on a device.

    ``numbers``: which parameters had gradients, as places in ``names``; ``largest``: a place in these numbers.
    """

    step: int
    norm: Any
    limit: Any
    factor: Any
    largest: Any
    numbers: Sequence[int]
    names: Sequence[str]
    skip: Any
    nonfinite: tuple[str, ...]
    changed: Any


def _plain(raw: _Raw) -> StepRow:
    """A step as plain numbers; waits for their device."""
    return StepRow(
        raw.step,
        None if raw.norm is None else float(raw.norm),
        None if raw.limit is None else float(raw.limit),
        1.0 if raw.factor is None else float(raw.factor),
        "" if raw.largest is None else raw.names[raw.numbers[int(raw.largest)]],
        raw.changed is not None and bool(raw.changed),
        bool(raw.skip),
        raw.nonfinite,
    )


def _largest_of(rows: Iterable[StepRow]) -> Iterator[str]:
    """The parameter with the largest norm at each step at which all were scaled down together."""
    return (row.largest for row in rows if row.largest and row.factor < 1)


class Audit:
    """Counts over all steps, and the last thousand one by one. Reading waits for the device.

    Made by ``Clipping``, which adds to it at each step; stays readable when the limits are removed. ``names``: those of
    the optimizer's parameters in its order, another list where these have become others.
    """

    def __init__(self) -> None:
        self.steps = 0  # evaluations, where steps have closures
        self.names: Sequence[str] = ()
        self._rows: list[_Raw] = []
        self._clipped: Any = 0
        self._skipped: Any = 0
        self._nonfinite: Counter[str] = Counter()
        self._each: dict[str, Any] = {}
        self._largest: Counter[str] = Counter()  # of steps that are not told one by one any more
        self._is_any: Tensor | None = None  # whether a rule for single parameters changed something in this step

    def add(
        self,
        norm: Tensor | None,
        factor: Tensor | None = None,
        limit: Any = None,
        largest: Tensor | None = None,
        *,
        numbers: Sequence[int] = (),
        skipped: bool | Tensor = False,
        nonfinite: tuple[str, ...] = (),
    ) -> None:
        """Take in one step, as tensors where they are; nothing is waited for.

        ``norm`` None: a step without gradients, which is counted only, or one whose gradients were told of by
        ``add_each`` as they came. ``largest``: place of the largest norm in ``numbers``; ``nonfinite``: names of
        parameters. What ``add_each`` told before belongs to the same step.
        """
        changed = factor < 1 if factor is not None else self._is_any
        self._is_any = None
        if norm is not None or changed is not None or nonfinite:
            self._rows.append(
                _Raw(self.steps, norm, limit, factor, largest, numbers, self.names, skipped, nonfinite, changed)
            )
            if len(self._rows) == 2 * _ROWS:  # their device is waited for once in a thousand steps
                self._largest.update(_largest_of(map(_plain, self._rows[:_ROWS])))
                del self._rows[:_ROWS]
        self.steps += 1
        if changed is not None:
            self._clipped = self._clipped + changed
        self._skipped = self._skipped + skipped
        self._nonfinite.update(nonfinite)

    def add_each(self, numbers: Sequence[int], changed: Sequence[Tensor]) -> None:
        """Take in which parameters a rule for single ones changed in this step; comes before ``add``, perhaps often.

        ``changed``: a flag for each of ``numbers``, as a tensor; the step counts as clipped where one is set.
        """
        for number, flag in zip(numbers, changed, strict=True):
            self._each[self.names[number]] = self._each.get(self.names[number], 0) + flag
        if changed:
            is_any = torch.stack([flag.to(changed[0].device) for flag in changed]).any()
            self._is_any = is_any if self._is_any is None else self._is_any | is_any.to(self._is_any.device)

    @property
    def clipped(self) -> int:
        """At how many steps something was scaled down or cut."""
        return int(self._clipped)

    @property
    def skipped(self) -> int:
        """How many steps changed neither parameters nor optimizer state."""
        return int(self._skipped)

    @property
    def nonfinite(self) -> dict[str, int]:
        """Parameters whose gradient was NaN or inf, and at how many steps."""
        return dict(self._nonfinite)

    @property
    def parameters(self) -> dict[str, int]:
        """How often each parameter was clipped by itself; of a global norm, how often it had the largest share."""
        counts: Counter[str] = Counter({name: int(count) for name, count in self._each.items()})
        counts.update(self._largest)
        counts.update(_largest_of(map(_plain, self._rows)))
        return {name: count for name, count in counts.most_common() if count}

    @property
    def rows(self) -> list[StepRow]:
        """The last thousand steps that had gradients, oldest first, as plain numbers."""
        return [_plain(raw) for raw in self._rows[-_ROWS:]]

    def __str__(self) -> str:
        rows = self.rows
        lines = [f"{self.steps} steps, {self.clipped} clipped, {self.skipped} skipped"]
        if self._nonfinite:
            lines.append(f"not finite: {', '.join(f'{name} ({count}x)' for name, count in self._nonfinite.items())}")
        most = ", ".join(f"{name} ({count}x)" for name, count in list(self.parameters.items())[:5])
        if most:
            lines.append(f"clipped most: {most}")
        if any(name.startswith("group ") for name in self.names):
            lines.append("(model=, the one that these parameters are of, gives them names)")
        cells = [
            (
                str(row.step),
                "" if row.norm is None else f"{row.norm:.4g}",
                "" if row.limit is None else f"{row.limit:.4g}",
                "" if row.factor == 1 else f"{row.factor:.4g}",
                row.largest,
                "skipped" if row.is_skipped else "clipped" if row.is_clipped else "",
            )
            for row in rows[-8:]
        ]
        if cells:
            head = ("step", "norm", "limit", "factor", "largest", "")
            lines.append(table(head, cells, right=("step", "norm", "limit", "factor")))
        return "\n".join(lines)

    __repr__ = __str__
