"""A module's own share of the gradient at its input, found by walking the autograd graph; nothing is inserted.

A tensor that goes into a module may also be used elsewhere, in a residual connection for instance; its gradient is
then the sum of several parts, of which autograd keeps none. This is about the part that passes through the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from gaff.address.nested import iter_deep, iter_tensors
from gaff.compat import autograd, memory
from gaff.compat.autograd import is_wrapper
from gaff.engine.clock import Frame, Run
from gaff.engine.gradients.pending import BATCHED, Armed, Gradients
from gaff.engine.gradients.ports import RETURNED_INPUT, GradientArm, find_input
from gaff.engine.streams import ExitArm, Stream


class InputShare(GradientArm):
    """The module's own part of the gradient at its input, as a module backward hook would show it.

    Finds the autograd nodes that were created inside the call and hand a gradient to the input, and adds up what they
    hand over, in the order in which autograd does. Nothing is inserted: upstream gradients keep their bits.

    Begins at the entry, where the number of the next node is noted, and ends at the exit, by ``exit_arm``. What cannot
    be told apart is refused: a tensor given twice, an input returned as it is, a view that was written to.
    """

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int) -> None:
        if not self._wants(call):
            return
        tensor = find_input(args, kwargs, self._site, self._stream, self._is_exact)
        if tensor is None:
            return
        given = [other for _, other in iter_tensors((args, kwargs))]
        twins = sum(other is tensor for other in given)
        if not tensor.requires_grad:
            self._gradients.arm_later(tensor, _ShareOfLate(self._stream), run, call)
        elif twins > 1:
            self._stream.refuse(run, call, f"the same tensor came in {twins} times: their shares cannot be told apart")
        else:
            for other in given:  # a stale view gets its node when it is asked for: before the call, not inside it
                _ = other.grad_fn
            edge, since = autograd.grad_edge_node(tensor), autograd.next_sequence()
            self._frame(run).notes[self] = (tensor, edge, since, memory.version_of(tensor), call, (args, kwargs))

    def _leave(self, output: Any, run: Run) -> None:
        """Find, when the module returned, the nodes that make up its share, and hook them."""
        noted = self._frame(run).notes.pop(self, None)
        if noted is None:
            return
        tensor, edge, since, version, call, given = noted
        outputs = [found for _, found in iter_tensors(output)]
        is_changed = memory.version_of(tensor) != version
        if any(found is tensor for found in outputs) and not is_changed:
            self._stream.refuse(run, call, f"{RETURNED_INPUT}: ask for :input_grad, the total gradient")
        elif tensor._is_view() and is_changed:
            self._stream.refuse(run, call, "the input is a view that the module changed in place")
        else:
            roots = [other for other in roots_of(output, given, self._node.module) if other is not tensor]
            if is_changed:
                roots.append(tensor)
            self._follow(find_feeding(roots, edge, since), run, call)

    def _follow(self, feeding: list[tuple[GraphNode, int]], run: Run, call: int) -> None:
        """Hook the nodes of a share, and let it be told when all of them have run."""
        if not feeding:
            self._stream.absent(run, call, "what the module returned does not depend on this input")
            return
        share = _Share(self._gradients, self._stream, run, call, len(feeding))
        for graph_node, position in feeding:
            share.handles.append(graph_node.register_hook(partial(_share_arrived, share, position)))
        self._gradients.add(share)

    def exit_arm(self) -> ShareExit:
        """The half that runs when the module returns."""
        return ShareExit(self._leave)

    def _frame(self, run: Run) -> Frame:
        """The innermost call of the module that is in progress, in the run or in its recomputation."""
        frames = run.frames if autograd.backward_task() == -1 else self._node.clock.replay_frames()
        return next(frame for frame in reversed(frames) if frame.owner is self._node)


class ShareExit(ExitArm):
    """The second half of an ``InputShare``, at the exit of the module; what never came is told by the first."""

    def __init__(self, leave: Callable[[Any, Run], None]) -> None:
        self._leave = leave

    def __call__(self, output: Any, given: tuple[Any, Any], run: Run, call: int) -> None:
        self._leave(output, run)


class _ShareOfLate(Stream):
    """Stands for a stream whose input came to require grad after the module was entered: its share is refused."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def add(self, value: Any, run: Run, call: int) -> None:
        self.refuse(run, call, "the input came to require grad inside the module: ask for :input_grad, the total")

    def absent(self, run: Run, call: int, reason: str) -> None:
        self._stream.absent(run, call, reason)

    def refuse(self, run: Run, call: int, reason: str) -> None:
        self._stream.refuse(run, call, reason)


