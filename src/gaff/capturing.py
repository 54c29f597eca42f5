"""``gaff.capture``: a plan opened on a model, with streams that keep what passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gaff.engine.session import Session, Tap, TensorTap
from gaff.errors import NeverFiredError, PlanError, SiteError
from gaff.plan import Plan
from gaff.receipt import Receipt, ReceiptRow
from gaff.select import resolve
from gaff.sinks.capture import Reading, Stream, make_stream
from gaff.sinks.ledger import Ledger
from gaff.sites import Site, every_call


class RunView:
    """The events of one run of a capture: ``got.run(2)["a@1"]``."""

    def __init__(self, reading: Reading, names: tuple[str, ...]) -> None:
        self._reading = reading
        self._names = names

    def __getitem__(self, address: str) -> Any:
        return self._reading.one(address, self._names)

    def all(self, address: str) -> list[Any]:
        return self._reading.all(address, self._names)


class Capture:
    """An open or closed capture. Read it by address, inside the ``with`` block or after it.

    ``got["a"]`` is the value of a site that fired once; ``got["a@1"]`` its second call within the only run;
    ``got.run(2)["a"]`` that of the third run; ``got.all("a")`` every value in order. A site whose value was None
    gives None, and the receipt says why.
    """

    def __init__(self, model: nn.Module | None, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        options = plan.options
        self._plan = plan
        self._ledger = Ledger(options.budget, options.evict, self._all_streams)
        self._streams: dict[str, Stream] = {}
        self._by_object: dict[tuple[int, Site], Stream] = {}
        self._missing: list[str] = []
        self._model = model
        self._names = tuple(tensors)
        taps = self._make_taps(model) if model is not None else []
        tensor_taps = [self._make_tensor_tap(name, tensor) for name, tensor in tensors.items()]
        self._session = Session(model, taps, tensor_taps, options.threads)

    def __enter__(self) -> Capture:
        self._session.open()
        for stream in self._streams.values():
            stream.is_foreign = self._session.clock.is_foreign
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session.close()
        if kind is None:
            raise_if_silent(self.receipt, self._ran())

    def __getitem__(self, address: str) -> Any:
        """Raises SiteError when nothing or several events fit, ExactnessError when the value cannot be trusted."""
        return self.run(None)[address]

    def __contains__(self, address: str) -> bool:
        try:
            return bool(self.all(address))
        except SiteError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Addresses of the sites that fired, in the order asked for."""
        return [str(stream.site) if name not in self._names else name for name, stream in self._named() if stream.fired]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Address and value of every site that fired; raises like ``got[address]``."""
        return ((name, self[name]) for name in self.keys())

    def all(self, address: str) -> list[Any]:
        """Every value of a site, in order of run, call and backward pass."""
        return self.run(None).all(address)

    def run(self, index: int | None) -> RunView:
        """The events of the run with this number, from 0; None for all runs."""
        return RunView(Reading(self._streams, self._find, index), self._names)

    @property
    def receipt(self) -> Receipt:
        """What happened so far: for each pattern what matched, fired, was None or skipped, and why."""
        rows = [stream.row() for stream in self._all_streams() if stream.fired or not stream.inner]
        rows += [ReceiptRow(pattern, "", reason="nothing in the model matches") for pattern in self._missing]
        optional = frozenset(str(request) for request in self._plan.requests if request.optional)
        return Receipt(tuple(rows), self._ran(), tuple(self._session.notes), optional)

    def __repr__(self) -> str:
        return f"<gaff capture, {'open' if self._session.is_open else 'closed'}>\n{self.receipt}"

    def _ran(self) -> int:
        return self._session.clock.latest.index + 1 if hasattr(self._session, "clock") else 0

    def _make_taps(self, model: nn.Module) -> list[Tap]:
        taps = []
        matched = set()
        for row in self._plan.check(model):
            site, request = row.found.site, self._plan.requests[row.request]
            matched.add(row.request)
            if str(site) in self._streams:
                continue  # two patterns may name one site; it is kept once, under the first
            stream = make_stream(str(request), site, self._plan.options, request.reduce, self._ledger)
            self._streams[str(site)] = stream
            self._by_object[_identity(row.found.module, row.found.name, site)] = stream
            taps.append(Tap(row.found, stream, row.is_exact and not request.optional))
        self._missing = [str(request) for at, request in enumerate(self._plan.requests) if at not in matched]
        return taps

    def _make_tensor_tap(self, name: str, tensor: Tensor) -> TensorTap:
        if name in self._streams:
            raise PlanError(f"name {name!r} is also the path of a captured site: expected another keyword for the tensor")
        stream = make_stream(name, Site(name, port="grad"), self._plan.options, None, self._ledger)
        self._streams[name] = stream
        return TensorTap(name, tensor, stream)

    def _find(self, site: Site) -> Stream | None:
        """The stream of an address: by its text, then by what it names (a shared module has several names)."""
        whole = every_call(site)
        for wanted in (site, whole):
            if found := self._streams.get(str(wanted)):
                return found
        for stream in self._all_streams():
            if stream.site in (site, whole):
                return stream
        if self._model is None:
            return None
        try:
            named = resolve(self._model, whole)[0]
        except (SiteError, PlanError):
            return None
        for wanted in (site, whole):
            if found := self._by_object.get(_identity(named.module, named.name, wanted)):
                return found
        return None

    def _named(self) -> list[tuple[str, Stream]]:
        rows = []
        for name, stream in self._streams.items():
            rows.append((name, stream))
            rows += [(str(inner.site), inner) for inner in stream.inner.values()]
        return rows

    def _all_streams(self) -> list[Any]:
        return [stream for _, stream in self._named()]


def raise_if_silent(receipt: Receipt, runs: int) -> None:
    """Raises NeverFiredError when a pattern stayed silent; it carries the receipt."""
    if not receipt.silent:
        return
    names = ", ".join(repr(name) for name in receipt.silent)
    reasons = [row.reason for row in receipt.rows if row.pattern in receipt.silent and row.reason]
    if any(name.rpartition(":")[2].partition("[")[0] in ("grad", "grad_output", "grad_input", "input_grad")
           for name in receipt.silent):  # fmt: skip
        hint = "a gradient needs backward() inside the session"
    elif runs == 0:
        hint = "the model was never called inside the session (or only by compiled code or on another thread)"
    else:
        hint = "the modules were not called in these runs"
    why = reasons[0] if reasons else hint
    raise NeverFiredError(
        f"{names} never fired in {runs} runs: {why}; allow it with gaff.maybe(pattern), see error.receipt", receipt
    )


def _identity(module: nn.Module, name: str, site: Site) -> tuple[int, Site]:
    owned = module._buffers if site.port == "buffer" else module._parameters
    target = owned.get(name) if name else module
    return id(target), Site("", site.op, site.op_index, site.call, site.port, site.key)

