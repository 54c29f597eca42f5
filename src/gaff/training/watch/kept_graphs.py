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
from gaff.compat.autograd import (
    graph_life,
    metadata_of,
    nearest_nodes,
    node_life,
    nodes_behind,
    nodes_of,
    sequence_of,
    takes_gradient,
)

_MOST_TENSORS = 16  # of one value
_RUNS = 8  # of an evaluation whose graphs are all still there, before somebody is said to hold them
_FAR = 10_000  # nodes behind a loss among which those that were marked are looked for
_BEHIND = 16  # nodes nearest to a loss, one of which is enough
_APART, _MARKS = 10, 32  # steps between those that are marked, and how many are known
_FIRST, _NEAR = 4, 64  # nodes behind a loss that are compared with those of the next step
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

    ``is_on``: whether the run in progress, or the latest, is one of such an evaluation. ``is_pending``: some are
    marked, and a gradient may still be asked for, until the next optimizer's step is over.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._has_told = False
        self._lives: deque[ref[Any]] = deque(maxlen=_RUNS)
        self._held = Certainty()
        self._found = ""  # the model whose graphs were all there at some time

    @property
    def is_pending(self) -> bool:
        """Whether passes are to be told."""
        return bool(self._lives) or bool(self._found)

    def run_begins(self, *, is_asked: bool) -> None:
        """A run that does not train begins; ``is_asked``: it is of a model that is trained, and has gradients."""
        self.is_on = is_asked and not self._has_told

    def run_ends(self, model: str, output: Any) -> None:
        """That run has returned ``output``; None where it raised."""
        made = [one for _, one in islice(iter_tensors(output), _MOST_TENSORS) if takes_gradient(one) and one.grad_fn]
        if made:
            self._lives.append(graph_life(made))
        if self._held.are_all(self._there, _RUNS):
            self._found = model

    def pass_begins(self, outputs: Any) -> None:
        """A backward pass begins: where it comes by what was marked, that was needed."""
        marks = {life for one in self._lives if (life := one()) is not None}
        if marks and any(marks & metadata_of(node).keys() for node in islice(nodes_behind(nodes_of(outputs)), _FAR)):
            self._forget()

    def take(self) -> str:
        """An optimizer's step is over, or all is: the model whose graphs were held though no gradient was asked for,
        told once; empty if there is none."""
        found, self._has_told = self._found, self._has_told or bool(self._found)
        self._forget()
        return found

    def _forget(self) -> None:
        self.is_on, self._found = False, ""
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
        self._ends[1].update(_first_numbers(loss))

    def step_ends(self) -> None:
        """The next loss is one of another step."""
        self._ends = self._ends[1], set()
        self._steps += 1

    def are_inside(self, loss: Tensor) -> bool:
        """Whether the graph behind this loss holds one of the step before."""
        return bool(self._ends[0]) and _reaches(loss, self._ends[0])

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


def _first_numbers(loss: Tensor) -> list[int]:
    """The numbers of the first four nodes behind a loss, along the first input of each; no others have them.

    Those of leaves are left out: a parameter has one node as long as any graph holds it.
    """
    node: Any = loss.grad_fn
    found: list[int] = []
    while node is not None and len(found) < _FIRST:
        following = node.next_functions  # made anew each time
        if not following:
            break
        found.append(sequence_of(node))
        for node, _ in following:
            if node is not None:
                break
    return found


def _reaches(loss: Tensor, numbers: set[int]) -> bool:
    """Whether a node of these numbers is among the first 64 behind a loss.

    Not one that converts a parameter: autocast around the whole loop shares these between steps.
    """
    near = islice(nodes_behind(nodes_of([loss])), _NEAR)
    return any(sequence_of(node) in numbers and not _converts_a_leaf(node) for node in near)


def _converts_a_leaf(node: Any) -> bool:
    ends = [one.name() for one, _ in node.next_functions if one is not None]
    return node.name().startswith("ToCopyBackward") and all(end.endswith("AccumulateGrad") for end in ends)
