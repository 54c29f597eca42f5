"""``gaff.edit``: a plan of edits opened on a model, as a session or for good.

``Editing`` looks every pattern up and checks what can be edited there when it is made; the engine then asks one
``EditedSite`` for each site and edit what the model goes on with.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from types import TracebackType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.nn.utils import parametrize

from gaff.address.grammar import GRADIENT_PORTS, STATE_PORTS, Pattern, Site, parse
from gaff.address.resolve import Found, identity, is_there, need_module, resolve
from gaff.compat import distributed
from gaff.edits.files import digest_of
from gaff.edits.places import Skip, When
from gaff.engine.leftovers import STRIPPED
from gaff.engine.session import Session
from gaff.engine.taps import EditTap, Tap, TensorTap
from gaff.errors import ExactnessError, PlanError, SiteError
from gaff.sessions.capture import names_by_site, raise_if_silent
from gaff.sessions.edited_site import EditedSite, Family
from gaff.sessions.plan import Plan
from gaff.sessions.receipt import CHANGING, Receipt, rows_of
from gaff.sessions.returns import makes_tuples
from gaff.sessions.same_run import SameRun
from gaff.sessions.unopened import Unopened
from gaff.sessions.whereabouts import Whereabouts

Named = str | nn.Module | Tensor | Callable[[Site], bool]  # what says which edits are meant
REPLACED = "the module was replaced while the session was open: its successor was not edited"


class Editing(Unopened):
    """Edits on a model while it is open: as a context (``gaff.edit``), or until ``remove`` (``attach``).

    ``receipt`` tells what was changed; ``on``, ``off`` and ``strength`` change it meanwhile. It is opened once. Modules
    whose calls a checkpoint may still repeat keep a hook after closing, until their autograd graphs are freed.
    """

    _state = "open"
    _has_warned = False

    def __init__(self, model: nn.Module | None, plan: Plan) -> None:
        if model is not None:
            need_module(model)
        if not all(request.edit is not None for request in plan.requests):
            raise PlanError("the plan captures: expected one of edits, Plan.edit({'layer3': gaff.edits.scale(0.5)})")
        self._plan = plan
        self._model = model
        meshes = distributed.meshes_of_rows(model) if model is not None else ()
        self._family = Family(check_finite=plan.options.check_finite, meshes=meshes)
        self._streams = self._family.streams  # one for each edited site, then those of single ops as they come
        self._missing: list[str] = []
        self._replaced: set[EditedSite] = set()  # whose module was another one when a run began
        self._sources = SameRun(model, meshes)
        self._checks: list[Tap] = []  # that edits of standard names come to where these are read
        self._taps = self._make_taps(model) if model is not None else []
        tensors = [self._make_tensor_tap(request) for request in plan.requests if isinstance(request.target, Tensor)]
        self._session = Session(
            model, [*self._taps, *self._checks], tensors, plan.options.threads, is_traceable=True, allows_flat=True
        )

    def __enter__(self) -> Editing:
        if self._state == "attached" and self._session.is_open:
            return self  # ``with gaff.edit(model, plan).attach() as handle``
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def attach(self) -> Editing:
        """Open without a block, until ``remove``; warns once where nothing was hit in the first full step.

        ``handle = gaff.edit(model, plan).attach()`` stays when the calling code returns: for a Trainer, a pipeline,
        ``generate``. It sees the runs of every thread, but where a parameter is edited: that is for one thread's run.
        Raises PlanError for edits that are open already.
        """
        if not any(stream.site.port == "param" for stream in self._streams):
            self._session.threads = "all"
        self._open()
        self._state = "attached"
        self._session.clock.at_end.append(self._warn)
        return self

    def _open(self) -> None:
        """Install the hooks, all or none. All ranks that share the model must open the same edits, and wait for it."""
        if self._model is not None:
            distributed.agree(distributed.processes_of(self._model), self._asked)
        self._session.open()
        try:
            self._sources.open(self._session.threads)
        except BaseException:
            self._session.close()
            raise
        if any(map(_is_kept_by_torch, self._streams)):
            self._session.clock.at_begin.insert(0, _need_no_cache)  # before parameters stand in
        replaced = Whereabouts(None, self._taps, self._streams[: len(self._taps)]).replaced
        self._session.clock.at_begin.append(lambda run: self._replaced.update(replaced()))
        CHANGING.add(self)

    def _asked(self) -> str:
        """What all processes must ask for, as text: patterns and kinds of edits.

        Their numbers, too, where rows are the same everywhere (tensor parallelism) and of parameters and their
        gradients. Else each process may do another thing to the examples of its own.
        """
        strict = {stream.pattern for stream in self._streams if stream.site.port in ("param", "grad")}
        asked = [
            f"{one}: {digest_of(one.edit, self._family.meshes or str(one) in strict)}" for one in self._plan.requests
        ]
        return f"edit {'; '.join(sorted(asked))}"

    def remove(self) -> None:
        """Take attached edits away. Raises NeverFiredError, with the receipt, for a pattern that never acted."""
        if self._session.is_open:
            self._close(None)

    @property
    def receipt(self) -> Receipt:
        """What happened so far, site by site. Reads the numbers from their device."""
        rows = rows_of([stream.row() for stream in self._streams if not stream.spawned], self._missing)
        notes, armed = tuple(self._session.notes), len(self._session.lingering or ())
        if not self._session.was_opened:
            rows = tuple(replace(row, reason="never opened: use it in a with block, or attach()") for row in rows)
        return Receipt(rows, self._session.runs, notes, self._plan.optional, is_edit=True, armed=armed)

    def on(self, pattern: Named | None = None) -> None:
        """Let the edits of ``pattern`` (as given, or a site it matched, or modules, or a tensor; None: all) act again.

        Takes effect at the next event. Raises SiteError for what is not edited.
        """
        for stream in self._named(pattern):
            stream.switch.set(is_on=True)

    def off(self, pattern: Named | None = None) -> None:
        """Let values pass as they are, until ``on``, which explains ``pattern``; the receipt counts what passed."""
        for stream in self._named(pattern):
            stream.switch.set(is_on=False)

    def strength(self, strength: float, pattern: Named | None = None) -> None:
        """Set how strongly edits act. 1: as given; 0: nothing; else ``value + strength * (edited - value)``.

        Where either is infinite that is ``(1 - strength) * value + strength * edited``, and what the edit leaves as it
        is stays so. Raises PlanError for what is no finite number, and for a strength other than 0 and 1 of a skipped
        module; at an event, for one of integers.
        """
        if not isinstance(strength, Real) or isinstance(strength, bool) or not math.isfinite(strength):
            raise PlanError(f"strength {strength!r:.60} is none: expected a finite number, such as 0.5")
        streams = self._named(pattern)
        skipping = [stream for stream in streams if stream.is_skip]
        if skipping and strength not in (0, 1):
            raise PlanError(
                f"{skipping[0].site}: a module is skipped or not: expected strength 0 or 1, got {strength!r}"
            )
        for stream in streams:
            stream.switch.set(strength=float(strength))

    def release(self) -> None:
        """Remove, after closing, the hooks that checkpoints in living autograd graphs need: their backward then raises.

        Raises PlanError while the edits are open.
        """
        if self._session.is_open:
            raise PlanError("the edits are still open: close them first, then release what is armed for recomputation")
        if self._session.lingering is not None:
            self._session.released.is_done = bool(len(self._session.lingering))
            self._session.lingering.release()

    def __repr__(self) -> str:
        was_opened = self._session.was_opened
        state = (
            self._state if self._session.is_open else "closed" if was_opened else "not opened: use it in a with block"
        )
        return f"<gaff edit, {state}>\n{self.receipt}"

    def _close(self, error: BaseException | None) -> None:
        """Remove the hooks, then say what went wrong, unless an ``error`` of the user, never masked, is under way.

        Raises ExactnessError where backward went on without an edit, NeverFiredError for a pattern that never acted;
        not for one whose edit has failed, since the error that it raised says more.
        """
        self._family.is_open = False
        gone: list[tuple[EditedSite, str]] = []
        pairs = [*zip(self._taps, self._streams, strict=False)]
        try:
            self._replaced |= {stream for tap, stream in pairs if not is_there(tap.found)}
            self._sources.close()
        finally:
            self._session.__exit__(None, error, None)
        for tap, stream in pairs:
            if stream in self._replaced or id(tap.found.module) in self._session.released.stripped:
                why = REPLACED if stream in self._replaced else STRIPPED
                gone += [(one, why) for one in stream.spawned or [stream]]
        for stream, why in gone:
            stream.skip(why)
        lost = [f"{stream.site}: {stream.lost[0]}" for stream in self._streams if stream.lost]
        if error is not None:
            return
        if lost:
            raise ExactnessError(f"{lost[0]}; backward went on without the edit")
        told = {one.pattern for one in self._streams if one.checked.has_failed or one.switch.has_held}
        raise_if_silent(self.receipt, told)
        for stream, why in gone:
            if stream.size.hits:
                warnings.warn(f"gaff: {stream.site}: {why}", stacklevel=4)

    def _warn(self, run: Any, output: Any) -> None:
        """At the end of each run of attached edits: warn once where one has not acted, or its module was replaced.

        Gradients are waited for until a step is completed, everything else until the first run ends. A run that an
        exception ended says nothing.
        """
        if output is None or run.failure.text or any(stream.checked.has_failed for stream in self._streams):
            return  # an exception ended the run, or will
        if not self._has_warned and (gone := [tap.found.site for tap in self._taps if not is_there(tap.found)]):
            self._has_warned = True
            warnings.warn(f"gaff: {gone[0]}: {REPLACED}: attach the plan again", stacklevel=4)
        if not self._has_warned and (run.step or not run.index):
            needs_backward = (*GRADIENT_PORTS, "grad")
            optional = self._plan.optional
            silent = [stream for stream in self._streams if stream.is_overdue and stream.pattern not in optional]
            due = [str(stream.site) for stream in silent if run.step or stream.site.port not in needs_backward]
            if due:
                self._has_warned = True
                warnings.warn(
                    f"gaff: attached edits at {', '.join(due[:4])} were not hit in the first full step", stacklevel=4
                )

    def _named(self, pattern: Named | None) -> list[EditedSite]:
        """The streams that ``pattern`` means: by the pattern as given, or by one of the sites that it matched."""
        if pattern is None:
            return self._streams
        wanted = _names_of(pattern, self._plan, self._model)
        found = [one for one in self._streams if not wanted.isdisjoint((one.pattern, str(one.site), one.place))]
        if not found:
            known = ", ".join(dict.fromkeys(stream.pattern for stream in self._streams))
            raise SiteError(f"{pattern!r} is not edited: expected one of {known}, or a site that one matched")
        return found

    def _make_taps(self, model: nn.Module) -> list[EditTap]:
        """Look the plan up in the model: a stream for each site and edit, in the order of the plan, in which they act.

        Raises PlanError where an edit has no meaning at a site.
        """
        taps = []
        told: dict[int, list[Site]] = {}  # by request: where captures tell the values of standard names
        for found, number, is_exact in self._plan.check(model):
            request = self._plan.requests[number]
            if number not in told:
                named = request.target if isinstance(request.target, Pattern) and request.target.is_named else None
                told[number] = [] if named is None else [one.site for one in resolve(model, named)][::-1]
                names = names_by_site(model, request.target)
            place = identity(found.module, found.name, found.site)
            edit = None if request.edit is None else self._sources.bind(request.edit, found.site)
            where = told[number].pop() if told[number] else None
            name = next(iter(names.get(where or found.site, [])), "")
            stream = self._make_stream(str(request), found.site, place, edit, told=where, name=name)
            if stream.checked.reached is not None:
                self._checks += [
                    Tap(one, stream.checked.reached) for one in resolve(model, stream.checked.reached.told)
                ]
            inner = request.edit.edit if isinstance(request.edit, When) else request.edit
            taps.append(EditTap(found, stream, isinstance(inner, Skip), is_exact and not request.optional))
            _check_port(found, inner, self._plan.options.threads, is_spread=bool(self._family.meshes))
        self._missing = [str(one) for at, one in enumerate(self._plan.requests)
                         if at not in told and not isinstance(one.target, Tensor)]  # fmt: skip
        return taps

    def _make_stream(self, pattern: str, site: Site, place: tuple[object, ...], edit: Any, **told: Any) -> EditedSite:
        """A stream that belongs to this session from now on; ``told`` is for ``EditedSite``."""
        stream = EditedSite(pattern, site, place, edit, self._family, self._family.number(site, place), **told)
        self._streams.append(stream)
        return stream

    def _make_tensor_tap(self, request: Any) -> TensorTap:
        """The stream that edits the gradient of a plain tensor; edits of one tensor are at the same place."""
        site = Site(str(request), port="grad")
        stream = self._make_stream(str(request), site, (id(request.target),), request.edit)
        return TensorTap(str(request), request.target, stream, is_edit=True)


def _names_of(pattern: Named, plan: Plan, model: nn.Module | None) -> set[Any]:
    """What the edits that are meant are called: by the names of their patterns, or of their sites, or by their places,
    which are the same for all names of a shared module."""
    if isinstance(pattern, Tensor):
        return {str(one) for one in plan.requests if one.target is pattern}
    if isinstance(pattern, str) and pattern in map(str, plan.requests):
        return {pattern}
    wanted = parse(pattern) if isinstance(pattern, str) else pattern
    named = {str(wanted)} if isinstance(pattern, str) else set()
    if model is None or (isinstance(pattern, str) and not isinstance(wanted, Site)):
        return named
    try:
        found = resolve(model, wanted)
    except SiteError:
        if not named:
            raise
        return named  # a site of an op, say, that no module has
    return named | {place for one in found for place in (str(one.site), identity(one.module, one.name, one.site))}


def edit(model: Any, changes: Any, options: dict[str, Any]) -> Editing:
    """Make the session of ``gaff.edit``, which explains the arguments. Raises PlanError where a model is missing."""
    if changes is None and not isinstance(model, nn.Module):
        model, changes = None, model
    plan = Plan.edit(changes, **options)
    needs_model = [request for request in plan.requests if not isinstance(request.target, Tensor)]
    if model is None and needs_model:
        raise PlanError(f"pattern {str(needs_model[0])!r} needs a model: expected gaff.edit(model, {{pattern: edit}})")
    return Editing(model, plan)


def _check_port(found: Found, inner: Any, threads: str, *, is_spread: bool) -> None:
    """Raises PlanError where an edit cannot act at a site.

    That is at a buffer, for ``skip`` anywhere but at the whole output of a module (with a value also where processes
    hold parts of what passes: ``is_spread``, and where the module returns a tuple), and at a parameter for all threads.
    """
    site = found.site
    if site.port == "buffer":
        raise PlanError(
            f"{site}: buffers cannot be edited, modules write into them: set the buffer, or edit the output"
        )
    if isinstance(inner, Skip) and (site.port != "output" or site.key or site.op is not None):
        module = site.path.rpartition(".")[0] if site.port in STATE_PORTS else site.path
        raise PlanError(f"{site}: skip takes the place of a whole module: expected it at {Site(module)}")
    if isinstance(inner, Skip) and inner.value is not None and is_spread:
        raise PlanError(
            f"{site}: skip with a value, which is of the whole tensor, where this process may hold a part (tensor "
            "parallelism): expected edits.skip(), or an edit of the output"
        )
    if site.port == "param" and threads == "all":
        raise PlanError(f"{site}: a parameter is edited for one thread's run: expected threads='own'")
    if isinstance(inner, Skip) and not callable(inner.value):
        _need_no_tuple(found.module, site)


def _need_no_tuple(module: nn.Module, site: Site) -> None:
    """Raises PlanError where a single tensor would stand in for a tuple: by the annotation or the code of ``forward``.

    Its caller would take the tensor apart by rows, without an error where there are enough of them.
    """
    forward = inspect.unwrap(module.forward)
    try:
        told = get_type_hints(forward).get("return")
    except (NameError, TypeError, AttributeError, SyntaxError):  # names that are not there at run time
        told = None
    kinds = {get_origin(one) or one for one in (get_args(told) if get_origin(told) in (Union, UnionType) else [told])}
    kinds.discard(type(None))
    is_told = bool(kinds) and all(isinstance(one, type) and issubclass(one, tuple) for one in kinds)
    if isinstance(module, nn.RNNBase) or is_told or makes_tuples(forward):
        names = [name for name in inspect.signature(forward).parameters if name not in ("self", "args", "kwargs")]
        first = names[0] if names else "x"
        raise PlanError(
            f"{site}: {type(module).__name__} returns a tuple, which a tensor cannot stand in for: expected a function "
            f"of the module's arguments that returns as many values, such as edits.skip(lambda {first}, *args, "
            f"**kwargs: ({first}, None)); or, so that it adds nothing, edits.zero() at its output [0]"
        )


def _is_kept_by_torch(stream: EditedSite) -> bool:
    """Whether the site is inside a parametrisation; but a gradient of its parameter makes nothing that is kept."""
    return "parametrizations" in stream.site.path.split(".") and stream.site.port != "grad"


def _need_no_cache(run: Any) -> None:
    """At the begin of a run: raise PlanError where torch keeps what parametrisations make (``parametrize.cached``).

    It would keep what the edit has made, after the session too, or go on with what was there before it.
    """
    if parametrize._cache_enabled:
        raise PlanError("an edit inside a parametrisation under torch.nn.utils.parametrize.cached(), which would keep "
                        "what it makes: expected the run outside of that block")  # fmt: skip
