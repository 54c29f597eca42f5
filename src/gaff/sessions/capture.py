"""``gaff.capture``: a plan opened on a model, with streams that keep what passes.

``Capture`` looks every pattern up and makes a stream for each site when it is made, has the engine install hooks when
it is entered and remove them when it is left, and answers by address at any time after.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn

from gaff.address.grammar import GRADIENT_PORTS, NAMED, Pattern, Site, every_call
from gaff.address.names import named_by
from gaff.address.resolve import by_path, first_name, identity, is_there, iter_modules, need_module, resolve, unwrap
from gaff.compat import distributed
from gaff.engine.leftovers import STRIPPED
from gaff.engine.session import Session
from gaff.engine.taps import Tap, TensorTap
from gaff.errors import NeverFiredError, PlanError, SiteError
from gaff.sessions.budget import Ledger
from gaff.sessions.exact import Keeper
from gaff.sessions.kept_site import KeptSite
from gaff.sessions.plan import Plan
from gaff.sessions.readable import Captured
from gaff.sessions.reading import Reading, Streams, sites_meant
from gaff.sessions.receipt import NO_BACKWARD, NOT_CALLED, Receipt, rows_of
from gaff.sessions.whereabouts import Whereabouts
from gaff.views.text import counted

PLAIN = "of plain tensors, and is entered once"


SUCCEEDED = "the module was replaced while the session was open: what its successor did was not seen"


class Capture(Captured):
    """An open or closed capture. Read it by address, inside the ``with`` block or after it.

    ``got["a"]`` is the value of a site that fired once; ``got["a@1"]`` its second call within the only run;
    ``got.run(2)["a"]`` that of the third run; ``got.all("a")`` every value in order; ``got.stack("h.*")`` one tensor of
    several sites. A site whose value was None gives None, and the receipt says why.

    Made by ``gaff.capture``, which checks everything that can be known without a run. It owns the kept values and frees
    them when it is freed itself. Entered again, it lets go of what it kept, and runs, calls and the receipt are counted
    from nothing; of plain tensors it is entered once.
    """

    def __init__(self, model: nn.Module | None, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        if model is not None:
            need_module(model)
        plan.need_captures()
        self._plan = plan
        self._model = model
        self._set_up(model, tensors)

    def _set_up(self, model: nn.Module | None, tensors: Mapping[str, Tensor]) -> None:
        """Look the plan up in the model as it is now; the session is made, and not opened."""
        options = self._plan.options
        self._ledger = Ledger(options.budget, options.evict, WeakMethod(self._iter_streams))
        self._by_name: dict[str, KeptSite] = {}  # plain tensors
        self._by_object: dict[tuple[object, ...], KeptSite] = {}
        self._found: tuple[int, Streams[KeptSite]] | None = None  # the sites by address, when there were so many
        self._missing: list[str] = []
        self._keepers: dict[tuple[int, bool, bool], Keeper] = {}  # one for all requests that keep alike
        self._places: Whereabouts[KeptSite] | None = None  # at opening
        self._taps = self._make_taps(model) if model is not None else []
        tensor_taps = [self._make_tensor_tap(name, tensor) for name, tensor in tensors.items()]
        is_traceable = not (options.graph or options.reference)
        self._session = Session(
            model, self._taps, tensor_taps, options.threads, is_traceable=is_traceable, allows_flat=True
        )

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: hooks belong to this model."""
        raise PlanError(
            "a capture is neither copied nor pickled: expected got.save('x.safetensors'), or copies of what is read"
        )

    def __enter__(self) -> Capture:
        """Install the hooks, all or none.

        Where values of DTensors are reduced, all ranks must open the same capture: reducing communicates. Raises
        PlanError where one does not.
        """
        if self._model is not None and any(keeper.reduce for keeper in self._keepers.values()):
            ranks = distributed.ranks_of(self._model.parameters())  # what reduces a DTensor talks to the others
            distributed.agree(ranks, f"capture {'; '.join(map(str, self._plan.requests))}")
        if self._session.was_opened:
            self._begin_anew()
        try:
            self._session.open()
            self._make_ready()
        except BaseException:  # a Ctrl-C, too
            self._session.close()
            raise
        return self

    def _make_ready(self) -> None:
        """The hooks are there: tell the keepers whose memory they must not share, and note where the modules hang."""
        for keeper in self._keepers.values():
            keeper.meet(self._session.clock, self._model)
            if self._session.is_traced:
                keeper.copy_all()
        for stream in self._iter_streams() if self._session.is_traced else ():
            stream.copy_all()
        self._places = self._places or Whereabouts(self._model, self._taps, list(self._by_object.values()))
        self._session.clock.at_begin.append(partial(_note_replaced, self._places))

    def _begin_anew(self) -> None:
        """Let go of what was kept; the plan is looked up again unless every module still hangs where it was.

        Raises PlanError while the capture is open, and for one of plain tensors: it holds none of them any more.
        """
        if self._session.is_open or self._by_name:
            raise PlanError(f"this capture is {'open already' if self._session.is_open else PLAIN}: expected a new one")
        if not (self._session.lasting and self._places is not None and self._places.is_as_it_was()):
            return self._set_up(self._model, {})
        self._found = None  # single ops and tensors are found anew
        for stream in self._by_object.values():
            stream.restart()
        self._ledger.held = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks, then say what went wrong, unless an exception of the user is under way.

        Raises NeverFiredError for a pattern that stayed silent; warns where a module was replaced after it had fired.
        """
        self._session.__exit__(kind, error, trace)
        self._report_replaced(is_quiet=kind is not None)  # never mask the user's own exception
        is_plain = all(stream.records and not stream.inner for stream in self._by_object.values())  # mostly
        if kind is None and (self._missing or self._by_name or not is_plain):
            raise_if_silent(self.receipt)

    def clear(self) -> None:
        """Let go of all values kept so far; the receipt goes on counting. For sessions that stay open for long."""
        for stream in (*self._by_object.values(), *self._by_name.values()):
            stream.clear()
        self._ledger.held = 0

    @property
    def receipt(self) -> Receipt:
        """What happened so far: for each pattern what matched, fired, was None or skipped, and why."""
        streams = [stream for stream in self._iter_streams() if stream.fired or not stream.inner]
        rows = rows_of([row for stream in streams for row in stream.rows()], self._missing)
        return Receipt(rows, self._session.runs, tuple(self._session.notes), self._plan.optional)

    def _reading(self) -> Reading:
        runs = self._session.runs if self._session.was_opened else None
        meshes = partial(distributed.meshes_of_rows, self._model) if self._model is not None else tuple
        return Reading(self._by_name, self._all_streams(), self._find, self._sites, runs, meshes=meshes)

    def _state(self) -> str:
        was_opened = self._session.was_opened
        return "open" if self._session.is_open else "closed" if was_opened else "not opened: use it in a with block"

    def _about(self) -> tuple[str, dict[int, Sequence[str]]]:
        found: dict[int, Sequence[str]] = {}
        for tap, stream in zip(self._taps, self._by_object.values(), strict=True):
            names = [base.__name__ for base in type(tap.found.module).__mro__]
            found.update((id(one), names) for one in _with_inner(stream, set()))
        return type(unwrap(self._model)).__name__ if self._model is not None else "", found

    def _ranks(self) -> dict[int, int]:
        places = {} if self._model is None else {path: at for at, (path, *_) in enumerate(iter_modules(self._model))}
        return {id(one): places.get(one.site.path, -1) for one in self._iter_streams()}

    def _report_replaced(self, *, is_quiet: bool) -> None:
        """Say which modules were replaced, or lost their hooks, while the session was open: what came was not seen."""
        stripped = self._session.released.stripped
        if (self._places is None or self._places.is_all_there()) and not stripped:
            return
        for tap, stream in zip(self._taps, self._by_object.values(), strict=True):
            is_gone = not is_there(tap.found)
            for one in stream.told if is_gone or id(tap.found.module) in stripped else ():
                one.skip(SUCCEEDED if is_gone else STRIPPED)
                if one.fired and not is_quiet:
                    warnings.warn(f"gaff: {one.site}: {list(one.reasons)[-1]}", stacklevel=3)

    def _make_taps(self, model: nn.Module) -> list[Tap]:
        """Look the plan up in the model: a stream for each site, and what the engine must be told of it.

        A site that several patterns name is kept once. It is exact, so that a miss is an error, if one of them names it
        by its own address and not as optional. Patterns that match nothing are noted for the receipt.
        """
        taps = []
        options = self._plan.options
        matched = set()
        by_object = self._by_object
        places: list[tuple[object, ...]] = []
        exact: set[tuple[object, ...]] = set()  # named by a pattern first, and by their own address later
        for number, rows in groupby(self._plan.check(model), key=attrgetter("request")):
            request = self._plan.requests[number]
            pattern, names, keeper = str(request), names_by_site(model, request.target), None
            matched.add(number)
            for found, _, is_exact in rows:
                same = identity(found.module, found.name, found.site)
                spelled = [request.spelled] if request.spelled else names.get(found.site, [])
                if same in by_object:  # kept once, and told for each pattern
                    by_object[same].serves(pattern, request.reduce or options.reduce)
                    by_object[same].also += tuple(one for one in spelled if one.startswith(NAMED))
                    exact.update([same] if is_exact and not request.optional else [])
                    continue
                keeper = keeper or self._make_keeper(request.reduce, found.site)
                by_object[same] = stream = KeptSite(pattern, found.site, keeper, self._ledger, options.last)
                stream.name, stream.also = "".join(spelled[:1]), tuple(spelled[1:])
                taps.append(Tap(found, stream, is_exact and not request.optional))
                places.append(same)
        if exact:
            taps = [Tap(*tap[:2], tap.is_exact or same in exact) for tap, same in zip(taps, places, strict=True)]
        self._missing = [str(request) for at, request in enumerate(self._plan.requests) if at not in matched]
        return taps

    def _make_keeper(self, reduce: Any, site: Site) -> Keeper:
        """How values of a request are kept, noted so that it hears of the session when that is opened.

        Buffers and parameters are copied; parameters only unless ``reference`` was asked for.
        """
        options = self._plan.options
        # batch norm writes into its buffers without torch's version counter: a reference to one could not be checked
        is_state = site.port == "buffer" or (site.port == "param" and not options.reference)
        is_gradient = site.port == "grad" or site.port in GRADIENT_PORTS
        reduce = reduce or options.reduce
        key = id(reduce), is_state, is_gradient
        keeper = self._keepers.get(key)
        if keeper is None:
            keeper = self._keepers[key] = Keeper(options, reduce, is_state=is_state, is_gradient=is_gradient)
        return keeper

    def _make_tensor_tap(self, name: str, tensor: Tensor) -> TensorTap:
        """The stream of a plain tensor's gradient, by the user's name for it. Raises PlanError if a site has it."""
        if any(stream.site.path == name for stream in self._by_object.values()):
            raise PlanError(
                f"name {name!r} is also the path of a captured site: expected another keyword for the tensor"
            )
        site = Site(name, port="grad")
        keeper = self._make_keeper(None, site)
        stream = self._by_name[name] = KeptSite(name, site, keeper, self._ledger, self._plan.options.last)
        stream.name = name
        return TensorTap(name, tensor, stream)

    def _find(self, site: Site) -> KeptSite | None:
        """The stream of an address: by its text, then by what it names (a shared module has several names), or None."""
        streams = self._all_streams()
        found = streams.find(site)
        if found is None and site.op is not None and self._model is not None:
            site = replace(site, path=first_name(self._model, site.path))
            found = streams.find(site)
        if found is not None or self._model is None:
            return found
        whole = every_call(site)
        try:
            named = resolve(self._model, whole)[0]
        except (SiteError, PlanError):
            return None
        kept = (self._by_object.get(identity(named.module, named.name, one)) for one in (site, whole))
        return next(filter(None, kept), None)

    def _sites(self, wanted: Pattern | nn.Module) -> list[Site]:
        """The sites that a pattern or a module names. Raises SiteError where there are none."""
        if self._model is None:
            raise SiteError(f"{wanted} names modules, and this capture has no model: read by the name of a tensor")
        if isinstance(wanted, nn.Module):
            known = self._by_object.get(identity(unwrap(wanted), "", Site("")))
            return [known.site] if known else [found.site for found in resolve(self._model, wanted)]
        is_same = self._places is None or self._places.is_as_it_was()
        now = partial(resolve, self._model, wanted) if is_same else None
        return sites_meant(self._all_streams(), wanted, self._about()[1], now)

    def _all_streams(self) -> Streams[KeptSite]:
        """Every stream, by its address; looked through anew only where some were made since."""
        if self._found is None or self._found[0] != self._ledger.sites:
            self._found = self._ledger.sites, Streams(self._iter_streams())
        return self._found[1]

    def _iter_streams(self) -> Iterator[Any]:
        """Every stream once: of sites, of plain tensors, and of single tensors and ops inside of these."""
        seen: set[int] = set()
        for stream in (*self._by_object.values(), *self._by_name.values()):
            yield from _with_inner(stream, seen)


def _note_replaced(places: Whereabouts[KeptSite], run: Any) -> None:
    """At the begin of each run: mark the sites whose module is not the one that was there at opening.

    What such a module does elsewhere must not be told as what is at this address.
    """
    for one in dict.fromkeys(one for site in places.replaced() for one in (site, *site.told)):
        one.be_replaced(run)


def _with_inner(stream: KeptSite, seen: set[int]) -> Iterator[KeptSite]:
    """A stream and those inside it, but for those in ``seen``: one op may be in the streams of several patterns."""
    if id(stream) not in seen:
        seen.add(id(stream))
        yield stream
        for inner in stream.inner.values():
            yield from _with_inner(inner, seen)


def raise_if_silent(receipt: Receipt, excused: AbstractSet[str] = frozenset()) -> None:
    """Raises NeverFiredError when a pattern stayed silent; it carries the receipt, and names the likeliest reason.

    ``excused``: patterns of which the user has heard another error.
    """
    silent = [name for name in receipt.silent if name not in excused]
    if not silent:
        return
    names = ", ".join(repr(name) for name in silent)
    rows = [row for row in receipt.rows if row.pattern in silent]
    reasons = [row.reason for row in rows if row.reason not in ("", NOT_CALLED, NO_BACKWARD)]
    if any(row.site.rpartition(":")[2].partition("[")[0] in ("grad", *GRADIENT_PORTS) for row in rows):
        hint = "a gradient needs backward() inside the session, and a module that returned (gaff.take may stop before)"
    elif not receipt.runs:
        hint = "the model was never called inside the session (or only inside a backward pass, or on another thread, "
        hint += "where threads='all' looks, too)"
    else:
        hint = "the modules were not called in these runs, or did not return"
        hint += ", or not so often" if any("@" in name for name in silent) else ""
        hint += ", or only on another thread, where threads='all' looks, too"
    why = reasons[0] if reasons else hint
    raise NeverFiredError(
        f"{names} never fired in {counted(receipt.runs, 'run')}: {why}; "
        "allow it with gaff.maybe(pattern), see error.receipt",
        receipt,
    )


def names_by_site(model: nn.Module, target: object) -> dict[Site, list[str]]:
    """By site the standard names that a pattern of several names it by; empty for any other pattern."""
    found: dict[Site, list[str]] = {}
    if isinstance(target, Pattern) and target.is_named:
        for name, site in named_by(by_path(model), target).items():
            found.setdefault(site, []).append(name)
    return found
