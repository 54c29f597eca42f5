"""Autograd graphs that are there long after their use: somebody holds losses, or outputs, with what led to them."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.compat.autograd import graph_life, nearest_nodes, node_life, sequence_of, takes_gradient
from gaff.engine.gradients.tensor_hooks import keep_gradient
from gaff.training.watch.loss_graph import first_numbers, reaches

_MOST_TENSORS = 16  # of one value
_RUNS = 8  # of an evaluation whose graphs are all still there, before somebody is said to hold them
_BEHIND = 16  # nodes nearest to a loss, one of which is enough
_APART, _MARKS = 10, 32  # steps between those that are marked, and how many are known
_HELD, _SPAN = 8, 200  # how many of the latest marks are still there, and over how many steps


class Certainty:
    """Tells whether graphs are held, by marks that live as long as they do.

    What holds itself, as the context of a custom Function that holds its output, is there until Python looks for
    cycles. So it is made to look, once in a run: where graphs go then, nothing is told, now and later.
    """

    def __init__(self) -> None:
        self._is_sure: bool | None = None

    def are_all(self, lives: Callable[[], Sequence[ref[Any]]], least: int) -> bool:
        """Whether as many of the latest graphs, as ``lives`` tells them, are still there as are asked for."""
        if self._is_sure is False or len(lives()) < least:
            return False
        if self._is_sure is None:
            gc.collect()
            self._is_sure = len(lives()) >= least
        return self._is_sure


class EvaluationGraphs:
    """The graphs of what a model returned in an evaluation that runs with gradients, as a rule by mistake.

    ``held``: the model whose graphs the program was found to hold though no gradient was asked for; empty until then.
    ``is_on``: whether the run in progress, or the latest, is one of such an evaluation.
    """

    def __init__(self) -> None:
        self.held = ""
        self.is_on = False
        self._lives: deque[ref[Any]] = deque(maxlen=_RUNS)
        self._held = Certainty()
        self._until_now = ""  # as ``held``, and a backward pass may still come

    def run_begins(self, *, is_asked: bool) -> None:
        """A run that does not train begins; ``is_asked``: it is of a model that is trained, and has gradients."""
        self.is_on = is_asked and not self.held

    def run_ends(self, model: str, output: Any) -> None:
        """That run has returned ``output``; None where it raised."""
        tensors = [one for _, one in islice(iter_tensors(output), _MOST_TENSORS) if takes_gradient(one)]
        made = [one for one in tensors if one.grad_fn is not None]
        if made:
            self._lives.append(graph_life(made))
            for one in made:  # not all passes are told beforehand: ``torch.autograd.grad`` is none of a loss
                keep_gradient(one, self._gradient_came)
        if self._held.are_all(self._there, _RUNS):
            self._until_now = model

    def backward_begins(self) -> None:
        """Graphs are needed: those that were marked may be among them."""
        self.is_on, self._until_now = False, ""
        self._lives.clear()

    def training_goes_on(self) -> None:
        """A run that trains begins, or all is over: no gradient was asked for since the evaluation began."""
        self.held = self.held or self._until_now
        self.backward_begins()

    def _gradient_came(self, _gradient: Tensor) -> None:
        self._until_now = ""
        self._lives.clear()

    def _there(self) -> list[ref[Any]]:
        return [life for life in self._lives if life() is not None]


class LossGraphs:
    """The graphs behind losses of the step in progress, of the step before it, and of some that were looked at."""

    def __init__(self) -> None:
        # numbers of the first nodes behind the losses of the step before, and of this one
        self._ends: tuple[set[int], set[int]] = (set(), set())
        self._steps = 0
        self._newest = -1  # number of the newest node that was marked
        self._marks: dict[str, deque[tuple[int, ref[Any]]]] = {}  # by loss: steps, and their marks
        self._held = Certainty()

    def add(self, loss: Tensor) -> None:
        """Backward begins from this loss; known are the first nodes behind it."""
        self._ends[1].update(first_numbers(loss))

    def step_ends(self) -> None:
        """The next loss is one of another step."""
        self._ends = self._ends[1], set()
        self._steps += 1

    def are_inside(self, loss: Tensor) -> bool:
        """Whether the graph behind this loss holds one of the step before."""
        return bool(self._ends[0]) and reaches(loss, self._ends[0])

    def are_held(self, loss: Tensor, name: str) -> bool:
        """Mark the first loss of this name in a step that is looked at; returns whether those of earlier ones are held.

        That is, those of the latest eight steps or more that were marked, over 200 steps. One of the nodes nearest to
        the loss is enough: somebody may hold a part of it, or what the model returned.
        """
        marks = self._marks.setdefault(name, deque(maxlen=_MARKS))
        found = self._held.are_all(lambda: _latest(marks), _HELD)
        if not marks or self._steps - marks[-1][0] >= _APART:
            near = [node for node in nearest_nodes(loss, _BEHIND) if node.next_functions]
            new = [node for node in near if sequence_of(node) > self._newest]  # none that all steps share
            self._newest = max(map(sequence_of, near), default=self._newest)
            marks.append((self._steps, node_life(new)))
        return found


def _latest(marks: Sequence[tuple[int, ref[Any]]]) -> list[ref[Any]]:
    """The marks of the latest steps that are all still there; none where they are of too few steps."""
    found: list[tuple[int, ref[Any]]] = []
    for step, life in reversed(marks):
        if life() is None:
            break
        found.append((step, life))
    return [life for _, life in found] if found and found[0][0] - found[-1][0] >= _SPAN else []
