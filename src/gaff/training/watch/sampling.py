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
from gaff.training.watch.sampled_step import SampledStep


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
    step, phase, scale = sampled.step, sampled.phase, sampled.scale

    def read() -> tuple[Sample, Sequence[Key], Tensor]:
        table = torch.cat([one.cpu() for one in rows]) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)
        table = _unscale(keys, table, losses.read(scale))
        sample = Sample(step, phase, seconds)
        sample.rows = {key: Numbers(row) for key, row in zip(keys, table.tolist(), strict=True)}
        sample.units = {key: _units(one.cpu(), inputs[key]) for key, one in units.items()}
        sample.shares = {name: float(total) / max(1, count) for name, (total, count) in shares.items()}
        sample.parameters = {key: step_facts.read(one) for key, one in parameters.items()}
        sample.losses = {name: losses.read(value) for name, value in values.items()}
        sample.facts = {**told, "scale": None if told.get("scale") is None else losses.read(told["scale"])}
        return sample, keys, table

    return read


def _units(table: Tensor, inputs: int) -> Units:
    """What a table of units tells: which were active or constant, and how far the largest stands out.

    ``table``: [3, n], see ``gaff.training.statistics.plain.observe_units_``. ``inputs``: how many values of each unit
    it has seen.
    """
    largest, smallest, magnitude = table
    size = torch.maximum(largest.abs(), smallest.abs())
    active = int.from_bytes(bytes_of(size >= 1e-5), "little")
    is_constant = bool((largest - smallest <= 1e-6 * size).all()) and bool((size > 0).any())
    middle = float(magnitude.median())
    outlier = float(magnitude.max()) / middle if middle else math.nan
    return Units(table.shape[1], inputs, active, is_constant, outlier)


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
