"""One edit as a function that can be trusted: what it returns fits, and a recomputation gets what the first pass got.

A wrong shape, a write into the argument, or another result in a recomputation raises before the model goes on with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import GRADIENT_PORTS, STATE_PORTS, Site
from gaff.compat import elements, memory, modes
from gaff.compat.checkpoints import StopRecomputation
from gaff.compat.placements import (
    ANY_PARTS,
    BY_HAND,
    PARTS,
    UNKNOWN_PART,
    is_equal_everywhere,
    part_again,
    placement_of,
    together,
    whole_on,
)
from gaff.compat.signals import is_of_handler
from gaff.edits.event import Edit, Event, acts_on_parts, among, is_linear, mixed, uses_event
from gaff.edits.files import tensors_of
from gaff.edits.places import widened
from gaff.errors import ExactnessError, GaffError, PlanError, note
from gaff.sessions.edit_size import plain
from gaff.sessions.same_run import sources_of

# What is kept of a first pass: the strength, checksums of what went in and came out, versions of the edit's constants,
# and what it has taken from other sites of the run.
FirstPass = tuple[float, tuple[Tensor, Tensor] | None, tuple[int, ...], tuple[Any, ...]]

# In what torch says of kinds that it cannot.
_NOT_SPARSE = ("Could not run 'aten::", "memory format", "parse", "addmm: ")
_MOST_CALLS = 4096  # of which gradients are counted: the last ones


class CheckedEdit:
    """One edit at one site: called, mixed with what passed by a strength, and checked. Counts and measures nothing.

    ``has_failed``: its last event ended in an error; closing must then not complain that the edit never acted.
    ``raised``: each such error as text, and how often it came.
    ``reached``: what sees that the edit of a standard name comes to where that is read, if it is made elsewhere.
    """

    def __init__(self, edit: Edit, site: Site, meshes: Sequence[Any] = (), number: int = 0, name: str = "") -> None:
        """``meshes``: those over which the model spreads its tensors while every process computes on the same rows.

        ``number`` counts the edits of the session at this place. ``name``: the standard name that was asked for.
        """
        self._name = name
        self.has_failed = False
        self.raised: Counter[str] = Counter()
        self.reached: Any = None
        self.number = number
        self._meshes = tuple(meshes)
        self._edit = edit
        self._site = site
        self._is_pure = edit.is_pure
        self._any_event = None if uses_event(edit) else Event(site, name=name)  # made once, where it is not asked for
        self._constants = tuple(tensors_of(edit)) if edit.is_pure else ()
        self._sources = sources_of(edit)
        self._gradients: Counter[tuple[int, int]] = Counter()  # by run and call: how many have come

    def change(self, value: Tensor, run: Any, call: int, strength: float) -> Tensor:
        """What the edit makes of ``value``, mixed by ``strength`` and checked: a tensor alike, and ``value`` untouched.

        Errors of a function of the user pass as they are, with a note of the site; those of torch in an edit of our own
        are about its constants, and become a PlanError. Our own edits get float8 as float32, rounded back afterwards,
        since torch computes with no float8. A tensor that is spread over processes is put together for it, unless the
        edit acts on parts: an address means the whole tensor, and so does an edit.
        """
        try:
            placement = placement_of(value) if ANY_PARTS or type(value) is not Tensor else None
            if placement is None or (acts_on_parts(self._edit) and not placement.is_sum):
                if placement is None and self._may_mean_the_whole():
                    self._need_whole(value)
                new = self._made(value, run, call)
            else:
                if value.requires_grad and self._site.port in GRADIENT_PORTS:
                    raise PlanError(
                        "a gradient lies in parts here (tensor parallelism), and this backward pass is differentiated "
                        "(create_graph=True): what puts parts together has no derivative there; expected scale, or "
                        "another edit of single elements"
                    )
                new = part_again(self._made(together(value, placement), run, call), value, placement)
        except StopRecomputation:
            raise
        except Exception as error:
            self.has_failed = True
            told = str(error).partition("\n")[0]
            self.raised[f"it raised {type(error).__name__}: {told:.120}"] += 1
            self._raise_ours(error, value)
            note(error, f"gaff: in the edit at {self._site}, run {run.index}, call {call}")
            raise
        self.has_failed = True  # unless what follows is right
        if strength != 1.0:
            new = _mix(value, new, strength, self._site)
        if placement is not None and type(new) is Tensor:
            PARTS[new] = placement
        self.has_failed = False
        return new

    def event(self, run: Any, call: int) -> Event:
        """What the edit is told of the ``call``-th call in ``run``."""
        return among(Event(self._site, run.index, call, run.step, self._name), self.number)

    def _event_now(self, run: Any, call: int) -> Event:
        """The event that happens now; each gradient of one call has its number, since several passes may bring one."""
        event = self.event(run, call)
        if not event.is_gradient:
            return event
        key = run.index, call
        self._gradients[key] = self._gradients.pop(key, 0) + 1  # behind all others
        if len(self._gradients) > _MOST_CALLS:
            del self._gradients[next(iter(self._gradients))]
        return among(Event(*event), self.number, self._gradients[key] - 1)

    def _made(self, value: Tensor, run: Any, call: int) -> Tensor:
        """What the edit makes of a whole tensor. Raises PlanError for what cannot take its place."""
        edit, is_pure = self._edit, self._is_pure
        parameter = None
        if self._site.port == "param" and not is_pure:  # a write into the weights themselves would stay for good
            with torch.inference_mode(False):  # in which nothing counts writes
                parameter, value = value, value.clone()
        mark = None if is_pure else memory.Mark(value)
        event = self._any_event or self._event_now(run, call)
        new = _change_sparse(edit, value, event) if value.is_sparse else widened(edit, value, event)
        if mark is not None and mark.is_written(value):
            raise PlanError("the edit wrote into what it was given: expected a new tensor, t * 2 not t.mul_(2)")
        if not isinstance(new, Tensor):
            raise PlanError(f"the edit returned {type(new).__name__} {new!r:.40}: expected a tensor")
        if new is value and parameter is not None:
            return parameter
        if not _is_alike(new, value):
            raise PlanError(f"the edit returned {_text(new, value)} where {_text(value, new)} passes")
        if self._site.port not in ("output", "input") or value.is_sparse or new is value:
            return new
        # whoever writes into it must not reach what came, as through t.detach(), and may not expect a view: FSDP loses
        # its hooks then, and what is expanded cannot be written to
        is_alias = not is_pure and memory.shares(new, value)
        return new.clone() if is_alias or (new._is_view() and not value._is_view()) else new

    def locate(self, tensor: Tensor) -> None:
        """Note that ``tensor`` lies whole in every process, if it does; a gradient alone, of a sum, may not tell it.

        Where models go on by hand, a tensor that is whole may have a gradient of which each process has a summand.
        """
        if acts_on_parts(self._edit) or not self._meshes or not BY_HAND.isdisjoint(self._meshes):
            return
        if placement_of(tensor) is None and is_equal_everywhere(tensor, list(self._meshes)):
            PARTS[tensor] = whole_on(self._meshes[0], tensor)

    def _may_mean_the_whole(self) -> bool:
        """Whether the edit, made of what one process has, may not be what it is of the whole.

        One of single elements is, of a part as of the whole; of a summand, which models that go on by hand may have
        anywhere, only if it is linear.
        """
        if not self._meshes or is_linear(self._edit):
            return False
        return not acts_on_parts(self._edit) or not BY_HAND.isdisjoint(self._meshes)

    def _need_whole(self, value: Tensor) -> None:
        """Raises PlanError for what may be a part of a tensor, of which nothing is known: processes hold other ones."""
        if not is_equal_everywhere(value, list(self._meshes), is_state=self._site.port in STATE_PORTS):
            raise PlanError(UNKNOWN_PART)

    def first_pass(self, value: Tensor, new: Tensor, strength: float, event: Event) -> FirstPass:
        """What ``again`` needs of a first pass that a checkpoint may repeat: sums only, where the edit is not pure.

        Of a patch from the same run also the value that it put in.
        """
        sums = None if self._is_pure else (_checksum(value), _checksum(new))
        return strength, sums, self._versions(), tuple(source.drawn(event) for source in self._sources)

    def again(self, value: Tensor, run: Any, call: int, first: FirstPass) -> Tensor:
        """Change a value in a recomputation as in the first pass, and see that nothing is different from it.

        What came out is compared only where what went in has the same bits: without that nothing can be expected.
        Raises ExactnessError for a function that returned something else, and for constants that were written to.
        """
        strength, checksums, versions, drawn = first
        if versions != self._versions():
            raise ExactnessError(
                f"{self._site}: a tensor of the edit was written to between the forward and the recomputation of a "
                "checkpoint: expected it unchanged until backward() is done"
            )
        with ExitStack() as given:
            for source, held in zip(self._sources, drawn, strict=True):
                given.enter_context(source.again(held))
            try:
                new = self.change(value, run, call, strength)
            except StopRecomputation:  # what the edit saves was the last that the checkpoint had waited for
                self.has_failed = False
                raise
        if checksums and _is_same(_checksum(value), checksums[0]) and not _is_same(_checksum(new), checksums[1]):
            raise ExactnessError(
                f"{self._site}: the edit returned another value in the recomputation of a checkpoint, so gradients "
                "would be wrong: expected a function of the tensor alone; noise goes by gaff.edits.noise"
            )
        return new

    def _raise_ours(self, error: Exception, value: Tensor) -> None:
        """Raise again, with the site, an error of ours, and any other of a pure edit; the rest are the user's."""
        if isinstance(error, GaffError):
            raise type(error)(f"{self._site}: {error}") from error
        if self._is_pure and not is_of_handler(error):
            told = str(error).partition(chr(10))[0][:160]
            if value.layout != torch.strided and any(word in told for word in _NOT_SPARSE):
                told = f"torch does it with no tensor of {value.layout}; expected another edit, or sparse=False"
            raise PlanError(f"{self._site}: the edit does not fit {_text(value, value)}: {told}") from error

    def _versions(self) -> tuple[int, ...]:
        """How often each constant was written to: another number than before means that it has changed."""
        return tuple(memory.version_of(constant) for constant in self._constants)


