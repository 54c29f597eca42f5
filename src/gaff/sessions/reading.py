"""Reading a capture: kept values by address, in any order.

An address is looked up among the sites that were captured; the model is asked only for other names of a shared module.
The events found are then limited by run and call, and the value is checked (``exact.read``) when handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gaff.address.grammar import GRADIENT_PORTS, Key, Site, nearest, parse_site
from gaff.address.nested import dig
from gaff.errors import SiteError
from gaff.sessions.exact import Kept, own, read
from gaff.sessions.kept_site import KeptSite


class Reading:
    """Looks up kept values by address; ``run`` limits it to one run.

    Made anew for each question. ``by_name`` are plain tensors by the names that the user gave them, ``streams`` all
    sites of the capture, ``find`` the capture's own look-up, which knows the several names of a shared module, and
    ``runs`` how many runs there have been.
    """

    def __init__(
        self,
        by_name: Mapping[str, KeptSite],
        streams: Sequence[KeptSite],
        find: Callable[[Site], KeptSite | None],
        run: int | None,
        runs: int,
    ) -> None:
        self._by_name = by_name
        self._streams = streams
        self._find = find
        self._run = run
        self._runs = runs  # how many there have been

    def one(self, address: str) -> Any:
        """The value of the only event. Raises SiteError when there is none, or several.

        Raises ExactnessError where the value can no longer be trusted. The reader may write into it, unless it was
        captured with ``graph`` or ``reference``.
        """
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
        """Values in order of run, call and backward pass; an empty list where nothing has fired yet.

        Raises SiteError for an address that was not captured.
        """
        _, events = self._events(address)
        return [value() for _, _, value in sorted(events, key=lambda event: (event[0], event[1]))]

    def _events(self, address: str) -> tuple[Site | None, list[tuple[int, int, Callable[[], Any]]]]:
        """The events of an address (run, call, and a function that reads), and its site: None for a plain tensor.

        An address may lead deeper than what was captured: the longest captured part of its key is taken, and the rest
        is looked up in each value. Nothing is read before it is wanted, since reading may raise. Raises SiteError where
        nothing fits.
        """
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

    def _find_all(self, site: Site) -> list[KeptSite]:
        """The stream of an address, if there is one; of an op without a number, those of all ops with its name."""
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

    def _select(self, stream: KeptSite, call: int | None, rest: Key) -> Iterator[tuple[int, int, Callable[[], Any]]]:
        """The events of one stream of the wanted run and call (None: any); ``rest`` leads on into each value."""
        for run, number, kept in stream.records:
            if (call is None or number == call) and (self._run is None or run.index == self._run):
                yield run.index, number, lambda kept=kept: _read(stream, kept, rest)  # type: ignore[misc]

    def _near(self, address: str) -> list[str]:
        """Addresses that were captured, the most similar first, for a message."""
        known = [*self._by_name, *(str(stream.site) for stream in self._streams)]
        return nearest(address, known, 5) or known[:5]

    def _nothing(self, address: str, site: Site | None) -> str:
        """The message for an address that was captured and has no event: the likeliest reason, and what there is."""
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


def _read(stream: KeptSite, kept: Any, rest: Key) -> Any:
    """A kept value, checked, followed by ``rest`` of a key, and made the reader's own unless it is handed out loose."""
    value = read(kept, stream.site)
    if rest and value is not None:
        try:
            value = dig(value, rest)
        except KeyError as error:
            raise SiteError(f"{stream.site}: {error.args[0]}") from None
    return value if stream.is_loose else own(value, is_shared=type(kept) is Kept)


def _several(address: str, site: Site | None, events: Sequence[tuple[int, int, Any]]) -> str:
    """The message for an address with several events: how to say which one, by run, by call, or all in order."""
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
    """Numbers for a message: ``0 to 7``, or ``0 and 1``."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else " and ".join(map(str, numbers))
