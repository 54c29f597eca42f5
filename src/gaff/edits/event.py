"""What an edit is, and what it may know of the moment at which it acts.

``Edit`` is the protocol that everything in this folder follows, ``Event`` what it is told. ``like``, ``remember`` and
``generator`` are what edits share: constants where the tensor is, and random numbers that can be drawn again.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gaff.address.grammar import Site
from gaff.compat import distributed, elements, memory, modes
from gaff.compat.placements import placement_of, whole_of
from gaff.errors import PlanError

# The types of what passes models whose range a constant can leave.
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
         torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
_WHOLE = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64)
_RANGES = (*_REAL, *_WHOLE)


class Event(NamedTuple):
    """One tensor passing one site, once. A gradient has the run, call and step of its forward.

    ``run`` counts the runs of the session and ``call`` those of the module in its run, from 0; ``step`` the optimizer
    steps that were completed when the run began. ``name``: the standard name by which the site was asked for, empty
    for an address. Equal in the forward and in its recomputation.
    """

    site: Site = Site()
    run: int = 0
    call: int = 0
    step: int = 0  # optimizer steps completed when the run began
    name: str = ""  # such as names:resid_post.3

    @property
    def is_gradient(self) -> bool:
        """Whether what passes is a gradient, and not a value or a parameter."""
        return self.site.port not in ("output", "input", "weights", "param")


class EventAmong(Event):
    """An event as one of several edits that act there, one after the other, is told of it.

    ``which``: its place among the edits of the site, then in a list within it, and so on. ``nth``: how many gradients
    have come before with the same run and call, by other backward passes.
    """

    which: tuple[int, ...] = ()
    nth: int = 0


def among(event: Event, at: int, nth: int | None = None) -> Event:
    """The event as the edit with number ``at`` of those that get it is told of it, at its ``nth`` gradient."""
    told = EventAmong(*event)
    told.which = (*getattr(event, "which", ()), at)
    told.nth = getattr(event, "nth", 0) if nth is None else nth
    return told


@runtime_checkable
class Edit(Protocol):
    """Returns the tensor that the model goes on with: of the same shape, dtype and device; never writes into its own.

    ``is_pure``: equal arguments give equal results, so that a recomputation needs no check. Three more attributes are
    read where an edit has them: ``uses_event`` False promises that the event is not asked for, which saves making one;
    ``keeps_zero`` True promises that zeros stay zero element by element, so that of a sparse gradient only the stored
    values need be edited; ``acts_on_parts`` True promises that each element becomes what it would be if it stood alone,
    so that a tensor which is spread over processes need not be put together; ``is_linear`` True, beside that, that of a
    sum each summand may be edited. A function of the user is wrapped into ``Call``.
    """

    @property
    def is_pure(self) -> bool:
        """Whether equal tensors at equal events give equal results, and nothing is written to."""

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """Return the tensor that goes on in the place of ``tensor``. Raises PlanError where the edit does not fit it.

        Called inside a hook, on the thread and in the grad mode of the model's own code; for a gradient inside
        backward, for a parameter with grad mode on when a run begins.
        """


@dataclass(frozen=True, eq=False)
class Call:
    """A function of the tensor alone, or a module (its parameters train through the model).

    Nothing is known of it, so it is not pure: what it returns in a recomputation is compared with the first pass.
    """

    function: Callable[[Tensor], Tensor]
    is_pure = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """What the function returns; whether that fits is checked by the session."""
        return self.function(tensor)


@dataclass(frozen=True, eq=False)
class WithEvent:
    """A function of the tensor and of the event: where and when it passes. Not pure, as ``Call``."""

    function: Callable[[Tensor, Event], Tensor]
    is_pure = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """What the function returns; whether that fits is checked by the session."""
        return self.function(tensor, event)


def mixed(value: Tensor, new: Tensor, strength: float | Tensor) -> Tensor:
    """``value + strength * (new - value)``, what an edit that acts with a part of its strength makes of a tensor.

    What the edit leaves as it is stays so, infinities too. Where either is infinite the difference would be NaN; there
    it is ``(1 - strength) * value + strength * new``.
    """
    at_infinity = torch.where(value == new, value, value * (1 - strength) + new * strength)
    return torch.where(value.isfinite() & new.isfinite(), torch.lerp(value, new, strength), at_infinity)


def uses_event(edit: Edit) -> bool:
    """Whether an edit asks in which run, call or step it acts; one that does not say counts as asking."""
    return bool(getattr(edit, "uses_event", True))


def acts_on_parts(edit: Edit) -> bool:
    """Whether an edit makes of each part of a tensor the part of what it makes of the whole; False where unknown."""
    return bool(getattr(edit, "acts_on_parts", False))


def is_linear(edit: Edit) -> bool:
    """Whether an edit makes of a sum the sum of what it makes of the summands, element by element; False if unknown."""
    return bool(getattr(edit, "is_linear", False))


def with_event(function: Callable[[Tensor, Event], Tensor]) -> WithEvent:
    """An edit by a function that also gets the ``Event``: its ``site``, ``run``, ``call`` and ``step``."""
    return WithEvent(need_callable(function))


def need_callable(function: Any) -> Any:
    """Return ``function``. Raises PlanError when it cannot be called."""
    if not callable(function):
        raise PlanError(f"edit {function!r} cannot be called: expected gaff.edits.scale(0.5), a function or a module")
    return function


def generator(event: Event, seed: int, device: torch.device) -> torch.Generator:
    """Random numbers that depend on seed, site, run, call and step, and leave every global state untouched.

    Of a gradient they depend on how many have come before it for the same call, too, by other backward passes.

    The seed is a hash of all of them (BLAKE2b: Python's own ``hash`` of a text differs between processes), so that no
    event repeats the numbers of another, and a recomputation or a second session draws the same. Of several edits at
    one site each draws its own; the first draws what it would draw alone.
    """
    text = f"{seed}|{event.site}|{event.run}|{event.call}|{event.step}"
    which = getattr(event, "which", ())
    last = max((at for at, number in enumerate(which) if number), default=-1)
    text += "".join(f"|{number}" for number in which[: last + 1])
    before = getattr(event, "nth", 0)
    text += f"|{before} before" if before else ""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator(device=device).manual_seed(number)


def logical(value: Tensor) -> Tensor:
    """All of a constant of which this process may hold a part: a DTensor, or a captured part of a module's output.

    Communicates then: every process must be at the same edit.
    """
    placement = placement_of(value)
    return value if placement is None else whole_of(value, placement)


def like(value: Tensor, tensor: Tensor, known: Known | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """``value`` on the device and in the dtype of ``tensor``, or ``dtype``; converted once, while it has the same bits.

    Of a tensor that is spread over processes ``value`` is the whole, or broadcast to it: this process takes its part.
    ``known`` is the edit's own memory for the converted constant. One that is trained is converted at every event, with
    its gradient, and so is one that is not on the CPU, where a look at its bits would wait for the device. Raises
    PlanError where the conversion would lose something, such as a fraction or an imaginary part.
    """
    if distributed.is_spread(tensor) and not distributed.is_spread(value):
        return distributed.part_of(like(value, distributed.local_of(tensor), dtype=dtype), tensor)
    wanted = tensor.dtype if dtype is None else dtype
    if value.device == tensor.device and value.dtype == wanted:
        return value
    _need_cast(value, wanted)
    if known is None or value.requires_grad or not (value.is_cpu and elements.is_plain(value)):
        return _converted(value, tensor.device, wanted)
    return known.of(value, (tensor.device, wanted), lambda: _converted(value, tensor.device, wanted))


def number(what: str, value: float, tensor: Tensor) -> float:
    """``value`` as a number of the tensor's type: whole for integers. Raises PlanError, naming ``what``, if it is none.

    A fraction would be cut off there, and torch wraps some numbers that are out of range, and takes the next that a
    quantised tensor has.
    """
    need_number(what, value, tensor.dtype, without(value))
    if tensor.is_quantized:
        least, most = _quantized_range(tensor)
        need_number(what, value, tensor.dtype, frozenset([] if least <= value <= most else [tensor.dtype]))
    return int(value) if tensor.dtype in _WHOLE or tensor.dtype == torch.bool else value


def _quantized_range(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest number that a tensor has which is quantised as a whole, and what is rounded to them."""
    if tensor.qscheme() != torch.per_tensor_affine:
        return -math.inf, math.inf
    whole = torch.iinfo(tensor.dtype)
    least, most = ((bound - tensor.q_zero_point()) * tensor.q_scale() for bound in (whole.min - 0.5, whole.max + 0.5))
    return least, most


def need_number(what: str, value: float, dtype: torch.dtype, lacking: frozenset[torch.dtype]) -> None:
    """Raise PlanError where ``dtype`` is one of the types that lack a number."""
    if dtype in lacking:
        is_cut = dtype in (*_WHOLE, torch.bool) and math.isfinite(value) and value != int(value)
        wrong = "would lose its fraction as" if is_cut else "is out of the range of"
        raise PlanError(f"{what} {value!r} {wrong} {dtype}, which passes")


@functools.lru_cache(maxsize=256)
def without(value: float) -> frozenset[torch.dtype]:
    """Types that have no such number: where it would lose a fraction, or is out of range. Floats have infinities."""
    is_whole = math.isfinite(value) and value == int(value)
    whole = (dtype for dtype in _WHOLE if not is_whole or not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max)
    wide = (dtype for dtype in _REAL if math.isfinite(value) and abs(value) > torch.finfo(dtype).max)
    return frozenset((*whole, *wide, *([] if value in (0, 1) else [torch.bool])))


def _converted(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``value`` there and in that dtype. Raises PlanError for numbers that are out of its range; waits for the device.

    Compiled code cannot ask for a number: there ``too_narrow`` has told before what does not fit.
    """
    new = value.to(device, dtype)
    if not torch.compiler.is_compiling() and not _fits(value, new):
        raise PlanError(_out_of_range(value.dtype, dtype))
    return new


def too_narrow(value: Tensor) -> frozenset[torch.dtype]:
    """Types that have not all the numbers of a constant. Waits for the device; to be asked outside compiled code."""
    wanted = (dtype for dtype in _RANGES if dtype != value.dtype and elements.can_cast(value.dtype, dtype))
    return frozenset(dtype for dtype in wanted if not _fits(value, value.to(dtype)))


def _need_cast(value: Tensor, dtype: torch.dtype) -> None:
    if not elements.can_cast(value.dtype, dtype):
        raise PlanError(f"a constant of {value.dtype} would lose something as {dtype}, which passes")


def need_room(value: Tensor, dtype: torch.dtype, narrow: frozenset[torch.dtype]) -> None:
    """Raise PlanError where ``dtype`` would lose something of a constant, or is one of those too ``narrow`` for it."""
    _need_cast(value, dtype)
    if dtype in narrow:
        raise PlanError(_out_of_range(value.dtype, dtype))


def _fits(value: Tensor, new: Tensor) -> bool:
    """Whether a constant's numbers are in the range of the type of ``new``, its copy, and not all too small for it.

    One that is trained is not asked. Reads numbers, so the process waits for the device.
    """
    if value.requires_grad or not elements.is_readable(new) or not value.numel():
        return True
    old, wide = value.detach().to(new.device), elements.wide_type(new)
    if new.dtype.is_floating_point or new.dtype.is_complex:
        kept = new.float() if elements.is_small_float(new) else new
        if not bool(kept.any()) and bool(old.any()):
            return False
        parts = torch.view_as_real(old.resolve_conj()) if old.is_complex() else old.to(elements.wide_type(old))
        return bool((parts.abs().nan_to_num(0.0, 0.0, 0.0) <= torch.finfo(new.dtype).max).all())
    return torch.equal(new.to(old.dtype), old) and torch.equal(new.to(wide), old.to(wide))


def _out_of_range(given: torch.dtype, passing: torch.dtype) -> str:
    """What is wrong with a constant of one type where another passes."""
    return f"a constant of {given} holds numbers that {passing} has not, which passes"


class Known:
    """What an edit has made of a constant, until it is needed in another form or the constant is written to.

    Its bits are compared, since fused optimizers, ``.data`` and NumPy write past torch's count; where it lies on a
    device that is waited for.
    """

    _held: tuple[Any, memory.Mark, Tensor] | None = None

    def of(self, constant: Tensor, form: Any, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives in a form, made once, as an ordinary tensor that no mode and no checkpoint has seen.

        Made in inference mode it could not be saved for a later backward, and a selective checkpoint would count its
        operations in the first pass and miss them in the recomputation.
        """
        held = self._held  # read once: another thread may be here
        with torch.inference_mode(False), torch.no_grad(), modes.outside_modes():
            if held is None or held[0] != form or held[1].is_written(constant):
                held = form, memory.Mark(constant, by_bits=True), make()
                self._held = held
        return held[2]
