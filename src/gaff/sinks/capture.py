"""Capture: keep the values of sites, every call of them, and read them by address in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gaff import compat
from gaff.address import GRADIENT_PORTS, Key, Site, nearest, parse_site
from gaff.compat import is_grad_enabled, memory_of, set_grad_enabled
from gaff.errors import GaffError, PlanError, SiteError
from gaff.keep import in_graph
from gaff.plan import Options
from gaff.receipt import ReceiptRow, merge_reasons
from gaff.sinks.exact import Keeper, Kept, Moment, Refused, own, read, size_of
from gaff.sinks.ledger import Ledger
from gaff.values import dig, iter_tensors

REPLACED = "the module was replaced while the session was open: what is at this address now was not seen"
NOT_CALLED = "it was not called"
NO_BACKWARD = "no backward pass reached it"


class Stream:
    """The kept events of one site, in order: run, call, what was kept."""

    none = 0  # events whose value was None
    evicted = 0  # events that were let go
    remarks: AbstractSet[str] = frozenset()
    is_replaced = False  # what fires is no longer what the address names

    def __init__(self, pattern: str, site: Site, keeper: Keeper, ledger: Ledger, last: int | None) -> None:
        self.patterns = [pattern]  # all that asked for this site
        self.site = site
        self.records: deque[tuple[Moment, int, Any]] = deque()
        self.inner: dict[Key | Site, Stream] = {}  # of single tensors inside this site's value, of single ops
        self.reasons: dict[str, int] = {}
        self._keeper = keeper
        self._ledger = ledger
        self._last = last
        self._lazy = compat.lazy_clone() if keeper.is_plain else None
        self.in_graph = in_graph(keeper.reduce)

    def add(self, value: Any, run: Any, call: int) -> None:
        if self.is_replaced:
            self.refuse(run, call, REPLACED)
            return
        held = self._hold(value, run) if type(value) is Tensor and self._lazy is not None else None
        if held is not None:
            self.records.append((run, call, held))
            size = held.nbytes
        elif value is None:
            self.absent(run, call, "the value is None")
            return
        else:
            kept = self._keep(value, run)
            self.records.append((run, call, kept))
            size = size_of(kept)
        ledger = self._ledger
        ledger.held += size
        if ledger.held > ledger.limit:
            ledger.check(self.site)
        if self._last is not None:
            self._trim()

    def copy_all(self) -> None:
        """See ``Keeper.copy_all``."""
        self._lazy = None

    def absent(self, run: Any, call: int, reason: str) -> None:
        self.none += 1
        self._note(reason)
        self.records.append((run, call, None))
        self._trim()

    def refuse(self, run: Any, call: int, reason: str) -> None:
        self._note(reason)
        self.records.append((run, call, Refused(reason)))
        self._trim()

    def skip(self, reason: str) -> None:
        self._note(reason)

    def remark(self, text: str) -> None:
        self.remarks = {*self.remarks, text}

    def at(self, key: Key) -> Stream:
        found = self.inner.get(key)
        if found is None:
            site = replace(self.site, key=(*self.site.key, *key))
            found = self.inner[key] = Stream(self.patterns[0], site, self._keeper, self._ledger, self._last)
            found.patterns = self.patterns
        return found

    def spawn(self, site: Site, known: Any) -> Stream:
        if known is None:
            new = Stream(self.patterns[0], site, self._keeper, self._ledger, self._last)
            new.patterns = list(self.patterns)
        else:
            new = known
            for pattern in self.patterns:
                new.serves(pattern, self._keeper.reduce)
        self.inner[site] = new
        return new

    def _trim(self) -> None:
        if self._last is not None and len(self.records) > self._last:
            self.evict()

    def _note(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def is_loose(self) -> bool:
        """Whether values are handed out as they are: with their graph, or by reference, as was asked."""
        return self._keeper.is_loose

    @property
    def fired(self) -> int:
        return len(self.records) + self.evicted

    def oldest(self) -> int | None:
        return self.records[0][0].index if self.records else None

    def evict(self) -> None:
        kept = self.records.popleft()[2]
        size = kept.nbytes if type(kept) is Tensor and kept.layout == torch.strided else size_of(kept)
        self.evicted += 1
        self._ledger.held -= size

    def clear(self) -> None:
        """Let all events go."""
        self.evicted += len(self.records)
        self.records.clear()
        if self.inner:
            for inner in self.inner.values():
                inner.clear()

    def iter_held(self) -> Iterator[Tensor]:
        for _, _, kept in self.records:
            yield from (tensor for _, tensor in iter_tensors(getattr(kept, "value", kept)))

    def serves(self, pattern: str, reduce: Any) -> None:
        """Another pattern names the same site. Raises PlanError when it wants another part of it."""
        if not self._keeper.reduces_by(reduce):
            raise PlanError(
                f"{self.site}: {self.patterns[0]!r} and {pattern!r} both name it, with different reductions: "
                "expected one, or two sessions"
            )
        self.patterns.append(pattern)

    def rows(self) -> list[ReceiptRow]:
        if not self.fired and not self.reasons:
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
        """The common case of ``exact.hold``, at the price of a reference; None where it is not that case."""
        had_grad = is_grad_enabled()
        if had_grad:
            set_grad_enabled(False)  # cheaper than detaching first
        try:
            memory = memory_of(value)
            if memory not in run.model and memory not in run.arguments and value.is_cpu and not value.is_quantized:
                return self._lazy(value)  # type: ignore[misc]
        except RuntimeError:
            pass  # sparse, nested or borrowed memory
        finally:
            if had_grad:
                set_grad_enabled(True)
        return None

    def _keep(self, value: Any, run: Any) -> Any:
        try:
            return self._keeper.keep(value, run)
        except GaffError as error:
            raise type(error)(f"{self.site}: {error}") from error
        except Exception as error:
            error.add_note(f"gaff: while keeping {self.site}") if hasattr(error, "add_note") else None
            raise


class Reading:
    """Looks up kept values by address; ``run`` limits it to one run."""

    def __init__(
        self,
        by_name: Mapping[str, Stream],
        streams: Sequence[Stream],
        find: Callable[[Site], Stream | None],
        run: int | None,
        runs: int,
    ) -> None:
        self._by_name = by_name
        self._streams = streams
        self._find = find
        self._run = run
        self._runs = runs  # how many there have been

    def one(self, address: str) -> Any:
        """The value of the only event. Raises SiteError when there is none, or several."""
        site, events = self._events(address)
        if len(events) == 1:
            return events[0][2]()
        if not events:
            raise SiteError(self._nothing(address, site))
        ops = self._find_all(site) if site is not None and site.op is not None else []
        if len(ops) > 1:
            names = ", ".join(str(replace(op.site, call=None)) for op in ops[:6])
            raise SiteError(f"{address!r} names {len(ops)} ops: say which, {names}; or got.all({address!r}) for all")
        raise SiteError(_several(address, site, events))

    def all(self, address: str) -> list[Any]:
        """Values in order of run, call and backward pass."""
        _, events = self._events(address)
        return [value() for _, _, value in sorted(events, key=lambda event: (event[0], event[1]))]

    def _events(self, address: str) -> tuple[Site | None, list[tuple[int, int, Callable[[], Any]]]]:
        if address in self._by_name:
            return None, list(self._select(self._by_name[address], None, ()))
        site = parse_site(address)
        for depth in range(len(site.key), -1, -1):
            found = self._find_all(replace(site, key=site.key[:depth]))
            if found:
                rest = site.key[depth:]
                return site, [event for stream in found for event in self._select(stream, site.call, rest)]
        near = ", ".join(self._near(address)) or "nothing"
        raise SiteError(f"{address!r} was not captured: expected one of {near}")

    def _find_all(self, site: Site) -> list[Stream]:
        """The stream of an address; of an op without a number, those of all ops with its name."""
        if site.op is not None and site.op_index is None:
            wanted = {replace(site, call=None), site}
            ops = [one for one in self._streams if one.site.op_index is not None]
            found = [one for one in ops if replace(one.site, op_index=None) in wanted]
            if found:
                return found
        exact = self._find(site)
        if exact is not None and site.op is not None and exact.inner and exact.site.op_index is None:
            return list(exact.inner.values())  # under another name of a shared module
        return [] if exact is None else [exact]

    def _select(self, stream: Stream, call: int | None, rest: Key) -> Iterator[tuple[int, int, Callable[[], Any]]]:
        for run, number, kept in stream.records:
            if (call is None or number == call) and (self._run is None or run.index == self._run):
                yield run.index, number, lambda kept=kept: _read(stream, kept, rest)  # type: ignore[misc]

    def _near(self, address: str) -> list[str]:
        known = [*self._by_name, *(str(stream.site) for stream in self._streams)]
        return nearest(address, known, 5) or known[:5]

    def _nothing(self, address: str, site: Site | None) -> str:
        where = "" if self._run is None else f" in run {self._run}"
        stream = self._find(site) if site is not None else self._by_name[address]
        why = "; the model was not called in this session yet" if not self._runs else ""
        if self._run is not None and self._run >= self._runs:
            why = f"; there were {self._runs} runs, from 0"
        elif stream is not None and stream.evicted:
            why = f"; {stream.evicted} older events were let go (last=, evict=)"
        elif stream is not None and stream.inner:
            why = f"; what there is: {', '.join(str(inner.site) for inner in stream.inner.values())}"
        elif site is not None and site.port in (*GRADIENT_PORTS, "grad"):
            why = "; a gradient needs backward() inside the session, None is known once it closes"
        elif stream is not None and stream.fired:
            calls = sorted({number for _, number, _ in stream.records})
            why = f"; it fired with calls {calls}"
        return f"{address!r} has no event{where}{why}"


def _read(stream: Stream, kept: Any, rest: Key) -> Any:
    value = read(kept, stream.site)
    if rest and value is not None:
        try:
            value = dig(value, rest)
        except KeyError as error:
            raise SiteError(f"{stream.site}: {error.args[0]}") from None
    return value if stream.is_loose else own(value, is_shared=type(kept) is Kept)


def _several(address: str, site: Site | None, events: Sequence[tuple[int, int, Any]]) -> str:
    runs = sorted({run for run, _, _ in events})
    calls = sorted({call for _, call, _ in events})
    what = f"{address!r} fired {len(events)} times"
    if len(runs) > 1:
        one = f"got.run({runs[0]})[{address!r}]"
        return f"{what}, in runs {_span(runs)}: say {one}, or got.all({address!r}) for all in order"
    if len(calls) > 1 and site is not None:
        one = str(replace(site, call=calls[0]))
        return f"{what}, calls {_span(calls)}: say got[{one!r}], or got.all({address!r}) for all in order"
    return f"{what}, in {len(events)} backward passes: say got.all({address!r})"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else " and ".join(map(str, numbers))


def make_keeper(options: Options, reduce: Any, site: Site) -> Keeper:
    """How values of ``site`` are kept; ``reduce`` of its request goes before the plan's own."""
    # batch norm writes into its buffers without torch's version counter: a reference to one could not be checked
    is_state = site.port == "buffer" or (site.port == "param" and not options.reference)
    return Keeper(options, reduce or options.reduce, is_state)
