"""Edits made of edits: at a place, in a row, at some events only; and a module that is not run at all.

``as_edit`` is the one way from what a user writes to an ``Edit``. What the outer edit promises (``is_pure``,
``uses_event``, ``keeps_zero``) follows from the inner ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import describe
from gaff.compat import elements
from gaff.edits.event import Call, Edit, Event, among, need_callable, uses_event
from gaff.edits.sources import Ablate, Patch, Replace
from gaff.errors import PlanError
from gaff.keep import Heads, Part


def _inside(edit: Edit) -> tuple[Edit, ...]:
    """The edits of which an edit is made, in their order."""
    return edit.edits if isinstance(edit, Chain) else (edit.edit,) if isinstance(edit, (At, When)) else ()


def _asked(name: str, doc: str, *, default: bool = False, join: Callable[..., bool] = all) -> Any:
    """A promise that follows from the edits inside: that of all of them, or of any; ``default``: of one without it."""
    return property(lambda edit: join(getattr(one, name, default) for one in _inside(edit)), doc=doc)


@dataclass(frozen=True, eq=False)
class At:
    """``edit`` where ``index`` says: a slice of ``gaff.keep``, or a mask that broadcasts to what passes.

    With a slice the inner edit sees the part alone: a norm is that of the part. With a mask it sees the whole, and what
    it returns is taken where the mask is True.
    """

    index: Part | Heads | Tensor
    edit: Edit

    is_pure = _asked("is_pure", "Whether the inner edit is pure.")
    uses_event = _asked("uses_event", "Whether the inner edit asks for the event.", default=True)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """A copy of the tensor with the edited part in its place; gradients flow through both.

        Raises PlanError where the place does not exist, or the edited part has another shape or dtype.
        """
        index = self.index
        if isinstance(index, Tensor):
            mask = index.to(tensor.device)
            fits = all(a in (1, b) for a, b in zip(mask.shape[::-1], tensor.shape[::-1], strict=False))
            if not fits or mask.dim() > tensor.dim():
                missing = tensor.dim() - mask.dim()
                is_of_first = missing > 0 and mask.shape == tensor.shape[: mask.dim()]
                hint = (
                    f": expected mask[...{', None' * missing}], for dimensions fit from the last" if is_of_first else ""
                )
                raise PlanError(
                    f"mask of shape {tuple(mask.shape)} does not fit what passes, {tuple(tensor.shape)}{hint}"
                )
            new = widened(self.edit, tensor, event)
            if not isinstance(new, Tensor) or new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise PlanError(f"edit of {describe(tensor)} at a mask returned {describe(new)}: expected the same")
            return torch.where(mask, new, tensor)
        return self._changed(tensor, self.edit, event)

    def _changed(self, tensor: Tensor, edit: Edit, event: Event) -> Tensor:
        """``tensor`` with what ``edit`` makes of the part in its place; of several each goes on from the one before."""
        if isinstance(edit, Chain):
            for number, inner in enumerate(edit.edits):
                tensor = self._changed(tensor, inner, among(event, number))
            return tensor
        place: Any = self.index  # no mask
        part = place(tensor)
        _need_once(place, tensor)
        new_part = _placed(edit, place, tensor, part.shape).change(part, event)
        if not isinstance(new_part, Tensor) or new_part.shape != part.shape or new_part.dtype != part.dtype:
            raise PlanError(f"edit of a part of {describe(part)} returned {describe(new_part)}: expected the same")
        try:
            return _put(place, tensor, new_part)
        except NotImplementedError:  # of uint16 and the like, whose elements torch does not set
            raise PlanError(f"torch puts no part into {describe(tensor)}: expected an edit of the whole") from None


@dataclass(frozen=True, eq=False)
class _OfPart:
    """``edit``, which brings values from elsewhere, at ``place`` of ``whole`` alone, a part that has ``shape``.

    Its values may be of the part, or of the whole, of which they are then taken as the part is. Which of the two they
    are is found by trying: what does not fit the part is of the whole. Values for a part as large as the whole, such as
    all its rows in another order, are of the whole. Places that a patch names along the dimension of ``place`` count in
    the part.
    """

    edit: Edit
    place: Part | Heads
    whole: Tensor
    shape: torch.Size
    is_pure = _asked("is_pure", "Whether the inner edit is pure.")

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """The part with other values; or a part of it, which another place inside names, and which is asked for first.

        Raises PlanError where the values fit neither: there the part around is asked for next.
        """
        counts_here = _names_places(self.edit, self.place, self.whole)
        if tensor.shape != self.shape or (self.shape == self.whole.shape and counts_here):
            return self.edit.change(tensor, event)
        if self.shape != self.whole.shape:
            try:
                return self.edit.change(tensor, event)
            except PlanError as error:
                if counts_here:
                    raise PlanError(f"{error}; inside {self.place} its numbers count in that part") from None
        return self.place(self.edit.change(_put(self.place, self.whole, tensor), event))


def _placed(edit: Edit, place: Part | Heads, whole: Tensor, shape: torch.Size) -> Edit:
    """``edit`` for the part of ``whole`` at ``place``: what brings values in it knows of what they may be."""
    if isinstance(edit, (Patch, Replace, Ablate, _OfPart)):
        return _OfPart(edit, place, whole, shape)
    if isinstance(edit, Chain):
        return replace(edit, edits=tuple(_placed(inner, place, whole, shape) for inner in edit.edits))
    if isinstance(edit, (At, When)):
        return replace(edit, edit=_placed(edit.edit, place, whole, shape))
    return edit


def _put(place: Part | Heads, whole: Tensor, part: Tensor) -> Tensor:
    """A copy of ``whole`` with ``part`` at ``place``; gradients flow through both."""
    new = whole.clone()
    if isinstance(place, Heads):
        new.unflatten(-1, (place.count, -1))[..., list(place.index), :] = part
        return new
    at: list[Any] = [slice(None)] * whole.dim()
    index: Any = place.index  # in a list: a tuple would mean several dimensions
    at[place.dim] = [index] if isinstance(index, int) else list(index) if isinstance(index, tuple) else index
    new[tuple(at)] = part
    return new


def _names_places(edit: Edit, place: Any, tensor: Tensor) -> bool:
    """Whether a patch names places along the dimension of ``place``: rows along the first, positions the second."""
    while isinstance(edit, _OfPart):
        edit = edit.edit
    if not isinstance(edit, Patch) or not isinstance(place, Part):
        return False
    dim = place.dim % tensor.dim()
    return dim < 2 and (edit.rows, edit.positions)[dim] is not None


def _need_once(place: Any, tensor: Tensor) -> None:
    """Raises PlanError for a place that names an index twice: what it holds would be put once, its gradient twice."""
    if isinstance(place.index, (int, slice)):
        return
    size = place.count if isinstance(place, Heads) else tensor.shape[place.dim]
    if len({number % size for number in place.index}) < len(place.index):
        raise PlanError(f"places {list(place.index)} name one twice (counted from either end): expected each once")


@dataclass(frozen=True, eq=False)
class Chain:
    """One edit after the other, in the order given: each gets what the one before it returned."""

    edits: tuple[Edit, ...]

    is_pure = _asked("is_pure", "Whether all of them are pure.")
    uses_event = _asked("uses_event", "Whether one of them asks for the event.", default=True, join=any)
    keeps_zero = _asked("keeps_zero", "Whether all of them leave zeros zero.")
    acts_on_parts = _asked("acts_on_parts", "Whether all of them do.")
    is_linear = _asked("is_linear", "Whether all of them are.")

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """What the last one returns. All of them get the same event, but for which of the edits they are."""
        for at, edit in enumerate(self.edits):
            tensor = widened(edit, tensor, among(event, at) if uses_event(edit) else event)
        return tensor


def widened(edit: Edit, tensor: Tensor, event: Event) -> Tensor:
    """What an edit returns; of float8 by way of float32 where it is pure, for torch computes in float8 with few ops."""
    if edit.is_pure and elements.is_small_float(tensor):
        return edit.change(tensor.float(), event).to(tensor.dtype)
    return edit.change(tensor, event)


Numbers = tuple[int, ...] | range | None


@dataclass(frozen=True, eq=False)
class When:
    """``edit`` at some runs, calls and steps only; elsewhere the tensor passes as it is.

    None means all of them. The session asks ``holds`` before it calls ``change``, to count what was let pass.
    """

    edit: Edit
    runs: Numbers = None
    calls: Numbers = None
    steps: Numbers = None

    # a recomputation has the event of its forward, and so the same answer
    is_pure = _asked("is_pure", "Whether the inner edit is pure.")
    keeps_zero = _asked("keeps_zero", "Whether the inner edit leaves zeros zero.")
    acts_on_parts = _asked("acts_on_parts", "Whether the inner edit does.")
    is_linear = _asked("is_linear", "Whether the inner edit is.")

    def holds(self, event: Event) -> bool:
        """Whether the edit acts at this event: its run, its call and its step must each be among those wanted."""
        wanted = ((self.runs, event.run), (self.calls, event.call), (self.steps, event.step))
        return all(numbers is None or number in numbers for numbers, number in wanted)

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """What the inner edit returns, or the tensor itself where the event is not among those wanted."""
        return self.edit.change(tensor, event) if self.holds(event) else tensor


@dataclass(frozen=True, eq=False)
class Skip:
    """The module is not run; its output is its first input, a tensor, or ``f(*args, **kwargs)``.

    Stands alone at the output of a module, or inside ``When``: the engine puts what stands in for the output in the
    place of the forward, and never calls ``change``.
    """

    value: Any = None
    is_pure = True

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        """Raises PlanError always: it comes here only as a part of another edit, when the module has been run."""
        raise PlanError(
            "skip takes the place of a whole module: expected it alone at a module, as 'path': edits.skip()"
        )


# What a user may write where an edit is asked for: several act in their order. A module is a function of a tensor, too;
# were nn.Module named beside it, type checkers would no longer know what a lambda is given.
EditLike = Edit | Callable[[Tensor], Tensor] | Sequence[Any]


def as_edit(value: Any) -> Edit:
    """Turn what a user may give into an edit: one of ``gaff.edits``, a function, a module, or a list of these.

    Raises PlanError for a class, for a function of ``gaff.edits`` that was not called, and for what cannot be called.
    """
    if isinstance(value, (list, tuple)):
        return Chain(tuple(as_edit(item) for item in value))
    if isinstance(value, type):
        raise PlanError(f"edit {value.__name__} is a class: expected what it makes, such as gaff.edits.scale(0.5)")
    if isinstance(value, Edit) and not isinstance(value, nn.Module):
        return value
    if (getattr(value, "__module__", "") or "").startswith("gaff.edits"):
        raise PlanError(f"edit gaff.edits.{value.__name__} was not called: expected gaff.edits.{value.__name__}(...)")
    return Call(need_callable(value))


def iter_innermost(edit: Edit) -> Iterator[Edit]:
    """The edits of which an edit is made, in their order; itself where it is made of none."""
    inside = _inside(edit)
    for inner in inside:
        yield from iter_innermost(inner)
    if not inside:
        yield edit


def is_placed(edit: Edit) -> bool:
    """Whether an edit brings values that have places of their own, as a patch does.

    Inside ``At`` these may have the shape of the part or of the whole; zeros fit everywhere.
    """
    return any(isinstance(one, (Patch, Replace)) or (isinstance(one, Ablate) and one.reference is not None)
               for one in iter_innermost(edit))  # fmt: skip


def holds(edit: Edit, event: Event) -> bool:
    """Whether anything of an edit acts at this event: not where each part of it is let pass by a ``When``."""
    if isinstance(edit, Chain):
        return any(holds(inner, event) for inner in edit.edits)
    if isinstance(edit, When) and not edit.holds(event):
        return False
    return not isinstance(edit, (At, When)) or holds(edit.edit, event)


def with_patches(edit: Edit, change: Callable[[Patch], Edit]) -> Edit:
    """``edit`` with every patch in it replaced by what ``change`` makes of it; the edit itself where there is none."""
    if isinstance(edit, Patch):
        return change(edit)
    if isinstance(edit, Chain):
        return replace(edit, edits=tuple(with_patches(inner, change) for inner in edit.edits))
    return replace(edit, edit=with_patches(edit.edit, change)) if isinstance(edit, (At, When)) else edit


def numbers_of(value: Any, name: str) -> Numbers:
    """A number, a range, a slice or several numbers, counted from 0, as a value. None, which means all, stays None.

    A slice without an end goes on for ever. Raises PlanError for anything else, and for negative numbers: which one is
    the last is not known before it is over.
    """
    if value is None:
        return None
    try:
        return _counts(value)
    except (TypeError, ValueError):
        raise PlanError(
            f"{name}={value!r} names no numbers counted from 0: expected 3, [0, 2], range(5) or slice(1, None)"
        ) from None


def _counts(value: Any) -> tuple[int, ...] | range:
    """What ``numbers_of`` returns. Raises TypeError or ValueError where it raises PlanError."""
    if isinstance(value, slice):
        stop = 2**62 if value.stop is None else value.stop
        return range(_count(value.start or 0), _count(stop), _count(1 if value.step is None else value.step))
    if isinstance(value, range):
        _count(min(value[0], value[-1]) if value else 0)
        return value
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or torch
    return (_count(value),) if isinstance(value, Integral) else tuple(_count(one) for one in value)


def _count(number: Any) -> int:
    """A whole number, 0 or more. Raises TypeError or ValueError for anything else."""
    if isinstance(number, bool) or operator.index(number) < 0:
        raise ValueError
    return operator.index(number)
