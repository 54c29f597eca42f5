"""What an edit does at one site: applies it, checks what it returned, repeats it, and measures the change.

``EditedSite`` is the stream that the engine calls. What an edit is lies in ``gaff.edits`` and when it acts in the
engine; here stands what must hold of it: a wrong shape, a write into the argument, or another result in a recomputation
raises before the model goes on with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import GRADIENT_PORTS, Key, Site
from gaff.address.nested import first_tensor
from gaff.compat import elements, memory, modes
from gaff.edits.event import Edit, Event, uses_event
from gaff.edits.files import tensors_of
from gaff.edits.places import Skip, When
from gaff.errors import ExactnessError, GaffError, PlanError
from gaff.sessions.edit_size import EditSize, plain
from gaff.sessions.receipt import ReceiptRow, merge_reasons

NOT_CALLED = "it was not called"
NO_BACKWARD = "no gradient came by while the session was open"
_MEASURED_FIRST = 16  # events that are measured one by one; later ones at powers of two, so that long runs pay nothing


class Switch:
    """Whether an edit acts, and how strongly: 1 is the edit itself, 0 nothing, between them a mixture.

    One for each edited site, shared with the sites of its single ops; set by ``Editing.on``, ``off`` and ``strength``
    at any time, read at every event. ``is_plain``: the edit acts just as it was given. Where compiled code holds the
    edit, ``gate`` is the strength, or 0 while it is off, in a tensor that the compiled graph reads.
    """

    __slots__ = ("gate", "is_on", "is_plain", "strength")

    def __init__(self) -> None:
        self.is_on = True
        self.is_plain = True  # nothing was switched
        self.strength = 1.0
        self.gate: Tensor | None = None  # the same as a number that compiled code reads, where there is some

    def set(self, *, is_on: bool | None = None, strength: float | None = None) -> None:
        """Change whether the edit acts, its strength, or both; None leaves it as it is."""
        self.is_on = self.is_on if is_on is None else is_on
        self.strength = self.strength if strength is None else strength
        self.is_plain = self.is_on and self.strength == 1.0
        if self.gate is not None:  # a new tensor: a graph in progress goes on with the old one
            self.gate = torch.tensor([self.strength if self.is_on else 0.0])


class Family:
    """All streams of one edit session, in the order in which they came, and what they have in common.

    ``streams`` grows while the session is open, where a site names several ops.
    """

    def __init__(self, *, check_finite: bool) -> None:
        self.check_finite = check_finite
        self.streams: list[EditedSite] = []


class EditedSite:
    """One edit at one site: the stream that the engine asks what the model goes on with.

    ``place`` is equal for edits at the same site, which act one after the other. Made by ``Editing`` before anything is
    installed; ``is_open`` ends with the session, but in recomputations of living autograd graphs it is called after
    that, too. ``hits`` counts events at which it acted, ``none`` those where there was no tensor.
    """

    def __init__(self, pattern: str, site: Site, place: object, edit: Edit, family: Family) -> None:
        check_finite = family.check_finite
        self.pattern = pattern
        self.family = family
        self.site = site
        self.place = place
        self.switch = Switch()
        self.spawned: list[EditedSite] = []  # of single ops, where the site names several
        self.hits = 0
        self.none = 0
        self.is_open = True
        self.has_failed = False  # its last event ended in an error
        self.lost: list[str] = []  # what could not be edited, found when nothing could be done about it
        self.measured = EditSize()
        self.edit = edit
        self._is_pure = edit.is_pure
        self._needs_event = uses_event(edit)
        self._is_direct = not self._needs_event and not check_finite
        self._any_event = Event(site)
        self._constants = tuple(tensors_of(edit)) if edit.is_pure else ()
        self.check_finite = check_finite
        self._passed = 0  # events at which the edit did not act, by ``when`` or by its switch
        self._reasons: dict[str, int] = {}

    def add(self, value: Tensor, run: Any, call: int) -> Tensor | None:
        """A gradient arrives, inside backward: return what backward goes on with, None where it stays as it is."""
        strength = self._strength(run, call)
        return None if strength is None else self._apply(value, run, call, strength)

    def change(self, value: Tensor, passage: Any, is_again: bool) -> Tensor:
        """A value passes: return what the model goes on with. Raises PlanError where the edit does not fit it.

        A ``passage`` has a ``memo`` where a checkpoint may run the call again. The first pass notes there whether and
        how strongly the edit acted, sums over what went in and came out unless the edit is pure, and the versions of
        its constants; the recomputation (``is_again``) acts by these notes and not by the switch, or gradients would
        belong to another forward. Raises ExactnessError where it cannot.
        """
        run, call, memo = passage.run, passage.call, passage.memo
        if is_again:
            decided = None if memo is None else memo.get(self)
            return value if decided is None else self._repeat(value, run, call, *decided)
        strength = self._strength(run, call)
        if strength is None:
            return value
        new = self._apply(value, run, call, strength)
        if memo is not None:
            memo[self] = (
                strength,
                None if self._is_pure else (_checksum(value), _checksum(new)),
                _versions(self._constants),
            )
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
            return
        _need_mixable(old, self.switch.strength, self.site)
        hits = self.hits = self.hits + 1
        if hits <= _MEASURED_FIRST or not hits & (hits - 1):
            self.measured.add(old, new)

    def absent(self, run: Any, call: int, reason: str) -> None:
        """The site was reached, and there is no tensor to edit."""
        self.none += 1
        self.skip(reason)

    def refuse(self, run: Any, call: int, reason: str) -> None:
        """The edit cannot be made truly. Raises ExactnessError, which stops the run or the backward pass.

        While the session closes there is nothing to stop: the reason is put into ``lost``, and ``Editing`` raises when
        the hooks are gone.
        """
        if self.is_open:
            raise ExactnessError(f"{self.site}: the edit cannot be made: {reason}")
        self.lost.append(reason)

    def remark(self, text: str) -> None:
        """Something that the reader of the receipt should know; told once."""
        self._reasons.setdefault(text, 1)

    def at(self, key: Key) -> EditedSite:
        """Itself: one stream edits each of the tensors in a nested value."""
        return self

    def spawn(self, site: Site, known: Any) -> EditedSite:
        """The stream of one op, where this site names several: with its own counts, under the same switch.

        ``known`` is that of another pattern for the same op; it edits, too, so it is not taken instead.
        """
        new = EditedSite(self.pattern, site, (self.place, site), self.edit, self.family)
        new.switch = self.switch
        self.spawned.append(new)
        self.family.streams.append(new)
        return new

    @property
    def is_skip(self) -> bool:
        """Whether the edit takes the place of a whole module, by itself or inside ``When``."""
        return isinstance(self.edit.edit if isinstance(self.edit, When) else self.edit, Skip)

    @property
    def is_overdue(self) -> bool:
        """Whether the edit has neither acted nor let anything pass yet, here and at each single op of the site."""
        return not self.hits and not self._passed and all(one.is_overdue for one in self.spawned)

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_again: bool) -> Any:
        """The output of a module that is not run: its first input, a constant, or a function of its arguments.

        Raises PlanError where the first input is meant and no argument is or holds a tensor. A constant is copied.
        """
        self.hits += not is_again
        edit = self.edit.edit if isinstance(self.edit, When) else self.edit
        value = edit.value if isinstance(edit, Skip) else None
        if value is None:
            first = first_tensor(args, kwargs)
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
        reasons = [*self._reasons.items(), *((text, 1) for text in self.lost)]
        if self._passed:
            reasons.append((f"let pass {self._passed} times, by when() or off()", 1))
        if not self.hits and not reasons:
            is_gradient = self.site.port in (*GRADIENT_PORTS, "grad")
            reasons.append((NO_BACKWARD if is_gradient else NOT_CALLED, 1))
        numbers = self.measured.read()
        if numbers["added_nonfinite"]:
            reasons.insert(0, (f"ADDED {numbers['added_nonfinite']} NON-FINITE ELEMENTS", 1))
        return ReceiptRow(self.pattern, str(self.site), self.hits + self.none, self.none,
                          reason=merge_reasons(reasons), hits=self.hits, **numbers)  # fmt: skip

    def direct(self, value: Tensor) -> Tensor | None:
        """The common case, a plain edit of our own, at the price of a raw hook; None where it is not that case.

        Taken only by an edit that needs no event, has acted before and is neither switched nor checked. Whatever is
        unusual returns None, after which ``change`` goes the long way round and says what is wrong.
        """
        if not (self._is_direct and self.hits and self.switch.is_plain):
            return None
        try:
            new = self.edit.change(value, self._any_event)
        except (RuntimeError, GaffError):
            return None  # the long way round says why
        if type(new) is not Tensor or new.dtype is not value.dtype or new.shape != value.shape:
            return None
        hits = self.hits = self.hits + 1
        if hits <= _MEASURED_FIRST or not hits & (hits - 1):
            self.measured.add(value, new)
        return new

    def _strength(self, run: Any, call: int) -> float | None:
        """How strongly the edit acts at this event; None, counted as let pass, where it does not."""
        is_now = not isinstance(self.edit, When) or self.edit.holds(self._event(run, call))
        if is_now and self.switch.is_on and self.switch.strength:
            return self.switch.strength
        self._passed += 1
        return None

    def _event(self, run: Any, call: int) -> Event:
        return Event(self.site, run.index, call, run.step)

    def _apply(self, value: Tensor, run: Any, call: int, strength: float) -> Tensor:
        """Compute what goes on, count the event, and measure it if it is one of the first or of a power of two.

        With ``check_finite`` every event is measured and the number is read, which waits for the device. Raises
        PlanError then for elements that the edit made NaN or infinite.
        """
        new = self._compute(value, run, call, strength)
        hits = self.hits = self.hits + 1
        if hits <= _MEASURED_FIRST or not hits & (hits - 1) or self.check_finite:
            added = self.measured.add(value, new)
            if self.check_finite and added.item():
                raise PlanError(f"{self.site}: the edit made {added.item()} non-finite elements, in run {run.index}")
        return new

    def _repeat(
        self, value: Tensor, run: Any, call: int, strength: float, checksums: Any, versions: tuple[int, ...]
    ) -> Tensor:
        """Compute the edit again in a recomputation, and see that nothing is different from the first pass.

        What it returned is compared only where what went in has the same bits: without that nothing can be expected.
        Raises ExactnessError for a function that returned something else, and for constants that were written to.
        """
        if versions != _versions(self._constants):
            raise ExactnessError(
                f"{self.site}: a tensor of the edit was written to between the forward and the recomputation of a "
                "checkpoint: expected it unchanged until backward() is done"
            )
        new = self._compute(value, run, call, strength)
        is_equal = checksums is not None and _is_same(_checksum(value), checksums[0])
        if is_equal and not _is_same(_checksum(new), checksums[1]):
            raise ExactnessError(
                f"{self.site}: the edit returned another value in the recomputation of a checkpoint, so gradients "
                "would be wrong: expected a function of the tensor alone; noise goes by gaff.edits.noise"
            )
        return new

    def _compute(self, value: Tensor, run: Any, call: int, strength: float) -> Tensor:
        """What the edit makes of ``value``, mixed by ``strength`` and checked: a tensor alike, and ``value`` untouched.

        ``has_failed`` stays set when anything goes wrong: closing must then not complain that the edit never acted.
        Errors of a function of the user pass as they are, with a note of the site; those of torch in an edit of our own
        are about its constants, and become a PlanError.
        """
        version = 0 if self._is_pure else memory.version_of(value)
        try:
            event = self._event(run, call) if self._needs_event else self._any_event
            change = _change_sparse if value.is_sparse else _change_plain
            new = change(self.edit, value, event)
        except GaffError as error:
            self.has_failed = True
            raise type(error)(f"{self.site}: {error}") from error
        except RuntimeError as error:
            self.has_failed = True
            if not self._is_pure:
                self._add_note(error, run, call)
                raise
            what = str(error).splitlines()[0][:160]  # of torch, about the constants of one of our own edits
            kind = "" if value.layout == torch.strided else f" as {value.layout}"
            raise PlanError(f"{self.site}: the edit does not fit {_text(value, value)}{kind}: {what}") from error
        except Exception as error:
            self.has_failed = True
            self._add_note(error, run, call)
            raise
        self.has_failed = True  # unless what follows is right
        if not self._is_pure and memory.version_of(value) != version:
            raise PlanError(
                f"{self.site}: the edit wrote into what it was given: expected a new tensor, t * 2 not t.mul_(2)"
            )
        if strength == 1.0 and type(new) is Tensor and _is_alike(new, value):
            self.has_failed = False
            return new
        if not isinstance(new, Tensor):
            raise PlanError(f"{self.site}: the edit returned {type(new).__name__} {new!r:.40}: expected a tensor")
        if not _is_alike(new, value):
            raise PlanError(f"{self.site}: the edit returned {_text(new, value)} where {_text(value, new)} passes")
        new = new if strength == 1.0 else _mix(value, new, strength, self.site)
        self.has_failed = False
        return new

    def _add_note(self, error: Exception, run: Any, call: int) -> None:
        """Say with an error of the user's function where it happened, as a note of the exception."""
        if hasattr(error, "add_note"):
            error.add_note(f"gaff: in the edit at {self.site}, run {run.index}, call {call}")

    def skip(self, reason: str) -> None:
        """An event that could not be edited, or a reason why none came; equal reasons are counted."""
        self._reasons[reason] = self._reasons.get(reason, 0) + 1


