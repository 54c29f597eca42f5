"""``gaff.take``: a feature extractor that runs a model only as far as the last wanted site.

Each call is a session of its own with one ``Feature`` for each site; the last one to arrive raises ``StopForward``
inside the hook, which ``Take`` catches outside of the model. What the model would have computed after that is never
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from gaff.address.grammar import GRADIENT_PORTS, Key, Site
from gaff.address.nested import first_tensor, map_tensors
from gaff.address.resolve import Found, need_module
from gaff.compat import distributed, libraries
from gaff.compat.compiler import is_loaded
from gaff.engine.session import Session
from gaff.engine.stop import EarlyStop
from gaff.engine.taps import Tap
from gaff.errors import PlanError, SiteError
from gaff.sessions.capture import names_by_site, raise_if_silent
from gaff.sessions.exact import Keeper, read
from gaff.sessions.plan import Plan
from gaff.sessions.receipt import Receipt, ReceiptRow, merge_reasons
from gaff.sessions.request import Options, Request

_OPTIONS = ("to", "dtype", "reduce", "clone")


class Feature:
    """The value of one wanted site in one run: its first call, or the one that its address names.

    The stream of the site, made for one call of the extractor. ``fired`` counts all events: a second one before the run
    was over makes the answer ambiguous. ``done`` is called when the value is there, and may raise ``StopForward``.
    """

    def __init__(self, request: Request, site: Site, name: str, keeper: Keeper, done: Callable[[], None]) -> None:
        self.pattern = str(request)
        self.name = name
        self.site = site
        self.kept: Any = None
        self.fired = 0
        self.reasons: dict[str, int] = {}
        self.keeper = keeper
        self.op: Site | None = None  # of several: the first
        self._done = done

    def add(self, value: Any, run: Any, call: int) -> None:
        """A value passed: keep the first one, and say that it is there.

        Of an op without a number that is said only at the end of its module's call (``end``), since a second one may
        follow.
        """
        self.fired += 1
        if self.fired == 1:
            self.kept = None if value is None else self.keeper.keep(value, run)
            if self.op is None:
                self._done()

    def end(self) -> None:
        """The call in which the op is looked for has ended: there was one op of that name, or none."""
        if self.op is not None and self.fired:
            self._done()

    def absent(self, run: Any, call: int, reason: str) -> None:
        """The site fired with None, which is its value."""
        self.add(None, run, call)

    def refuse(self, run: Any, call: int, reason: str) -> None:
        """Raises PlanError, inside the run: a value that cannot be told exactly is no feature."""
        raise PlanError(f"{self.site}: {reason}")

    def skip(self, reason: str) -> None:
        """A reason why the site could not be shown, counted for the receipt."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def remark(self, text: str) -> None:
        """Something that the reader of the receipt should know."""
        self.skip(text)

    def spawn(self, site: Site, known: Any) -> Feature:
        """The stream of one op, where the address has no number: itself. Raises SiteError at a second such op."""
        if self.op is not None:
            raise SiteError(
                f"{self.site}: is 2 ops or more: say which, "
                f"{replace(self.op, call=None)}, {replace(site, call=None)} ..."
            )
        self.op = site
        return self

    def at(self, key: Key) -> Feature:
        """Raises PlanError: a feature is the value of its site as a whole, and has no streams of single tensors."""
        raise PlanError(f"{self.site}: holds several tensors: expected the address of one")


