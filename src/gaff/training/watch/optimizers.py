"""Optimizers of a run: which of them count, and which one's steps are the steps of the run."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from gaff.training.watch.models import Models
from gaff.training.watch.updates import parameters_of

_OFTEN = 4  # optimizers that took over from others, before the run is said to be many short trainings
_SHORT = 64  # steps of each of them, at most
_SETTLED = 16  # steps in which the optimizers of one training come one by one


class _Made:
    """How many steps the parameters of one optimizer have had, by it and by those before it; ``named``: their names.

    ``which``: the identity of the optimizer, which may be gone; ``first``, ``last``: its first and latest step, counted
    in those of all.
    """

    __slots__ = ("first", "last", "named", "steps", "which")

    def __init__(self, which: int, named: set[Any]) -> None:
        self.which = which
        self.named = named
        self.steps = self.first = self.last = 0


class Optimizers:
    """Which optimizers count, and which one's steps are the steps of the run.

    ``given``: only these count, and those that take over from them; none: those that own parameters of ``models``, or
    all where ``is_any``. A step of the run ends with a step of the leader. That is the first optimizer that makes one;
    another takes its place when it makes a second step before the leader has made one: the leader is gone, or steps
    less often. One that begins late with a model of its own takes it at once, as in another training.

    All but those given are held weakly, and parameters not at all, which torch may have to swap. ``counts``: how many
    steps each that has made one has made; ``made``: those of all, also of optimizers that are gone; ``others``: how
    many steps were made that do not count.
    """

    def __init__(self, given: Iterable[Any], models: Models, *, is_any: bool) -> None:
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps of each
        self.others = 0
        self.made = 0
        self._renewed = 0  # optimizers that took over all parameters of another
        self._has_moved = False  # such a one has begun with weights that were written to since
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given = list(given)
        self._models = models
        self._is_any = is_any
        self._leader: weakref.ref[Any] | None = None
        self._has_changed = False  # as ``leads_from_now`` tells
        self._now: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps since the leader's last
        self._made_by: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()
        self._all: list[_Made] = []  # also of optimizers that are gone
        self._owners: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def has(self, optimizer: Any) -> bool:
        """Whether the steps of ``optimizer`` count; asked anew of its parameters when their number has changed."""
        if self._given:
            return any(one is optimizer for one in self._given) or self._takes_over(optimizer)
        if self._is_any:
            return True
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._owners.get(optimizer)
        if known is None or known[0] != size:
            owns = any(self._models.name_of(parameter) for _, parameter in parameters_of(optimizer))
            known = self._owners[optimizer] = size, owns
        return known[1]

    def _takes_over(self, optimizer: Any) -> bool:
        """Whether an optimizer owns all parameters of one that was given, whose place it takes then: it was made for
        the next part of the training, or makes the steps of a wrapper that was given. What is no parameter of a model
        any more, as of a head that was replaced, does not count."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._owners.get(optimizer) == (size, False):
            return False
        mine = {id(parameter) for _, parameter in parameters_of(optimizer)}
        for at, one in enumerate(self._given):
            theirs = {id(parameter) for _, parameter in parameters_of(one)}
            if (theirs and theirs <= mine) or self._replaces(optimizer, one, mine):
                self._given[at] = optimizer
                return True
        self._owners[optimizer] = size, False
        return False

    def _replaces(self, optimizer: Any, other: Any, mine: set[int]) -> bool:
        """Whether parameters of a model, which ``other`` owned, have been replaced, and ``optimizer`` owns the rest."""
        known = self._made_by.get(other)
        if known is None or not known.named:
            return False  # it never owned any
        self._models.reread()
        left = [one for _, one in parameters_of(other) if self._models.name_of(one) is not None]
        has_lost = len(left) < sum(1 for _ in parameters_of(other))
        owns = any(self._models.name_of(one) is not None for _, one in parameters_of(optimizer))
        return has_lost and owns and {id(one) for one in left} <= mine

    def leaves_out(self, optimizer: Any) -> bool:
        """Whether a step that ``optimizer`` has made does not count; such steps are counted apart."""
        is_other = not self.has(optimizer)
        self.others += is_other
        return is_other

    @property
    def known(self) -> int:
        """How many optimizers there are, as far as is known: those given, or those that have made a step, if more."""
        return max(len(self._given), len(self.counts))

    @property
    def in_use(self) -> int:
        """How many of those that have made a step go on: others made none since the leader's first, as those of a
        training do that is over."""
        leader = self._leader() if self._leader is not None else None
        began = self._made_by[leader].first if leader is not None else 0
        return sum(self._made_by[one].last >= began for one in self.counts)

    @property
    def is_single(self) -> bool:
        """Whether there is one: it was given, or this is not the first step of all, after which others may follow.

        As they do where each parameter has an optimizer of its own.
        """
        return self.known == 1 and (len(self._given) == 1 or self.made > 1)

    @property
    def are_of_tasks(self) -> bool:
        """Whether the run is many short trainings: optimizers have taken over from one another again and again, after
        a few dozen steps each, and one of them with weights that somebody had written anew."""
        return self._has_moved and self._are_short_lived

    def begin_elsewhere(self) -> None:
        """An optimizer begins, with weights that were written to since the step before."""
        self._has_moved = self._has_moved or self._are_short_lived

    @property
    def _are_short_lived(self) -> bool:
        return self._renewed >= _OFTEN and self.made <= _SHORT * self._renewed

    def number_of(self, optimizer: Any, stepped: Collection[int] = ()) -> int:
        """How many steps its parameters have had before the one that it is about to make.

        ``stepped``: the optimizers, by identity, that made theirs in the same step of the run.

        An optimizer that takes over from another (a second phase of a training, with groups or settings of its own)
        goes on with the number of that one, which may be gone by now.
        """
        known = self._made_by.get(optimizer)
        if known is None:
            named = {self._models.name_of(parameter) for _, parameter in parameters_of(optimizer)} - {None}
            known = self._made_by[optimizer] = _Made(id(optimizer), named)
            for other in self._all:
                if other.named & named:
                    known.steps = max(known.steps, other.steps - (other.which in stepped))
            kept = [one for one in self._all if not one.named <= named]  # a new one for each epoch, say
            self._renewed += len(kept) < len(self._all)
            self._all = [*kept, known]
        return known.steps

    def leads_from_now(self, optimizer: Any) -> bool:
        """Whether this one, which has just made a step and is not the leader, becomes it: once in a whole run.

        For a run whose steps would end in the middle of an iteration, as between the halves of one of a GAN, and part
        forwards from their backward passes.
        """
        leader = self._leader() if self._leader is not None else None
        if self._has_changed or leader is None or leader is optimizer:
            return False
        if self.counts.get(leader) != self.counts.get(optimizer):  # one of them steps more often
            return False
        self._has_changed, self._leader = True, weakref.ref(optimizer)
        self._now.clear()
        return True

    @property
    def has_begun(self) -> bool:
        """Whether the leader has just made its second step, with which another one takes the lead."""
        leader = self._leader() if self._leader is not None else None
        return leader is not None and self.counts.get(leader) == 2

    def stepped(self, optimizer: Any, stepped: Collection[int] = ()) -> bool:
        """Count a step of ``optimizer``; whether it ends a step of the run, being the leader's.

        ``stepped``: those that made theirs before it in the same step of the run, as for ``number_of``.
        """
        self.made += 1
        self.number_of(optimizer, stepped)
        known = self._made_by[optimizer]
        known.steps += 1
        known.first, known.last = known.first or self.made, self.made
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        leader = self._leader() if self._leader is not None else None
        if leader is not optimizer:
            twice = self._now[optimizer] = self._now.get(optimizer, 0) + 1
            if leader is not None and twice == 1 and not self._begins_late(leader, optimizer):
                return False
            self._leader = weakref.ref(optimizer)
        if self._now:
            self._now.clear()
        return True

    def _begins_late(self, leader: Any, optimizer: Any) -> bool:
        """Whether ``optimizer`` has just made its first step, after many of the leader, and owns parameters of a model
        that no other optimizer has any of."""
        if self.counts[optimizer] > 1 or self.counts.get(leader, 0) < _SETTLED:
            return False
        mine = self._made_by[optimizer]
        others = {model for one in self._all if one is not mine for model, _ in one.named}
        return any(model not in others for model, _ in mine.named)

    def take_new(self) -> list[Any]:
        """Those that have made a step since this was last asked for the first time."""
        new = [one for one in self.counts if one not in self._told]
        self._told.update(new)
        return new

    def forget(self) -> None:
        """Watching has ended: hold none of the user's optimizers."""
        self._given.clear()
