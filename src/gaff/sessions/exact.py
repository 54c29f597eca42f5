"""Exact values without copies: what a tensor is at this moment, whatever is written into it later.

A tensor that the run itself made is kept as a copy-on-write copy: the price of a reference, and a later in-place
write copies first. Memory of arguments is kept by reference and its version counter is checked on reading; where there
is none (inference mode) it is cloned. It is not shared copy-on-write, since a later write would move it, and NumPy
views and shared memory would stop following. Memory of parameters and buffers is cloned: fused optimizers and batch
norm write past the counter.

On a GPU torch's copy-on-write copies are not safe (the copy is made on another stream than the write), so values there
are kept by reference and checked, but for those that are likely to be written to, which are cloned: gradients, which a
GradScaler divides past the counter, and all values of a model that has modules which work in place.

A ``Keeper`` decides when the value passes, ``read`` checks when it is asked for, and ``own`` gives the reader something
to write into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gaff.address.grammar import Site
from gaff.address.nested import Opaque, iter_tensors, map_tensors, size_bytes
from gaff.compat import distributed, elements, memory
from gaff.compat.compiler import is_reduced, mark_reduced
from gaff.compat.modes import outside_modes
from gaff.engine.clock import Clock
from gaff.engine.gradients.tensor_hooks import original
from gaff.engine.ops.attention import Weights
from gaff.errors import ExactnessError, PlanError
from gaff.keep import Reduce, is_pure
from gaff.sessions.request import Options


class Moment(Protocol):
    """When a value was seen: the run of the engine, of which no more is needed to order and name events.

    ``index`` is the number of the run, ``step`` how many optimizer steps were completed when it began.
    """

    index: int
    step: int


@dataclass(slots=True, eq=False)
class Kept:
    """A value that is handed out only after a check: of version counters, or of a copy still under way.

    Each of ``checks`` is called with the site for its message, and raises ExactnessError or waits.
    """

    value: Any
    checks: list[Callable[[Site], None]]


@dataclass(slots=True, eq=False)
class Refused:
    """Stands for a value that cannot be told exactly; reading it raises ExactnessError with ``reason``."""

    reason: str


def read(kept: Any, site: Site) -> Any:
    """The value behind what a ``Keeper`` returned. Raises ExactnessError if it can no longer be trusted.

    Waits for a copy to the host that is still under way; otherwise it does not wait.
    """
    if type(kept) is Kept:
        for check in kept.checks:
            check(site)
        return kept.value
    if type(kept) is Refused:
        raise ExactnessError(f"{site}: {kept.reason}")
    return kept


def own(value: Any, *, is_shared: bool) -> Any:
    """``value`` for the reader, who may write into it: neither what is kept nor the model's memory changes with it.

    Copy-on-write where that is safe, else a copy; ``is_shared``: others hold the memory. Elsewhere than on the CPU
    what is kept is handed out itself, unless it is shared: there a write of the reader is seen by later readers.
    """
    with outside_modes():  # a program's own may change what operations return
        return map_tensors(value, _copied if is_shared else _apart)


def _apart(tensor: Tensor) -> Tensor:
    """One tensor for a reader, where nobody else but what is kept holds the memory."""
    if distributed.is_spread(tensor):
        return distributed.with_local(tensor, _apart(distributed.local_of(tensor)))
    lazy = memory.lazy_clone()
    if not tensor.is_cpu:
        return tensor
    if lazy is None or type(tensor) is not Tensor or tensor.is_quantized:
        return tensor.clone()
    try:
        return lazy(tensor)
    except RuntimeError:
        return tensor.clone()  # sparse, nested or borrowed memory


def _copied(tensor: Tensor) -> Tensor:
    """One tensor for a reader, copied with its strides."""
    if distributed.is_spread(tensor):
        return distributed.with_local(tensor, _copied(distributed.local_of(tensor)))
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return tensor.clone()
    if elements.is_packed(tensor.dtype):
        return _copied(tensor.view(torch.uint8)).view(tensor.dtype)
    if type(tensor) not in (Tensor, Parameter):  # copy_ into a plain tensor is not what such a class expects
        return tensor.clone()
    if 0 in tensor.stride():
        return memory.copied(tensor)
    strided = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


def size_of(kept: Any) -> int:
    """Bytes of the tensors in what a ``Keeper`` returned; memory that two of them share counts twice."""
    value = kept.value if type(kept) is Kept else kept
    return sum(size_bytes(tensor) for _, tensor in iter_tensors(value))


class Keeper:
    """Turns a passing value into one that can be read later.

    One for all requests of a capture that keep alike, shared by their sites; holds the options and no values.
    ``is_state``: what is kept are parameters or buffers, and is copied. ``is_gradient``: it is gradients. ``is_loose``:
    values are handed out as they are, with their autograd graph or by reference, as was asked. ``is_plain``: no option
    asks for anything. ``wants_graph``: values are kept with their autograd graph. ``is_apart``: what lies in memory of
    the caller or the model is copied at once, so that nothing can change it later; not what has an autograd graph.
    """

    def __init__(
        self,
        options: Options,
        reduce: Callable[[Tensor], Tensor] | None,
        *,
        is_state: bool = False,
        is_gradient: bool = False,
        is_apart: bool = False,
    ) -> None:
        self.reduce = reduce
        self._dtype = options.dtype
        self._device = torch.device(options.to) if options.to is not None else None
        self.wants_graph = options.graph
        self._clone = options.clone or is_state
        self.is_loose = self.wants_graph or options.reference
        self._clock: Clock | None = None
        self._model: nn.Module | None = None
        self._is_gradient = is_gradient
        self._is_apart = is_apart
        self._refers = options.reference
        self._is_bare = False  # no copy-on-write, not even for a moment
        self._is_number = type(reduce) is Reduce and not (self._dtype or self._device or self.wants_graph)
        self.is_plain = not (self.reduce or self._dtype or self._device or self.wants_graph or self._clone)

    def meet(self, known: Clock, model: nn.Module | None) -> None:
        """A session opens: ``known`` tells whose memory values of ``model`` lie in. Before, all counts as others'."""
        self._clock, self._model = known, model

    def copy_all(self) -> None:
        """What passes lies in memory that is written to without torch's knowledge: copy at once from here on.

        Compiled code uses the memory of its intermediate values again, and no version counter tells.
        """
        self._clone = self._is_bare = True
        self.is_plain = False

    def reduces_by(self, reduce: Any) -> bool:
        """Whether ``reduce`` is how this keeper reduces: the same function, or an equal value of ``gaff.keep``."""
        return reduce is self.reduce or (is_pure(reduce) and reduce == self.reduce)

    def keep(self, value: Any, run: Any) -> Any:
        """Keep ``value``, a tensor or a nested value, as it is at this moment; ``read`` takes what this returns.

        Called inside hooks, of which it must not be felt: writes into nothing, and waits for no device unless
        ``reduce`` does. Objects that gaff does not follow are replaced by ``Opaque``.
        """
        with outside_modes():  # a checkpoint's counts operations, and would take ours for the model's
            return self._kept(value, run)

    def _kept(self, value: Any, run: Any) -> Any:
        """``value`` kept, unseen by modes of others."""
        if type(value) is Weights:
            value = self._made(value)
        number = self._number(value) if self._is_number and type(value) is Tensor else None
        if number is not None:
            return number
        checks: list[Callable[[Site], None]] = []

        def keep_tensor(tensor: Tensor) -> Tensor:
            return self._keep_tensor(tensor, checks, run)

        kept = map_tensors(value, keep_tensor, lambda other: Opaque(type(other).__name__))
        return Kept(kept, checks) if checks else kept

    def size_ahead(self, value: Weights) -> int:
        """Bytes that keeping weights of attention will take; 0 where that depends on a function or another dtype.

        Raises PlanError for a part that is not there.
        """
        part = value.part_of(self.reduce)
        size = value.size_bytes(part)
        return size if (self.reduce is None or part is not None) and self._dtype is None else 0

    def _made(self, value: Weights) -> Tensor:
        """The weights of attention, which nobody has computed; only what ``reduce`` wants, where that is a part."""
        part = value.part_of(self.reduce)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.wants_graph):
            made = value.make(part)
        if part is not None:
            mark_reduced(made)
        return made

    def _number(self, tensor: Tensor) -> Tensor | None:
        """A tensor reduced to something smaller, the short way; None where the long way is needed.

        What compiled code has told may be reduced already, and lies in memory that will be used again: it is cloned.
        """
        if is_reduced(tensor):
            return tensor.clone()
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return None
        found: Tensor = self.reduce(tensor.detach())  # type: ignore[misc]
        return found if found.numel() < tensor.numel() else None

    def _keep_tensor(self, tensor: Tensor, checks: list[Callable[[Site], None]], run: Any) -> Tensor:
        """One tensor of a value: reduced, then moved, then held, each where asked for.

        A part that still shares the memory of the whole is copied where it is at most half as large: kept as it is, it
        would hold the whole. The autograd graph is kept only with ``graph``, and is that of the tensor itself, no view
        of it that somebody was given so that a part of its gradient is told: what a kept value brings is no such part.
        """
        tensor = original(tensor) if self.wants_graph else tensor
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.wants_graph):
            if self.reduce is not None and not is_reduced(tensor):
                exact = self._safe(tensor, run)
                part = self.reduce(exact)
                if not isinstance(part, Tensor):
                    raise PlanError(f"reduce= returned {type(part).__name__}: expected a function that gives a tensor")
                part = distributed.settled(part)
                is_part = memory.shares(part, exact)
                tensor = part.clone() if is_part and (self._clone or part.numel() * 2 <= exact.numel()) else part
            moved = self._move(tensor, checks)
            return moved if moved is not tensor else self._hold(tensor, checks, run)

    def _hold(self, tensor: Tensor, checks: list[Callable[[Site], None]], run: Any) -> Tensor:
        """A tensor as it is now: a copy where one was asked for or a check could not be trusted."""
        if self._clone or (not self._refers and not tensor.is_meta and self._is_written_past(tensor, run)):
            return memory.copied(tensor if self.wants_graph else tensor.detach())
        known = self._clock
        has_graph = self.wants_graph and tensor.requires_grad
        is_known = tensor.layout == torch.strided and not tensor.is_nested  # whose memory it is
        if self._is_apart and not (has_graph or tensor.is_meta or (is_known and not _is_foreign(known, tensor, run))):
            return memory.copied(tensor.detach())
        return hold(tensor, self.wants_graph, lambda other: _is_foreign(known, other, run), checks)

    def _is_written_past(self, tensor: Tensor, run: Any) -> bool:
        """Whether somebody may write to it past the version counter, or is likely to where a write can only be told."""
        if not tensor.is_cpu and (self._is_gradient or self._works_in_place):
            return True
        if self._clock is None or tensor.layout != torch.strided:
            return False
        leaf = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        is_trained = leaf.is_leaf and leaf.requires_grad  # by an optimizer, perhaps a fused one
        return self._clock.is_of_model(tensor, run) or (is_trained and self._clock.is_foreign(tensor, run))

    @cached_property
    def _works_in_place(self) -> bool:
        """Whether the model has modules that work in place."""
        return self._model is not None and any(getattr(one, "inplace", False) for one in self._model.modules())

    def _safe(self, tensor: Tensor, run: Any) -> Tensor:
        """What a user's function may be given of ``tensor``: its writes must reach neither the model nor the caller.

        A value of ``gaff.keep`` writes into nothing, and gets the memory itself where no copy-on-write copy can be
        made.
        """
        if self._is_bare:
            return tensor.detach() if is_pure(self.reduce) else tensor.detach().clone()
        checks: list[Callable[[Site], None]] = []
        held = self._hold(tensor, checks, run)
        return held.clone() if checks and not is_pure(self.reduce) else held

    def _move(self, tensor: Tensor, checks: list[Callable[[Site], None]]) -> Tensor:
        """``tensor`` in the dtype and on the device asked for; itself where it is already so.

        From a GPU to the CPU without an autograd graph it goes through pinned memory, and nobody waits.
        """
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        device = self._device or tensor.device
        source = tensor if self.wants_graph else tensor.detach()
        if tensor.is_cuda and device.type == "cpu" and not self.wants_graph:
            return _to_pinned(source, dtype, checks)
        if dtype == tensor.dtype and device.type == tensor.device.type and device.index in (None, tensor.device.index):
            return tensor
        return elements.cast(source, dtype, device=device)


