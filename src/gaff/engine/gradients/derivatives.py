"""Second derivatives: what a differentiable backward pass makes of a call's nodes belongs to the call, too.

Such a pass (``create_graph=True``) makes nodes while it runs those of the forward, and a later pass goes through them.
Before one begins, the nodes of the calls whose shares are asked for are found in its graph and hooked, each before and
after it runs: a call has left a mark on its nodes. Passes that are not differentiable pay nothing for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gaff.compat import autograd
from gaff.compat.compiler import leave_once_loaded, never_traced, uncompiled
from gaff.compat.replacements import Announced, Replacements
from gaff.engine.gradients.reach import NEVER, Edge, Feeding, find_feeding
from gaff.engine.process.stack_room import passed_over


class Follower(Protocol):
    """The share of one call, as far as it hears of further nodes."""

    handles: list[Any]

    @property
    def is_open(self) -> bool:
        """Whether its session is still open."""

    def follow_more(self, feeding: Feeding) -> None:
        """Hook nodes of a derivative that hand something to the input, too."""

    def refuse(self, reason: str) -> None:
        """Tell that the share cannot be told exactly."""


class Derivatives:
    """The nodes whose backward makes nodes that hand a gradient to the input, too: those of one call, and theirs.

    Held by hooks and metadata of the autograd graph alone, so that it lives and dies with that: it lies in the metadata
    of the nodes of the call, and says there whether that is hooked. torch makes the Python object of a node anew when
    nobody holds it, and to hold it here would be a circle.
    """

    def __init__(self, share: Follower, edge: Edge) -> None:
        self.share = share
        self._edge = edge

    def follow(self, node: GraphNode) -> None:
        """Hook one node before and after it runs, and remember the number that autograd had reached before."""
        metadata = autograd.metadata_of(node)
        if metadata.get(self) or node is self._edge[0] or hasattr(node, "variable"):
            return
        metadata[self] = True
        first: list[int] = []

        def before(gradients: Any) -> None:
            first[:] = [autograd.next_sequence()]

        def after(handed: tuple[Tensor | None, ...], _given: Any) -> None:
            if autograd.is_grad_enabled() and self.share.is_open and first:
                self._made(handed, first[0])

        self.share.handles += [node.register_prehook(uncompiled(before)), node.register_hook(uncompiled(after))]

    def _made(self, handed: tuple[Tensor | None, ...], since: int) -> None:
        """A node has run with grad mode on and made others since ``since``: they belong to the call, too."""
        made: set[GraphNode] = set()
        roots = [tensor for tensor in handed if tensor is not None]
        if any(autograd.takes_gradient(one) and autograd.grad_edge_node(one) == self._edge for one in roots):
            self.share.refuse("a custom Function hands on its input itself: a part of its share has no node of its own")
        feeding, _, _ = find_feeding(roots, self._edge, since, made=made)
        made = {node for node in made if not autograd.metadata_of(node).get(self)}
        self.share.follow_more([(node, position) for node, position in feeding if node in made])
        for node in made:
            self.follow(node)


def follow_derivatives(share: Follower, made: set[GraphNode], edge: Edge) -> None:
    """Let the share of a call, which has made the nodes ``made``, hear of derivatives."""
    PASSES.is_followed = True
    derivatives = Derivatives(share, edge)
    for node in made:
        if autograd.sequence_of(node) < NEVER:  # no accumulator of a leaf, which everybody uses
            autograd.metadata_of(node).setdefault(derivatives, False)


_MADE: deque[range] = deque(maxlen=256)  # the numbers of nodes that each of the last differentiable passes has made
# How many passes there have been while somebody wanted to know: differentiable ones; those that began outside of other
# ones, as those inside of reentrant checkpoints do not. And whether the share of any call was ever followed.
PASSES = SimpleNamespace(differentiable=0, outermost=0, is_followed=False)


def made_since(count: int) -> list[range]:
    """The numbers of nodes that differentiable passes have made since there had been ``count`` of them."""
    new = PASSES.differentiable - count
    return list(_MADE)[-new:] if new else []


def _begins(outputs: Any) -> None:
    """A differentiable pass begins from ``outputs``: hook the nodes behind them of every call that is followed."""
    for node in autograd.nodes_behind(autograd.nodes_of(outputs)):
        for one in [one for one in autograd.metadata_of(node) if isinstance(one, Derivatives)]:
            if one.share.is_open:
                one.follow(node)


def _run_backward(told: Callable[[Any], None], run: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own call of its engine, which tells of passes before they begin, and looks into differentiable ones."""

    @passed_over
    @wraps(run)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        PASSES.outermost += autograd.backward_task() == -1
        told(outputs)
        if not PASSES.is_followed or not (args[2] if len(args) > 2 else kwargs.get("create_graph")):
            return run(outputs, *args, **kwargs)
        _begins(outputs)
        first = autograd.next_sequence()
        try:
            return run(outputs, *args, **kwargs)
        finally:
            _MADE.append(range(first, autograd.next_sequence()))
            PASSES.differentiable += 1

    return leave_once_loaded(run_backward)


# A backward pass is about to begin: told with its outputs.
backward_passes = Announced(
    lambda told: Replacements((torch.autograd, "_engine_run_backward", partial(_run_backward, never_traced(told))))
)
