"""A plan: what was asked for, as a frozen value. Checked against a model before anything is installed.

``gaff.capture``, ``gaff.edit`` and ``gaff.take`` make one from their arguments and accept one in their place, so that
the same question can be asked of several models, saved, and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gaff.address.grammar import Site, fits_op
from gaff.address.resolve import resolve
from gaff.edits.places import At, Chain, When, as_edit
from gaff.errors import PlanError, SiteError
from gaff.keep import Heads
from gaff.sessions import plan_files
from gaff.sessions.request import Options, Request, Resolved, edit_text, read_options, requests_of, told_apart
from gaff.views.text import table

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gaff.edits.places import EditLike
    from gaff.sessions.request import CaptureOptions, EditOptions, PatternLike


@dataclass(frozen=True, slots=True)
class Plan:
    """Sites to capture and how (``Plan.of``, for ``gaff.capture``), or to edit and how (``Plan.edit``).

    Knows no model: ``check`` looks one up, as often as wanted. It captures, or every request has an edit.
    """

    requests: tuple[Request, ...] = ()
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", tuple(told_apart(self.requests)))

    @classmethod
    def of(cls, *patterns: PatternLike | Plan, **options: Unpack[CaptureOptions]) -> Plan:
        """A plan to capture by: ``patterns`` as ``gaff.capture`` takes them; ``options`` are the fields of ``Options``.

        A single ``Plan`` in their place is taken over, with other options where some are given. Raises SiteError for an
        address that cannot be read, PlanError for options that are not known.
        """
        if len(patterns) == 1 and isinstance(patterns[0], Plan):
            return patterns[0]._with(_of_captures(options))
        return cls(tuple(requests_of(patterns)), Options(**_of_captures(options)))

    @classmethod
    def edit(cls, changes: Mapping[Any, EditLike] | Plan, **options: Unpack[EditOptions]) -> Plan:
        """A plan to edit by; ``changes``: a dict from pattern to edit, as ``gaff.edit`` takes it, or a plan of edits.

        ``options``: ``check_finite`` and ``threads``. Raises SiteError for an address that cannot be read, PlanError
        for what is no edit.
        """
        unknown = [name for name in options if name not in ("check_finite", "threads")]
        if unknown:
            raise PlanError(f"option {unknown[0]!r} is not known to an edit: expected check_finite or threads")
        if isinstance(changes, Plan):
            return changes._with(read_options(dict(options)))
        if not isinstance(changes, Mapping) or not changes:
            what = "are none" if isinstance(changes, Mapping) else "are no dict"
            raise PlanError(f"edits {changes!r:.60} {what}: expected {{'layer3': gaff.edits.scale(0.5)}}")
        requests = []
        for pattern, edit in changes.items():
            asked = [Request(pattern)] if isinstance(pattern, Tensor) else requests_of([pattern])
            requests += [replace(request, edit=as_edit(edit)) for request in asked]
        return cls(tuple(requests), Options(**read_options(dict(options))))

    def _with(self, options: dict[str, Any]) -> Plan:
        """The same plan with other ``options`` where some are given."""
        return replace(self, options=replace(self.options, **options)) if options else self

    @property
    def is_edit(self) -> bool:
        """Whether the plan changes what passes, at one site at least."""
        return any(request.edit is not None for request in self.requests)

    @property
    def optional(self) -> frozenset[str]:
        """The patterns that may stay silent, and are nowhere asked for without ``gaff.maybe``."""
        needed = {str(request) for request in self.requests if not request.optional}
        return frozenset(str(request) for request in self.requests) - needed

    def need_captures(self) -> None:
        """Raise PlanError for a plan that edits: it changes nothing where values are only looked at."""
        if self.is_edit:
            raise PlanError("the plan edits: expected one of captures, Plan.of('layer3'); open it with gaff.edit")

    @property
    def digest(self) -> str:
        """SHA-256 of what the plan says, tensors included; equal for equal plans, in every process.

        Reads tensors from their device. Raises PlanError for a plan that cannot be saved.
        """
        return plan_files.digest_of(self.requests, self.options)

    def __str__(self) -> str:
        rows = [
            (str(request), edit_text(request.edit), "maybe" if request.optional else "") for request in self.requests
        ]
        return table(("pattern", "edit", ""), rows)

    def check(self, model: nn.Module) -> list[Resolved]:
        """Every site that the plan names in ``model``, request by request. Installs nothing.

        Raises SiteError for a pattern that names nothing, unless it is optional, and PlanError for what cannot be done.
        Requests for plain tensors name no site, and are left out.
        """
        resolved = []
        for number, request in enumerate(self.requests):
            if isinstance(request.target, Tensor):
                continue  # itself: nothing to look up
            try:
                found = resolve(model, request.target, is_edit=request.edit is not None)
            except SiteError:  # names nothing; what cannot be done (PlanError) is never forgiven
                if not request.optional:
                    raise
                found = []
            is_exact = isinstance(request.target, (Site, nn.Module))
            for one in found if _cuts_heads((request.reduce or self.options.reduce, request.edit)) else ():
                _need_features(one.site)
            resolved += [Resolved(item, number, is_exact) for item in found]
        return resolved

    def to_json(self, tensors: dict[str, Tensor] | None = None) -> str:
        """The plan as text; tensors that edits hold are put into ``tensors``, and named in the text.

        Raises PlanError, naming the request, when the plan holds a function, a capture or a module object, or tensors
        and no place for them.
        """
        return plan_files.to_json(self.requests, self.options, tensors)

    @classmethod
    def from_json(cls, text: str, tensors: dict[str, Tensor] | None = None) -> Plan:
        """The plan of which ``to_json`` wrote ``text``; raises RecordError when it is no plan.

        ``tensors`` are those that the text names, by name.
        """
        return cls(*plan_files.from_json(text, tensors or {}))

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON to ``path``, and tensors that edits hold to ``path`` + ``.safetensors``.

        Raises PlanError for a plan that holds functions, and where the package ``safetensors`` is needed and missing.
        """
        plan_files.save(self.requests, self.options, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """The plan that was saved at ``path``. Raises RecordError where a file is missing or wrong."""
        return cls(*plan_files.load(path))


def _of_captures(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plan that captures. Raises PlanError for one that is known to edits only."""
    if "check_finite" in options:
        raise PlanError("option 'check_finite' is not known to a capture: expected it at gaff.edit, or gaff.guard")
    return read_options(dict(options))


def _cuts_heads(asked: Any) -> bool:
    """Whether a reduction or an edit, or one of several, cuts the last dimension into heads."""
    if isinstance(asked, (list, tuple)):
        return any(map(_cuts_heads, asked))
    inside = {At: ("index", "edit"), Chain: ("edits",), When: ("edit",)}.get(type(asked), ())
    return isinstance(asked, Heads) or any(_cuts_heads(getattr(asked, name)) for name in inside)


def _need_features(site: Site) -> None:
    """Raises PlanError for the weights of attention, whose last dimension are the keys: it would be they that are cut.

    Such a number of keys as can be cut into so many would pass without a word.
    """
    if site.port == "weights" or fits_op((site.op or "").partition("#")[0], "softmax"):
        raise PlanError(
            f"{site}: weights of attention are [batch, heads, queries, keys], and gaff.keep.heads cuts the last "
            "dimension: expected gaff.keep.channels(2) for head 2"
        )