def _is_foreign(known: Clock | None, tensor: Tensor, run: Any) -> bool:
    """Whether others than the run hold the memory of a tensor; so all memory counts of which nothing is known."""
    return known is None or known.is_foreign(tensor, run)


def hold(
    tensor: Tensor, has_graph: bool, is_foreign: Callable[[Tensor], bool], checks: list[Callable[[Site], None]]
) -> Tensor:
    """``tensor`` as it is now, without a copy where that is possible; otherwise a check is added to ``checks``.

    With ``has_graph`` the result stays connected to the autograd graph of ``tensor``. Of a DTensor the local part is
    held. A tensor without a version counter is cloned, and so are a quantised one and a parameter that is not the
    model's own.
    """
    if tensor.is_meta:  # no numbers, and no memory that anybody could write into
        return tensor if has_graph else tensor.detach()
    if distributed.is_spread(tensor) and not has_graph:
        with torch.no_grad():
            local = hold(distributed.local_of(tensor), False, is_foreign, checks)
            return distributed.with_local(tensor, local)
    is_parameter = isinstance(tensor, Parameter) and tensor.layout == torch.strided
    if is_parameter and not is_foreign(tensor):  # lent by FSDP2, which frees what it has gathered
        return tensor.clone() if has_graph else tensor.detach().clone()
    lazy = memory.lazy_clone()
    if lazy is not None and type(tensor) is Tensor and tensor.is_cpu and not tensor.is_quantized:
        try:
            if not is_foreign(tensor):
                if not tensor.untyped_storage().resizable():  # a NumPy array points at this memory
                    return tensor.clone() if has_graph else tensor.detach().clone()
                return lazy(tensor if has_graph else tensor.detach())
        except RuntimeError:
            pass  # sparse, nested or borrowed memory: torch refuses to share it
    if tensor.is_inference() or tensor.is_quantized:
        return tensor.clone()
    # an alias shares the version counter, and does not hold the graph; of a DTensor it has a counter of its own
    alias = tensor if distributed.is_spread(tensor) else tensor.detach()
    checks.append(_version_check(alias, memory.version_of(tensor)))
    return tensor if has_graph else alias


