"""``gaff.harvest``: run a model over a data set and keep what passes at some sites on disk, once, whatever happens.

The data is cut into shards of so many batches. A shard is a function of its batches alone, so a harvest that was killed
is begun again by the same call: shards that are there are left as they are, all others are made anew.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from gaff.address.grammar import STATE_PORTS
from gaff.address.resolve import need_module, unwrap
from gaff.compat import distributed
from gaff.errors import PlanError, RecordError
from gaff.harvesting import manifest
from gaff.harvesting.batches import BatchSource, source_of
from gaff.harvesting.engines import Engine
from gaff.harvesting.folder import location_of
from gaff.harvesting.index import read_shards, write_index
from gaff.harvesting.location import Location, draft_in, leave, sweep, writing
from gaff.harvesting.making import Job
from gaff.harvesting.mode import in_mode
from gaff.harvesting.options import HarvestOptions, plan_functions, plan_options
from gaff.harvesting.progress import Progress
from gaff.harvesting.shard import Shard
from gaff.harvesting.store import Store
from gaff.harvesting.tensor_file import TensorFile, WrittenTensor, checksum_of
from gaff.harvesting.values import Norms, reader_of
from gaff.sessions.plan import Plan
from gaff.sessions.take import arguments


def harvest(
    model: nn.Module,
    data: Any,
    patterns: tuple[Any, ...],
    out: Any,
    options: HarvestOptions,
    *,
    progress: Progress,
    engine: Engine,
    norms: Norms | None = None,
) -> Store:
    """Go through ``data`` and write what is not there yet. See ``gaff.harvest``, which explains the arguments."""
    need_module(model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    place = location_of(out)
    # cast once it is known what was not finite, and which numbers are the largest
    is_late = options.is_rounded or options.small is not None or options.top is not None
    given: dict[str, Any] = {"dtype": None if is_late else options.dtype, "reduce": options.reduce}
    plan = Plan.of(*patterns, **{name: one for name, one in given.items() if one is not None})
    if not plan.requests:
        raise PlanError("harvest was given no site: expected gaff.harvest(model, data, 'layer4', out=...)")
    for row in plan.check(model):
        if row.found.site.port in STATE_PORTS:
            raise PlanError(
                f"{row.found.site}: belongs to a parameter or a buffer, and has no rows of samples: expected the "
                "address of a value or of its gradient"
            )
    source = source_of(data, partial(_arguments, model, options))
    with _as_drawn(data), nullcontext() if options.training else in_mode(model, training=False):
        reader_of(model, plan, options.loss, norms)  # what it refuses is refused before anything is written
        changes = _begin(model, plan, source, place, options)
        sweep(place.drafts())
        there = {shard.number: shard for shard in read_shards(place)}
        like = {(kind, name): one for shard in there.values() for kind, name, one in shard.columns()}
        job = Job(model, plan, options, place, like, list(changes), _known_end(there, place, options.shard), norms)
        engine.run(job, source, there, progress)
    _end(there, place, options.shard, source.count)
    leave(place.drafts())
    if distributed.meshes_of(model):
        distributed.told_by_all(None)  # the first of several writes for the others
    store = Store(place)
    if store.is_complete:
        write_index(place, store.shards)
    if job.changes and {shard.number for shard in store.shards} == there.keys():
        told = f"nothing was left to make, and all rows are from before what has changed: {'; '.join(job.changes)}"
        warnings.warn(told, stacklevel=3)
    for site, count in store.nonfinite.items():
        beyond = "" if options.small is None else f", or a number beyond {torch.finfo(options.small).max:g}"
        warnings.warn(f"{site}: {count} of {store.rows} rows hold a NaN or an infinity{beyond}", stacklevel=3)
    return store


@contextmanager
def _as_drawn(data: Any) -> Iterator[None]:
    """Leave torch's random numbers, and a loader's own, as they were, so that what comes next is the same whether the
    harvest was there already or not."""
    batches = getattr(data, "batch_sampler", None)
    drawing = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(one, "generator", None) for one in drawing]
    own = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for generator, state in own:
                generator.set_state(state)


def _begin(
    model: nn.Module, plan: Plan, source: BatchSource, out: Location, options: HarvestOptions
) -> tuple[str, ...]:
    """Write or compare the manifest, and have the source take samples in the order of the first start.

    Returns what has changed since, where that is allowed. Raises PlanError where it is not.
    """
    drawn = source.draw_order()
    order = _written_order(drawn, out) if not manifest.is_begun(out) else None
    told = {
        "model": manifest.described(model),
        "sites": [str(request) for request in plan.requests],
        "options": {**options.described(), "plan": plan_options(plan)},
        "functions": {**options.functions(), **plan_functions(plan)},
        "data": source.described(),
    }
    known, changes = manifest.begin(out, told, order, accept_changes=options.accept_changes)
    source.use_order(_read_order(known.get("order"), out))
    return changes


def _known_end(there: Mapping[int, Shard], out: Location, size: int) -> int | None:
    """How many batches the data had, where that is known: it was noted, or a shard is not full."""
    if out.holds(manifest.END):
        return manifest.end_of(out)
    return min((one.batches[1] for one in there.values() if one.batches[1] % size), default=None)


def _end(there: Mapping[int, Shard], out: Location, size: int, count: int) -> None:
    """Note how many batches the data had. Raises RecordError where shards that were there hold others."""
    if not count:
        raise PlanError("the data gave no batch: expected some; a generator can be gone through only once")
    for number, shard in there.items():
        if shard.batches != (number * size, min((number + 1) * size, count)):
            raise RecordError(
                f"shard {number} holds batches {shard.batches[0]} to {shard.batches[1] - 1}, and the data has "
                f"{count} now: it is another"
            )
    manifest.end(out, count)


def _arguments(model: nn.Module, options: HarvestOptions, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with. A column that is there for its label, or as the mask, does not go to a model
    without it."""
    args, kwargs = arguments(batch, options.inputs)
    if kwargs and options.inputs is None and not callable(options.labels):
        known = inspect.signature(unwrap(model).forward).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            columns = {*options.labels.values(), options.mask} - known.keys()
            kwargs = {name: one for name, one in kwargs.items() if name not in columns}
    return args, kwargs


def _written_order(order: list[list[int]], out: Location) -> Any:
    """Write down which samples each batch has, and say where; None where the data has no indices."""
    if not order:
        return None
    pairs = torch.tensor([[number, sample] for number, batch in enumerate(order) for sample in batch], device="cpu")
    name = f"order-{checksum_of([pairs]):08x}.safetensors"
    with writing(out), draft_in(out.drafts(), 0) as folder, TensorFile(folder / name, manifest.ORDER, pairs) as file:
        file.append(pairs)
        told = file.close().to_dict()
        out.send(folder / name, name)
    return told


def _read_order(told: Any, out: Location) -> list[list[int]]:
    """The samples of each batch. Raises RecordError where the file is damaged."""
    if told is None:
        return []
    written = WrittenTensor.from_dict(told)
    pairs = out.rows(written.file, manifest.ORDER, written).run(0, written.rows)
    counts = torch.bincount(pairs[:, 0]).tolist()
    return [one.tolist() for one in pairs[:, 1].split(counts)]
