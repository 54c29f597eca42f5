"""A session: entered and left; owns every hook that it installed, and removes all of them however it is left.

The verbs (capture, edit, take, trace ...) make taps of what was asked and a session that feeds them. Making one only
looks and refuses. Opening makes a clock and a wiring, decides about compiled code and exported graphs, and installs the
hooks of each node. From then on the hooks work by themselves; closing removes them and tells the streams what never
came.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import nn

from gaff.address.nested import iter_tensors
from gaff.compat import distributed
from gaff.compat.checkpoints import note_functions
from gaff.compat.flat_shards import FLAT
from gaff.engine import placements, surroundings
from gaff.engine.clock import Clock, Run
from gaff.engine.exported import WHY_EAGER, run_as, trees_of
from gaff.engine.force_eager import keep_eager
from gaff.engine.gradients.derivatives import backward_passes
from gaff.engine.gradients.outer import spare_units
from gaff.engine.leftovers import Lingering, Release, take_off
from gaff.engine.modules import install
from gaff.engine.node import Node
from gaff.engine.ops.mode import forget
from gaff.engine.ops.workers import worker_watch
from gaff.engine.parameters.substitutes import parameters_given
from gaff.engine.process.optimizer import count_steps
from gaff.engine.raised import tell_where
from gaff.engine.taps import EditTap, Tap, TensorTap
from gaff.engine.wiring import AnyTap, Wiring
from gaff.errors import PlanError


class Session:
    """Feeds ``taps`` while open. Checked when made, installed when opened. Not reentrant.

    One that is ``lasting`` may be opened again, on the wiring of the first time; any other opens once.

    ``notes``: why what ran is not, bit by bit, what would have run without the session; they go into the receipt.
    ``clock`` (from opening on) counts runs. After closing, ``lingering`` holds the hooks that the recomputation of
    living autograd graphs still needs, else None; ``released`` is what tells those graphs that somebody has given them
    up.

    All handles are in one stack, in the order in which things were installed, so that they go in the opposite order,
    and a failure in the middle of opening leaves nothing behind.
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
        allows_flat: bool = False,
    ) -> None:
        """Look at the model and refuse what cannot work; installs nothing.

        ``taps``: what is asked of ``model``, ``tensors``: plain tensors whose gradients are asked for, which need no
        model. ``threads``: whose runs are seen, those of the thread that opens ("own") or of "all". ``is_traceable``:
        whoever looks is content with what compiled code tells; else such code runs eagerly while the session is open.
        ``allows_flat``: what is asked is about calls alone, or about parameters that no first FSDP has laid end to end.

        Raises PlanError for a model that cannot be looked at, and for a tensor that gets no gradient.
        """
        for tensor in tensors:
            if not tensor.tensor.requires_grad:
                raise PlanError(f"tensor {tensor.name!r} does not require grad: no gradient comes to it")
        self.notes: list[str] = []
        self.threads = threads
        self.released = Release()
        self.lingering: Lingering | None = None
        self._around = surroundings.look(model, allows_flat=allows_flat) if model is not None else None
        if self._around is not None and self._around.has_flat:
            self._refuse_parameters(taps)
        if self._around is not None and self._around.has_script:
            self.notes.append("parts of the model are TorchScript, which takes no hooks: they are left out")
        self._model = model
        self._taps = taps
        self._tensors = tensors
        self._handles: ExitStack | None = None
        self._is_traceable = is_traceable
        self._is_waiting = False  # calls without grad mode may still be recomputed
        self._inside: Any = None  # hooks inside compiled code
        self._is_forced = False  # compiled code runs eagerly

    def _refuse_parameters(self, taps: Sequence[AnyTap]) -> None:
        """Raises PlanError where a parameter or its gradient is asked for, of which no process has all.

        Also for ``:outer_grad``, for which the caller of a unit is given another tensor than the one that the first
        FSDP has hooked.
        """
        for tap in taps:
            if tap.found.site.port in ("param", "grad", "outer_grad"):
                raise PlanError(f"{tap.found.site}: {FLAT}")

    def __enter__(self) -> Session:
        self.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
        tell_where(error, self._model)

    @property
    def is_open(self) -> bool:
        """Whether the hooks are in place."""
        return self._handles is not None

    @property
    def was_opened(self) -> bool:
        """Whether the session was ever opened; only one that is ``lasting`` can be again."""
        return hasattr(self, "clock")

    @property
    def lasting(self) -> bool:
        """Whether what the first opening prepared serves another one: only values of modules are looked at, eagerly."""
        return self.was_opened and self._wiring.is_lasting and self._inside is None

    @property
    def is_traced(self) -> bool:
        """Whether the hooks are inside compiled code; else it runs eagerly, if there is any. Known from opening on."""
        return self._inside is not None

    @property
    def runs(self) -> int:
        """How many runs there have been; none before the session is opened."""
        return self.clock.latest.index + 1 if self.was_opened else 0

    def open(self) -> None:
        """Install every hook, all or nothing: a failure halfway removes what was already in.

        Raises PlanError for a session that is open, or was and is not ``lasting``, and for what the wiring finds
        impossible.
        """
        if self.is_open or (self.was_opened and not self.lasting):
            raise PlanError("this session was opened before: expected a new one for each with block")
        self.released.stripped.clear()
        with ExitStack() as opening:
            opening.callback(forget)
            wiring = self._prepare()
            opening.callback(self._let_go)
            self._follow_runs(wiring)
            wiring.follow_runs()
            opening.enter_context(parameters_given if wiring.swaps else nullcontext())
            opening.callback(wiring.swaps.restore)
            self._meet_compiled(opening, wiring)
            hooks: list[tuple[Node, list[Any]]] = []
            opening.callback(self._remove, hooks)
            for node in wiring.nodes.values():
                hooks.append((node, []))
                if self._inside is not None:
                    self._inside.install(node, hooks[-1][1])
                else:
                    install(node, hooks[-1][1])
            if self._model is not None and self._inside is None and distributed.shares_rows(self._model):
                placements.follow(self._model, opening)  # before all hooks that ask
            wiring.follow_leaves(opening)
            if wiring.scopes:
                opening.enter_context(worker_watch)
            ports = {tap.found.site.port for tap in wiring.taps if isinstance(tap, Tap)}
            if wiring.has_marks:
                is_inside = self._inside is not None
                ahead = partial(wiring.gradients.pass_begins, is_inside=is_inside)
                opening.enter_context(backward_passes.at_each(ahead))
            if "outer_grad" in ports and self._model is not None:
                spare_units(self._model, opening)
            parameters = self._model.parameters if self._model is not None else tuple
            opening.callback(count_steps(parameters, self.clock.count_step).remove)
            self._handles = opening.pop_all()

    def close(self, error: BaseException | None = None) -> None:
        """Remove everything, then tell the streams what a backward pass left out. May be called twice.

        Where a living autograd graph would recompute an edited module, its hooks stay, as ``lingering``. Raises
        ExactnessError where edits inside compiled code would still have to act, unless an ``error`` is on its way.
        """
        if self._handles is not None:
            handles = self._handles
            try:
                handles.__exit__(type(error) if error is not None else None, error, None)
            finally:
                self._handles = None

    def _prepare(self) -> Wiring:
        """Make the wiring and the clock (``was_opened``); later look around again and let the clock begin anew."""
        if not self.was_opened:
            clock = Clock(self._around.memory if self._around is not None else frozenset(), self.threads)
            self._wiring, self.clock = Wiring(self._model, self._taps, self._tensors, clock, self.notes), clock
        elif self._model is not None:
            self._around = self._around.renewed(self._model) if self._around else surroundings.look(self._model)
            self.notes.clear()
            self.clock.restart(self._around.memory)
        return self._wiring

    def _meet_compiled(self, opening: ExitStack, wiring: Wiring) -> None:
        """Put hooks into compiled code, or have it run eagerly; exported graphs run as their trees.

        It runs eagerly where compiled code cannot hold what is asked, and where there is an exported graph, which runs
        node by node as a tree of modules. Where nothing is compiled yet, code that is first compiled while the session
        is open runs eagerly, too.
        """
        trees = trees_of(node.module for node in wiring.nodes.values())
        if self._model is not None and self._around is not None and surroundings.runs_compiled(self._around):
            from gaff.engine.compiled import session  # imports what only processes that compile need

            reason = "" if self._is_traceable else "what it looks at is not in graphs"
            reason = WHY_EAGER if trees else reason
            self._inside = session.meet(
                opening, self._model, wiring.taps, self.notes, reason, has_marks=wiring.has_marks
            )
            self._is_forced = self._inside is None
            if not self._is_forced:
                wiring.gradients.meet_compiled()
        elif self._around is not None:
            keep_eager(opening, self.clock.at_end, self.notes)
        edits = [tap.found for tap in wiring.taps if isinstance(tap, EditTap)]
        edited = [found.module for found in edits if found.site.port == "output" and found.site.op is None]
        run_as(trees, opening, self.notes, edited)

    def _follow_runs(self, wiring: Wiring) -> None:
        """Let the clock call what is due when a run begins or ends, as far as this session needs it.

        Called before ``Wiring.follow_runs``, for the clock calls in the order in which it was asked.
        """
        clock = self.clock
        if self._around is not None and self._around.fused:
            clock.at_begin.append(surroundings.slow_path(self._around.fused, wiring.nodes.values(), self.notes))
        if wiring.has_marks:
            clock.at_begin.insert(0, note_functions)
        if wiring.scopes:
            clock.at_begin.append(forget)
        if wiring.has_arms or wiring.has_edits:
            clock.at_end.append(self._stop_waiting)
        if wiring.has_edits:
            clock.at_end.append(self._guard)

    def _remove(self, hooks: list[tuple[Node, list[Any]]]) -> None:
        """Remove all hooks but those of edits that a living autograd graph would recompute; these become ``lingering``.

        ``hooks``: each node with the handles of its hooks, in the order in which they were installed.
        """
        kept: list[tuple[Node, list[Any]]] = []
        take_off(hooks, kept, self.released.stripped, has_edits=self._wiring.has_edits)
        if kept:
            self.lingering = Lingering(kept, is_forced=self._is_forced)

    def _let_go(self) -> None:
        """Break the ties to taps, nodes and tensors, so that they are freed without a garbage collector.

        Comes after hooks are removed; nodes of hooks that linger keep what they need.
        """
        self.clock.close()
        if not self.lasting:
            self._wiring.let_go(self.lingering.nodes() if self.lingering is not None else set())
            self._taps = self._tensors = ()

    def _stop_waiting(self, run: Run, output: Any) -> None:
        """Tell streams of calls without grad mode, once it is certain, that no gradient will come.

        Such a call may be one inside a reentrant checkpoint, which runs it again with grad mode; it waits for that only
        as long as its checkpoint lives. Looked at when a run ends, and in no session that never met such a call.
        """
        self._is_waiting = self._is_waiting or run.is_waiting
        if self._is_waiting:
            for node in self._wiring.nodes.values():
                node.give_up(is_final=False)

    def _guard(self, run: Run, output: Any) -> None:
        """Hook what a run with a recomputation ahead has returned: backward raises once its edits were released.

        Without that the recomputation would run unedited, and gradients would be those of another function.
        """
        if run.is_waiting:
            for _, tensor in iter_tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    self.released.guard(tensor)