def _change_plain(edit: Edit, value: Tensor, event: Event) -> Tensor:
    """Call the edit; our own ones get float8 as float32 and are rounded back, since torch computes with no float8."""
    if edit.is_pure and elements.is_small_float(value):  # torch computes with no float8: our own edits in float32
        return edit.change(value.float(), event).to(value.dtype)
    return edit.change(value, event)


def _change_sparse(edit: Edit, value: Tensor, event: Event) -> Tensor:
    """Edits that leave zeros zero act on the values that a sparse gradient has; others get it as it is."""
    if not getattr(edit, "keeps_zero", False):
        return edit.change(value, event)
    value = value.coalesce()
    new = edit.change(value.values(), event)
    return torch.sparse_coo_tensor(value.indices(), new, value.shape, is_coalesced=True, check_invariants=False)


def _versions(constants: tuple[Tensor, ...]) -> tuple[int, ...]:
    """How often each constant was written to: another number than before means that it has changed."""
    return tuple(memory.version_of(constant) for constant in constants)


def _need_mixable(value: Tensor, strength: float, site: Site) -> None:
    """Raises PlanError for a mixture of tensors that have no values between: integers and truth values."""
    if strength != 1.0 and not (value.is_floating_point() or value.is_complex()):
        raise PlanError(f"{site}: strength {strength} of an edit of {value.dtype}: expected 0 or 1, it cannot be mixed")


