"""Edited parameters: other values stand in for them during a run, and again in its recomputations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gaff import compat
from gaff.engine.clock import Frame, Run
from gaff.engine.modules import Node
from gaff.engine.replay import Passage
from gaff.engine.stream import EditStream
from gaff.select import Found


class Swap:
    """One edited parameter, wherever the model holds it. Never writes into the parameter."""

    def __init__(self, found: Found, stream: EditStream, owners: Sequence[nn.Module]) -> None:
        self._found = found
        self._stream = stream
        self._owners = owners
        self._original: Tensor | None = None  # while another stands in
        self._passages: dict[Run, Passage] = {}

    def begin(self, run: Run) -> None:
        """A run begins: compute the value with its graph, and let it stand in everywhere."""
        self.restore()
        passage = self._passages[run] = Passage(run, 0)
        passage.memo = {}  # the decision is kept, whether or not a checkpoint follows
        self._stand_in(passage, is_again=False)

    def end(self, run: Run, output: Any) -> None:
        """The run is over."""
        self.restore()
        self._passages.pop(run, None)

    def scope(self, node: Node) -> SwapScope:
        """What repeats the edit when a checkpoint recomputes ``node``."""
        return SwapScope(self, node)

    def passage(self, run: Run) -> Passage | None:
        return self._passages.get(run)

    def again(self, passage: Passage, frame: Frame) -> None:
        """A recomputation enters a module: until it leaves it, the value of that run stands in again."""
        if self._original is None:
            self._stand_in(passage, is_again=True)
            frame.at_leave.append(self.restore)

    def restore(self) -> None:
        """The parameter is back in its place."""
        if self._original is not None:
            original, self._original = self._original, None
            self._put(original)

    def _stand_in(self, passage: Passage, *, is_again: bool) -> None:
        tensor = self._found.tensor
        # what the edit saves for backward must not be counted by a checkpoint around it: its two passes differ in that
        plain = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with plain, compat.outside_modes():
            new = self._stream.change(tensor, passage, is_again)
        if new is not tensor:
            self._put(new)
            self._original = tensor

    def _put(self, new: Tensor) -> None:
        old = self._found.tensor
        for owner in self._owners:
            for name in [name for name, value in owner._parameters.items() if value is old]:
                owner._parameters[name] = new  # type: ignore[assignment]
            for held in (value for value in vars(owner).values() if isinstance(value, list)):  # as LSTM keeps them
                held[:] = [new if value is old else value for value in held]


class SwapScope:
    """At the entry of a module around the parameter: a recomputation of it needs the value of its run."""

    is_gradient = False

    def __init__(self, swap: Swap, node: Node) -> None:
        self._swap = swap
        self._node = node

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool) -> None:
        if not is_again:
            first = self._swap.passage(passage.run)
            if first is not None and passage.memo is not None:
                passage.memo[self] = first
        elif passage.memo is not None and self in passage.memo:
            frame = next(frame for frame in reversed(self._node.clock.replay_frames()) if frame.owner is self._node)
            self._swap.again(passage.memo[self], frame)

    def give_up(self, run: Any, call: int) -> None:
        return
