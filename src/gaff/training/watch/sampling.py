"""From a sampled step, whose numbers may still be on a device, to a ``Sample`` of plain ones. Waits for devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gaff.record.sample import Key, Sample, Units
from gaff.record.statistics import WIDTH, Numbers
from gaff.training.watch import losses, step_facts
from gaff.training.watch.recorder import bytes_of
from gaff.training.watch.routers import load_of
from gaff.training.watch.sampled_step import SampledStep

_ROUNDING = 3e-6  # of a sum of a few dozen products in float32
_ROUNDED = 1e-3  # how far a sum that is divided by its number may be from the mean


def reading_of(
    sampled: SampledStep, parameters: Mapping[Key, Mapping[str, Any]], values: Mapping[str, Any], seconds: float
) -> Callable[[], tuple[Sample, Sequence[Key], Tensor]]:
    """A function that reads a step that was looked at: the sample, and its rows, [n, 74] on the CPU, by key.

    What is there now is taken from the step, whose accumulator may be filled again. The function is called later, on
    the thread that writes, and waits for devices there. ``parameters`` and ``values`` (the losses) may hold tensors,
    too; ``seconds``: since the run began.
    """
    keys, rows = sampled.numbers.take()
    units, inputs = dict(sampled.numbers.units), dict(sampled.numbers.inputs)
    shares, told = dict(sampled.numbers.shares), dict(sampled.facts)
    loads = sampled.routes.take()
    step, phase, scale = sampled.step, sampled.phase, sampled.scale

    def read() -> tuple[Sample, Sequence[Key], Tensor]:
        here = [one.cpu() for one in rows]
        rows.clear()  # a look at a large model holds much
        table = (
            here[0] if len(here) == 1 else torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64, device="cpu"), *here])
        )
        table = _unscale(keys, table, losses.read(scale))
        sample = Sample(step, phase, seconds)
        known = memoryview(bytes_of(table)).cast("d")  # a list of Python's numbers would take four times as much
        sample.rows = {key: Numbers(known[at * WIDTH : (at + 1) * WIDTH]) for at, key in enumerate(keys)}
        sample.units = _all_units(units, inputs)
        totals = losses.read_all(total for total, _ in shares.values())
        sample.shares = {name: total / max(1, shares[name][1]) for name, total in zip(shares, totals, strict=True)}
        sample.loads = {key: load_of(one) for key, one in loads.items()}
        sample.parameters = {key: step_facts.read(one) for key, one in _read_tensors(parameters).items()}
        sample.losses = dict(zip(values, losses.read_all(values.values()), strict=True))
        sample.facts = {name: plain(one) for name, one in told.items()}
        summed = sample.facts.pop("summed", None)
        if summed is not None and abs(summed["by"] - 1) > _ROUNDED:
            sample.facts["factor"] = {**summed, "weight": 1.0, "scale": summed["by"]}
        return sample, keys, table

    return read


def _read_tensors(known: Mapping[Key, Mapping[str, Any]]) -> dict[Key, dict[str, Any]]:
    """The same with numbers in place of all tensors, which are read together."""
    places = [(key, name) for key, one in known.items() for name, value in one.items() if isinstance(value, Tensor)]
    found = {key: dict(one) for key, one in known.items()}
    for (key, name), number in zip(places, losses.read_all(known[key][name] for key, name in places), strict=True):
        found[key][name] = number
    return found


def plain(fact: Any) -> Any:
    """A fact with numbers in place of tensors, which may be on a device, also inside tuples and dicts."""
    if isinstance(fact, Tensor):
        return fact.tolist() if fact.dim() else losses.read(fact)
    if isinstance(fact, tuple):
        return tuple(map(plain, fact))
    return {name: plain(one) for name, one in fact.items()} if isinstance(fact, dict) else fact


def _all_units(tables: Mapping[Key, Tensor], inputs: Mapping[Key, int]) -> dict[Key, Units]:
    """What tables of units tell; those of one size are read together. In the order of ``tables``."""
    by_size: dict[int, list[Key]] = {}
    for key, table in tables.items():
        by_size.setdefault(table.shape[1], []).append(key)
    found: dict[Key, Units] = {}
    for keys in by_size.values():
        several = _together([tables[key] for key in keys])
        found.update(zip(keys, _units(several, [inputs[key] for key in keys]), strict=True))
    return {key: found[key] for key in tables}


def _together(tables: Sequence[Tensor]) -> Tensor:
    """Tables of one size as one tensor on the CPU, [k, 3, n]; waits once, where they are on one device."""
    if len({one.device for one in tables}) > 1:
        tables = [one.cpu() for one in tables]
    return torch.stack(list(tables)).cpu()


def _units(tables: Tensor, inputs: Sequence[int]) -> list[Units]:
    """What tables of units tell: which were active or constant, and how far the largest stands out.

    ``tables``: [k, 3, n], see ``gaff.training.statistics.plain.observe_units_``. ``inputs``: how many values of each
    unit each of them has seen.
    """
    largest, smallest, magnitude = tables.unbind(1)
    size = torch.maximum(largest.abs(), smallest.abs())
    count = tables.shape[2]
    active = bytes_of(size >= 1e-5)
    usual = torch.maximum(size, size.median(1, keepdim=True).values)  # one near zero is noise beside the others
    is_constant = (largest - smallest <= _ROUNDING * usual).all(1).tolist()
    middle, most = magnitude.median(1).values.tolist(), magnitude.amax(1).tolist()
    return [
        Units(count, seen, int.from_bytes(active[at * count : (at + 1) * count], "little"), is_constant[at],
              most[at] / middle[at] if middle[at] else math.nan)
        for at, seen in enumerate(inputs)
    ]  # fmt: skip


def _unscale(keys: Sequence[Key], table: Tensor, scale: float) -> Tensor:
    """The table with gradients as those of the loss itself, and not of the loss times a GradScaler's factor.

    Only gradients of activations have to be changed: those of parameters are unscaled before the step is made, and so
    before they are counted.
    """
    if scale == 1.0:
        return table
    rows = [_unscaled(row, scale) if ":grad_output" in key[1] else row for key, row in zip(keys, table, strict=True)]
    return torch.stack(rows)


def _unscaled(row: Tensor, scale: float) -> Tensor:
    """A row of gradients of ``scale`` times the loss, as those of the loss; the powers of two stay as they were.

    A scale that is not finite, or zero, has left nothing that could be told.
    """
    if scale == 1.0 or not math.isfinite(scale) or not scale:
        return row
    row = row.clone()
    row[1] /= scale
    row[2] /= scale * scale
    row[3:5] /= scale
    return row
