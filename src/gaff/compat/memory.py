"""The memory behind a tensor: its address, how often it was written to, and copy-on-write copies of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaff.compat import autograd, distributed, elements
from gaff.compat.modes import outside_modes, unseen

# Address of the memory behind a tensor: equal for all views of it, and (unlike ``data_ptr``) without making a
# copy-on-write copy real. Raises where there is no such memory (sparse, nested).
memory_of: Callable[[Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


def storage_life(tensor: Tensor) -> Callable[[], object]:
    """A function that returns None once nobody holds the memory of ``tensor`` any more; it does not hold it itself."""
    return weakref.ref(unseen(tensor.untyped_storage))


def holders_of(tensor: Tensor) -> int:
    """How many references Python's objects hold to ``tensor``; what autograd graphs hold is left out.

    Two counts are comparable that the same function takes. torch 2.13 counts all that it holds as one more reference.
    """
    return sys.getrefcount(tensor) - (_is_held_by_torch() and tensor._use_count() > 1)  # type: ignore[attr-defined]


@cache
def _is_held_by_torch() -> bool:
    """Whether a tensor of which torch keeps hold counts one reference more: tried on one with a view.

    Made without an autograd graph: it may be asked inside a model, where hooks of others count what graphs save.
    """
    with outside_modes(), torch.inference_mode(False), torch.no_grad():
        tensor = torch.zeros(2, device="cpu")
        before = sys.getrefcount(tensor)
        view = tensor[:1]  # holds its base
        return sys.getrefcount(tensor) > before and view.numel() == 1


def is_freed(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` was given back while it was held: to read it would end the process."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except RuntimeError:  # torch's word for sparse tensors and the like, which have no memory of their own
        return False


def address_of(tensor: Tensor) -> int:
    """The address of the memory behind a tensor; 0 for what has no memory of its own, as sparse tensors have none."""
    try:
        return memory_of(tensor)
    except RuntimeError:  # torch's word for it
        return 0


class Extent(NamedTuple):
    """Which elements of its memory a tensor shows: its sizes, strides and first element, and the size of one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    element_bytes: int

    @property
    def end(self) -> int:
        """One past the last element, counted as ``first`` is."""
        return self.first + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)) + 1


def extent_of(tensor: Tensor) -> Extent:
    """Which part of its memory a strided tensor shows."""
    return Extent(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.element_size())


