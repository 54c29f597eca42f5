"""How much an edit changes: sums that stay on the device until somebody reads them.

An edit is measured inside the user's run, so nothing here may wait for a device: five sums are taken for each event and
added up where they are, and ``read`` brings them over when a receipt is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gaff.compat import distributed, elements, modes
from gaff.errors import PlanError

_NARROW = (torch.float32, torch.float16, torch.bfloat16)  # whose squares neither vanish nor overflow in float64


class EditSize:
    """How often one edit has acted at one site, and how much it has changed there, over the events that were measured.

    Holds sums by device, read when somebody looks; ``events`` counts the events behind them, ``hits`` all events. Made
    and owned by the ``EditedSite``, which counts ``hits`` itself and calls ``add`` for those that it measures.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.events = 0
        self._sums: dict[torch.device, list[Tensor]] = {}
        self._seen = 0

    def add(self, old: Tensor, new: Tensor) -> Tensor:
        """Add one event: what passed and what the edit made of it, of the same shape and dtype.

        Returns how many elements became non-finite, as a number on the device. Nothing is synchronised.
        """
        if not elements.is_readable(old):  # a meta or a fake tensor: there is nothing to be measured
            with modes.outside_modes():
                return torch.zeros((), dtype=torch.long, device="cpu")
        self.events += 1
        with torch.no_grad(), modes.outside_modes():
            before, after = plain(old), plain(new)
            self._seen += before.numel()
            try:
                sums = _sums(before, after)
            except TypeError as error:  # by a subclass that does not know an op
                raise PlanError(
                    f"a {type(before).__name__} does not have the operations by which an edit is measured: expected "
                    "an edit where the value is a plain tensor"
                ) from error
            known = self._sums.get(old.device)
            self._sums[old.device] = sums if known is None else _added(known, sums)
        return sums[2]

    def read(self) -> dict[str, Any]:
        """The numbers of a receipt, by the names of its row. Waits for the device.

        ``delta`` is the L2 norm of all changes over that of all values, both over elements that were and stayed finite;
        infinite where zeros were changed, or no element stayed finite.
        """
        columns = list(zip(*(map(float, sums) for sums in self._sums.values()), strict=True)) or [()] * 5
        changed, rows, added = (int(sum(column)) for column in columns[:3])
        moved, before = (math.hypot(*column) for column in columns[3:])
        return {
            "hits": self.hits,
            "measured": self.events,
            "seen": self._seen,
            "changed": changed,
            "rows_changed": rows,
            "added_nonfinite": added,
            "delta": moved / before if before else math.inf if moved or added else 0.0,
        }


def _added(known: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
    """Counts of two events are added, norms as the legs of a right triangle."""
    counts = [a + b for a, b in zip(known[:3], sums[:3], strict=True)]
    return [*counts, *(torch.hypot(a, b) for a, b in zip(known[3:], sums[3:], strict=True))]


def _sums(old: Tensor, new: Tensor) -> list[Tensor]:
    """Five numbers, on the device: elements and rows that differ, elements that became non-finite, two L2 norms.

    The norms are of the change and of the value before, over elements that are finite in both. NaN that stays NaN is no
    change; a NaN of an infinity has become non-finite, too. Rows are indices of dimension 0; a tensor with fewer than
    two dimensions is one row. Norms are taken in float64; of floating tensors on MPS, which does not have it, in
    float32.
    """
    if not old.numel():
        wide = elements.wide_type(old.real)
        return [torch.zeros((), dtype=kind, device=old.device) for kind in (torch.long,) * 3 + (wide,) * 2]
    quick = _quick_sums(old, new) if old.is_cpu and old.dtype in _NARROW else None
    if quick is not None:
        return quick
    differs = (old != new) & ~(old.isnan() & new.isnan())
    both = old.isfinite() & new.isfinite()
    added = ((old.isfinite() & ~both) | (new.isnan() & ~old.isnan())).sum()
    wide = elements.wide_type(old)
    before, after = (torch.where(both, one, 0).to(wide) for one in (old, new))
    rows = differs.flatten(1).any(1).sum() if old.dim() > 1 else differs.any().long()
    return [differs.sum(), rows, added, _norm(before, after), _norm(torch.zeros_like(before), before)]


def _norm(old: Tensor, new: Tensor) -> Tensor:
    """The L2 norm of a difference of finite numbers, in units of the largest of them: no square vanishes or overflows.

    Halves are subtracted, for the difference of the two largest numbers of a type is none. An infinity only where the
    norm itself is beyond the type.
    """
    largest = torch.maximum(old.abs().max(), new.abs().max()).clamp_min(torch.finfo(old.dtype).tiny)
    return (2 * largest).mul(torch.linalg.vector_norm(new / 2 / largest - old / 2 / largest))


def _quick_sums(old: Tensor, new: Tensor) -> list[Tensor] | None:
    """The sums of ``_sums`` where all is finite, at a tenth of the price on a CPU; None where something is not.

    It reads numbers to tell, which is no wait on a CPU. Norms are taken in float64, in which squares of float32 neither
    vanish nor overflow.
    """
    if old.element_size() < 4:
        old, new = old.float(), new.float()
    change = new - old
    wide = torch.float64
    dims = tuple(range(1, change.dim()))
    rows = torch.linalg.vector_norm(change, dim=dims, dtype=wide) if dims else change.abs().to(wide)
    moved, before = torch.linalg.vector_norm(rows), torch.linalg.vector_norm(old, dtype=wide)
    if not math.isfinite(moved.item() + before.item()):
        return None
    changed_rows = rows.bool().sum() if change.dim() > 1 else change.any().long()
    return [change.bool().sum(), changed_rows, torch.zeros((), dtype=torch.long, device="cpu"), moved, before]


def plain(tensor: Tensor) -> Tensor:
    """The elements of a tensor as a strided one, without an autograd graph.

    Of one spread over processes it is this one's part. Sparse and quantised ones are made dense; of a nested one the
    parts are put one after the other.
    """
    value = elements.dense(tensor)
    if value is None:
        value = elements.elements(tensor)
    return value if value is not None else distributed.local_of(tensor.detach())
