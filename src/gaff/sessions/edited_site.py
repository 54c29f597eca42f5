"""One edit at one site: whether it acts and how strongly, what is counted and measured of it, and what is told.

``EditedSite`` is the stream that the engine calls. What an edit is lies in ``gaff.edits``, when the site is passed in
the engine, and what must hold of an edit in ``checked_edit``.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import GRADIENT_PORTS, Site
from gaff.address.nested import first_tensor
from gaff.compat import checkpoints, elements, memory
from gaff.edits.event import Edit, Event, uses_event
from gaff.edits.places import Skip, When, holds
from gaff.engine.streams import Stream
from gaff.errors import ExactnessError, GaffError, PlanError
from gaff.sessions.checked_edit import CheckedEdit, need_mixable
from gaff.sessions.edit_size import EditSize
from gaff.sessions.receipt import NO_BACKWARD, NOT_CALLED, ReceiptRow, merge_reasons

_MEASURED_FIRST = 16  # events that are measured one by one; later ones at powers of two, so that long runs pay nothing


class Switch:
    """Whether an edit acts, and how strongly: 1 is the edit itself, 0 nothing, between them a mixture.

    One for each edited site, shared with the sites of its single ops; set by ``Editing.on``, ``off`` and ``strength``
    at any time, read at every event. ``is_plain``: the edit acts just as it was given. Where compiled code holds the
    edit, ``gate`` is the strength, or 0 while it is off, in a tensor that the compiled graph reads.
    """

    __slots__ = ("gate", "has_held", "is_on", "is_plain", "strength")

    def __init__(self) -> None:
        self.is_on = True
        self.is_plain = True  # nothing was switched
        self.has_held = False  # it has held the edit back at some event: whoever set it knows
        self.strength = 1.0
        self.gate: Tensor | None = None  # the same as a number that compiled code reads, where there is some

    def set(self, *, is_on: bool | None = None, strength: float | None = None) -> None:
        """Change whether the edit acts, its strength, or both; None leaves it as it is."""
        self.is_on = self.is_on if is_on is None else is_on
        self.strength = self.strength if strength is None else strength
        self.is_plain = self.is_on and self.strength == 1.0
        if self.gate is not None:  # a new tensor: a graph in progress goes on with the old one
            with torch.inference_mode(False):
                self.gate = torch.tensor([self.strength if self.is_on else 0.0], dtype=torch.float64, device="cpu")


class Family:
    """All streams of one edit session, in the order in which they came, and what they have in common.

    ``streams`` grows while the session is open, where a site names several ops. ``is_open`` ends with the session.
    """

    def __init__(self, *, check_finite: bool, meshes: Sequence[Any] = ()) -> None:
        self.is_open = True
        self.meshes = meshes  # over which tensors are spread, every process computing on the same rows
        self.check_finite = check_finite
        self.streams: list[EditedSite] = []
        self._counts: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)  # of edits, by place or op

    def number(self, site: Site, place: object) -> int:
        """The number of one more edit at a place; of ops the place is the single one, which several patterns may name.

        Edits of patterns for ops have none of their own: each op that is met has.
        """
        is_pattern = site.op is not None and site.op_index is None
        return 0 if is_pattern else next(self._counts[place if site.op is None else replace(site, call=None)])


class Reached(Stream):
    """Sees that an edit of a standard name, made at the op ``site``, comes to the place ``told`` where it is read.

    Which op makes a value was found in one run; in another, as in another mode, it may be another op.
    """

    def __init__(self, pattern: str, site: Site, told: Site) -> None:
        self.told = told
        self._text = f"{pattern}: what {site} makes in this run is not what comes to {told}, or comes several times"
        # by thread and run, since the place was last reached; runs that ended before it leave theirs behind
        self._made: dict[int, tuple[int, list[Callable[[], Tensor | None]]]] = {}
        self._is_written = (site.op or "").endswith("_")  # in place: its own tensor goes on, with these bits

    def edited(self, new: Tensor, run: Any) -> None:
        """The edit has returned this."""
        index, made = self._made.get(get_ident(), (-1, []))
        one = (lambda: new) if self._is_written else weakref.ref(new)
        self._made[get_ident()] = run.index, [*(made if index == run.index else ()), one]

    def add(self, value: Any, run: Any, call: int) -> None:
        """The place is reached. Raises PlanError where the value is not the one that the edit has returned."""
        index, made = self._made.pop(get_ident(), (-1, []))
        made = made if index == run.index else []
        new = made[0]() if made else None
        is_there = isinstance(value, Tensor) and new is not None and (value is new or memory.shares(value, new))
        if self._is_written and new is not None and isinstance(value, Tensor) and not is_there:
            is_there = elements.has_bits(value, new)
        if made and (len(made) > 1 or not is_there):
            raise PlanError(
                f"{self._text}: expected an edit by the address of the op that makes it, as gaff.sites tells it"
            )


class EditedSite(Stream):
    """One edit at one site: the stream that the engine asks what the model goes on with.

    ``place`` is equal for edits at the same site, which act one after the other; ``number`` counts them. Made by
    ``Editing`` before anything is installed; in recomputations of living autograd graphs it is called after the
    session, too. ``size`` counts events at which it acted, ``none`` those where there was no tensor. One stream edits
    each of the tensors in a nested value.
    """

    def __init__(
        self, pattern: str, site: Site, place: tuple[object, ...], edit: Edit, family: Family, number: int = 0,
        *, told: Site | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """``told``: where captures tell the value, of a standard name that is edited elsewhere; edits are told that.

        ``name`` is that name.
        """
        self.pattern = pattern
        self.family = family
        self.site = site
        self.place = place
        self.switch = Switch()
        self.spawned: list[EditedSite] = []  # of single ops, where the site names several
        self.none = 0
        self.lost: list[str] = []  # what could not be edited, found when nothing could be done about it
        self.size = EditSize()
        self.edit = edit
        self.checked = CheckedEdit(edit, told or site, family.meshes, number, name)
        self.checked.reached = None if told is None or told == site else Reached(pattern, site, told)
        self.check_finite = family.check_finite
        is_long = uses_event(edit) or self.check_finite or family.meshes or self.checked.reached
        self._direct_event = None if is_long else Event(told or site, name=name)  # for the short way
        self._passed = 0  # events at which the edit did not act, by ``when`` or by its switch
        self._reasons: dict[str, int] = {}

    def add(self, value: Tensor, run: Any, call: int) -> Tensor | None:
        """A gradient arrives, inside backward: return what backward goes on with, None where it stays as it is.

        Raises ExactnessError in a pass that a checkpointed region runs by itself, such as one for forces: the region is
        computed again without what the edit has made of it.
        """
        strength = self._strength(run, call)
        if strength is None:
            return None
        if checkpoints.is_first_pass():
            told = "it acts on a backward pass inside a checkpoint (use_reentrant=False), which computes again without"
            self.refuse(run, call, f"{told} it; expected use_reentrant=True, or no checkpoint around that pass")
        return self._apply(value, run, call, strength)

    def change(self, value: Tensor, crossing: Any) -> Tensor:
        """A value passes: return what the model goes on with. Raises PlanError where the edit does not fit it.

        A ``crossing`` has a ``memo`` where a checkpoint may run the call again. The first pass notes there whether and
        how strongly the edit acted, with what ``CheckedEdit.again`` needs; the recomputation acts by these notes and
        not by the switch, or gradients would belong to another forward. Raises ExactnessError where it cannot.
        """
        run, call, memo = crossing.run, crossing.call, crossing.memo
        if crossing.is_again:
            first = None if memo is None else memo.get(self)
            return value if first is None else self.checked.again(value, run, call, first)
        strength = self._strength(run, call)
        if strength is None:
            return value
        new = self._apply(value, run, call, strength)
        if self.checked.reached is not None:
            self.checked.reached.edited(new, run)
        if memo is not None:
            memo[self] = self.checked.first_pass(value, new, strength, self.checked.event(run, call))
        return new

    def told(self, old: Tensor, new: Tensor, remark: str) -> None:
        """Compiled code has made the edit: count and measure it, with ``old`` and ``new`` detached.

        Where the edit was off, ``new`` is equal to ``old`` and the event counts as let pass. ``remark`` goes into the
        receipt.
        """
        if remark:
            self.remark(remark)
        if not (self.switch.is_on and self.switch.strength):
            self._passed += 1
            self.switch.has_held = True
            return
        need_mixable(old, self.switch.strength, self.site)
        hits = self.size.hits = self.size.hits + 1
        if hits <= _MEASURED_FIRST or not hits & (hits - 1):
            self.size.add(old, new)

    def expect(self, tensor: Tensor) -> None:
        """The gradient of ``tensor`` is to come: under tensor parallelism its values tell whether it is whole."""
        self.checked.locate(tensor)

    def absent(self, run: Any, call: int, reason: str) -> None:
        """The site was reached, and there is no tensor to edit."""
        self.none += 1
        self.skip(reason)

    def refuse(self, run: Any, call: int, reason: str) -> None:
        """The edit cannot be made truly. Raises ExactnessError, which stops the run or the backward pass.

        While the session closes there is nothing to stop: the reason is put into ``lost``, and ``Editing`` raises when
        the hooks are gone.
        """
        if self.family.is_open:
            raise ExactnessError(f"{self.site}: the edit cannot be made: {reason}")
        self.lost.append(reason)

    def remark(self, text: str) -> None:
        """Something that the reader of the receipt should know; told once."""
        self._reasons.setdefault(text, 1)

    def spawn(self, site: Site, known: Any) -> EditedSite:
        """The stream of one op, where this site names several: with its own counts, under the same switch.

        ``known`` is that of another pattern for the same op; it edits, too, so it is not taken instead.
        """
        place = self.place[0], *site.inside  # as of an exact address of that op
        new = EditedSite(self.pattern, site, place, self.edit, self.family, self.family.number(site, None))
        new.switch = self.switch
        self.spawned.append(new)
        self.family.streams.append(new)
        return new

    @property
    def is_spread(self) -> bool:
        """Whether the model's tensors are spread over processes, and the edit is of the whole."""
        return bool(self.family.meshes)

    @property
    def is_skip(self) -> bool:
        """Whether the edit takes the place of a whole module, by itself or inside ``When``."""
        return isinstance(self.edit.edit if isinstance(self.edit, When) else self.edit, Skip)

    @property
    def is_overdue(self) -> bool:
        """Whether the edit has neither acted nor let anything pass yet, here and at each single op of the site."""
        return not self.size.hits and not self._passed and all(one.is_overdue for one in self.spawned)

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_again: bool) -> Any:
        """The output of a module that is not run: its first input, a constant, or a function of its arguments.

        Raises PlanError where the first input is meant and no argument is or holds a tensor. A constant is copied.
        """
        self.size.hits += not is_again
        edit = self.edit.edit if isinstance(self.edit, When) else self.edit
        value = edit.value if isinstance(edit, Skip) else None
        if value is None:
            first = first_tensor((args, kwargs))
            if first is None:
                raise PlanError(f"{self.site}: skipped, but given no tensor to pass on: expected edits.skip(value)")
            return first[1]
        if isinstance(value, Tensor):
            return value.clone()  # the model may write into what it is given
        return value(*args, **kwargs)

    def wants(self, run: Any, call: int) -> bool:
        """Whether the edit acts at this event. An event at which it does not is counted as let pass."""
        return self._strength(run, call) is not None

    def row(self) -> ReceiptRow:
        """What happened so far, as a row of the receipt. Waits for the device."""
        reasons = [*self._reasons.items(), *self.checked.raised.items(), *((text, 1) for text in self.lost)]
        if self._passed:
            reasons.append((f"let pass {self._passed} times, by when(), off() or a strength of 0", 1))
        if not self.size.hits and not reasons:
            reasons.append((NO_BACKWARD if self.site.port in (*GRADIENT_PORTS, "grad") else NOT_CALLED, 1))
        if self.is_skip and self.size.hits:
            reasons.append(("what the module would have returned was not made: how much that changes is not known", 1))
        numbers = self.size.read()
        if numbers["added_nonfinite"]:
            reasons.insert(0, (f"ADDED {numbers['added_nonfinite']} NON-FINITE ELEMENTS", 1))
        fired, why = self.size.hits + self.none, merge_reasons(reasons)
        return ReceiptRow(self.pattern, str(self.site), fired, self.none, reason=why, **numbers)

    def direct(self, value: Tensor) -> Tensor | None:
        """The common case, a plain edit of our own, at the price of a raw hook; None where it is not that case.

        Taken only by an edit that needs no event, has acted before and is neither switched nor checked. Whatever is
        unusual returns None, after which ``change`` goes the long way round and says what is wrong.
        """
        event, size = self._direct_event, self.size
        if event is None or not size.hits or not self.switch.is_plain:
            return None
        try:
            new = self.edit.change(value, event)
        except (RuntimeError, GaffError):
            return None  # the long way round says why
        if type(new) is not Tensor or new.dtype is not value.dtype or new.shape != value.shape or new._is_view():
            return None
        hits = size.hits = size.hits + 1
        if hits <= _MEASURED_FIRST or not hits & (hits - 1):
            size.add(value, new)
        return new

    def _strength(self, run: Any, call: int) -> float | None:
        """How strongly the edit acts at this event; None, counted as let pass, where it does not."""
        is_now = not uses_event(self.edit) or holds(self.edit, self.checked.event(run, call))
        if is_now and self.switch.is_on and self.switch.strength:
            return self.switch.strength
        self._passed += 1
        self.switch.has_held = self.switch.has_held or is_now
        return None

    def _apply(self, value: Tensor, run: Any, call: int, strength: float) -> Tensor:
        """Make the edit, count the event, and measure it if it is one of the first or of a power of two.

        With ``check_finite`` every event is measured and the number is read, which waits for the device. Raises
        PlanError then for elements that the edit made NaN or infinite.
        """
        new, size = self.checked.change(value, run, call, strength), self.size
        hits = size.hits = size.hits + 1
        if hits <= _MEASURED_FIRST or not hits & (hits - 1) or self.check_finite:
            added = size.add(value, new)
            if self.check_finite and elements.is_readable(value) and added.item():
                raise PlanError(f"{self.site}: the edit made {added.item()} non-finite elements, in run {run.index}")
        return new

    def skip(self, reason: str) -> None:
        """An event that could not be edited, or a reason why none came; equal reasons are counted."""
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
