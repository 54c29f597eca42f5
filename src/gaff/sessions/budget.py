"""The memory budget of a capture: counts what is held, and refuses or lets the oldest go.

Counting exactly is dear, since kept values share memory with each other. So each site adds the sizes of what it keeps
to a number, and only when that passes the limit is the memory behind all kept values counted for real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol

import torch

from gaff.address.grammar import Site
from gaff.address.nested import size_bytes
from gaff.compat.memory import address_of
from gaff.errors import PlanError
from gaff.views.text import bytes_text

_LOOK_FIRST_AT = 64 * 2**20  # below this nobody asks the system how much memory is free


class Holder(Protocol):
    """Something that holds values and can let the oldest go: a site of a capture.

    ``records`` are what it holds, in order; the ledger asks for their number only.
    """

    records: Sized

    def oldest(self) -> int | None:
        """The run of the oldest value held, or None where nothing is held."""

    def evict(self) -> None:  # and tells the ledger
        """Let the oldest value go. Called only where there is one."""

    def iter_held(self) -> Iterator[Any]:
        """Every tensor held, also inside nested values."""


class Ledger:
    """Bytes held by one capture. ``budget`` None: half of the memory that was free, looked up when it matters.

    ``held`` is what the sites added up, value by value, which counts shared memory more than once; it is corrected
    whenever ``limit`` is passed. ``limit`` starts low, so that the system is asked only by captures that hold much.
    ``sites``: how many sites there have been, those of single ops and tensors included. ``evict`` is "raise" or
    "oldest". ``holders`` is a weak method: what is kept must be freed with the capture, and not wait for a collector.
    """

    def __init__(
        self, budget: int | None, evict: str, holders: Callable[[], Callable[[], Iterable[Holder]] | None]
    ) -> None:
        self.held = 0
        self.sites = 0
        self.limit = min(budget, _LOOK_FIRST_AT) if budget is not None else _LOOK_FIRST_AT
        self._budget = budget
        self._evict = evict
        self._holders = holders

    def check(self, site: Site) -> None:
        """Count what is held, let the oldest go where that was asked, and raise PlanError where it is still too much.

        Called by the ``site`` that has just kept a value, when ``held`` passes ``limit``; so inside a hook, where
        raising stops the user's run.
        """
        self.held = self._count()
        self._look_up()
        if self._evict == "oldest":
            self._let_go()
        if self.held > self.limit:
            raise PlanError(
                f"{site}: capture holds {bytes_text(self.held)}, over its budget of {bytes_text(self.limit)}; "
                "keep less: last=n, reduce=gaff.keep.rows(0), dtype=, to='cpu', evict='oldest', or a larger budget="
            )

    def expect(self, size: int) -> None:
        """Raises PlanError before a value of ``size`` bytes is computed, of which the budget has no room for even one.

        The message leaves out the site.
        """
        if size > self.limit:
            self._look_up()
        if size > self.limit:
            raise PlanError(
                f"it would take {bytes_text(size)}, over the budget of {bytes_text(self.limit)}, and was not computed; "
                "keep some rows: reduce=gaff.keep.rows([0, 7], dim=-2), or give a larger budget="
            )

    def _look_up(self) -> None:
        """Set the limit to the budget, which is half of what is free where nobody gave one."""
        if self._budget is None:
            self._budget = (_free_bytes(self._device()) + self.held) // 2
        self.limit = self._budget

    def _iter_holders(self) -> Iterable[Holder]:
        """The sites of the capture; none where it has been freed."""
        holders = self._holders()
        return holders() if holders is not None else ()

    def _device(self) -> torch.device | None:
        """The GPU on which something is held, if any: that is the memory which runs short."""
        held = (tensor for holder in self._iter_holders() for tensor in holder.iter_held())
        return next((tensor.device for tensor in held if tensor.is_cuda), None)

    def _let_go(self) -> None:
        """Let values of the earliest runs go until the budget is kept, but never the only one that is left."""
        while self.held > self.limit:
            holders = [(age, holder) for holder in self._iter_holders() if (age := holder.oldest()) is not None]
            if sum(len(holder.records) for _, holder in holders) < 2:
                return  # what has just come is too large by itself
            min(holders, key=lambda pair: pair[0])[1].evict()

    def _count(self) -> int:
        """The bytes behind all kept values: memory that several of them share is counted once, and as a whole."""
        held = (tensor for holder in self._iter_holders() for tensor in holder.iter_held())
        # sparse and nested ones, which have no single memory, by their identity
        return sum({address_of(tensor) or id(tensor): _storage_bytes(tensor) for tensor in held}.values())


def _storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the whole memory behind a tensor, which may be a view; where that is unknown, of its elements."""
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError:
        return size_bytes(tensor)


def _free_bytes(device: torch.device | None) -> int:
    """Memory that could still be taken, on a GPU or (None) of the host, in bytes.

    Linux tells the latter directly; elsewhere free pages are what there is.
    """
    if device is not None:
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30  # chosen: a system that tells nothing