def _version_check(tensor: Tensor, version: int) -> Callable[[Site], None]:
    """A check that raises ExactnessError when ``tensor``, an alias of what passed, was written to after ``version``."""
    whose = "belongs to a parameter, buffer or argument"
    if not tensor.is_cpu or type(tensor) not in (Tensor, Parameter):
        what = f"a {type(tensor).__name__} is" if tensor.is_cpu else f"on {tensor.device} values are"
        whose = f"{what} kept by reference"

    def check(site: Site) -> None:
        if memory.is_freed(tensor):
            raise ExactnessError(
                f"{site}: its memory was freed after the capture, as FSDP2 frees what it has gathered; capture it with "
                "clone=True"
            )
        if memory.version_of(tensor) != version:
            raise ExactnessError(
                f"{site}: its memory was changed in place after the capture "
                f"({memory.version_of(tensor) - version} writes), and {whose}; capture it with clone=True (harvest it "
                "by gaff.Plan.of(..., clone=True))"
            )

    return check


def _to_pinned(tensor: Tensor, dtype: torch.dtype, checks: list[Callable[[Site], None]]) -> Tensor:
    """A copy in pinned host memory, made beside the model's own queue; waited for on reading.

    The device copies first, in its queue: what the model writes into ``tensor`` next does not reach what is on its way.
    The second copy runs on a stream of its own, which waits for the first, so that the model need not wait for the bus.
    """
    buffer = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=True)
    source = elements.cast(tensor, dtype, copy=True)
    side = _side_stream(tensor.device)
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(side):
        buffer.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(side)
    source.record_stream(side)  # its memory is not used again before the copy is done
    checks.append(lambda site: event.synchronize())
    return buffer


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of one device on which all copies to the host are made."""
    return torch.cuda.Stream(device)
