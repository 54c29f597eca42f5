"""A module's own share of the gradient at its input, found by walking the autograd graph; nothing is inserted.

A tensor that goes into a module may also be used elsewhere, in a residual connection for instance; its gradient is
then the sum of several parts, of which autograd keeps none. This is about the part that passes through the module.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from gaff.address.nested import Arguments, holds_code, iter_deep
from gaff.compat import autograd, memory
from gaff.compat.autograd import is_wrapper
from gaff.compat.compiler import uncompiled
from gaff.engine.clock import Run
from gaff.engine.crossing import Crossing
from gaff.engine.gradients.armed import Armed
from gaff.engine.gradients.derivatives import PASSES, follow_derivatives, made_since
from gaff.engine.gradients.kept import is_kept, kept_by
from gaff.engine.gradients.later import NO_GRAD_MODE, ShareOfLate
from gaff.engine.gradients.pending import BATCHED, Gradients
from gaff.engine.gradients.ports import RETURNED_INPUT, GradientArm, find_input
from gaff.engine.gradients.reach import NEVER, Edge, Feeding, PassGraph, find_feeding
from gaff.engine.gradients.tensor_hooks import on_gradient
from gaff.engine.streams import Act, Stream

OLDER = (
    "what the module returned was made of its input outside of this call, too: by a worker thread, or before the call "
    "and kept; ask for :input_grad, the total gradient"
)
PAST_THE_SHARE = (
    "somebody kept something that the module made of its input and did not return (a hook that collects, a list, the "
    "tangent of a dual tensor), or the module kept the input, and this backward pass came by it; ask for :input_grad, "
    "the total gradient"
)
HELD = (
    "the module holds this tensor as an attribute, too: what it makes of it by way of the argument cannot be told "
    "apart; ask for :input_grad, the total gradient"
)
WRITTEN_VIEW = "the input is a view that the module changed in place"
WRITTEN = (
    "the module wrote into memory that another of its inputs shows, too: what it makes of the one and of the other "
    "cannot be told apart; ask for :input_grad, the total gradient"
)
CACHED = (
    "autocast keeps the copy of a leaf in the lower precision for everybody who uses the leaf: shares cannot be told "
    "apart; ask for :input_grad, the total gradient"
)
IN_COMPILED_PASS = (
    "the backward pass is compiled as a whole (compiled autograd), which does not tell who hands what to whom; ask for "
    ":input_grad, the total gradient"
)
_NESTED = 16  # backward passes inside one another


class InputShare(GradientArm):
    """The module's own part of the gradient at its input, as a module backward hook would show it.

    Finds the autograd nodes that were created inside the call and hand a gradient to the input, and adds up what they
    hand over, in the order in which autograd does. Nothing is inserted: upstream gradients keep their bits.

    Begins at the entry, where the number of the next node is noted, and ends at the exit, by ``leave``. What cannot
    be told apart is refused: a tensor given twice, an input returned as it is, a view that was written to.
    """

    def __call__(self, value: Arguments, given: Arguments, crossing: Crossing) -> None:
        run, call = crossing.run, crossing.call
        if not self._wants(call):
            return
        tensor = find_input(value, self._site, self._stream, self._is_exact)
        if tensor is None:
            return
        twins = sum(other is tensor for other in iter_deep(value))
        if not autograd.takes_gradient(tensor):
            self._arm_late(tensor, ShareOfLate(self._stream), crossing)
        elif twins > 1:
            self._stream.refuse(run, call, f"the same tensor came in {twins} times: their shares cannot be told apart")
        elif any(other is tensor for other in kept_by(self._node.module)):
            self._stream.refuse(run, call, HELD)
        else:
            # a stale view gets its node when it is asked for: before the call, not inside it
            stops = {other.grad_fn for other in iter_deep(value) if autograd.takes_gradient(other)} - {None}
            edge, since = autograd.grad_edge_node(tensor), autograd.next_sequence()
            version, holders = memory.version_of(tensor), _holders(tensor, value)
            # by a weak reference: a strong one would count among those of other sessions that look here
            noted = weakref.ref(tensor), edge, since, version, holders, call, value, stops
            self._node.note(self, noted)

    without_graph = Act.without_graph  # a share is of what the call makes, whatever becomes of its input later

    def leave(self, noted: Any, output: Any, given: Arguments, crossing: Crossing) -> None:
        """Find, when the module returned, the nodes that make up its share, and hook them."""
        run = crossing.run
        ref, edge, since, version, holders, call, given, stops = noted
        tensor = ref()
        has_more = _holders(tensor, given) > holders
        outputs = [found for found in iter_deep(output) if autograd.takes_gradient(found)]
        is_changed = memory.version_of(tensor) != version
        if any((found.grad_fn is edge[0] and found.output_nr == edge[1]) or found is tensor for found in outputs) and (
            not is_changed or tensor.grad_fn is edge[0]  # a write without grad mode leaves the graph as it was
        ):
            self._stream.refuse(run, call, f"{RETURNED_INPUT}: ask for :input_grad, the total gradient")
        elif is_changed and (tensor._is_view() or shows_elsewhere(tensor, given)):
            self._stream.refuse(run, call, WRITTEN_VIEW if tensor._is_view() else WRITTEN)
        else:
            kept = list(kept_by(self._node.module))
            roots = [other for other in (*iter_deep(given), *iter_deep(output), *kept) if other is not tensor]
            if is_changed:
                roots.append(tensor)
            made: set[GraphNode] = set()
            feeding, older, unseen = find_feeding(roots, edge, since, stops, made)
            is_held = any(other is tensor for other in kept) or (has_more and is_kept(self._node.module, tensor))
            if is_held or holds_code(output):
                unseen = range(since, NEVER)  # whatever is made of it from now on may be the module's, too
            if older and _lead_to(older, edge, stops):
                self._stream.refuse(run, call, OLDER)
            elif tensor.is_leaf and _is_cached(feeding, tensor):
                self._stream.refuse(run, call, CACHED)
            elif not feeding and unseen is None:
                why = "what the module returned does not depend on this input"
                self._stream.absent(run, call, why if autograd.is_grad_enabled() else NO_GRAD_MODE)
            else:
                share = _Share(self._gradients, self._stream, run, call, len(feeding))
                share.lie_as(tensor)
                share.follow(feeding)
                share.watch_writes(tensor, outputs)
                if unseen is not None:
                    share.watch_total(tensor, edge, feeding, unseen)
                follow_derivatives(share, made, edge)
                self._gradients.add(share)


class _Share(Armed):
    """Sums the shares of one backward pass; hands over the sum when all have come, or the pass has ended.

    A pass may reach only some of the nodes, when a loss depends on a part of the output: then its end decides. A pass
    that comes by again begins a new sum; one inside another has a sum of its own. ``expected`` is the number of nodes
    that hand something to the input; 0 where a differentiable backward pass has added others, so that only the end of a
    pass can decide.

    Where the output is a view of the input, a later write into that memory gives it another node, and the one that is
    followed never runs: the version counter tells, and the share is refused. Where the call made nodes that nothing
    known leads to, each pass is looked through for those that hand something to the input (``watch_total``).
    """

    __slots__ = ("_expected", "_gradients", "_is_written", "_sums", "_token", "_total", "handles")

    def __init__(self, gradients: Gradients, stream: Stream, run: Run, call: int, expected: int) -> None:
        super().__init__(stream, run, call)
        self.handles: list[Any] = []
        self._expected = expected
        self._is_written: Callable[[], bool] | None = None  # the memory of the input, where an output is a view of it
        self._gradients = gradients
        self._sums: dict[int, tuple[int, Tensor | None]] = {}  # by backward pass: how many have come, and their sum
        self._total: Any = None  # the handle of the hook that hears of the total
        self._token: object = None  # in the metadata of the nodes that are known, where that is asked

    def follow(self, feeding: Feeding) -> None:
        """Hook nodes that hand a gradient to the input, each at the given position of what it hands on."""
        for graph_node, position in feeding:
            self.handles.append(graph_node.register_hook(uncompiled(partial(_share_arrived, self, position))))
            if self._token is not None:
                autograd.metadata_of(graph_node)[self._token] = None

    def follow_more(self, feeding: Feeding) -> None:
        """Hook the nodes of a second derivative, too; from now on only the end of a pass tells that all have come."""
        self._expected = 0
        self.follow(feeding)

    def watch_writes(self, tensor: Tensor, outputs: list[Tensor]) -> None:
        """Note how often the memory of the input was written to, if one of the outputs is a view of it."""
        if any(found is not tensor and _is_of_same_memory(found, tensor) for found in outputs):
            self._is_written = memory.write_watch(tensor)

    def watch_total(self, tensor: Tensor, edge: Edge, feeding: Feeding, unseen: range) -> None:
        """Compare the share with the total of the input, ``tensor``, in each pass; see ``watch_unseen``."""
        self._expected = 0

        def arrived(total: Tensor, is_fed_unseen: Callable[[], bool]) -> None:
            task = autograd.backward_task()
            is_all = total is self._sums.get(task, (0, None))[1]
            if self.is_dead():
                self._total.remove()  # from what outlives the graph
            elif self._gradients.is_open and not is_all and is_fed_unseen():
                self._sums.pop(task, None)
                self._gradients.heard(self.run)
                self.refuse(PAST_THE_SHARE)

        self._token = mark(feeding)
        self._total = watch_unseen(self._gradients.pass_graph, tensor, edge, unseen, self._token, arrived)
        self.more += (self._total,)

    def why_refused(self) -> str:
        """Why a missing or partial share is not the truth; empty if it is."""
        if self._is_written is None or not self._is_written():
            return ""
        return "the module returned a view of its input, which was changed in place later: torch hides its share"

    @property
    def is_open(self) -> bool:
        """Whether its session is still open."""
        return self._gradients.is_open

    def is_dead(self) -> bool:
        """Whether the graph of the call is gone. Where somebody may hold on to a part of it, only some time later."""
        is_gone = all(handle.hooks_dict_ref() is None for handle in self.handles)
        if self._total is None or self._total.hooks_dict_ref() is None:
            return is_gone
        return is_gone and (self.fired or not self._gradients.is_recent(self.run))

    def remove(self) -> None:
        super().remove()
        for handle in self.handles:
            handle.remove()

    def arrive(self, gradient: Tensor | None) -> None:
        """A node has run and hands ``gradient`` to the input; None is counted, and adds nothing."""
        task = autograd.backward_task()
        if task not in self._sums:
            while len(self._sums) > _NESTED:  # of passes that raised
                del self._sums[min(self._sums)]
            if self._expected != 1:
                autograd.at_backward_end(partial(self.finish, task))
        come, total = self._sums.get(task, (0, None))
        if gradient is not None:
            total = gradient if total is None else _sum(total, gradient)
        self._sums[task] = come + 1, total
        if come + 1 == self._expected:
            self.finish(task)

    def finish(self, task: int) -> None:
        """Deliver the sum of the backward pass ``task``, once: when all have come, else at the end of the pass."""
        _, total = self._sums.pop(task, (0, None))
        if total is None or not self._gradients.is_open:
            return
        self._gradients.seen(self.run)
        refused = self.why_refused()
        if refused:
            self.refuse(refused)
        else:
            self.deliver(total)


def _sum(total: Tensor, gradient: Tensor) -> Tensor:
    """The sum of two parts of a gradient; torch adds a dense one to a sparse one in one order alone."""
    return gradient + total if total.is_sparse and not gradient.is_sparse else total + gradient


def _share_arrived(share: _Share, position: int, handed: tuple[Tensor | None, ...], _given: Any) -> None:
    """The hook of a node that hands a part of the share to the input, as ``handed[position]``."""
    node = autograd.current_node()
    if node is None:
        share.refuse(IN_COMPILED_PASS)
        return
    target = node.next_functions[position][0]
    if not share._gradients.is_open or target is None or not autograd.is_due(target):
        return
    gradient = handed[position]
    if gradient is not None and is_wrapper(gradient):
        share.run.has_backward = True
        share.refuse(BATCHED)
    else:
        share.arrive(gradient)


def _holders(tensor: Tensor, given: Arguments) -> int:
    """How many references there are to a tensor that a call is given, and to the containers that it may lie in."""
    around = [one for one in (*given.args, *given.kwargs.values()) if isinstance(one, (list, dict, tuple))]
    return memory.holders_of(tensor) + sum(map(sys.getrefcount, around))


def _is_cached(feeding: Feeding, leaf: Tensor) -> bool:
    """Whether one of the nodes at a leaf is the copy that autocast keeps, and goes on giving to others."""
    kind = leaf.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return (
        is_on
        and torch.is_autocast_cache_enabled()
        and any(node.name().startswith("ToCopyBackward") for node, _ in feeding)
    )


def roots_of(output: Any, given: Any, module: nn.Module) -> list[Tensor]:
    """Where the effect of a call leaves it: what it returned, arguments that it wrote to, attributes of the module.

    ``given`` are the arguments. The tensors from which the walk over the autograd graph starts; some may need no grad.
    """
    return [*iter_deep(given), *iter_deep(output), *kept_by(module)]


def shows_elsewhere(tensor: Tensor, given: Any, alias: Tensor | None = None) -> bool:
    """Whether another tensor among the arguments shows the memory of ``tensor``, too. ``alias``: none that counts."""
    others = (other for other in iter_deep(given) if other is not tensor and other is not alias)
    return any(memory.shares(other, tensor) for other in others)


def mark(feeding: Feeding) -> object:
    """A new token in the metadata of nodes, which says that they are known."""
    token = object()
    for node, _ in feeding:
        autograd.metadata_of(node)[token] = None
    return token


def watch_unseen(
    graph: PassGraph,
    tensor: Tensor,
    edge: Edge,
    unseen: range,
    token: object,
    arrived: Callable[[Tensor, Callable[[], bool]], object],
) -> Any:
    """Call ``arrived`` in each backward pass that brings the input ``tensor`` its total; returns the handle.

    It is given the total, and a function that looks through the pass for nodes of the call, by their numbers
    ``unseen``, that hand something to ``edge`` as well and do not have the ``token`` of known ones (``mark``): a user's
    hook may collect what it sees, a list outside of the model may hold it.
    """
    position, count = edge[1], PASSES.differentiable

    def is_fed_unseen() -> bool:
        nodes = graph.handing_to(position)
        numbers = [unseen, *made_since(count)]  # also what differentiable passes have made of nodes that were not found
        return nodes is None or any(
            any(autograd.sequence_of(node) in one for one in numbers)
            and token not in autograd.metadata_of(node)
            and autograd.is_due(node)
            for node in nodes
        )

    def total_arrived(total: Tensor | None) -> None:
        if total is not None:
            arrived(total, is_fed_unseen)

    if autograd.grad_edge_node(tensor) == edge:
        return on_gradient(tensor, total_arrived)
    return edge[0].register_prehook(uncompiled(lambda given: total_arrived(given[position])))


def _lead_to(older: list[GraphNode], edge: Edge, stops: Set[GraphNode]) -> bool:
    """Whether a node from outside the call, which is behind none of its arguments' ``stops``, hands to ``edge``.

    Then a part of what the module returned was made of the input in another way: by a worker thread of the forward, or
    before the call and kept somewhere. Walks what lies behind such nodes; there are none in most models.
    """
    behind = autograd.nodes_behind(older, {edge[0], *stops})
    return any(onward == edge for node in behind for onward in node.next_functions)


def _is_of_same_memory(found: Tensor, tensor: Tensor) -> bool:
    """Whether one of the two is a view of the other, or both are views of a third."""
    base, other = found._base, tensor._base
    return (base is not None and (base is tensor or base is other)) or (other is not None and other is found)