def overlaps(one: Extent, other: Extent) -> bool:
    """Whether two tensors in one memory share an element. Marks each element of that memory where bounds do not tell.

    Elements of different sizes are taken to overlap.
    """
    if one.element_bytes != other.element_bytes:
        return True
    if not (all(one.size) and all(other.size)) or one.end <= other.first or other.end <= one.first:
        return False
    marks = torch.zeros(max(one.end, other.end), dtype=torch.bool, device="cpu")
    marks.as_strided(one.size, one.stride, one.first).fill_(True)
    return bool(marks.as_strided(other.size, other.stride, other.first).any())


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to in place; -1 where torch does not count (inference mode).

    Views of one memory share the count. Writes that go past torch (NumPy, ``.data``, some kernels) are not counted.
    """
    if distributed.is_spread(tensor):  # both count: operations on the whole, and those on the local part alone
        return -1 if tensor.is_inference() else tensor._version + distributed.local_of(tensor)._version
    return -1 if tensor.is_inference() else tensor._version


class Mark:
    """What a tensor held at one moment, by which it is told later whether somebody wrote to it.

    That is its version; in inference mode, where torch counts none, or where ``by_bits`` asks for what cannot be hidden
    by writes that go past torch, a copy of its bits.
    """

    def __init__(self, tensor: Tensor, *, by_bits: bool = False) -> None:
        self._version = version_of(tensor)
        is_kept = (by_bits or self._version == -1) and elements.is_plain(tensor)
        self._bits = unseen(elements.words, tensor).clone() if is_kept else None

    def is_written(self, tensor: Tensor) -> bool:
        """Whether that tensor was written to since; waits for its device where bits are compared."""
        if self._bits is None:
            return version_of(tensor) != self._version
        now = unseen(elements.words, tensor)
        return now.shape != self._bits.shape or not torch.equal(now, self._bits)


def shares(one: Tensor, other: Tensor) -> bool:
    """Whether a write to one of the two can change the other: both lie in one memory, as far as torch can tell."""
    try:
        return one is other or memory_of(one) == memory_of(other)
    except RuntimeError:  # torch's word for sparse tensors and the like, which have no memory of their own
        return False


def is_alias(one: Tensor, other: Tensor) -> bool:
    """Whether both are one tensor, or show the same elements in the same order."""
    if one is other:
        return True
    is_plain = one.layout == other.layout == torch.strided and type(one) is type(other) and one.dtype == other.dtype
    if not is_plain or autograd.is_wrapper(one):  # inside a transform all are
        return False
    return extent_of(one) == extent_of(other) and address_of(one) == address_of(other) != 0


def write_watch(tensor: Tensor) -> Callable[[], bool]:
    """Whether the memory of ``tensor`` was written to in place since this was called, as far as torch counts.

    Holds no memory: an empty tensor shares the version counter.
    """

    def make() -> Tensor:
        probe = tensor.detach()
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return probe

    probe = unseen(make)
    before = probe._version
    return lambda: probe._version != before


def snapshot(tensor: Tensor) -> Tensor | None:
    """What a tensor holds now, by which ``is_as_in`` tells writes that the version counter misses.

    On the CPU a copy-on-write copy. Elsewhere there is none, and what is returned shares the memory: it tells only that
    the tensor was given other memory. None for what lies in no plain memory of torch's.
    """
    lazy = lazy_clone()
    if lazy is None or type(tensor) is not Tensor or tensor.is_quantized:
        return None
    try:
        with outside_modes(), torch.no_grad():
            if not tensor.is_cpu:
                return tensor.detach()
            return lazy(tensor) if tensor.untyped_storage().resizable() else None
    except RuntimeError:  # torch's word for sparse, nested or borrowed memory
        return None


def is_as_in(tensor: Tensor, snapshot: Tensor | None) -> bool:
    """Whether a tensor holds what it held when ``snapshot`` was made of it; True where there is none.

    Costs nothing unless the two were parted: by torch, for a write or because somebody asked for the address, or by
    who gave the tensor other memory.
    """
    if snapshot is None or address_of(tensor) == address_of(snapshot):
        return True
    with outside_modes(), torch.no_grad():
        return elements.has_bits(tensor, snapshot)


def copied(tensor: Tensor) -> Tensor:
    """A clone; of what is expanded only what is stored is copied, and expanded again."""
    is_strided = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    if not is_strided or 0 not in tensor.stride():
        return tensor.clone()
    stored = tensor[tuple(slice(None) if one else slice(1) for one in tensor.stride())]
    return stored.clone().expand(tensor.shape)


def lazy_clone() -> Callable[[Tensor], Tensor] | None:
    """A function that makes copy-on-write copies, if torch has one that does what gaff needs, else None.

    Where collectives of CPU tensors run on threads of their own it makes real copies. torch's are not safe there: one
    thread that parts two copies, and another that lets one of them go at the same moment, write to freed memory
    (``COWDeleterContext::decrement_refcount`` takes its lock after it has counted; seen with torch 2.13). So it does
    where saved tensors may be written to, which torch finds again by the address of their memory.
    """
    found = _lazy_clone()
    return copied if found is not None and (distributed.has_threads() or autograd.is_saved_by_address()) else found


@cache
def _lazy_clone() -> Callable[[Tensor], Tensor] | None:
    """``torch._lazy_clone`` if it does what gaff needs, else None.

    It makes a copy-on-write copy: both tensors share memory until one of them is written to in place. Proven on
    first use, for a tensor, a view of it and its base; without it gaff falls back to references whose version
    counter is checked on reading.
    """
    found: Callable[[Tensor], Tensor] | None = getattr(torch, "_lazy_clone", None)
    return found if found is not None and _is_copy_on_write(found) else None


def _is_copy_on_write(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``function`` makes copies that share memory until somebody writes: tried on a tensor and a view of it."""
    state: Any = torch.is_inference_mode_enabled()
    if state:  # version counters and views behave otherwise there; prove it in ordinary mode
        with torch.inference_mode(False):
            return _is_copy_on_write(function)
    with outside_modes(), torch.no_grad():
        base = torch.arange(4, dtype=torch.float32, device="cpu") + 0
        view = base[1:3]
        kept_base, kept_view = function(base), function(view)
        is_shared = memory_of(kept_base) == memory_of(base) == memory_of(view)
        view.add_(10)
        base.add_(100)
        return (
            is_shared
            and kept_base.tolist() == [0, 1, 2, 3]
            and kept_view.tolist() == [1, 2]
            and base.tolist() == [100, 111, 112, 103]
            and view.tolist() == [111, 112]
        )
