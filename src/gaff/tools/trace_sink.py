"""What a trace notes of every call: shapes, time, statistics, gradients. Keeps no tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gaff.address import Key, Site
from gaff.engine.stream import Stream
from gaff.tools.record import Gradient, Statistics
from gaff.values import iter_tensors, size_bytes


@dataclass(slots=True)
class CallNotes:
    """One call while it is traced, and after it."""

    site: Site  # of the module or op, without call
    cls: str
    depth: int
    call: int
    run: Any
    started: float
    flops: int
    input: str
    output: str = ""
    dtype: str = ""
    time_s: float = 0.0
    memory_bytes: int = 0
    statistics: tuple[Tensor, ...] | None = None
    is_complete: bool = False
    gradients: dict[str, Gradient] = field(default_factory=dict)


class CallLog:
    """All calls of a traced run, in the order of entry. ``flops``: operations counted so far."""

    def __init__(self, flops: Callable[[], int], device: torch.device) -> None:
        self.calls: list[CallNotes] = []
        self._open: list[CallNotes] = []
        self._flops = flops
        self._device = device

    def enter(self, site: Site, cls: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any, call: int) -> None:
        """A module, or an op (``cls``: its place in the code), is called."""
        shapes = shapes_text((*args, kwargs) if kwargs else args)
        self._settle()
        notes = CallNotes(site, cls, len(self._open), call, run, time.perf_counter(), self._flops(), shapes)
        self.calls.append(notes)
        self._open.append(notes)

    def leave(self, site: Site, output: Any) -> None:
        self._settle()
        ended = time.perf_counter()
        while self._open and self._open[-1].site != site:
            self._open.pop()  # left by an exception
        notes = self._open.pop()
        notes.time_s = ended - notes.started
        notes.flops = self._flops() - notes.flops
        tensors = [tensor for _, tensor in iter_tensors(output)]
        notes.output = shapes_text(output)
        notes.memory_bytes = sum(size_bytes(tensor) for tensor in tensors)
        notes.is_complete = True
        if tensors:
            notes.dtype = str(tensors[0].dtype).removeprefix("torch.")
            notes.statistics = measure(tensors[0])

    def _settle(self) -> None:
        if self._device.type == "cuda":  # times of queued work would mean nothing
            torch.cuda.synchronize(self._device)


class GradientLog(Stream):
    """The gradients at one port of one module: written into the notes of the call they belong to."""

    def __init__(self, log: CallLog, site: Site, port: str) -> None:
        self._log = log
        self._site = site
        self._port = port

    def add(self, value: Any, run: Any, call: int) -> None:
        self._note(run, call, gradient_of(value))

    def absent(self, run: Any, call: int, reason: str) -> None:
        self._note(run, call, Gradient(reason=reason))

    def refuse(self, run: Any, call: int, reason: str) -> None:
        self._note(run, call, Gradient(reason=reason))

    def at(self, key: Key) -> GradientLog:
        return self

    def spawn(self, site: Site, known: Any) -> GradientLog:
        return GradientLog(self._log, Site(site.path, site.op, site.op_index), self._port)

    def _note(self, run: Any, call: int, gradient: Gradient) -> None:
        for notes in self._log.calls:
            if notes.site == self._site and notes.call == call and notes.run is run:
                known = notes.gradients.get(self._port)
                if known is None or known.norm is None:  # of several tensors the first that has one is shown
                    notes.gradients[self._port] = gradient


class ParameterLog(Stream):
    """The gradient of one parameter."""

    def __init__(self) -> None:
        self.grad: Gradient | None = None

    def add(self, value: Any, run: Any, call: int) -> None:
        self.grad = gradient_of(value)

    def absent(self, run: Any, call: int, reason: str) -> None:
        self.grad = Gradient(reason=reason)

    refuse = absent


def measure(tensor: Tensor) -> tuple[Tensor, ...] | None:
    """Mean, population std, min, max and non-finite count as 0-dim tensors; None where they mean nothing."""
    is_odd = tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
    if is_odd or tensor.is_complex() or tensor.numel() == 0:
        return None
    with torch.no_grad():
        x = tensor.detach()
        if not x.is_floating_point():
            x = x.double()
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        std, mean = torch.std_mean(wide, correction=0)
        low, high = torch.aminmax(wide)
        count = torch.zeros((), device=x.device)
        if not bool(torch.isfinite(mean + low + high)):
            count = (~torch.isfinite(wide)).sum()
        return mean, std, low, high, count


def statistics_of(measured: tuple[Tensor, ...] | None) -> Statistics | None:
    """What ``measure`` returned, as numbers. Synchronises with the device."""
    if measured is None:
        return None
    mean, std, low, high, count = (value.item() for value in measured)
    return Statistics(mean, std, low, high, int(count))


def gradient_of(tensor: Tensor) -> Gradient:
    """Shape, norm and share of zeros of a gradient, half precision summed in float32. Synchronises with the device."""
    if tensor.is_meta:
        return Gradient(shape_text(tensor), reason="a meta tensor has no values")
    with torch.no_grad():
        x = tensor.detach()
        x = x.coalesce().values() if x.layout == torch.sparse_coo else x.to_dense() if x.layout != torch.strided else x
        norm = torch.linalg.vector_norm(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).item()
        zeros = 1 - torch.count_nonzero(x).item() / max(x.numel(), 1)
        zeros = 1 - (x.numel() * (1 - zeros)) / max(tensor.numel(), 1)  # what a sparse gradient leaves out is zero
    return Gradient(shape_text(tensor), norm, zeros)


def shape_text(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "x".join(map(str, tensor.shape)) or "scalar"


def shapes_text(value: Any) -> str:
    """``1x3x8x8``, or ``2x5x8, 2x8`` for several tensors; other values by their type."""
    tensors = [shape_text(tensor) for _, tensor in iter_tensors(value)]
    if not tensors:
        is_empty = isinstance(value, (tuple, list, dict)) and not value
        return "" if is_empty else "None" if value is None else type(value).__name__
    return ", ".join(tensors[:4]) + (f", ... ({len(tensors)})" if len(tensors) > 4 else "")