class _Share(Armed):
    """Sums the shares of one backward pass; hands over the sum when all have come, or the pass has ended.

    A pass may reach only some of the nodes, when a loss depends on a part of the output: then its end decides. A pass
    that comes by again begins a new sum. ``expected`` is the number of nodes that hand something to the input.
    """

    __slots__ = ("_come", "_expected", "_gradients", "_sum", "_task", "handles")

    def __init__(self, gradients: Gradients, stream: Stream, run: Run, call: int, expected: int) -> None:
        super().__init__(stream, run, call)
        self.handles: list[Any] = []
        self._expected = expected
        self._gradients = gradients
        self._task = -1
        self._come = 0
        self._sum: Tensor | None = None

    def is_dead(self) -> bool:
        return all(handle.hooks_dict_ref() is None for handle in self.handles)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def arrive(self, gradient: Tensor | None) -> None:
        """A node has run and hands ``gradient`` to the input; None is counted, and adds nothing."""
        task = autograd.backward_task()
        if task != self._task:
            self._task, self._come, self._sum = task, 0, None
            if self._expected > 1:
                autograd.at_backward_end(partial(self.finish, task))
        self._come += 1
        if gradient is not None:
            self._sum = gradient if self._sum is None else self._sum + gradient
        if self._come == self._expected:
            self.finish(task)

    def finish(self, task: int) -> None:
        """Deliver the sum of the backward pass ``task``, once: when all have come, else at the end of the pass."""
        if task != self._task or not self._gradients.is_open:
            return
        self._task = -1
        total, self._sum = self._sum, None
        self._gradients.seen(self.run)
        if total is not None:
            self.deliver(total)


def _share_arrived(share: _Share, position: int, handed: tuple[Tensor | None, ...], _given: Any) -> None:
    """The hook of a node that hands a part of the share to the input, as ``handed[position]``."""
    if not share._gradients.is_open:
        return
    gradient = handed[position]
    if gradient is not None and is_wrapper(gradient):
        share.run.has_backward = True
        share.refuse(BATCHED)
    else:
        share.arrive(gradient)


def roots_of(output: Any, given: Any, module: nn.Module) -> list[Tensor]:
    """Where the effect of a call leaves it: what it returned, arguments that it wrote to, attributes of the module.

    ``given`` are the arguments. The tensors from which the walk over the autograd graph starts; some may need no grad.
    """
    return [*iter_deep(given), *(tensor for _, tensor in iter_tensors(output)), *_kept_by(module)]


def find_feeding(roots: Iterable[Tensor], edge: tuple[GraphNode, int], since: int) -> list[tuple[GraphNode, int]]:
    """The nodes made since ``since`` that hand a gradient to ``edge``, each with the position at which it does.

    ``roots`` are where the walk begins, ``edge`` is the node of the input and its output number, ``since`` the
    sequence number of the first node of the call. The walk stops at older nodes, so it costs what the call itself
    made.
    """
    waiting = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    seen: set[GraphNode] = set()
    found = []
    while waiting:
        node = waiting.pop()
        if node in seen or autograd.sequence_of(node) < since:
            continue
        seen.add(node)
        for position, (onward, number) in enumerate(node.next_functions):
            if onward is None:
                continue
            if onward is edge[0] and number == edge[1]:
                found.append((node, position))
            else:
                waiting.append(onward)
    return found


def _kept_by(module: nn.Module) -> Iterable[Tensor]:
    """The tensors that a module keeps as attributes: a loss put aside during the call carries a share, too."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, (Tensor, list, tuple, dict)):
                yield from (tensor for tensor in iter_deep(value) if tensor.requires_grad)
