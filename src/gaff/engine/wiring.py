"""A wiring: what was asked for, hung on the modules of a model that need hooks for it. Nothing is installed here.

A session makes a wiring when it opens, installs the hooks of its nodes, and lets go of it when it closes. Every way of
looking or changing has one place on a node (``connect``, ``connect_edit``); parameters, gradients of leaves and ops
have objects of their own beside the nodes: a ``Swap`` or a ``StateValue`` for a parameter, a ``LeafGradient``, a
``Scope`` for the ops of a module.

Besides the modules that were asked for, those around them and the root become nodes, since only they tell where a run
begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import GRADIENT_PORTS, WEIGHTS, Site
from gaff.address.nested import dig
from gaff.address.resolve import Found, is_container, unwrap
from gaff.engine.clock import Clock, Run
from gaff.engine.exported import is_untold
from gaff.engine.gradients.edits import ShareChange
from gaff.engine.gradients.leaves import LeafGradient, itself
from gaff.engine.gradients.outer import OuterGradient
from gaff.engine.gradients.pending import Gradients
from gaff.engine.gradients.ports import InputGradient, OutputGradient, find_input, report_missing
from gaff.engine.gradients.sharded import Shards, SwapUnit
from gaff.engine.gradients.share import InputShare
from gaff.engine.node import Node
from gaff.engine.ops.attention import WeightsChange, WeightsTap
from gaff.engine.ops.mode import Scopes, drop
from gaff.engine.ops.scope import Scope, Want
from gaff.engine.parameters.edits import ParameterEdits, Swap, SwapScope
from gaff.engine.parameters.substitutes import original_of
from gaff.engine.parameters.values import Owners, StateValue, called_above, kept_tensors, need_no_view
from gaff.engine.side import Side
from gaff.engine.skips import SkipChange
from gaff.engine.streams import Act, Look, SecondHalf, Stream
from gaff.engine.taps import CallTap, EditTap, OpTap, Tap, TensorTap
from gaff.engine.value_edits import ValueChange
from gaff.errors import PlanError

AnyTap = Tap | EditTap | CallTap | OpTap
_VALUES = ("output", "input")


class Wiring:
    """The nodes, leaves, substitutes and scopes that ``taps`` and ``tensors`` need in ``model``.

    Raises PlanError for what cannot be done. ``has_arms``: some gradient at a module is wanted; ``has_edits``:
    something is changed; ``is_lasting``: values of modules alone are told, which leaves nothing behind, so that it
    serves another opening. ``let_go`` tells streams what never came, and frees all that was made.

    A node is made once for each module, whatever is asked of it, and found again by the module's identity; ``swaps``
    are the edits of parameters.
    """

    def __init__(
        self,
        model: nn.Module | None,
        taps: Sequence[AnyTap],
        tensors: Sequence[TensorTap],
        clock: Clock,
        notes: list[str],
    ) -> None:
        self.taps = [tap for tap in taps if not is_untold(tap)]
        self.nodes: dict[int, Node] = {}
        self.leaves: list[LeafGradient] = []
        self.swaps = ParameterEdits()
        self.scopes = Scopes(model, notes)
        self.has_arms = False
        self.has_edits = any(isinstance(tap, EditTap) for tap in taps) or bool(tensors and tensors[0].is_edit)
        self.gradients = Gradients(has_edits=self.has_edits)
        self._clock = clock
        self._kept: list[Any] | None = None  # tensors that modules keep, once a parameter is edited
        self._shards = Shards(model)
        self._owners = Owners(model)
        if model is not None:
            for tap in self.taps:
                self._wire(model, tap)
            self._wire_runs(model)
        for tensor in tensors:
            find = partial(itself, tensor.tensor)
            self.leaves.append(LeafGradient(self.gradients, tensor.stream, clock, find, is_anywhere=True))
        is_value = all(type(tap) is Tap and tap.found.site.port in _VALUES for tap in self.taps)
        self.is_lasting = is_value and not (self.has_marks or self.swaps or self.scopes)

    @property
    def has_marks(self) -> bool:
        """Whether somebody asks which backward pass belongs to which run: for gradients or for edits."""
        return self.has_arms or bool(self.leaves) or self.has_edits

    def follow_leaves(self, opening: ExitStack) -> None:
        """Hook the parameters and tensors whose gradients are asked for; ``opening`` removes the hooks."""
        for leaf in self.leaves:
            opening.callback(leaf.remove)
            leaf.follow()

    def let_go(self, staying: set[Node]) -> None:
        """The session closes: tell the streams what a backward pass left out. ``staying``: nodes with hooks left."""
        drop(self.scopes)
        try:
            for scope in self.scopes:
                scope.settle()
            for node in self.nodes.values() if self.has_arms or self.has_edits else ():
                node.give_up(is_final=True)
                if node not in staying:
                    node.drop()
            for leaf in self.leaves:
                leaf.close()
        finally:
            self.gradients.close()
        self.nodes.clear()  # what the taps hold is freed with them, without waiting for a collector
        self.leaves.clear()
        self.swaps.clear()
        for scope in self.scopes:
            if scope.owner not in staying:
                scope.let_go()
        self.scopes.clear()
        self.taps = []

    def _wire(self, model: nn.Module, tap: AnyTap) -> None:
        """Hang one tap where it belongs, by its kind and the port of its site."""
        if isinstance(tap, OpTap):
            self._wire_listener(tap)
        elif isinstance(tap, CallTap):
            node = self._node(tap.found.module)
            node.entry.taps += (tap.enter,)
            node.exit.taps += (tap.leave,)
        elif tap.found.site.port == "grad":
            find = partial(_parameter, tap.found)
            sharded = self._shards.of(tap.found)
            self._wire_marks(tap.found)
            self.leaves.append(LeafGradient(self.gradients, tap.stream, self._clock, find, sharded=sharded))
        elif isinstance(tap, EditTap) and tap.found.site.port == "param":
            self._wire_swap(model, tap)
        elif tap.found.site.port in ("param", "buffer"):
            self._wire_state(tap)
        else:
            self.has_arms = self.has_arms or tap.found.site.port in GRADIENT_PORTS
            if tap.found.site.op is not None:
                self._wire_op(tap)
            else:
                self._wire_module(tap)

    def _wire_module(self, tap: Tap | EditTap) -> None:
        node, site = self._node(tap.found.module), tap.found.site
        if isinstance(tap, EditTap) and tap.is_skip:
            skip = SkipChange(node, tap.stream, site.call)
            _edit(node.entry, skip)
            _edit(node.exit, SecondHalf(node, skip))
        else:
            connect(tap, self.gradients, node, site, tap.stream)

    def _wire_marks(self, found: Found) -> None:
        """Have the owners of a parameter mark what they return, so that its gradient is known as one of their run."""
        for module in (*self._owners.of(found), found.module if (above := called_above(found)) is None else above):
            self._node(module).mark = self.gradients.mark_returned

    def _wire_state(self, tap: Tap | EditTap) -> None:
        """Have the value of a parameter or buffer told by the first of its owners that a run enters.

        Where no owner is called itself, the module around it tells at the end of the run.
        """
        around = called_above(tap.found)
        above = self._node(around) if around is not None else None
        value = StateValue(tap.found, tap.stream, above, is_lent=self._shards.of(tap.found) is not None)
        for owner in self._owners.of(tap.found):
            node = self._node(owner)
            node.has_entry = True
            node.entry.taps += (value,)
        self._clock.at_end.append(value.finish)

    def _wire_listener(self, tap: OpTap) -> None:
        """Ask for every op in the own forward of a module, which rules out the short way of its scope."""
        scope = self._scope(tap.found)
        scope.is_plain = False
        scope.repeats = scope.repeats or tap.is_again
        scope.listeners.append(tap)

    def _wire_op(self, tap: Tap | EditTap) -> None:
        """Ask for one op of a module, or for all that its pattern names; they are connected when they are first met."""
        scope = self._scope(tap.found)
        site, is_edit = tap.found.site, isinstance(tap, EditTap)
        scope.is_edit = scope.is_edit or is_edit
        scope.repeats = scope.repeats or is_edit or site.port in GRADIENT_PORTS
        scope.is_plain = scope.is_plain and not is_edit and site.port == "output"
        scope.wants.append(Want(site, tap.stream, partial(connect, tap, self.gradients)))
        if site.op_index is None and (end := getattr(tap.stream, "end", None)) is not None:  # only ``take`` asks
            scope.at_end.append(end)

    def _scope(self, found: Found) -> Scope:
        """What sees to the ops of a module, made when they are first asked for.

        An ``nn.TransformerEncoder`` around it has one, too: torch's mode for functions must be there already where it
        decides whether its layers get a nested tensor, which is for their fused path alone.
        """
        for module in found.chain:
            if isinstance(module, nn.TransformerEncoder):
                self.scopes.of(self._node(module), None)
        return self.scopes.of(self._node(found.module), found.site.path)

    def _wire_swap(self, model: nn.Module, tap: EditTap) -> None:
        """Let an edited parameter's value stand in from the beginning of a run; a recomputation repeats that.

        It does so in the modules around the parameter and in all its owners, any of which a checkpoint may begin with.
        Of a sharded parameter the value stands in for each call of its FSDP2 unit, before other changes at its entry.
        Raises PlanError for a parameter that is kept on the meta device between calls, or of which a view is kept.
        """
        owners = self._owners.of(tap.found)
        if tap.found.tensor.is_meta:
            raise PlanError(
                f"{tap.found.site}: the parameter lies on the meta device (without memory, or offloaded by "
                "accelerate), so that nothing can stand in for it: expected an edit of an output, or another model"
            )
        self._kept = list(kept_tensors(model)) if self._kept is None else self._kept
        need_no_view(self._kept, tap.found)
        sharded = self._shards.of(tap.found)
        swap = Swap(tap.found, tap.stream, owners, is_sharded=sharded is not None)
        if sharded is not None:
            node = self._node(sharded[1])
            node.has_entry = node.has_swaps = True
            unit = SwapUnit(node, swap)
            _edit(node.entry, unit, before=lambda act: not isinstance(act, SwapUnit))
            _edit(node.exit, SecondHalf(node, unit))
        if not self.swaps:
            self._clock.at_begin.append(self.swaps.begin)
        self.swaps.append(swap)
        around = [unwrap(model), *(module for module in tap.found.chain if not is_container(module))]
        if sharded is not None:  # modules around the unit are entered before the parameter is gathered
            around = around[around.index(sharded[1]) :] if sharded[1] in around else [sharded[1]]
        for module in dict.fromkeys([*around, *owners]):
            node = self._node(module)
            node.has_entry = node.has_swaps = True
            scope = next((act for act in node.entry.acts if isinstance(act, SwapScope)), None)
            if scope is None:
                _edit(node.entry, scope := SwapScope(node))
            scope.swaps.append(swap)

    def _wire_runs(self, model: nn.Module) -> None:
        """Have the root and every module around a site hooked at their entry: they tell where a run begins and ends.

        A node also learns which hooked modules are around it, by which the clock tells a call that belongs to the run
        in progress from one that came after an exception.
        """
        self._node(unwrap(model)).has_entry = True
        for node in self.nodes.values():
            if node.entry.taps or node.entry.acts:
                node.has_entry = True
        above: dict[tuple[int, ...], frozenset[Node]] = {}  # by identities of the modules around, as siblings have them
        for tap in self.taps:
            chain = tap.found.chain
            if tap.found.site.port == "grad":
                continue  # a parameter's gradient needs no hook on a module
            key = tuple(map(id, chain))
            if key not in above:
                hooked = [self._node(module) for module in chain]
                for node in hooked:
                    node.has_entry = True
                for depth, node in enumerate(hooked):
                    node.above |= frozenset(hooked[:depth])
                above[key] = frozenset(hooked)
            node, around = self.nodes[id(tap.found.module)], above[key]
            node.above = node.above | around if node.above else around
        self._clock.size = len(self.nodes)

    def follow_runs(self) -> None:
        """Let the clock call what is due when a run begins or ends."""
        clock = self._clock
        if self.swaps:
            clock.at_end.append(self.swaps.end)
        if self.leaves or self.has_arms:
            clock.at_end.append(self.gradients.run_ended)
            clock.at_recomputed.append(self.gradients.settle_later)
        if self.leaves:
            self.gradients.asks_for_runs = True
            clock.at_begin.append(self._follow_leaves)
            clock.at_end.append(lambda run, output: self._follow_leaves(run))  # FSDP2 makes tensors in a forward
            self.gradients.at_pass.append(self._follow_leaves)

    def _follow_leaves(self, run: Run | None = None) -> None:
        """Hook the parameters that are there now, for they may have been replaced, or come to require grad, since."""
        for leaf in self.leaves:
            leaf.follow(run)

    def _node(self, module: nn.Module) -> Node:
        """The node of a module, made when it is first asked for; its number is that of its place among the nodes."""
        found = self.nodes.get(id(module))
        if found is None:
            found = self.nodes[id(module)] = Node(module, self._clock, len(self.nodes))
        return found


def _parameter(found: Found) -> Tensor:
    """The parameter itself, also while an edit lets another tensor stand in for it."""
    return original_of(found.tensor)


def connect(tap: Tap | EditTap, gradients: Gradients, node: Node, site: Site, stream: Any) -> None:
    """Hang the stream of one place that ``tap`` asks for, of its own or of one op that its pattern names, on a node.

    Values are told by taps and edited by acts; gradients are asked for by acts, which set their hooks where the tensor
    passes. At the exit values are edited before gradients of what they have become are hooked. At the entry total
    gradients come first, then values, then a module's own share: the total is that of the tensor as it was passed in.
    """
    is_edit = isinstance(tap, EditTap)
    side = node.entry if site.port == "input" else node.exit
    if site.port not in (*_VALUES, WEIGHTS):
        _connect_gradient(_edit if is_edit else _hang, gradients, node, stream, site, tap.is_exact)
    elif not is_edit:
        side.taps += (WeightsTap(site, stream) if site.port == WEIGHTS else _value_tap(site, stream, tap.is_exact),)
    elif site.port == WEIGHTS:
        _edit(side, WeightsChange(site, stream))
    else:
        is_later = attrgetter("needs_graph") if side is node.exit else lambda act: isinstance(act, ShareChange)
        _edit(side, ValueChange(site, stream, node.module), before=is_later)


def _connect_gradient(
    hang: Callable[..., None], gradients: Gradients, node: Node, stream: Any, site: Site, is_exact: bool
) -> None:
    """Hang what looks at a gradient, or edits it, by ``hang``: at an output at the exit, at an input at both sides."""
    given = gradients, node, stream, site, is_exact
    if site.port == "grad_output":
        hang(node.exit, OutputGradient(*given), before=attrgetter("gives_view"))
    elif site.port == "outer_grad":
        hang(node.exit, OuterGradient(*given))
    else:
        is_total = site.port == "input_grad"
        share = ShareChange if hang is _edit else InputShare
        first = InputGradient(*given) if is_total else share(*given)
        hang(node.entry, first, before=lambda act: is_total and isinstance(act, (ValueChange, ShareChange)))
        hang(node.exit, SecondHalf(node, first), before=attrgetter("gives_view"))


def _hang(side: Side, new: Act, before: Callable[[Act], bool] | None = None) -> None:
    """Hang an act on a side, as the last; or before the first of those that are to come after it."""
    at = next((at for at, act in enumerate(side.acts) if before is not None and before(act)), len(side.acts))
    side.acts = (*side.acts[:at], new, *side.acts[at:])


def _edit(side: Side, new: Act, before: Callable[[Act], bool] | None = None) -> None:
    """Hang an edit on a side: a recomputation has to make it again."""
    _hang(side, new, before)
    side.is_edited = True


def _value_tap(site: Site, stream: Stream, is_exact: bool) -> Look:
    """What hears of a module's output or of its arguments for ``stream``: of the call that is asked for, or of all.

    The stream itself hears of the whole output of every call. Of arguments without a key the first tensor is meant; a
    key that leads nowhere raises SiteError where ``is_exact``, else the stream is told of a skipped event.
    """
    is_first = site.port == "input" and not site.key
    if site.call is None and not site.key and not is_first:
        return stream.add  # the common case pays nothing for the others

    def tap(value: Any, run: Run, call: int) -> None:
        if site.call is not None and site.call != call:
            return
        try:
            found = find_input(value, site, stream, is_exact) if is_first else dig(value, site.key)
        except KeyError as error:
            report_missing(site, stream, is_exact, error)
        else:
            if found is not None or not is_first:
                stream.add(found, run, call)

    return tap
