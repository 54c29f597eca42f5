"""Capture: keep the values of sites, every call of them, and read them by address in any order.

``KeptSite`` is the stream that the engine calls at each event of one site: it keeps the value by its ``Keeper``, tells
the ``Ledger`` its size, and counts for the receipt what could not be kept and why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import GRADIENT_PORTS, OUTPUT, Key, Site
from gaff.address.nested import iter_tensors
from gaff.compat import elements, memory
from gaff.compat.autograd import is_grad_enabled, set_grad_enabled
from gaff.compat.memory import memory_of
from gaff.compat.modes import is_simple
from gaff.compat.placements import ANY_PARTS, PARTS, Placement
from gaff.compat.signals import is_of_handler
from gaff.engine.ops.attention import Weights
from gaff.errors import GaffError, PlanError, note
from gaff.keep import in_graph, is_pure
from gaff.sessions.budget import Ledger
from gaff.sessions.exact import Keeper, Moment, Refused, size_of
from gaff.sessions.receipt import NO_BACKWARD, NOT_CALLED, ReceiptRow, merge_reasons

REPLACED = "the module was replaced while the session was open: what is at this address now was not seen"
ENDLESS = "the tensor is a wrapper that lies inside itself, of which torch can read nothing"
NO_GRAPH = "kept without its autograd graph: grad mode was off there, as in the first pass of a reentrant checkpoint"


_NO_NAMES: tuple[str, ...] = ()


class KeptSite:
    """The kept events of one site, in order: run, call, what was kept.

    Made by ``Capture`` for each site that its patterns name, before anything is installed; patterns that name the same
    site share one (``serves``). ``records`` hold a value, None where there was none, or ``Refused``. ``inner`` are
    streams of their own for single tensors inside a nested value (gradients come one by one) and for single ops.
    ``in_graph`` is what compiled code may tell in the place of the tensor.
    """

    name = ""  # the address as it was written, where it was
    also = _NO_NAMES  # other standard names by which it was asked for
    none = 0  # events whose value was None
    evicted = 0  # events that were let go
    remarks: AbstractSet[str] = frozenset()
    replaced: tuple[tuple[int, int], ...] = ()  # first and last of runs in which another module was at the address

    def __init__(self, pattern: str, site: Site, keeper: Keeper, ledger: Ledger, last: int | None) -> None:
        self.patterns = [pattern]  # all that asked for this site
        self.site = site
        self.parts: dict[tuple[int, int], dict[Key, Placement]] = {}  # by run and call: where held tensors lie
        self.records: deque[tuple[Moment, int, Any]] = deque()
        self.inner: dict[Key | Site, KeptSite] = {}  # of single tensors inside this site's value, of single ops
        self.reasons: dict[str, int] = {}
        self._keeper = keeper
        self._ledger = ledger
        self._last = last
        self._lazy = memory.lazy_clone() if keeper.is_plain else None
        self.in_graph = in_graph(keeper.reduce)
        ledger.sites += 1

    def add(self, value: Any, run: Any, call: int) -> None:
        """A value passed, in a hook or in backward: keep it. Raises PlanError where the budget is exceeded.

        In a run that began when the module was replaced, what fires is not what the address names, and was refused;
        what backward brings to runs before is.
        """
        if self.replaced and any(first <= run.index <= last for first, last in self.replaced):
            return
        if ANY_PARTS:
            self._note_parts(value, run, call)
        held = self._hold(value, run) if type(value) is Tensor and self._lazy is not None else None
        if held is not None:
            self.records.append((run, call, held))
            size = held.nbytes
        elif value is None:
            self.absent(run, call, "the value is None")
            return
        elif isinstance(value, Tensor) and elements.is_endless(value):
            self.refuse(run, call, ENDLESS)
            return
        else:
            kept = self._keep(value, run)
            if self._keeper.wants_graph and not is_grad_enabled() and self.site.port in (OUTPUT, "input"):
                self.remark(NO_GRAPH)
            self.records.append((run, call, kept))
            size = size_of(kept)
        ledger = self._ledger
        ledger.held += size
        if self._last is not None:
            self._trim()
        if ledger.held > ledger.limit:
            ledger.check(self.site)

    def _note_parts(self, value: Any, run: Any, call: int) -> None:
        """Note which tensors of a value are this process's part of one that is spread, and say so in the receipt."""
        found = {key: PARTS[tensor] for key, tensor in iter_tensors(value) if tensor in PARTS}
        if found and self._keeper.reduce is None:
            self.parts[run.index, call] = found
        more = "got.full(...) puts it together" if self._keeper.reduce is None else "what is kept is of that part"
        for part in found.values():
            if not part.is_whole:
                self.remark(f"this rank's part of {part}: {more}")

    def be_replaced(self, run: Any) -> None:
        """A run begins, and the module at this address is another one: what it does in this run is not seen."""
        known, last = self.replaced, self.replaced[-1] if self.replaced else (run.index, run.index)
        is_next = bool(known) and last[1] == run.index - 1
        self.replaced = (*known[:-1], (last[0], run.index)) if is_next else (*known, (run.index, run.index))
        is_to_come = run.index > 0 and self.site.port in GRADIENT_PORTS  # of a run before
        if self.fired or is_to_come:  # else that it never did is told at the end
            self.refuse(run, 0, REPLACED)

    def restart(self) -> None:
        """Let go of all events and of what was counted: the capture is opened again."""
        self.records.clear()
        self.parts = {}
        if self.reasons or self.remarks or self.inner or self.evicted:
            self.reasons.clear()
            self.inner.clear()
            self.none = self.evicted = 0
            self.remarks = frozenset()
        self.replaced = ()

    def copy_all(self) -> None:
        """Take no short way: what passes lies in memory that compiled code will use again; see ``Keeper.copy_all``."""
        self._lazy = None

    def absent(self, run: Any, call: int, reason: str) -> None:
        """The site fired, and there was None to see: an event that reads as None."""
        self.none += 1
        self.skip(reason)
        self.records.append((run, call, None))
        self._trim()

    def refuse(self, run: Any, call: int, reason: str) -> None:
        """The site fired, but its value cannot be told exactly: reading it raises ExactnessError with the reason."""
        self.skip(reason)
        self.records.append((run, call, Refused(reason)))
        self._trim()

    def skip(self, reason: str) -> None:
        """An event that this site cannot show, or a reason why none came: counted, and nothing is kept."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def remark(self, text: str) -> None:
        """Something that the reader of the receipt should know; told once."""
        self.remarks = {*self.remarks, text}

    def at(self, key: Key) -> KeptSite:
        """The stream of one tensor inside this site's value, made when it is first asked for."""
        found = self.inner.get(key)
        if found is None:
            site = replace(self.site, key=(*self.site.key, *key))
            found = self.inner[key] = KeptSite(self.patterns[0], site, self._keeper, self._ledger, self._last)
            found.patterns = self.patterns
        return found

    @property
    def told(self) -> list[KeptSite]:
        """The streams that the receipt tells of it: those of its ops where it names several, else itself."""
        return [one for key, one in self.inner.items() if isinstance(key, Site)] or [self]

    def spawn(self, site: Site, known: Any) -> KeptSite:
        """The stream of one op, where this site names several.

        ``known``: that of another pattern for the same op, which then serves this one's patterns, too. Raises PlanError
        where the two want different parts of it.
        """
        if known is None:
            new = KeptSite(self.patterns[0], site, self._keeper, self._ledger, self._last)
            new.patterns = list(self.patterns)
        else:
            new = known
            for pattern in self.patterns:
                new.serves(pattern, self._keeper.reduce)
        self.inner[site] = new
        return new

    def _trim(self) -> None:
        """Let the oldest event go where more than ``last`` are held."""
        if self._last is not None and len(self.records) > self._last:
            self.evict()

    @property
    def is_loose(self) -> bool:
        """Whether values are handed out as they are: with their autograd graph, or by reference, as was asked."""
        return self._keeper.is_loose

    @property
    def fired(self) -> int:
        """How many events there have been, those that were let go and those without a value included."""
        return len(self.records) + self.evicted

    def oldest(self) -> int | None:
        """The run of the oldest event held, or None."""
        return self.records[0][0].index if self.records else None

    def evict(self) -> None:
        """Let the oldest event go, and tell the ledger. Must not be called where none is held."""
        run, call, kept = self.records.popleft()
        if self.parts and not (self.records and self.records[0][:2] == (run, call)):
            self.parts.pop((run.index, call), None)
        size = kept.nbytes if type(kept) is Tensor and kept.layout == torch.strided else size_of(kept)
        self.evicted += 1
        self._ledger.held -= size

    def clear(self) -> None:
        """Let all events go, those of single tensors and ops, too; ``Capture.clear`` tells the ledger."""
        self.evicted += len(self.records)
        self.records.clear()
        self.parts = {}
        if self.inner:
            for inner in self.inner.values():
                inner.clear()

    def iter_held(self) -> Iterator[Tensor]:
        """Every tensor held by this site itself; streams of single tensors and ops are asked by themselves."""
        for _, _, kept in self.records:
            yield from (tensor for _, tensor in iter_tensors(getattr(kept, "value", kept)))

    def serves(self, pattern: str, reduce: Any) -> None:
        """Note another pattern that names the same site. Raises PlanError when it wants another part of the value."""
        if not self._keeper.reduces_by(reduce):
            raise PlanError(
                f"{self.site}: {self.patterns[0]!r} and {pattern!r} both name it, with different reductions: "
                "expected one, or two sessions"
            )
        self.patterns.append(pattern)

    def rows(self) -> list[ReceiptRow]:
        """A row of the receipt for each pattern that names this site, or why nothing came."""
        if not (self.fired or self.reasons or self.remarks):
            is_gradient = self.site.port in (*GRADIENT_PORTS, "grad")
            missing = NO_BACKWARD if is_gradient else NOT_CALLED
            return [ReceiptRow(name, str(self.site), reason=missing) for name in self.patterns]
        reasons = [*self.reasons.items(), *((text, 1) for text in self.remarks)]
        if self.evicted:
            reasons.append((f"{self.evicted} older events let go", 1))
        skipped = sum(self.reasons.values()) - self.none
        why = merge_reasons(reasons)
        return [ReceiptRow(name, str(self.site), self.fired, self.none, skipped, why) for name in self.patterns]

    def _hold(self, value: Tensor, run: Any) -> Tensor | None:
        """The common case of ``exact.hold``, at the price of a reference; None where it is not that case.

        It is a CPU tensor in memory that the run itself made: such a one is kept copy-on-write, without an autograd
        graph.
        """
        had_grad = is_grad_enabled()
        if not is_simple():  # modes of others do not see what is kept
            return None
        if had_grad:
            set_grad_enabled(False)  # cheaper than detaching first
        try:
            address, given = memory_of(value), run.given
            if address not in given.model and address not in given.memory and value.is_cpu and not value.is_quantized:
                if not value.untyped_storage().resizable():  # a NumPy array points at this memory
                    return value.clone()
                return self._lazy(value)  # type: ignore[misc]
        except RuntimeError:
            pass  # sparse, nested or borrowed memory
        finally:
            if had_grad:
                set_grad_enabled(True)
        return None

    def _keep(self, value: Any, run: Any) -> Any:
        """Keep a value the long way; an error tells the site, those of a function of the user as a note."""
        try:
            if type(value) is Weights:
                self._ledger.expect(self._keeper.size_ahead(value))
            return self._keeper.keep(value, run)
        except GaffError as error:
            raise type(error)(f"{self.site}: {error}") from error
        except Exception as error:
            reduce = self._keeper.reduce
            if is_pure(reduce) and not is_of_handler(error):
                raise PlanError(f"{self.site}: {reduce!r} cannot be kept of this value: {error}") from error
            note(error, f"gaff: while keeping {self.site}")
            raise
