"""Gradients by tensor hooks: at outputs, at inputs, a module's own share, of parameters and of plain tensors.

Looking inserts nothing into the graph. No hook holds the tensor that it sits on (it would never be freed).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from gaff import compat
from gaff.address import Key, Site, print_key
from gaff.engine.clock import Frame, Run
from gaff.engine.modules import Node
from gaff.engine.stream import Stream
from gaff.errors import SiteError
from gaff.values import dig, dig_argument, first_tensor, iter_tensors

NO_GRAD_MODE = "grad mode was off in this call, and nothing recomputed it"
NEEDS_NONE = "the tensor does not require grad"
NOT_REACHED = "backward ran, but no gradient reached this tensor"


class Armed:
    """One tensor hook that waits: whose gradient it will be."""

    __slots__ = ("call", "fired", "handle", "run", "stream")

    def __init__(self, stream: Stream, run: Run, call: int) -> None:
        self.stream = stream
        self.run = run
        self.call = call
        self.fired = False
        self.handle: Any = None

    def is_dead(self) -> bool:
        """Whether the graph that the hook sits on is gone."""
        return self.handle is None or self.handle.hooks_dict_ref() is None

    def why_refused(self) -> str:
        """Why a missing gradient is not None; empty where None is the truth."""
        return ""


class ArmedView(Armed):
    """On a view: torch never calls its hook once it or its base has been changed in place."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, stream: Stream, run: Run, call: int, tensor: Tensor) -> None:
        super().__init__(stream, run, call)
        self._version = _version(tensor)
        self._tensor = weakref.ref(tensor)

    def why_refused(self) -> str:
        tensor = self._tensor()
        if tensor is not None and _version(tensor) == self._version:
            return ""
        was = "was changed in place later" if tensor is not None else "may have been changed in place later"
        return f"no gradient arrived, and it is a view that {was}: torch then tells none"


class Gradients:
    """All gradient hooks of one session; what they are waiting for, and their removal."""

    def __init__(self) -> None:
        self.is_open = True
        self.has_leaves = False  # gradients of parameters are wanted, which ask whose backward pass it is
        self.has_backward = False  # a backward pass of any run has been seen
        self._armed: list[Armed] = []
        self._prune_at = 256
        self._tasks: dict[int, Run] = {}

    def arm(self, tensor: Tensor, stream: Stream, run: Run, call: int) -> None:
        """Tell ``stream`` every gradient that arrives at ``tensor``, which must require grad."""
        if tensor._is_view():
            _ = tensor.grad_fn  # torch 2.13 can crash when a hook is set on a stale view
            armed: Armed = ArmedView(stream, run, call, tensor)
        else:
            armed = Armed(stream, run, call)
        armed.handle = tensor.register_hook(partial(_arrived, self, armed))
        self.add(armed)

    def add(self, armed: Armed) -> None:
        """Keep an armed hook until its graph is gone, to remove it at closing."""
        self._armed.append(armed)
        if len(self._armed) > self._prune_at:
            self._prune()

    def run_of(self, task: int) -> Run | None:
        """The run in whose backward pass ``task`` this thread is, as far as a gradient of it has been seen."""
        return self._tasks.get(task)

    def seen(self, run: Run) -> None:
        """A gradient of ``run`` has come by in the current backward pass."""
        run.has_backward = self.has_backward = True
        if len(self._tasks) > 64:
            self._tasks.clear()
        self._tasks[compat.backward_task()] = run

    def watch(self, output: Any, run: Run) -> None:
        """Note on ``run`` when a backward pass comes by one of the tensors that it returned."""
        for _, tensor in iter_tensors(output):
            if tensor.requires_grad:
                self.arm(tensor, _Mark(), run, 0)

    def close(self) -> None:
        """Remove every hook; what a backward pass left out is told to the streams as None."""
        self.is_open = False
        for armed in self._armed:
            _settle(armed)
            armed.handle.remove()
        self._armed.clear()

    def _prune(self) -> None:
        kept = []
        for armed in self._armed:
            if armed.is_dead():
                _settle(armed)
            else:
                kept.append(armed)
        self._armed = kept
        self._prune_at = 2 * len(kept) + 256