def need_mixable(value: Tensor, strength: float, site: Site) -> None:
    """Raises PlanError for a mixture of tensors that have no values between: integers and truth values."""
    if strength != 1.0 and not (value.is_floating_point() or value.is_complex()):
        raise PlanError(f"{site}: strength {strength} of an edit of {value.dtype}: expected 0 or 1, it cannot be mixed")


def _change_sparse(edit: Edit, value: Tensor, event: Event) -> Tensor:
    """Edits that leave zeros zero act on the values that a sparse tensor has; others get it as it is.

    Values lie in rows, as of an embedding's gradient, or as single numbers, of which only edits of single elements know
    enough: the norm of a row needs it whole.
    """
    if not getattr(edit, "keeps_zero", False):
        return edit.change(value, event)
    value = value.coalesce()
    if value.sparse_dim() > 1 and not acts_on_parts(edit):
        return edit.change(value.to_dense(), event).sparse_mask(value)
    new = edit.change(value.values(), event)
    return torch.sparse_coo_tensor(value.indices(), new, value.shape, is_coalesced=True, check_invariants=False)


def _mix(value: Tensor, new: Tensor, strength: float, site: Site) -> Tensor:
    """``value + strength * (new - value)``: float8 by way of float32, sparse ones by sums, the rest by ``lerp``."""
    need_mixable(value, strength, site)
    if value.layout != torch.strided:
        return value * (1 - strength) + new * strength
    if elements.is_small_float(value):
        return _mix(value.float(), new.float(), strength, site).to(value.dtype)
    if value.is_nested:
        return torch.lerp(value, new, strength)
    return mixed(value, new, strength)


def _is_alike(new: Tensor, old: Tensor) -> bool:
    """Whether a tensor can take the place of another: the same dtype, shape, device and layout."""
    is_kind = new.dtype is old.dtype and new.device == old.device and new.layout is old.layout
    return is_kind and new.is_nested == old.is_nested and _shape(new) == _shape(old)


def _shape(tensor: Tensor) -> Any:
    """The shape of a tensor, of a nested one in strides those of its parts."""
    is_strided = tensor.is_nested and tensor.layout is torch.strided
    return [part.shape for part in tensor.unbind()] if is_strided else tensor.shape


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
    shape = "nested" if tensor.is_nested else "x".join(map(str, tensor.shape)) or "a scalar"
    text = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
    text += f" on {tensor.device}" if tensor.device != other.device else ""
    return text + (f" as {tensor.layout}" if tensor.layout != other.layout else "")