def _mix(value: Tensor, new: Tensor, strength: float, site: Site) -> Tensor:
    """``value + strength * (new - value)``: float8 by way of float32, sparse ones by sums, the rest by ``lerp``."""
    _need_mixable(value, strength, site)
    if value.layout != torch.strided:
        return value * (1 - strength) + new * strength
    if elements.is_small_float(value):
        return torch.lerp(value.float(), new.float(), strength).to(value.dtype)
    return torch.lerp(value, new, strength)


def _is_alike(new: Tensor, old: Tensor) -> bool:
    """Whether a tensor can take the place of another: the same dtype, shape, device and layout."""
    return new.dtype is old.dtype and new.shape == old.shape and new.device == old.device and new.layout is old.layout


def _checksum(tensor: Tensor) -> Tensor:
    """Some hundred sums that tell one tensor from another, by value and by place; they stay on the device.

    64 sums of the columns and 64 of the rows of the elements laid out as 64 columns and as 64 rows, then the rest that
    does not fill a row: a changed element shows, and so does a changed order.
    """
    with torch.no_grad(), modes.outside_modes():
        flat = plain(tensor).flatten()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        flat = flat.to(torch.float64 if flat.dtype == torch.float64 or not flat.is_floating_point() else torch.float32)
        side = flat.numel() // 64
        body, rest = flat[: side * 64], flat[side * 64 :]
        return torch.cat([body.view(-1, 64).sum(0), body.view(64, -1).sum(1), rest])


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two checksums have the same bits, by which NaN is equal to itself. Waits for the device."""
    with modes.outside_modes():
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # bits: NaN is equal to itself


def _text(tensor: Tensor, other: Tensor) -> str:
    """Shape and dtype for a message, and device and layout where they differ from those of ``other``."""
    text = f"{'x'.join(map(str, tensor.shape)) or 'a scalar'} {str(tensor.dtype).removeprefix('torch.')}"
    text += f" on {tensor.device}" if tensor.device != other.device else ""
    return text + (f" as {tensor.layout}" if tensor.layout != other.layout else "")