class _Mark:
    """A stream that keeps nothing: its hook is there to note the backward pass on its run."""

    def add(self, value: Any, run: Run, call: int) -> None:
        return

    def absent(self, run: Run, call: int, reason: str) -> None:
        return

    def refuse(self, run: Run, call: int, reason: str) -> None:
        return

    def skip(self, reason: str) -> None:
        return

    def at(self, key: Key) -> Stream:
        return self


class _Arm:
    """Sets the gradient hooks of one site. ``is_exact``: the user named this very site, so a miss is an error."""

    def __init__(self, gradients: Gradients, node: Node, stream: Stream, site: Site, is_exact: bool) -> None:
        self._gradients = gradients
        self._node = node
        self._stream = stream
        self._site = site
        self._is_exact = is_exact
        self._is_plain = site.call is None and not site.key

    def give_up(self, run: Run, call: int) -> None:
        if self._wants(call):
            self._stream.absent(run, call, NO_GRAD_MODE)

    def _wants(self, call: int) -> bool:
        return self._site.call is None or self._site.call == call

    def _arm(self, tensor: Tensor, stream: Stream, run: Run, call: int) -> None:
        if tensor.requires_grad:
            self._gradients.arm(tensor, stream, run, call)
        else:
            stream.absent(run, call, NEEDS_NONE)


class OutputGradient(_Arm):
    """The gradient at a module's output."""

    def __call__(self, output: Any, run: Run, call: int) -> None:
        if type(output) is Tensor and self._is_plain and output.requires_grad:
            self._gradients.arm(output, self._stream, run, call)
            return
        if not self._wants(call):
            return
        try:
            value = dig(output, self._site.key)
        except KeyError as error:
            _missing(self._site, self._stream, self._is_exact, error)
            return
        found = list(iter_tensors(value))
        if not found:
            self._stream.absent(run, call, "there is no tensor in this output")
            return
        if len(found) > 1 and self._is_exact:
            raise _ambiguous(self._site, self._site.key, found)
        for key, tensor in found:
            self._arm(tensor, self._stream.at(key) if key else self._stream, run, call)


class InputGradient(_Arm):
    """The total gradient of a tensor that came in: all its uses together."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int) -> None:
        if self._wants(call):
            tensor = find_input(args, kwargs, self._site, self._stream, self._is_exact)
            if tensor is not None:
                self._arm(tensor, self._stream, run, call)


class InputShare(_Arm):
    """The module's own part of the gradient at its input, as a module backward hook would show it.

    Finds the autograd nodes that were created inside the call and hand a gradient to the input, and adds up what
    they hand over, in the order in which autograd does. Nothing is inserted: upstream gradients keep their bits.
    """

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int) -> None:
        if not self._wants(call):
            return
        tensor = find_input(args, kwargs, self._site, self._stream, self._is_exact)
        if tensor is None:
            return
        twins = sum(other is tensor for _, other in iter_tensors((args, kwargs)))
        if not tensor.requires_grad:
            self._stream.absent(run, call, NEEDS_NONE)
        elif twins > 1:
            self._stream.refuse(run, call, f"the same tensor came in {twins} times: their shares cannot be told apart")
        else:
            noted = (tensor, compat.grad_edge_node(tensor), compat.next_sequence(), _version(tensor), call)
            self._frame(run).notes[self] = noted

    def _leave(self, output: Any, run: Run, call: int) -> None:
        noted = self._frame(run).notes.pop(self, None)
        if noted is None:
            return
        tensor, edge, since, version, call = noted
        outputs = [found for _, found in iter_tensors(output)]
        is_changed = _version(tensor) != version
        if any(found is tensor for found in outputs) and not is_changed:
            self._stream.refuse(
                run, call, "the module returned its input itself: ask for :input_grad, the total gradient"
            )
        elif tensor._is_view() and is_changed:
            self._stream.refuse(run, call, "the input is a view that the module changed in place")
        else:
            self._follow(_feeding([*outputs, *_tensors_on(self._node.module)], edge, since), run, call)

    def _follow(self, feeding: list[tuple[GraphNode, int]], run: Run, call: int) -> None:
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
        frames = run.frames if compat.backward_task() == -1 else self._node.clock.replay_frames()
        return next(frame for frame in reversed(frames) if frame.owner is self._node)


class ShareExit:
    """The second half of an ``InputShare``; what never came is told by the first."""

    def __init__(self, leave: Callable[[Any, Run, int], None]) -> None:
        self._leave = leave

    def __call__(self, output: Any, run: Run, call: int) -> None:
        self._leave(output, run, call)

    def give_up(self, run: Run, call: int) -> None:
        return


class _Share(Armed):
    """Sums the shares of one backward pass; hands over the sum when all have come, or the pass has ended."""

    __slots__ = ("_come", "_gradients", "_sum", "_task", "expected", "handles")

    def __init__(self, gradients: Gradients, stream: Stream, run: Run, call: int, expected: int) -> None:
        super().__init__(stream, run, call)
        self.expected = expected
        self.handles: list[Any] = []
        self.handle = self
        self._gradients = gradients
        self._task = -1
        self._come = 0
        self._sum: Tensor | None = None

    def hooks_dict_ref(self) -> Any:
        """Stands for a tensor hook's handle: None once every node is gone."""
        return next((True for handle in self.handles if handle.hooks_dict_ref() is not None), None)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def arrive(self, gradient: Tensor | None) -> None:
        task = compat.backward_task()
        if task != self._task:
            self._task, self._come, self._sum = task, 0, None
            if self.expected > 1:
                compat.at_backward_end(partial(self.finish, task))
        self._come += 1
        if gradient is not None:
            with torch.no_grad():
                self._sum = gradient.detach() if self._sum is None else self._sum + gradient.detach()
        if self._come == self.expected:
            self.finish(task)

    def finish(self, task: int) -> None:
        if task != self._task or not self._gradients.is_open:
            return
        self._task = -1
        total, self._sum = self._sum, None
        self._gradients.seen(self.run)
        if total is not None:
            self.fired = True
            self.stream.add(total, self.run, self.call)