class Take(nn.Module):
    """Calls ``model`` and returns its values at ``patterns`` as a dict, from address to value.

    The model runs only until every wanted site has fired. Keys are addresses as they were written, those of a pattern's
    sites as ``gaff.sites`` prints them, or by name if it is one of standard names (``names:resid_post.*``). One without
    ``@call`` means the first call; when more calls were seen before the run could end, that is an error which says how
    to choose. Values keep their autograd graph (call it under ``torch.no_grad()`` to drop it) and are what they were at
    their site, even if a later module overwrites them.
    ``model`` is a submodule, so the extractor moves, trains and saves like any other.

    Made by ``gaff.take``, which raises SiteError and PlanError for what can be known before the first call. The sites
    are looked up again at each call, since modules may have been replaced.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        _check(model, plan)
        if not distributed.can_stop(model):
            raise PlanError(f"FSDP2 of torch {torch.__version__} cannot be stopped early: expected gaff.capture")
        if distributed.meshes_of(model):
            distributed.agree(distributed.processes_of(model), f"take {'; '.join(map(str, plan.requests))}")
        super().__init__()
        self.model = model
        self.training = model.training
        self._plan = plan
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt:
        """The receipt of the latest call. Raises PlanError before the first."""
        if self._receipt is None:
            raise PlanError("the extractor has not been called yet: there is no receipt")
        return self._receipt

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model on these arguments; return a dict from address to value. A single DataLoader goes to ``over``.

        Raises NeverFiredError for a site that was not reached, SiteError for one that was called several times. Under
        DDP a run that is stopped early averages no gradients, and is refused where grad mode is on; so is what no unit
        of FSDP2 returns, whose backward pass brings the parameters no gradient. Called in code that is compiled it runs
        outside of the graph, which breaks there.
        """
        run = torch.compiler.disable(self._taken) if is_loaded() else self._taken
        return run(*args, **kwargs)

    def _taken(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if len(args) == 1 and not kwargs and isinstance(args[0], DataLoader):
            return self.over(args[0])
        if isinstance(self.model, nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
            raise PlanError(
                "DistributedDataParallel that is stopped early does not average gradients: expected "
                "DistributedDataParallel(gaff.take(model.module, ...)), or a call under torch.no_grad()"
            )
        wanted = list(_named(self.model, self._plan))
        if torch.is_grad_enabled() and distributed.is_sharded(self.model):
            _need_units(row.found for row, *_ in wanted)
        waiting: set[int] = set()
        early = EarlyStop()

        def arrived(at: int) -> None:
            waiting.discard(at)
            if not waiting:
                early.stop()

        features = [
            Feature(request, row.found.site, name, self._keeper(request.reduce), partial(arrived, at))
            for at, (row, request, name) in enumerate(wanted)
        ]
        waiting.update(range(len(features)))
        taps = [
            Tap(row.found, feature, row.is_exact and not request.optional)
            for (row, request, _), feature in zip(wanted, features, strict=True)
        ]
        session = Session(self.model, taps)
        self._run(session, early, features, args, kwargs)
        self._receipt = _receipt(features, session, self._plan, waiting, early.is_stopped)
        raise_if_silent(self._receipt)
        return self._collect(features)

    def over(
        self,
        loader: Iterable[Any],
        *,
        inputs: Callable[[Any], Any] | None = None,
        to: str = "cpu",
        progress: bool = True,
    ) -> dict[str, Tensor]:
        """Features of a whole data set, batches joined along dimension 0, without gradients, kept on ``to``.

        Raises SiteError for a feature whose first dimension is not the batch's: its rows cannot be joined. One that is
        by chance as long as the batch (time first) is not noticed.
        Batches are moved to the model's device. A dict is passed as keywords, of a tuple or list the first element
        (the rest are labels); ``inputs`` turns a batch into what the model takes instead (a tuple: several
        arguments). ``progress`` draws a bar on stderr when the package ``rich`` is there and stderr is a terminal.
        """
        if inputs is not None and not callable(inputs):
            raise PlanError(f"inputs={inputs!r} cannot be called: expected a function from a batch to arguments")
        if isinstance(loader, Tensor) or not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
            kind = type(loader).__name__
            raise PlanError(f"a {kind} was given for a loader: expected batches, such as a DataLoader or [batch]")
        torch.empty(0, device=to)  # an error of torch's before the model runs, and not after
        parts: dict[str, list[Tensor]] = {}
        device = libraries.device_of(self.model)
        for batch in _progress(loader, progress):
            args, kwargs = arguments(batch, inputs)
            moved = _moved((args, kwargs), device)
            with torch.no_grad():
                found = self.forward(*moved[0], **moved[1])
            size = _examples(moved)
            for address, value in found.items():
                parts.setdefault(address, []).append(_rows(address, value, size).to(to))
        if not parts:
            raise PlanError("the loader gave no batch: there are no features")
        return {address: _join(address, tensors) for address, tensors in parts.items()}

    def extra_repr(self) -> str:
        """What ``print`` of the extractor shows beside its name: the patterns."""
        return ", ".join(str(request) for request in self._plan.requests)

    def _keeper(self, reduce: Any) -> Keeper:
        """How the values of one request are kept: with their autograd graph where grad mode is on."""
        options = replace(self._plan.options, graph=torch.is_grad_enabled())
        return Keeper(options, reduce or options.reduce, is_apart=True)

    def _run(self, session: Session, early: EarlyStop, features: list[Feature], args: Any, kwargs: Any) -> None:
        """Call the model inside the session, until it ends or ``early`` ends it.

        A ``StopForward`` that comes out leaves nothing behind: its frames, which hold activations, are let go, FSDP2
        forgets the forward, and grad mode is as it was.
        """
        # the model may be stopped while it has switched grad mode off
        with session, torch.set_grad_enabled(torch.is_grad_enabled()):
            for feature in features:
                feature.keeper.meet(session.clock, self.model)
            with early:
                self.model(*args, **kwargs)
            if early.is_stopped:
                distributed.reset_sharded(self.model)

    def _collect(self, features: list[Feature]) -> dict[str, Any]:
        """The values by address. Raises SiteError for a site that was called several times and named without a call."""
        values = {}
        for feature in features:
            if feature.fired > 1 and feature.site.call is None and feature.site.port not in ("param", "buffer"):
                first = str(replace(feature.site, call=0))
                raise SiteError(
                    f"{feature.site}: was called {feature.fired} times in the run: say which, such as {first!r}"
                )
            if feature.fired:
                values[feature.name] = read(feature.kept, feature.site)
        return values


def take(model: nn.Module, patterns: tuple[Any, ...], options: dict[str, Any]) -> Take:
    """Make the extractor of ``gaff.take``, which explains the arguments. Raises PlanError if nothing is asked for."""
    plan = Plan.of(*patterns, **options)
    if not plan.requests:
        raise PlanError("take was given no site: expected gaff.take(model, 'layer4', ...)")
    return Take(model, plan)


def _check(model: nn.Module, plan: Plan) -> None:
    """Everything that can be known before the first call. Raises SiteError or PlanError.

    Gradients are refused, since the run ends before any backward; so is a module under several names without a call.
    """
    need_module(model)
    plan.need_captures()
    if plan.options != Options(to=plan.options.to, dtype=plan.options.dtype, reduce=plan.options.reduce,
                               clone=plan.options.clone):  # fmt: skip
        raise PlanError(f"take knows only the options {', '.join(_OPTIONS)}; the plan has others: {plan.options}")
    counts: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        counts.setdefault(id(module), []).append(path)
    asked: dict[str, Any] = {}  # how each value is reduced, by the name under which it is told
    for row, request, name in _named(model, plan):
        site, reduce = row.found.site, request.reduce or plan.options.reduce
        if asked.setdefault(name, reduce) != reduce:
            raise PlanError(f"{name}: is asked for twice, with different reductions: expected one, or two extractors")
        if site.port in (*GRADIENT_PORTS, "grad"):
            raise PlanError(f"{site}: take gives forward values only: expected gaff.capture for gradients")
        names = counts.get(id(row.found.module), [])
        if row.is_exact and site.call is None and len(names) > 1 and not row.found.name:
            raise PlanError(
                f"{site}: is one module under {len(names)} names ({', '.join(names[:4])}), and may be called by each: "
                f"say which call, such as {str(replace(site, call=0))!r}"
            )


def _named(model: nn.Module, plan: Plan) -> Iterator[tuple[Any, Request, str]]:
    """The rows of a plan in a model, each with its request and its key: as it was written, or by the standard name that
    a pattern of such names finds it by, or as ``gaff.sites`` prints it."""
    known = [names_by_site(model, request.target) for request in plan.requests]
    for row in plan.check(model):
        request, site = plan.requests[row.request], row.found.site
        yield row, request, request.spelled or next(iter(known[row.request].get(site, ())), str(site))


def _need_units(found: Iterable[Found]) -> None:
    """Raises PlanError for a site that is not the output of a unit of FSDP2.

    A unit asks for its parameters, and gives them their gradients, where a backward pass comes to what it returned.
    """
    for one in found:
        if one.site.port != "output" or one.site.op is not None or distributed.fsdp_state(one.module) is None:
            raise PlanError(
                f"{one.site}: no unit of FSDP2 returns it, so a backward pass from it would bring weights no gradient: "
                "expected the output of a unit, fully_shard for that module, or a call under torch.no_grad()"
            )


def _receipt(features: list[Feature], session: Session, plan: Plan, waiting: set[int], is_stopped: bool) -> Receipt:
    """The receipt of one call. A model that caught the exception of the early stop and ran on is told in a note."""
    rows = tuple(
        ReceiptRow(
            feature.pattern,
            str(feature.site),
            feature.fired,
            skipped=sum(feature.reasons.values()),
            reason=merge_reasons(list(feature.reasons.items())),
        )
        for feature in features
    )
    notes = list(session.notes)
    if not waiting and not is_stopped:
        notes.append("the model swallowed the early stop and ran on; the values are complete")
    return Receipt(rows, 1, tuple(notes), plan.optional)


def arguments(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with for one batch: ``inputs`` decides, or the kind of the batch does.

    A dict (also that of a tokenizer) goes by keywords; of a tuple or list only the first element is taken. Raises
    PlanError where there is none.
    """
    if inputs is not None:
        batch = inputs(batch)
        return (batch, {}) if isinstance(batch, tuple) else ((), batch) if isinstance(batch, dict) else ((batch,), {})
    if isinstance(batch, PackedSequence):  # a tuple by its class alone
        return (batch,), {}
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise PlanError("a batch is empty: expected the inputs, or a tuple or list that begins with them")
        batch = batch[0]
    if isinstance(batch, Mapping):  # also tokenizers' batches; what merely has keys, as one of graphs, is one argument
        return (), {str(name): batch[name] for name in batch.keys()}  # noqa: SIM118
    return (batch,), {}


def _moved(given: Any, device: torch.device) -> Any:
    """Arguments on a device; packed sequences as wholes, whose sizes stay on the CPU."""
    args: tuple[Any, ...]
    args, kwargs = given
    if any(isinstance(one, PackedSequence) for one in args):
        return tuple(one.to(device) if hasattr(one, "to") else one for one in args), kwargs
    return map_tensors(given, lambda tensor: tensor.to(device, non_blocking=True))


def _examples(given: Any) -> int | None:
    """How many examples the arguments of a call hold, by the first tensor in them; None where that does not tell."""
    packed = next((one for one in given[0] if isinstance(one, PackedSequence)), None)
    if packed is not None:
        return int(packed.batch_sizes[0])
    first = first_tensor(given)
    return first[1].shape[0] if first is not None and first[1].dim() else None


def _rows(address: str, value: Any, size: int | None) -> Tensor:
    """A feature of one batch, if it has one row for each of its ``size`` examples, which None leaves open. Raises
    SiteError otherwise."""
    if not isinstance(value, Tensor):
        raise SiteError(f"{address}: is a {type(value).__name__}: expected one tensor; add its key, such as [0]")
    if value.dim() == 0 or (size is not None and value.shape[0] != size):
        raise SiteError(
            f"{address}: has shape {tuple(value.shape)}, and the batch {size} examples: it cannot be joined by rows; "
            "move the examples to the front with reduce=, or loop over the batches"
        )
    return value


def _join(address: str, tensors: list[Tensor]) -> Tensor:
    """One tensor of the features of all batches. Raises SiteError where shapes differ behind the first dimension."""
    shapes = sorted({tuple(tensor.shape[1:]) for tensor in tensors})
    if len(shapes) > 1:
        raise SiteError(
            f"{address}: its shape differs between batches, {shapes[0]} and {shapes[1]} after the first dimension: "
            "pad the batches alike, reduce it, such as reduce=gaff.keep.positions(0) (a mean would take in the "
            "padding), or keep tokens as rows by gaff.harvest(..., rows='token')"
        )
    return torch.cat(tensors)


def _progress(loader: Iterable[Any], is_wanted: bool) -> Iterable[Any]:
    """The batches, with a bar on stderr where that is wanted, stderr is a terminal and ``rich`` is installed."""
    if not is_wanted:
        return loader
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return loader
    total = len(loader) if isinstance(loader, Sized) else None
    console = Console(stderr=True)
    return track(loader, "gaff take", total=total, console=console, transient=True) if console.is_terminal else loader
