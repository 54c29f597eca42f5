"""A session: entered and left; owns every hook that it installed, and removes all of them however it is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import GRADIENT_PORTS, Site
from gaff.address.nested import iter_tensors
from gaff.address.resolve import Found, is_container, iter_modules, unwrap
from gaff.engine import surroundings
from gaff.engine.clock import Clock, Run
from gaff.engine.exported import WHY_EAGER, is_untold, run_as, trees_of
from gaff.engine.force_eager import keep_eager
from gaff.engine.gradients.leaves import LeafGradient
from gaff.engine.gradients.pending import Gradients
from gaff.engine.gradients.sharded import Shards, SwapUnit, SwapUnitEnd
from gaff.engine.leftovers import Lingering, Release, remove_all
from gaff.engine.modules import Node
from gaff.engine.ops.mode import OpListener, Scope, Want, drop, forget
from gaff.engine.parameters.edits import Swap
from gaff.engine.parameters.substitutes import original_of
from gaff.engine.parameters.values import StateValue, called_above, owners_of
from gaff.engine.process.optimizer import StepCount
from gaff.engine.skips import SkipChange
from gaff.engine.taps import CallTap, EditTap, OpTap, Tap, TensorTap
from gaff.engine.wiring import connect, connect_edit
from gaff.errors import ExactnessError, GaffError, PlanError


class Session:
    """Feeds ``taps`` while open. Checked when made, installed when entered. Not reentrant, opens once."""

    def __init__(
        self,
        model: nn.Module | None,
        taps: Sequence[Tap | EditTap | CallTap | OpTap],
        tensors: Sequence[TensorTap] = (),
        threads: str = "own",
        *,
        is_traceable: bool = False,
    ) -> None:
        for tensor in tensors:
            if not tensor.tensor.requires_grad:
                raise PlanError(f"tensor {tensor.name!r} does not require grad: it will get no gradient to capture")
        self._around = surroundings.look(model) if model is not None else None
        self.notes: list[str] = []  # why what ran is not what would have run without the session
        self._model = model
        self._taps = taps
        self._tensors = tensors
        self.threads = threads
        self._handles: ExitStack | None = None
        self._is_used = False
        self._has_arms = False  # some gradient at a module is wanted
        self._nodes: dict[int, Node] = {}
        self._leaves: list[LeafGradient] = []
        self._swaps: list[Swap] = []
        self._shards = Shards(model)
        self._scopes: list[Scope] = []  # modules whose ops are asked for
        self._known: set[int] = set()  # identities of all modules, where ops are asked for
        self.released = Release()
        self._fused: list[nn.Module] = []
        self._is_waiting = False
        self._is_forced = False  # compiled code runs eagerly
        self._is_traceable = is_traceable  # whoever looks is content with what compiled code can tell
        self._inside: Any = None  # taps inside compiled code
        self._has_edits = any(isinstance(tap, EditTap) for tap in taps) or bool(tensors and tensors[0].is_edit)
        self._gradients = Gradients(has_edits=self._has_edits)
        self.lingering: Lingering | None = None  # hooks that the recomputation of living graphs still needs
        self.clock: Clock

    @property
    def is_open(self) -> bool:
        return self._handles is not None

    def open(self) -> None:
        """All or nothing: a failure halfway removes what was already in."""
        if self._is_used:
            raise PlanError("this session was opened before: expected a new one for each with block")
        self._is_used = True
        self.clock = Clock(self._around.memory if self._around is not None else frozenset(), self.threads)
        with ExitStack() as opening:
            opening.callback(forget)
            opening.callback(self._let_go)
            self._prepare()
            trees = trees_of(node.module for node in self._nodes.values())
            for swap in self._swaps:
                opening.callback(swap.restore)
            if self._model is not None and self._around is not None and surroundings.runs_compiled(self._around):
                from gaff.engine.compiled import session  # imports what only processes that compile need

                reason = "" if self._is_traceable else "what it looks at is not in graphs"
                reason = WHY_EAGER if trees else reason
                has_marks = self._has_arms or bool(self._leaves) or self._has_edits
                self._inside = session.meet(opening, self._model, self._taps, self.notes, reason, has_marks=has_marks)
                self._is_forced = self._inside is None
            elif self._around is not None:
                keep_eager(opening, self.clock.at_end, self.notes)
            edits = [tap.found for tap in self._taps if isinstance(tap, EditTap)]
            edited = [found.module for found in edits if found.site.port == "output" and found.site.op is None]
            run_as(trees, opening, self.notes, edited)
            hooks: list[tuple[Node, list[Any]]] = []
            opening.callback(self._remove, hooks)
            for node in self._nodes.values():
                hooks.append((node, []))
                if self._inside is not None:
                    self._inside.install(node, hooks[-1][1])
                else:
                    node.install(hooks[-1][1])
            for leaf in self._leaves:
                opening.callback(leaf.remove)
                leaf.follow()
            parameters = self._model.parameters if self._model is not None else tuple
            opening.enter_context(StepCount(parameters, self.clock.count_step))
            self._handles = opening.pop_all()

    @property
    def is_traced(self) -> bool:
        """Whether the hooks are inside compiled code."""
        return self._inside is not None

    def close(self) -> None:
        """Remove everything, then tell the streams what a backward pass left out."""
        if self._handles is not None:
            handles, self._handles = self._handles, None
            handles.close()

    def _let_go(self) -> None:
        self.clock.closed = True
        drop(self._scopes)
        for scope in self._scopes:
            scope.settle()
        for node in self._nodes.values() if self._has_arms else ():
            node.give_up(is_final=True)
            node.drop_arms()
        lingering = self.lingering.nodes() if self.lingering is not None else ()
        for node in self._nodes.values() if self._has_edits else ():
            if node not in lingering:
                node.drop_changes()
        for leaf in self._leaves:
            leaf.close()
        self._gradients.close()
        self.clock.close()
        self._nodes.clear()  # what the taps hold is freed with them, without waiting for a collector
        self._leaves.clear()
        self._swaps.clear()
        for scope in self._scopes:
            if scope.owner not in lingering:
                scope.let_go()
        self._scopes.clear()
        self._taps = self._tensors = ()

    def _prepare(self) -> None:
        """Build the nodes and taps; installs nothing."""
        model = self._model
        if model is not None:
            self._taps = [tap for tap in self._taps if not is_untold(tap)]
            for tap in self._taps:
                self._prepare_tap(model, tap)
            self._prepare_nodes(model)
        for tensor in self._tensors:
            find = partial(_itself, tensor.tensor)
            self._leaves.append(LeafGradient(self._gradients, tensor.stream, self.clock, find, is_anywhere=True))
        if self._leaves or self._has_arms:
            self.clock.at_end.append(self._gradients.end_run)
        if self._leaves:
            self._gradients.has_leaves = True
            self.clock.at_begin.append(self._follow_leaves)
            self.clock.at_end.append(lambda run, output: self._follow_leaves(run))  # FSDP2 makes tensors in a forward

    def _remove(self, hooks: list[tuple[Node, list[Any]]]) -> None:
        """All hooks but those of edits that a living graph would recompute."""
        kept = []
        for node, handles in reversed(hooks):
            if self._has_edits and node.repeats():
                kept.append((node, handles))
            else:
                remove_all(handles)
        if kept:
            self.lingering = Lingering(kept, is_forced=self._is_forced)

    def _prepare_tap(self, model: nn.Module, tap: Tap | EditTap | CallTap | OpTap) -> None:
        if isinstance(tap, OpTap):
            self._prepare_listener(tap)
            return
        if isinstance(tap, CallTap):
            node = self._node(tap.found.module)
            node.entries += (tap.enter,)
            node.exits += (tap.leave,)
            return
        site, module, stream = tap.found.site, tap.found.module, tap.stream
        if site.port == "grad":
            find = partial(_parameter, tap.found)
            self._leaves.append(
                LeafGradient(self._gradients, stream, self.clock, find, sharded=self._shards.of(tap.found))
            )
        elif isinstance(tap, EditTap) and site.port == "param":
            self._prepare_swap(model, tap)
        elif site.port in ("param", "buffer"):
            around = called_above(tap.found)
            above = self._node(around) if around is not None else None
            value = StateValue(tap.found, stream, above, is_lent=self._shards.of(tap.found) is not None)
            for owner in owners_of(model, tap.found):
                node = self._node(owner)
                node.has_entry = True
                node.entries += (value,)
            self.clock.at_end.append(value.finish)
        elif site.op is not None:
            self._has_arms = self._has_arms or site.port in GRADIENT_PORTS
            self._prepare_op(tap)
        else:
            node = self._node(module)
            self._has_arms = self._has_arms or site.port in GRADIENT_PORTS
            if isinstance(tap, EditTap) and tap.is_skip:
                node.entry_changes += (SkipChange(node, tap.stream, site.call),)
            elif isinstance(tap, EditTap):
                connect_edit(node, site, tap.stream, self._gradients)
            else:
                connect(node, site, stream, tap.is_exact, self._gradients)

    def _prepare_listener(self, tap: OpTap) -> None:
        scope = self._scope(tap.found)
        scope.is_plain = False
        scope.repeats = scope.repeats or tap.is_again
        scope.listeners.append(OpListener(tap.enter, tap.leave, tap.is_again))

    def _prepare_op(self, tap: Tap | EditTap) -> None:
        scope = self._scope(tap.found)
        site, is_edit = tap.found.site, isinstance(tap, EditTap)
        scope.is_edit = scope.is_edit or is_edit
        scope.repeats = scope.repeats or is_edit or site.port in GRADIENT_PORTS
        scope.is_plain = scope.is_plain and not is_edit and site.port == "output"

        def connect_op(node: Node, site: Site, stream: Any) -> None:
            if isinstance(tap, Tap):
                connect(node, site, stream, tap.is_exact, self._gradients)
            else:
                connect_edit(node, site, stream, self._gradients)

        scope.wants.append(Want(site, tap.stream, connect_op))
        if site.op_index is None and (end := getattr(tap.stream, "end", None)) is not None:  # only ``take`` asks
            scope.at_end.append(end)

    def _scope(self, found: Found) -> Scope:
        node = self._node(found.module)
        if node.scope is None:
            node.scope = Scope(node, found.site.path)
            node.has_entry = True
            node.scope.notes = self.notes
            if not self._known and self._model is not None:
                inside = (module for _, module, _ in iter_modules(self._model))
                self._known = {id(module) for module in (*self._model.modules(), *inside)}
            node.scope.known = self._known
            self._scopes.append(node.scope)
        scope: Scope = node.scope
        return scope

    def _prepare_swap(self, model: nn.Module, tap: EditTap) -> None:
        """The value stands in from the beginning of a run; a recomputation repeats it in every module around it."""
        owners = owners_of(model, tap.found)
        if tap.found.tensor.is_meta:
            raise PlanError(
                f"{tap.found.site}: the parameter lies on the meta device between calls (offloaded by accelerate), so "
                "that nothing can stand in for it: expected an edit of an output, or a model that is not offloaded"
            )
        sharded = self._shards.of(tap.found)
        swap = Swap(tap.found, tap.stream, owners, is_sharded=sharded is not None)
        if sharded is not None:
            node = self._node(sharded[1])
            node.has_entry = node.has_swaps = True
            unit = SwapUnit(swap)
            units = [change for change in node.entry_changes if isinstance(change, SwapUnit)]
            node.entry_changes = (*units, unit, *node.entry_changes[len(units) :])
            node.exit_changes += (SwapUnitEnd(unit),)
        self._swaps.append(swap)
        if len(self._swaps) == 1:
            self.clock.at_begin.append(self._begin_swaps)
        around = [module for module in tap.found.chain if not is_container(module)]
        for module in dict.fromkeys([unwrap(model), *around, *owners]):
            node = self._node(module)
            node.has_entry = node.has_swaps = True
            node.entry_changes += (swap.scope(node),)

    def _begin_swaps(self, run: Run) -> None:
        try:
            for swap in self._swaps:
                swap.begin(run)
        except BaseException:
            for swap in self._swaps:
                swap.restore()
            raise

    def _end_swaps(self, run: Run, output: Any) -> None:
        problems: list[GaffError] = []
        if isinstance(output, Iterator):
            problems.append(
                PlanError("an edited parameter stands in until the model returns, and it returned an iterator")
            )
        for swap in self._swaps:
            try:
                swap.end(run, output)
            except ExactnessError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def _prepare_nodes(self, model: nn.Module) -> None:
        """The root and every module around a site tell where a run begins and ends."""
        self._node(unwrap(model)).has_entry = True
        for node in self._nodes.values():
            if node.entries or node.entry_arms or node.entry_changes:
                node.has_entry = True
        above: dict[int, frozenset[Node]] = {}  # by identity of the chain, which siblings share
        for tap in self._taps:
            chain = tap.found.chain
            if tap.found.site.port == "grad":
                continue  # a parameter's gradient needs no hook on a module
            if id(chain) not in above:
                hooked = [self._node(module) for module in chain]
                for node in hooked:
                    node.has_entry = True
                for depth, node in enumerate(hooked):
                    node.above |= frozenset(hooked[:depth])
                above[id(chain)] = frozenset(hooked)
            self._nodes[id(tap.found.module)].above |= above[id(chain)]
        self.clock.resize(len(self._nodes))
        self._prepare_callbacks()

    def _prepare_callbacks(self) -> None:
        if self._around is not None and self._around.fused:
            ours = {node.module for node in self._nodes.values()}
            asked = {inner for scope in self._scopes for inner in scope.owner.module.modules()}
            self._fused = [
                block
                for block in self._around.fused
                if block in asked or not (isinstance(block, nn.MultiheadAttention) or ours.isdisjoint(block.modules()))
            ]
            self.clock.at_begin.append(self._note_slow_path)
        if self._scopes:
            self.clock.at_begin.append(forget)
        if self._has_arms or self._has_edits:
            self.clock.at_end.append(self._stop_waiting)
        if self._has_edits:
            self.clock.at_end.append(self._guard)
        if self._swaps:
            self.clock.at_end.append(self._end_swaps)

    def _node(self, module: nn.Module) -> Node:
        found = self._nodes.get(id(module))
        if found is None:
            found = self._nodes[id(module)] = Node(module, self.clock, len(self._nodes))
        return found

    def _follow_leaves(self, run: Run) -> None:
        for leaf in self._leaves:
            leaf.follow(run)

    def _stop_waiting(self, run: Run, output: Any) -> None:
        """Calls without grad mode wait for a reentrant checkpoint only as long as it could recompute them."""
        self._is_waiting = self._is_waiting or run.is_waiting
        if self._is_waiting:
            for node in self._nodes.values():
                node.give_up(is_final=False)

    def _guard(self, run: Run, output: Any) -> None:
        """What a run with a recomputation ahead returned raises in backward once its edits have been released."""
        if run.is_waiting:
            for _, tensor in iter_tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    self.released.guard(tensor)

    def _note_slow_path(self, run: Run) -> None:
        if surroundings.SLOW_PATH not in self.notes and surroundings.takes_fast_path(self._fused):
            self.notes.append(surroundings.SLOW_PATH)
            surroundings.warn_once(surroundings.SLOW_PATH)


def _parameter(found: Found) -> Tensor:
    """The parameter itself, also while an edit lets another tensor stand in for it."""
    return original_of(found.tensor)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
