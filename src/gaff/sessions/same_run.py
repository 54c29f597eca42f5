"""Patches from the same run: the value that passed one site goes in at another, later in the very same run.

A ``PatchSource`` listens at the source and gives its value to the patches of it; ``SameRun`` has those of one session.
They listen in an engine session of their own, whose hooks come after those of the edits, so that a source that is
edited itself is told as the model goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import STATE_PORTS, VALUE_PORTS, Site, parse_single, parse_site
from gaff.address.nested import describe, iter_tensors
from gaff.address.resolve import find_site, resolve
from gaff.compat.placements import UNKNOWN_PART, is_equal_everywhere, placement_of, together
from gaff.edits.event import Edit, Event
from gaff.edits.places import iter_innermost, with_patches
from gaff.edits.sources import Patch
from gaff.engine.session import Session
from gaff.engine.streams import Stream
from gaff.engine.taps import Tap
from gaff.errors import PlanError, SiteError
from gaff.sessions.exact import Keeper, Kept, Refused, read
from gaff.sessions.request import Options

# What is kept of one value: itself, and whether grad mode was on when it passed.
Held = tuple[Any, bool]


class PatchSource(Stream):
    """The values that passed the source of a patch in the run in progress, by thread and call; a stream of the engine.

    Called with an event it is the value that goes in there: of a tensor that lies in parts the whole. Kept exactly, as
    a capture keeps values, and with their autograd graph unless ``detach``; let go of when the run ends. Of skipped
    events and remarks it tells nothing: a patch that misses its source raises.
    """

    def __init__(self, site: Site, *, detach: bool, meshes: Sequence[Any] = ()) -> None:
        """``meshes``: of processes that share the model, where each may hold a part of what passes."""
        self.site = site
        self._meshes = meshes
        self.keeper = Keeper(Options(graph=not detach), None, is_apart=True)
        self._detach = detach
        self._values: dict[int, dict[int, Held]] = {}
        self._again: dict[int, tuple[Held, bool]] = {}  # by thread: what a recomputation is given instead

    def add(self, value: Any, run: Any, call: int) -> None:
        """The source passed. Raises SiteError where its value is no single tensor."""
        if not isinstance(value, Tensor):
            parts = ", ".join(str(replace(self.site, key=(*self.site.key, *key))) for key, _ in iter_tensors(value))
            raise SiteError(f"{self.site}: its value is a {describe(value)}, a patch takes one tensor of it: {parts}")
        placement = placement_of(value)
        if placement is not None:
            value = together(value.detach() if self._detach else value, placement)
        elif self._meshes and not is_equal_everywhere(
            value, list(self._meshes), is_state=self.site.port in STATE_PORTS
        ):
            raise PlanError(f"patched from {self.site} of the same run: {UNKNOWN_PART}")
        self._keep(call, self.keeper.keep(value, run))

    def absent(self, run: Any, call: int, reason: str) -> None:
        """The source passed, and there was None."""
        self._keep(call, Refused(f"its value is None: {reason}"))

    def refuse(self, run: Any, call: int, reason: str) -> None:
        """The source passed, and its value cannot be told exactly."""
        self._keep(call, Refused(reason))

    def __call__(self, event: Event) -> Tensor:
        """The value of the source that goes in at an event: its call of that number, or the one that it names.

        Raises PlanError, to which the edited site is added, where the source has not passed before in this run, and
        where its gradient would be lost; ExactnessError where its value cannot be trusted.
        """
        thread, now = get_ident(), torch.is_grad_enabled()
        again = self._again.get(thread)
        if again is not None:
            held, had_grad = again
            self._need_graph(now and not had_grad)
        else:
            call = event.call if self.site.call is None else self.site.call
            values = self._values.get(thread, {})
            if call not in values:
                there = f"; it passed with calls {sorted(values)}, say which, as {self.site}@n" if values else ""
                raise PlanError(
                    f"it is patched from {self.site} of the same run, which has not passed before it in run "
                    f"{event.run}, call {call}{there}: expected a site that comes first"
                )
            held = values[call]
        self._need_graph(now and not held[1])
        value: Tensor = read(held[0], self.site)
        return value

    @contextmanager
    def again(self, held: tuple[Held, bool] | None) -> Iterator[None]:
        """Give what ``drawn`` has told to the recomputation that runs on this thread, inside the context."""
        if held is not None:
            self._again[get_ident()] = held
        try:
            yield
        finally:
            self._again.pop(get_ident(), None)

    def drawn(self, event: Event) -> tuple[Held, bool] | None:
        """What the recomputation of an event needs: the value, without its graph, which would keep itself alive.

        It requires grad where the value did, so that the recomputed graph saves what the first one has saved. None
        where the source has not passed, and so was not asked for.
        """
        call = event.call if self.site.call is None else self.site.call
        found = self._values.get(get_ident(), {}).get(call)
        if found is None:
            return None
        kept, had_grad = found
        value = read(kept, self.site)
        alone = value.detach().requires_grad_(value.requires_grad)
        return (Kept(alone, kept.checks) if type(kept) is Kept else alone, had_grad), torch.is_grad_enabled()

    def forget(self, run: Any, output: Any = None) -> None:
        """A run begins or ends on its thread: let go of what passed."""
        self._values.pop(run.thread, None)

    def clear(self) -> None:
        """Let go of everything: the session has closed."""
        self._values.clear()

    def _keep(self, call: int, kept: Any) -> None:
        self._values.setdefault(get_ident(), {})[call] = (kept, torch.is_grad_enabled())

    def _need_graph(self, is_lost: bool) -> None:
        """Raises PlanError where a gradient flows on from here, and ``is_lost`` on its way to the source."""
        if is_lost and not self._detach:
            raise PlanError(
                f"it is patched from {self.site} of the same run, which passed without grad mode or into a reentrant "
                "checkpoint, so that its gradient would be lost: expected detach=True, or use_reentrant=False"
            )


class SameRun:
    """The sources of one edit session: looked up when it is made, heard of while it is open."""

    def __init__(self, model: nn.Module | None, meshes: Sequence[Any] = ()) -> None:
        """``meshes``: of processes that share the model and compute on the same rows."""
        self._model = model
        self._meshes = meshes
        self._passed: dict[tuple[str, bool], PatchSource] = {}
        self._session: Session | None = None

    def bind(self, edit: Edit, target: Site) -> Edit:
        """``edit`` at ``target`` with its patches from the same run tied to their sources.

        Raises SiteError or PlanError for a source that names nothing, or is no value of a module or of one op.
        """

        def bound(patch: Patch) -> Edit:
            if not patch.is_of_same_run or patch.source is None:
                return patch
            source = self._source_of(patch.source)
            if target.port not in VALUE_PORTS or source.port not in VALUE_PORTS:
                raise PlanError(
                    f"{target}: patched from {source} of the same run: expected outputs and inputs, whose values pass"
                )
            if source.op is not None and source.op_index is None:
                raise PlanError(f"{target}: patched from {source}, which may be several ops: say which, as {source}#0")
            key = (patch.source, patch.detach)
            if key not in self._passed:
                self._passed[key] = PatchSource(source, detach=patch.detach, meshes=self._meshes)
            return replace(patch, values=self._passed[key])

        return with_patches(edit, bound)

    def _source_of(self, text: str) -> Site:
        """The site in the model that ``text`` means. Raises SiteError for one that there is not."""
        return parse_site(text) if self._model is None else resolve(self._model, parse_single(text))[0].site

    def open(self, threads: str) -> None:
        """Listen at the sources, if there are any."""
        if self._model is None or not self._passed:
            return
        taps = [Tap(find_site(self._model, one.site)[0], one) for one in self._passed.values()]
        self._session = Session(self._model, taps, threads=threads)
        self._session.open()
        for passed in self._passed.values():
            passed.keeper.meet(self._session.clock, self._model)
            self._session.clock.at_begin.append(passed.forget)
            self._session.clock.at_end.append(passed.forget)

    def close(self) -> None:
        """Listen no more, and let go of all values but those that a recomputation needs."""
        if self._session is not None:
            self._session.close()
        for passed in self._passed.values():
            passed.clear()


def sources_of(edit: Edit) -> tuple[PatchSource, ...]:
    """The sources that patches inside an edit are tied to."""
    values = (one.values for one in iter_innermost(edit) if isinstance(one, Patch))
    return tuple(dict.fromkeys(one for one in values if isinstance(one, PatchSource)))
