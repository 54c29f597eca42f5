"""The statistics on a GPU: kernels in Triton's language (``triton_kernels``) are launched, and nothing is waited for.

The same numbers as ``plain`` and ``kernel.cpp`` give, up to rounding, by one pass over the memory. torch brings Triton
where it is built for GPUs; without it plain torch counts, some seventy kernels for each tensor in place of one or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import Tensor

from gaff.record.statistics import WIDTH, stride_of
from gaff.training.statistics import triton_kernels
from gaff.training.statistics.plain import in_memory_order

TILE = 8192  # elements that a program has in its registers at once
_SIZES = {"TILE": TILE, "SAMPLES": 1024, "num_warps": 4}
_MOST = 512  # programs of one tensor
_MANY = 64  # programs of each tensor, where there are many
_MERGED = 512  # lines of parts that are merged at once: at least as many as programs
_PART = 9  # numbers in a line of parts: those of a row before its magnitudes
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


def observe_(x: Tensor, row: Tensor, histogram: bool) -> None:
    """Add the elements of ``x`` to ``row``: [74], float64, on the same device, written in place.

    ``x``: float16, bfloat16, float32 or float64, any shape and strides (copied where it is not dense), not written to.
    ``histogram``: whether powers of two are counted, too, as by ``plain.observe_``.
    """
    x = _flat(x)
    elements = x.numel()
    if not elements:
        return
    programs = min(-(-elements // TILE), _MOST)
    stride = stride_of(elements) if histogram else 0
    with _on(x.device):
        parts = row if programs == 1 else torch.empty(programs, _PART, dtype=torch.float64, device=x.device)
        launch = triton_kernels.count_one[programs,]
        launch(x, row, parts, elements, stride, programs, IS_ALONE=programs == 1, **_SIZES)
        if programs > 1:
            triton_kernels.merge_one[1,](parts, row, programs, SIZE=_MERGED)


def observe_many_(tensors: Sequence[Tensor], rows: Tensor, histogram: bool) -> None:
    """Add the elements of each tensor to its own row: ``rows`` is [n, 74], float64, on the device of all of them.

    Two launches for all tensors of one dtype, two more for those that begin at odd addresses. What tells them where the
    tensors lie is copied to the device from pinned memory, without waiting.
    """
    by_kind: dict[tuple[torch.dtype, bool], list[tuple[Tensor, int]]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.numel():
            flat = _flat(tensor)
            by_kind.setdefault((tensor.dtype, flat.data_ptr() % 16 == 0), []).append((flat, at))
    with _on(rows.device):
        for (dtype, is_aligned), known in by_kind.items():
            elements = [tensor.numel() for tensor, _ in known]
            programs = [min(-(-one // TILE), _MANY) for one in elements]
            starts = [0, *accumulate(programs)]
            plan = [
                *(tensor.data_ptr() for tensor, _ in known),
                *elements,
                *(stride_of(one) if histogram else 0 for one in elements),
                *(at for _, at in known),
                *starts,
                *chain.from_iterable(map(repeat, range(len(known)), programs)),  # whose stretch each program counts
            ]
            table = _to_device(plan, rows.device)
            parts = torch.empty(starts[-1], _PART, dtype=torch.float64, device=rows.device)
            launch, kind = triton_kernels.count_many[starts[-1],], _KINDS[dtype]
            launch(table, len(known), rows, parts, KIND=kind, IS_ALIGNED=is_aligned, WIDTH=WIDTH, **_SIZES)
            triton_kernels.merge_many[len(known),](table, len(known), parts, rows, WIDTH=WIDTH, SIZE=_MANY)


def observe_units_(x: Tensor, units: Tensor, inner: int) -> None:
    """Add to ``units`` what each unit of ``x`` did, as ``plain.observe_units_``; NaN passes none of its numbers."""
    x = _flat(x)
    count = units.shape[1]
    lines = x.numel() // (count * inner)
    if not lines:
        return
    at_once = 32 if inner == 1 else 1
    with _on(x.device):
        triton_kernels.count_units[-(-count // at_once),](x, units, count, inner, lines * inner, UNITS=at_once,
                                                   SIZE=2048 // at_once)  # fmt: skip


def _flat(x: Tensor) -> Tensor:
    """All elements in one line of memory, as they lie there; a copy of what is not dense, or negated by a flag only."""
    x = x.detach().resolve_neg()
    return x if x.is_contiguous() else in_memory_order(x).contiguous()


def _to_device(numbers: list[int], device: torch.device) -> Tensor:
    """Whole numbers as a tensor on ``device``; nothing waits for the copy."""
    here = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
    return here.to(device, non_blocking=True)


def _on(device: torch.device) -> Any:
    """A context in which Triton launches there, and not on the device that is current."""
    return torch.device(device) if device.type == "cpu" else torch.get_device_module(device).device(device)
