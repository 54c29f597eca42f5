"""A session: entered and left; owns every hook that it installed, and removes all of them however it is left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from gaff.address.nested import iter_tensors
from gaff.engine import surroundings
from gaff.engine.clock import Clock, Run
from gaff.engine.exported import WHY_EAGER, run_as, trees_of
from gaff.engine.force_eager import keep_eager
from gaff.engine.leftovers import Lingering, Release, remove_all
from gaff.engine.modules import Node
from gaff.engine.ops.mode import forget
from gaff.engine.process.optimizer import StepCount
from gaff.engine.taps import EditTap, TensorTap
from gaff.engine.wiring import AnyTap, Wiring
from gaff.errors import PlanError


class Session:
    """Feeds ``taps`` while open. Checked when made, installed when opened. Not reentrant, opens once.

    ``notes``: why what ran is not, bit by bit, what would have run without the session. ``clock`` (from opening on)
    counts runs. After closing, ``lingering`` holds the hooks that the recomputation of living graphs still needs.
    """

    clock: Clock
    _wiring: Wiring

    def __init__(
        self,
        model: nn.Module | None,
        taps: Sequence[AnyTap],
        tensors: Sequence[TensorTap] = (),
        threads: str = "own",
        *,
        is_traceable: bool = False,
    ) -> None:
        """``threads``: whose runs are seen. ``is_traceable``: whoever looks is content with what compiled code tells.

        Raises PlanError for a model that cannot be looked at, and for a tensor that gets no gradient.
        """
        for tensor in tensors:
            if not tensor.tensor.requires_grad:
                raise PlanError(f"tensor {tensor.name!r} does not require grad: it will get no gradient to capture")
        self.notes: list[str] = []
        self.threads = threads
        self.released = Release()
        self.lingering: Lingering | None = None
        self._around = surroundings.look(model) if model is not None else None
        self._model = model
        self._taps = taps
        self._tensors = tensors
        self._handles: ExitStack | None = None
        self._is_traceable = is_traceable
        self._is_waiting = False  # calls without grad mode may still be recomputed
        self._inside: Any = None  # hooks inside compiled code
        self._is_forced = False  # compiled code runs eagerly

    def __enter__(self) -> Session:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the hooks are in place."""
        return self._handles is not None

    @property
    def was_opened(self) -> bool:
        """Whether it is open, or was."""
        return hasattr(self, "clock")

    @property
    def is_traced(self) -> bool:
        """Whether the hooks are inside compiled code."""
        return self._inside is not None

    def open(self) -> None:
        """Install every hook, all or nothing: a failure halfway removes what was already in."""
        if self.was_opened:
            raise PlanError("this session was opened before: expected a new one for each with block")
        self.clock = Clock(self._around.memory if self._around is not None else frozenset(), self.threads)
        with ExitStack() as opening:
            opening.callback(forget)
            self._wiring = wiring = Wiring(self._model, self._taps, self._tensors, self.clock, self.notes)
            opening.callback(self._let_go)
            self._follow_runs(wiring)
            wiring.follow_runs()
            opening.callback(wiring.swaps.restore)
            self._meet_compiled(opening, wiring)
            hooks: list[tuple[Node, list[Any]]] = []
            opening.callback(self._remove, hooks)
            for node in wiring.nodes.values():
                hooks.append((node, []))
                if self._inside is not None:
                    self._inside.install(node, hooks[-1][1])
                else:
                    node.install(hooks[-1][1])
            wiring.follow_leaves(opening)
            parameters = self._model.parameters if self._model is not None else tuple
            opening.enter_context(StepCount(parameters, self.clock.count_step))
            self._handles = opening.pop_all()

    def close(self) -> None:
        """Remove everything, then tell the streams what a backward pass left out."""
        if self._handles is not None:
            handles, self._handles = self._handles, None
            handles.close()

    def _meet_compiled(self, opening: ExitStack, wiring: Wiring) -> None:
        """Where code is compiled, hooks go into it, or it runs eagerly; exported graphs run as their trees."""
        trees = trees_of(node.module for node in wiring.nodes.values())
        if self._model is not None and self._around is not None and surroundings.runs_compiled(self._around):
            from gaff.engine.compiled import session  # imports what only processes that compile need

            reason = "" if self._is_traceable else "what it looks at is not in graphs"
            reason = WHY_EAGER if trees else reason
            self._inside = session.meet(
                opening, self._model, wiring.taps, self.notes, reason, has_marks=wiring.has_marks
            )
            self._is_forced = self._inside is None
        elif self._around is not None:
            keep_eager(opening, self.clock.at_end, self.notes)
        edits = [tap.found for tap in wiring.taps if isinstance(tap, EditTap)]
        edited = [found.module for found in edits if found.site.port == "output" and found.site.op is None]
        run_as(trees, opening, self.notes, edited)

    def _follow_runs(self, wiring: Wiring) -> None:
        """What is due when a run begins or ends."""
        clock = self.clock
        if self._around is not None and self._around.fused:
            slow = surroundings.SlowPath(self._around.fused, wiring.nodes.values(), self.notes)
            clock.at_begin.append(slow.note)
        if wiring.scopes:
            clock.at_begin.append(forget)
        if wiring.has_arms or wiring.has_edits:
            clock.at_end.append(self._stop_waiting)
        if wiring.has_edits:
            clock.at_end.append(self._guard)

    def _remove(self, hooks: list[tuple[Node, list[Any]]]) -> None:
        """All hooks but those of edits that a living graph would recompute."""
        kept = []
        for node, handles in reversed(hooks):
            if self._wiring.has_edits and node.repeats():
                kept.append((node, handles))
            else:
                remove_all(handles)
        if kept:
            self.lingering = Lingering(kept, is_forced=self._is_forced)

    def _let_go(self) -> None:
        self.clock.closed = True
        self._wiring.let_go(self.lingering.nodes() if self.lingering is not None else set())
        self._taps = self._tensors = ()

    def _stop_waiting(self, run: Run, output: Any) -> None:
        """Calls without grad mode wait for a reentrant checkpoint only as long as it could recompute them."""
        self._is_waiting = self._is_waiting or run.is_waiting
        if self._is_waiting:
            for node in self._wiring.nodes.values():
                node.give_up(is_final=False)

    def _guard(self, run: Run, output: Any) -> None:
        """What a run with a recomputation ahead returned raises in backward once its edits have been released."""
        if run.is_waiting:
            for _, tensor in iter_tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    self.released.guard(tensor)