def find_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], site: Site, stream: Stream, is_exact: bool
) -> Tensor | None:
    """The tensor that an input address means; None, and the stream is told why, where there is none."""
    if not site.key:
        first = first_tensor(args, kwargs)
        if first is None:
            _missing(site, stream, is_exact, KeyError("the call was given no tensor"))
            return None
        return first[1]
    try:
        value = dig_argument(args, kwargs, site.key)
    except KeyError as error:
        _missing(site, stream, is_exact, error)
        return None
    found = list(iter_tensors(value))
    if len(found) != 1:
        if is_exact and found:
            raise _ambiguous(site, site.key, found)
        stream.skip(f"{len(found)} tensors at {print_key(site.key)}, expected one")
        return None
    return found[0][1]


def _missing(site: Site, stream: Stream, is_exact: bool, error: KeyError) -> None:
    if is_exact:
        raise SiteError(f"{site}: {error.args[0]}") from None
    stream.skip(str(error.args[0]))


def _ambiguous(site: Site, key: Key, found: list[tuple[Key, Tensor]]) -> SiteError:
    names = ", ".join(f"{Site(site.path, port=site.port, key=(*key, *inner))}" for inner, _ in found[:8])
    return SiteError(f"{site}: its value holds {len(found)} tensors, a gradient belongs to one; say which: {names}")


def _arrived(gradients: Gradients, armed: Armed, gradient: Tensor) -> None:
    if gradients.is_open:
        armed.fired = True
        armed.run.has_backward = True
        if gradients.has_leaves:
            gradients.seen(armed.run)
        armed.stream.add(gradient, armed.run, armed.call)


def _share_arrived(share: _Share, position: int, handed: tuple[Tensor | None, ...], _given: Any) -> None:
    if share._gradients.is_open:
        share.arrive(handed[position])


def _settle(armed: Armed) -> None:
    if armed.fired or not armed.run.has_backward:
        return
    armed.fired = True
    refused = armed.why_refused()
    if refused:
        armed.stream.refuse(armed.run, armed.call, refused)
    else:
        armed.stream.absent(armed.run, armed.call, NOT_REACHED)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _feeding(roots: Iterable[Tensor], edge: tuple[GraphNode, int], since: int) -> list[tuple[GraphNode, int]]:
    """Nodes made since ``since``, reachable from ``roots``, that hand a gradient to ``edge``, and at which position."""
    waiting = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    seen: set[GraphNode] = set()
    found = []
    while waiting:
        node = waiting.pop()
        if node in seen or compat.sequence_of(node) < since:
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


def _tensors_on(module: nn.Module) -> Iterable[Tensor]:
    """Tensors that a module keeps as attributes: a loss put aside during the call also carries a share."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, (Tensor, list, tuple, dict)):
                yield from (tensor for _, tensor in iter_tensors(value) if tensor.requires_grad)
