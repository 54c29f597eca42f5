"""Rows of numbers that fill up during one sampled step, on the devices where the tensors are.

Nothing here waits for a device, so that a look does not hold the training up: rows are handed over as tensors, and read
on another thread (``sampling``). Modes of the user's, such as that of a selective checkpoint, do not see the counting:
the ``Shield`` shuts them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gaff.compat import autograd, elements
from gaff.record.sample import Key
from gaff.record.statistics import M2, MAX, MEAN, MIN, WIDTH
from gaff.training.statistics import kernel, on_gpu, plain

_ROOM = 64
_ROW_BYTES = 2048  # of a row: its 74 numbers, once more as plain ones when it is judged, and its key
_UNITS = 1 << 14
_LARGEST, _SMALLEST = range(2)  # of a table of units
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def readable(tensor: Tensor) -> Tensor | None:
    """What of a tensor can be counted, as a real, floating tensor on its device; None if nothing of it can.

    Detached; a view of its memory where that is possible. Of a tensor that is spread over processes the part of this
    one counts. None for integers, quantised and nested tensors, and for what stands for many inside a torch.func
    transform or a batched backward pass.
    """
    if autograd.is_wrapper(tensor):
        return None
    is_usual = (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter) and tensor.dtype in _READABLE
    if is_usual and not tensor.is_mps and elements.is_plain(tensor):
        return tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_nested or tensor.is_quantized:
        return None
    value = elements.elements(tensor)
    return value if value is None or value.dtype in _READABLE else value.float()


class Accumulator:
    """What is counted in one sampled step, by key: the model's name and the address of a tensor stream.

    Rows of numbers for each stream, ``units``: tables of its units (both as in ``gaff.training.statistics``), and
    ``shares`` of it by name. ``notes``: what the record should say of how it was counted. All stays on the devices of
    the tensors until ``take``. Adding needs no lock: one thread.
    """

    def __init__(self) -> None:
        self._kernel = kernel.load()
        self._rows: dict[Key, Tensor] = {}
        self._aliases: dict[Key, list[Key]] = {}
        self._room: dict[torch.device, list[Tensor]] = {}
        self._no_units: dict[tuple[torch.device, int], Tensor] = {}  # tables before the first input, by width
        self.units: dict[Key, Tensor] = {}
        self._unlike: set[Key] = set()  # of calls whose units are not the same ones
        self.inputs: dict[Key, int] = {}  # values of each unit that its table has seen
        self.shares: dict[tuple[str, Key], tuple[Any, int]] = {}  # sums and what to divide them by
        self.notes: set[str] = set()

    def observe(self, key: Key, tensor: Tensor, histogram: bool = True) -> None:
        """Add a readable tensor's numbers to the row of ``key``, made when it is first met. No synchronisation.

        ``histogram``: whether its powers of two are counted, too. A stream that moves to another device begins anew
        there.
        """
        row = self._rows.get(key)
        if row is None or row.device != tensor.device:
            row = self._rows[key] = self._new_row(tensor.device)
        self._ops(tensor.device).observe_(tensor, row, histogram)

    def observe_units(self, key: Key, tensor: Tensor, count: int, inner: int) -> None:
        """Add the first inputs of a batch to the table of the units of ``key``: 16,384 elements at most, or one input.

        ``count`` and ``inner`` are those of ``models.units_of``. Of what had another number of units before, as a
        module that is used in several places, nothing is told: the numbers would be those of one place.
        """
        each = tensor[0].numel()
        some = tensor[: max(1, _UNITS // each)]
        table = self.units.get(key)
        if key in self._unlike or (table is not None and table.shape[1] != count):
            self._unlike.add(key)
            self.units.pop(key, None)
            return
        if table is None:
            table = self.units[key] = self._new_table(tensor.device, count)
        self.inputs[key] = self.inputs.get(key, 0) + some.numel() // (count * inner) * inner
        self._ops(tensor.device).observe_units_(some, table, inner)

    def observe_many(self, keys: Sequence[Key], tensors: Sequence[Tensor], histogram: bool = True) -> None:
        """Add the numbers of many readable tensors, each to a new row, in one call for each device."""
        by_device: dict[torch.device, list[int]] = {}
        for at, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(at)
        for device, places in by_device.items():
            rows = _empty_rows(len(places), device)
            self._ops(device).observe_many_([tensors[at] for at in places], rows, histogram)
            self._rows.update(zip((keys[at] for at in places), rows.unbind(0), strict=True))

    def __contains__(self, key: Key) -> bool:
        """Whether anything was counted under ``key``."""
        return key in self._rows

    def add_share(self, name: str, key: Key, value: Tensor, count: int) -> None:
        """Add to a share of ``key`` a sum, and how many numbers there are in it. No synchronisation."""
        known, number = self.shares.get((name, key), (0.0, 0))
        self.shares[name, key] = known + value.to(elements.wide_type(value)), number + count

    def add_largest(self, name: str, key: Key, value: Tensor) -> None:
        """Keep the largest of what is given under this name, where a share would be a mean. No synchronisation."""
        known = self.shares.get((name, key))
        value = value.to(elements.wide_type(value))
        self.shares[name, key] = value if known is None else torch.maximum(known[0], value), 1

    def alias(self, key: Key, known: Key) -> None:
        """Let ``key`` have the numbers of ``known``, which is the same tensor stream, and come just after it."""
        if known in self._rows:
            self._rows[key] = self._rows[known]
            self._aliases.setdefault(known, []).append(key)
        if known in self.units:
            self.units[key], self.inputs[key] = self.units[known], self.inputs[known]

    @property
    def size_bytes(self) -> int:
        """About how much memory rows and tables take, on whatever devices they are, with the objects around them."""
        return len(self._rows) * _ROW_BYTES + sum(one.nbytes for one in self.units.values())

    def rows(self, ending: str) -> Iterator[tuple[Key, Tensor]]:
        """The keys whose address ends with ``ending``, such as ``:grad``, with their rows, which go on being filled."""
        return ((key, row) for key, row in self._rows.items() if key[1].endswith(ending))

    def rescale(self, port: str, factor: Any) -> None:
        """Multiply what was counted so far at this port, of whatever key, as if the tensors had been; not their powers
        of two. ``factor``: a number, or a tensor of one on any device, which is not waited for."""
        rows = [row for key, row in self._rows.items() if port in key[1]]
        for device in {row.device for row in rows}:
            by = torch.as_tensor(factor, dtype=torch.float64, device=device)
            here = [row for row in rows if row.device == device]
            torch._foreach_mul_([row[MEAN] for row in here], by)
            torch._foreach_mul_([row[M2] for row in here], by * by)
            torch._foreach_mul_([row[MIN : MAX + 1] for row in here], by)

    def take(self) -> tuple[list[Key], list[Tensor]]:
        """All keys, and their rows stacked: one tensor a device, in order.

        No row is left afterwards; tables of units and shares stay as they are.
        """
        by_device: dict[torch.device, list[Key]] = {}
        for key in self._ordered():
            by_device.setdefault(self._rows[key].device, []).append(key)
        rows, self._rows = self._rows, {}
        keys = [key for several in by_device.values() for key in several]
        return keys, [torch.stack([rows[key] for key in several]) for several in by_device.values()]

    def _ordered(self) -> list[Key]:
        """All keys in the order in which they came, each followed by those that are the same stream."""
        aliases = {key for several in self._aliases.values() for key in several}
        waiting = [key for key in reversed(self._rows) if key not in aliases]
        found = []
        while waiting:
            found.append(waiting.pop())
            waiting += reversed(self._aliases.get(found[-1], ()))
        return found

    def _ops(self, device: torch.device) -> Any:
        """What computes there: the compiled kernel on a CPU, Triton's kernels on a GPU, else plain torch."""
        if device.type == "cpu":
            return plain if self._kernel is None else self._kernel
        found, why = on_gpu.load(device)
        if why:
            self.notes.add(why)
        return plain if found is None else found

    def _new_table(self, device: torch.device, count: int) -> Tensor:
        """A table for so many units; a copy of one that was made before, since to make it takes as long as counting."""
        if (device, count) not in self._no_units:
            empty = torch.zeros(3, count, dtype=torch.float64, device=device)
            empty[_LARGEST].fill_(-math.inf)
            empty[_SMALLEST].fill_(math.inf)
            self._no_units[device, count] = empty
        return self._no_units[device, count].clone()

    def _new_row(self, device: torch.device) -> Tensor:
        """An empty row; many are made at once, since a launch on a device costs more than their memory."""
        room = self._room.setdefault(device, [])
        if not room:
            room.extend(_empty_rows(_ROOM, device).unbind(0))
        return room.pop()


def _empty_rows(number: int, device: torch.device) -> Tensor:
    """Rows of nothing (``EMPTY``), made on the device: what is copied there from the CPU would be waited for."""
    rows = torch.zeros(number, WIDTH, dtype=torch.float64, device=device)
    rows[:, MIN].fill_(math.inf)
    rows[:, MAX].fill_(-math.inf)
    return rows
