"""Reading a capture: kept values by address, in any order.

An address is looked up among the sites that were captured; the model is asked only for other names of a shared module,
for patterns and for module objects. The events found are then limited by run and call, and the value is checked
(``exact.read``) when handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gaff.address.grammar import (
    GRADIENT_PORTS,
    NAMED,
    Key,
    Pattern,
    Site,
    every_call,
    fits_op,
    nearest,
    parse,
    print_key,
)
from gaff.address.nested import Opaque, describe, dig, iter_tensors
from gaff.address.resolve import Found
from gaff.compat.modes import outside_modes
from gaff.compat.placements import PARTS, Placement
from gaff.errors import PlanError, SiteError
from gaff.sessions.exact import Kept, own, read

Wanted = str | Site | nn.Module  # what a value is read by


class ReadSite(Protocol):
    """The events of one site, as a capture keeps them or as a file holds them.

    ``records`` are run, call and what was kept, in order; ``inner`` the sites of single tensors and ops inside this
    one; ``name`` is how the user asked for it, empty where only a pattern did; ``also`` are other standard names by
    which it was asked for.
    """

    site: Site
    name: str
    also: tuple[str, ...]
    records: Any
    inner: Any

    @property
    def is_loose(self) -> bool:
        """Whether values are handed out as they are, with their autograd graph or by reference."""

    @property
    def fired(self) -> int:
        """How many events there have been."""

    @property
    def evicted(self) -> int:
        """How many of them were let go."""


T = TypeVar("T", bound=ReadSite)


class ReadEvent(NamedTuple):
    """One event that fits an address; ``value`` reads it, which may raise, so it is called only where it is wanted."""

    run: int
    call: int
    value: Callable[[], Any]


class Group(NamedTuple):
    """What one exact address names: its text for messages, the site (None: a plain tensor), and its events."""

    name: str
    site: Site | None
    events: list[ReadEvent]


class Streams(Generic[T]):
    """The sites of a capture, in the order asked for, each found by its address in one step however many there are."""

    def __init__(self, streams: Iterable[T]) -> None:
        self.all = list(streams)
        self._by_site: dict[Site, T] = {}
        self._ops: dict[str, list[T]] = {}
        for one in self.all:
            self._by_site.setdefault(one.site, one)
            if one.site.op_index is not None:
                self._ops.setdefault(one.site.path, []).append(one)

    def find(self, site: Site) -> T | None:
        """The site of this very address, else of this address at every call, else None."""
        found = self._by_site.get(site)
        return found if found is not None else self._by_site.get(every_call(site))

    def ops_of(self, path: str) -> Sequence[T]:
        """The single ops of the module of this name."""
        return self._ops.get(path, ())


@dataclass(frozen=True, slots=True)
class Reading:
    """Looks up kept values by address; ``index`` limits it to one run.

    Made anew for each question. ``by_name`` are plain tensors by the names that the user gave them, ``streams`` all
    sites of the capture, ``find`` the capture's own look-up, which knows the several names of a shared module,
    ``sites`` what a pattern or a module names, and ``runs`` how many runs there have been (None: never opened).
    """

    by_name: Mapping[str, ReadSite]
    streams: Streams[Any]
    find: Callable[[Site], ReadSite | None]
    sites: Callable[[Pattern | nn.Module], list[Site]]
    runs: int | None
    index: int | None = None
    meshes: Callable[[], Sequence[Any]] = tuple  # of processes that hold parts of the model (tensor parallelism)

    def keys(self) -> list[str]:
        """Addresses of the sites with an event, in the order asked for: as they were written, where they were."""
        told = (
            stream.name or str(stream.site)
            for stream in self.streams.all
            if any(self.index in (None, run.index) for run, _, _ in stream.records)
        )
        return [*dict.fromkeys(told)]  # a part of a gradient may have been asked for by its own address, too

    def one(self, wanted: Wanted) -> Any:
        """The value of the only event. Raises SiteError when there is none, or several.

        Raises ExactnessError where the value can no longer be trusted. The reader may write into it, unless it was
        captured with ``graph`` or ``reference``.
        """
        address = _parsed(wanted)
        if isinstance(address, Pattern) and address.is_single:
            address, *others = self.sites(address)
            if others:
                calls = ", ".join(repr(str(one)) for one in (address, *others)[:4])
                raise SiteError(f"{wanted}: several of its calls were captured: say which, such as one of {calls}")
        if isinstance(address, Pattern):
            raise SiteError(
                f"address {wanted!r} is a pattern: expected one exact site, without *, ? or <Class>; "
                f"got.all({wanted!r}) gives all, got.stack({wanted!r}) one tensor of them"
            )
        return self._only(self._exact(wanted, address))()

    def all(self, wanted: Wanted) -> list[Any]:
        """Values in order of run, call and backward pass; an empty list where nothing has fired yet.

        Of a pattern those of all sites that were captured. Raises SiteError for an address that was not captured.
        """
        events = [event for group in self._groups(wanted) for event in group.events]
        return [event.value() for event in sorted(events, key=lambda event: event[:2])]

    def has(self, wanted: object) -> bool:
        """Whether there is an event, of one captured site at least where it is a pattern."""
        try:
            return any(group.events for group in self._groups(wanted))  # type: ignore[arg-type]
        except (SiteError, PlanError):
            return False

    def stack(self, wanted: Sequence[Wanted]) -> Tensor:
        """The only value of each site as one tensor ``[sites, ...]``, as ``Readable.stack`` tells."""
        found = []
        for group in [group for one in wanted for group in self._groups(one)]:
            value = self._only(group)()
            if not isinstance(value, Tensor):
                inside = [f"{_keyed(group, key)!r}" for key, _ in iter_tensors(value)]
                remedy = f"say which, such as {inside[0]}" if inside else "expected a tensor of each site"
                what = "None" if value is None else f"a {describe(value)}"
                raise SiteError(f"{group.name!r} cannot be stacked, its value is {what}: {remedy}")
            found.append((group.name, value))
        if not found:
            raise SiteError("stack was given no address: expected got.stack('h.*'), addresses or modules")
        kinds: dict[str, list[str]] = {}
        for name, tensor in found:
            size = f"nested {name}" if tensor.is_nested else describe(tensor)
            layout = "" if tensor.layout == torch.strided else f" as {tensor.layout}"
            kinds.setdefault(f"{size} on {tensor.device}{layout}", []).append(name)
        if len(kinds) > 1:
            told = "; ".join(f"{kind}: {_few(names)}" for kind, names in kinds.items())
            raise SiteError(f"sites cannot be stacked, their values are not of one shape, dtype and device: {told}")
        with outside_modes():  # a program's own may change what operations return
            return torch.stack([tensor for _, tensor in found])

    def _groups(self, wanted: Wanted) -> list[Group]:
        """What an address names, one group for each site. Raises SiteError where nothing of it was captured."""
        address = _parsed(wanted)
        if not isinstance(address, Pattern):
            return [self._exact(wanted, address)]
        self.need_opened(wanted)
        found, seen = [], set[Any]()
        for site in self.sites(address):
            for stream, rest in self._captured(site):
                for one in _told_of(stream):
                    found.append(Group(str(one.site), one.site, self._new_events(one, site.call, rest, seen)))
        if not found:
            raise SiteError(f"{wanted!r} was captured nowhere: expected one of {', '.join(self._near(str(wanted)))}")
        # of ops those that ran: a pattern is looked for in every module that it fits, and no module runs all ops
        return [one for one in found if one.events or one.site is None or one.site.op is None] or found

    def _exact(self, wanted: Wanted, address: Site | nn.Module | None) -> Group:
        """The events of an exact address, of a module or of a plain tensor's name.

        Nothing is read before it is wanted, since reading may raise. Raises SiteError where nothing fits.
        """
        self.need_opened(wanted)
        if isinstance(wanted, str) and wanted in self.by_name:
            return Group(wanted, None, list(self._select(self.by_name[wanted], None, ())))
        site = address if isinstance(address, Site) else None
        if isinstance(address, nn.Module):
            [site] = self.sites(address)
        if site is None:
            raise SiteError(
                f"got[{wanted!r:.60}]: expected an address as text, such as got['conv'] or got[':output'], or a module"
            )
        name = wanted if isinstance(wanted, str) else str(site)
        found = self._captured(site)
        if not found:
            raise SiteError(f"{name!r} was not captured: expected one of {', '.join(self._near(name)) or 'nothing'}")
        seen = set[Any]()
        told = [(one, rest) for stream, rest in found for one in _told_of(stream)]
        return Group(
            name, site, [event for one, rest in told for event in self._new_events(one, site.call, rest, seen)]
        )

    def _new_events(self, stream: ReadSite, call: int | None, rest: Key, seen: set[Any]) -> list[ReadEvent]:
        """The events of one stream that no other has told that was asked for by another pattern, as ``seen`` says."""
        place = (
            replace(stream.site, call=None) if stream.site is not None and stream.site.op is not None else id(stream)
        )
        events = [one for one in self._select(stream, call, rest) if (place, rest, one.run, one.call) not in seen]
        seen.update((place, rest, one.run, one.call) for one in events)
        return events

    def _captured(self, site: Site) -> list[tuple[ReadSite, Key]]:
        """The streams of a site, each with the rest of its key.

        An address may lead deeper than what was captured: the longest captured part of its key is taken, and the rest
        is looked up in each value.
        """
        for depth in range(len(site.key), -1, -1):
            found = self._find_all(replace(site, key=site.key[:depth]))
            if found:
                return [(stream, site.key[depth:]) for stream in found]
        return []

    def _only(self, group: Group) -> Callable[[], Any]:
        """What reads the only event of a site. Raises SiteError when there is none, or several."""
        name, site, events = group
        if len(events) == 1:
            return events[0].value
        if not events:
            raise SiteError(self._nothing(name, site))
        ops = self._find_all(site) if site is not None and site.op is not None else []
        inside = _told_of(self.find(site)) if site is not None and site.op is None else []
        if len(inside) > 1:
            names = ", ".join(str(one.site) for one in inside[:6])
            raise SiteError(f"{name!r} names {len(inside)} tensors: say which, {names}; or got.all({name!r}) for all")
        if len(ops) > 1:
            names = ", ".join(str(replace(op.site, call=None)) for op in ops[:6])
            raise SiteError(f"{name!r} names {len(ops)} ops: say which, {names}; or got.all({name!r}) for all")
        raise SiteError(_several(name, site, events))

    def need_opened(self, wanted: object) -> None:
        """Raises PlanError where nothing can have been kept, since the session was never opened."""
        if self.runs is None:
            raise PlanError(f"got[{wanted!r}]: this session was never opened: use `with gaff.capture(...) as got:`")

    def _find_all(self, site: Site) -> list[ReadSite]:
        """The stream of an address, if there is one; of an op without a number, those of all ops that its name fits."""
        if site.op is not None and site.op_index is None:
            wanted = {replace(site, call=None), site}
            found = [
                one
                for one in self.streams.ops_of(site.path)
                if replace(one.site, op=site.op, op_index=None) in wanted and fits_op(site.op, one.site.op or "")
            ]
            if found:
                return found
        exact = self.find(site)
        if exact is not None and site.op is not None and exact.inner and exact.site.op_index is None:
            return list(exact.inner.values())  # under another name of a shared module
        return [] if exact is None else [exact]

    def _select(self, stream: ReadSite, call: int | None, rest: Key) -> Iterator[ReadEvent]:
        """The events of one stream of the wanted run and call (None: any); ``rest`` leads on into each value."""
        for run, number, kept in stream.records:
            if (call is None or number == call) and (self.index is None or run.index == self.index):
                parts = getattr(stream, "parts", {}).get((run.index, number), {})
                yield ReadEvent(run.index, number, partial(_read, stream, kept, rest, parts))

    def _near(self, address: str) -> list[str]:
        """Addresses that were captured, the most similar first, for a message."""
        known = [*self.by_name, *(str(stream.site) for stream in self.streams.all)]
        return nearest(address, known, 5) or known[:5]

    def _nothing(self, address: str, site: Site | None) -> str:
        """The message for an address that was captured and has no event: the likeliest reason, and what there is."""
        where = "" if self.index is None else f" in run {self.index}"
        stream = self.find(site) if site is not None else self.by_name[address]
        why = "; the model was not called in this session yet" if not self.runs else ""
        if self.index is not None and self.runs is not None and self.index >= self.runs:
            why = f"; there were {self.runs} runs, from 0"
        elif self.index is not None and self.index < 0:
            why = "; runs are counted from 0, and not from the end"
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


def sites_meant(
    streams: Streams[Any],
    wanted: Pattern,
    classes: Mapping[int, Sequence[str]],
    now: Callable[[], Sequence[Found]] | None,
) -> list[Site]:
    """What a pattern meant when the sites were captured.

    What it means ``now`` tells that as well as then, where all modules hang where they hung; else it is None, and
    patterns are looked up among the sites, by standard names by which they were captured, and by ``classes`` (by
    identity of the stream). Raises SiteError for another standard name then, and what ``now`` raises where nothing was
    captured by that name.
    """
    found = named_sites(streams, wanted) if wanted.is_named else []
    if found and (now is None or wanted.is_single):
        return found
    if now is not None:
        try:
            return [*dict.fromkeys([*(one.site for one in now()), *found])]
        except (SiteError, PlanError):
            if not found:
                raise
            return found
    if wanted.is_named:
        known = ", ".join(stream.name or str(stream.site) for stream in streams.all[:6])
        raise SiteError(
            f"{wanted} was not captured by that name, and the model has other modules now, so that nothing tells what "
            f"it meant then: expected one of {known}"
        )
    return sites_like(streams, wanted, lambda stream: classes.get(id(stream), ()))


def named_sites(streams: Streams[Any], wanted: Pattern) -> list[Site]:
    """The sites that were captured by the standard names that ``wanted`` means, whatever these mean in a model now."""
    found: dict[Site, str] = {}
    for stream in streams.all:
        for name in (stream.name, *stream.also):
            known = parse(name) if name.startswith(NAMED) else None
            if isinstance(known, Pattern) and _is_of(known, wanted):
                call = stream.site.call if wanted.call is None else wanted.call
                rest = wanted.key[len(known.key) :]
                site = replace(stream.site, call=call, key=(*stream.site.key, *rest))
                found.setdefault(site, ".".join(map(str, known.names)))
    return _by_number(found)


def _by_number(found: Mapping[Site, str]) -> list[Site]:
    """Sites in the order in which they came, but for the numbers in their names, as of blocks one behind the other: of
    these the smaller comes first, in the places that numbers have among names beside them."""

    def ordered(names: list[tuple[list[str], Site]], at: int) -> Iterator[Site]:
        groups: dict[str, list[tuple[list[str], Site]]] = {}
        for parts, site in names:
            groups.setdefault(parts[at] if at < len(parts) else "", []).append((parts, site))
        numbers = iter(sorted((one for one in groups if one.isdecimal()), key=int))
        for head in [next(numbers) if one.isdecimal() else one for one in groups]:
            yield from ordered(groups[head], at + 1) if head else (site for _, site in groups[head])

    return list(ordered([(name.split("."), site) for site, name in found.items()], 0))


def _is_of(known: Pattern, wanted: Pattern) -> bool:
    """Whether a standard name by which something was captured is one that ``wanted`` means, or leads into its value."""
    return (
        wanted.matches(".".join(map(str, known.names)))
        and wanted.port == known.port
        and wanted.key[: len(known.key)] == known.key
        and (wanted.call is None or known.call in (None, wanted.call))
    )


def sites_like(streams: Streams[Any], wanted: Pattern, classes_of: Callable[[Any], Sequence[str]]) -> list[Site]:
    """What a pattern means among the sites that were captured, by the classes of their modules then."""
    known = [
        stream
        for stream in streams.all
        if (wanted.matches(stream.site.path) or not (wanted.names or stream.site.path))
        and wanted.cls in (None, *classes_of(stream))
    ]
    tail = wanted.op, wanted.op_index, wanted.call, wanted.port, wanted.key
    ranks = [getattr(stream, "rank", -1) for stream in known]  # of a saved one its place in the model
    if min(ranks, default=0) >= 0:
        return list(dict.fromkeys(Site(one.site.path, *tail) for one in sorted(known, key=lambda one: one.rank)))
    return _by_number({Site(one.site.path, *tail): one.site.path for one in known})


def _told_of(stream: ReadSite | None) -> list[ReadSite]:
    """A stream, or those of the single tensors of its values, where gradients are told of these one by one."""
    return [] if stream is None else list(stream.inner.values()) if stream.inner and not stream.records else [stream]


def _parsed(wanted: Any) -> Site | Pattern | nn.Module | None:
    """What a user reads by: text as the address that it is, everything else as it is; None for what names nothing."""
    wanted = parse(wanted) if isinstance(wanted, str) else wanted
    return wanted if isinstance(wanted, (Site, Pattern, nn.Module)) else None


def _read(stream: ReadSite, kept: Any, rest: Key, parts: Mapping[Key, Placement]) -> Any:
    """A kept value, checked, followed by ``rest`` of a key, and made the reader's own unless it is handed out loose.

    Of ``parts``, tensors of which a process has a part, by their keys, the placement is known from then on.
    """
    value = read(kept, stream.site)
    if rest and value is not None:
        try:
            value = dig(value, rest)
        except KeyError as error:
            raise SiteError(f"{stream.site}: {error.args[0]}") from None
        if type(value) is Opaque:
            address = str(replace(stream.site, key=(*stream.site.key, *rest)))
            raise SiteError(f"{address!r} was not captured with what it lies in: capture it by this address")
    value = value if stream.is_loose else own(value, is_shared=type(kept) is Kept)
    for key, tensor in iter_tensors(value) if parts else ():
        place = (*rest, *key)
        if place in parts:
            PARTS[tensor] = parts[place]
    return value


def _several(address: str, site: Site | None, events: Sequence[ReadEvent]) -> str:
    """The message for an address with several events: how to say which one, by run, by call, or all in order."""
    runs = sorted({event.run for event in events})
    calls = sorted({event.call for event in events})
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


def _keyed(group: Group, key: Key) -> str:
    """The address of one tensor inside the value of a site."""
    site = group.site
    return f"{group.name}{print_key(key)}" if site is None else str(replace(site, key=(*site.key, *key)))


def _few(names: Sequence[str]) -> str:
    """Some names for a message, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
