"""Autograd graphs that are there long after their use: somebody holds losses, or outputs, with what led to them."""

from __future__ import annotations

import gc
from collections import deque
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.compat.autograd import graph_life, takes_gradient
from gaff.training.watch.loss_graph import first_numbers, reaches

_MOST_TENSORS = 64  # of one value
_RUNS = 8  # of an evaluation whose graphs are all still there, before somebody is said to hold them
_STEPS = 20  # that were looked at, as many


class KeptGraphs:
    """Marks graphs, one after another, without holding them, and tells once all of the latest ones are still there.

    ``most``: how many that is. Used on the thread that trains.
    """

    def __init__(self, most: int) -> None:
        self._lives: deque[ref[Any]] = deque(maxlen=most)
        self._is_sure: bool | None = None  # that somebody holds them; False: they go when Python collects cycles

    def add(self, value: Any) -> None:
        """Mark the graph behind the tensors in ``value``; one without a graph is passed over."""
        made = [one for _, one in islice(iter_tensors(value), _MOST_TENSORS) if takes_gradient(one)]
        if any(one.grad_fn is not None for one in made):
            self._lives.append(graph_life(made))

    def forget(self) -> None:
        """Let go of all marks."""
        self._lives.clear()

    @property
    def are_held(self) -> bool:
        """Whether as many as are asked for were marked, and the graph of each is still there.

        What holds itself, as the context of a custom Function that holds its output, is there until Python looks for
        cycles. So it is made to look, once: nothing is told of graphs that are gone then, now and later.
        """
        if self._is_sure is False or len(self._lives) != self._lives.maxlen or not self._are_there():
            return False
        if self._is_sure is None:
            gc.collect()
            self._is_sure = self._are_there()
        return self._is_sure

    def _are_there(self) -> bool:
        return all(life() is not None for life in self._lives)


class EvaluationGraphs:
    """The graphs of what a model returned in an evaluation that runs with gradients, as a rule by mistake.

    ``held``: the model whose graphs the program was found to hold though no backward pass came; empty until then.
    ``is_on``: whether the run in progress, or the latest, is one of such an evaluation.
    """

    def __init__(self) -> None:
        self.held = ""
        self.is_on = False
        self._kept = KeptGraphs(_RUNS)
        self._until_now = ""  # as ``held``, and a backward pass may still come

    def run_begins(self, *, is_asked: bool) -> None:
        """A run that does not train begins; ``is_asked``: it is of a model that is trained, and has gradients."""
        self.is_on = is_asked and not self.held

    def run_ends(self, model: str, output: Any) -> None:
        """That run has returned ``output``; None where it raised."""
        self._kept.add(output)
        if self._kept.are_held:
            self._until_now = model

    def backward_begins(self) -> None:
        """Graphs are needed: those that were marked may be among them."""
        self.is_on, self._until_now = False, ""
        self._kept.forget()

    def training_goes_on(self) -> None:
        """A run that trains begins: no backward pass has come since the evaluation began, and none will."""
        self.held = self.held or self._until_now
        self.backward_begins()


class LossGraphs:
    """The graphs behind losses of the step in progress, of the step before it, and of some that were looked at."""

    def __init__(self) -> None:
        # numbers of the first nodes behind the losses of the step before, and of this one
        self._ends: tuple[set[int], set[int]] = (set(), set())
        self._kept: dict[str, KeptGraphs] = {}  # by loss

    def add(self, loss: Tensor) -> None:
        """Backward begins from this loss; known are the first nodes behind it."""
        self._ends[1].update(first_numbers(loss))

    def step_ends(self) -> None:
        """The next loss is one of another step."""
        self._ends = self._ends[1], set()

    def are_inside(self, loss: Tensor) -> bool:
        """Whether the graph behind this loss holds one of the step before."""
        return bool(self._ends[0]) and reaches(loss, self._ends[0])

    def are_held(self, loss: Tensor, name: str) -> bool:
        """Mark the first loss of this name in a step that is looked at; returns whether those of 20 before are held."""
        kept = self._kept.setdefault(name, KeptGraphs(_STEPS))
        found = kept.are_held
        kept.add(loss)
        return found
