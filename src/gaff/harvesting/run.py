"""``gaff.harvest``: run a model over a data set and keep what passes at some sites on disk, once, whatever happens.

The data is cut into shards of so many batches. A shard is a function of its batches alone, so a harvest that was killed
is begun again by the same call: shards that are there are left as they are, all others are made anew.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import groupby
from types import CodeType, FunctionType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gaff.address.grammar import STATE_PORTS
from gaff.address.nested import map_tensors
from gaff.address.resolve import need_module
from gaff.compat import distributed, libraries
from gaff.errors import PlanError, RecordError
from gaff.harvesting import manifest
from gaff.harvesting.batches import BatchSource, Numbered, source_of
from gaff.harvesting.places import Place, draft_in, leave, place_of, sweep
from gaff.harvesting.progress import Progress, silent
from gaff.harvesting.rows import SCALE_OF, Rows, Selection, is_reserved, own_columns
from gaff.harvesting.shard import Shard, ShardWriter, read_shard
from gaff.harvesting.store import Store
from gaff.harvesting.tensor_file import TensorFile, WrittenTensor, checksum_of
from gaff.harvesting.values import Loss, evaluating, reader_of
from gaff.sessions.plan import Plan
from gaff.sessions.take import arguments

NonFinite = Literal["count", "mark", "refuse"]
_ORDER = "batch, sample"  # what the columns of the file of the order are
_FUNCTIONS = ("rows", "loss", "inputs", "labels", "reduce")


@dataclass(frozen=True, slots=True)
class HarvestOptions:
    """How a data set is harvested; the meaning of each is told at ``gaff.harvest``. Raises PlanError, when made."""

    rows: Rows | Callable[[Any], Tensor] = "sample"
    loss: Loss | None = None
    inputs: Callable[[Any], Any] | None = None
    mask: str | None = None
    labels: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = field(default_factory=dict)
    reduce: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | str | None = None
    nonfinite: NonFinite = "count"
    shard: int = 64
    training: bool = False
    accept_changes: bool = False

    def __post_init__(self) -> None:
        if not callable(self.rows) and self.rows not in get_args(Rows):
            raise PlanError(f"rows={self.rows!r} is not known: expected 'sample', 'token', 'position' or a function")
        if self.nonfinite not in get_args(NonFinite):
            raise PlanError(f"nonfinite={self.nonfinite!r} is not known: expected 'count', 'mark' or 'refuse'")
        if isinstance(self.shard, bool) or not isinstance(self.shard, int) or self.shard < 1:
            raise PlanError(f"shard={self.shard!r} is no number of batches: expected 1 or more")
        if self.mask is not None and self.rows != "token":
            raise PlanError(f"mask={self.mask!r} is for rows='token': expected that, or no mask")
        taken = [name for name in (() if callable(self.labels) else self.labels) if is_reserved(name)]
        if taken:
            raise PlanError(f"label {taken[0]!r} is a name of gaff's own: expected another")
        for name in ("loss", "inputs", "reduce"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise PlanError(f"{name}={getattr(self, name)!r} cannot be called: expected a function")

    @property
    def is_rounded(self) -> bool:
        """Whether rows are written as int8, each with a scale."""
        return str(self.dtype).removeprefix("torch.") == "int8"

    def described(self) -> dict[str, Any]:
        """The options on which the rows depend, as JSON."""
        labels = self.labels if callable(self.labels) else {name: str(key) for name, key in self.labels.items()}
        return {
            **{name: _told(getattr(self, name)) for name in ("rows", "loss", "inputs", "mask", "reduce")},
            "labels": _told(labels), "dtype": str(self.dtype).removeprefix("torch."), "nonfinite": self.nonfinite,
            "shard": self.shard, "training": self.training,
        }  # fmt: skip

    def functions(self) -> dict[str, str]:
        """By option: a checksum of the user's function, of Python's instructions; what it calls is not looked at."""
        return _checksums({name: getattr(self, name) for name in _FUNCTIONS})


def _plan_options(plan: Plan) -> list[Any]:
    """What a plan that was given ready-made says of how its values are kept."""
    return [str(plan.options.dtype), _told(plan.options.reduce), *(_told(one.reduce) for one in plan.requests)]


def _plan_functions(plan: Plan) -> dict[str, str]:
    """As ``HarvestOptions.functions``, of the functions in a plan."""
    given = {"plan.reduce": plan.options.reduce, **{f"plan.{one}": one.reduce for one in plan.requests}}
    return _checksums(given)


def _checksums(given: Mapping[str, Any]) -> dict[str, str]:
    """By name: a checksum of what a function does; what is none is left out."""
    return {
        name: sha256(_code(one.__code__).encode()).hexdigest()[:16]
        for name, one in given.items()
        if isinstance(one, FunctionType)
    }


def _code(code: CodeType) -> str:
    """What a function does, as text: its instructions, names and constants, and those of functions inside it."""
    inner = [
        _code(one) if isinstance(one, CodeType) else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
        for one in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"


def harvest(
    model: nn.Module,
    data: Any,
    patterns: tuple[Any, ...],
    out: Any,
    options: HarvestOptions,
    progress: Progress = silent,
) -> Store:
    """Go through ``data`` and write what is not there yet. See ``gaff.harvest``, which explains the arguments."""
    need_module(model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if distributed.meshes_of(model):
        raise PlanError("a model whose weights lie on several processes cannot be harvested yet: expected one that is "
                        "whole in each, which may be wrapped by DistributedDataParallel")  # fmt: skip
    place = place_of(out)
    given: dict[str, Any] = {"dtype": None if options.is_rounded else options.dtype, "reduce": options.reduce}
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
    work = _Work(model, source, place, options, progress)
    with ExitStack() as stack:
        stack.enter_context(nullcontext() if options.training else evaluating(model))
        work.read = reader_of(model, plan, options.loss)
        work.go_on(_begin(model, plan, source, place, options))
    store = Store(place)
    for site, count in store.nonfinite.items():
        warnings.warn(f"{site}: {count} of {store.rows} rows hold a NaN or an infinity", stacklevel=3)
    return store


def _begin(model: nn.Module, plan: Plan, source: BatchSource, out: Place, options: HarvestOptions) -> tuple[str, ...]:
    """Write or compare the manifest, and have the source take samples in the order of the first start.

    Returns what has changed since, where that is allowed. Raises PlanError where it is not.
    """
    order = _written_order(source.draw_order(), out) if not manifest.is_begun(out) else None
    told = {
        "model": manifest.described(model),
        "sites": [str(request) for request in plan.requests],
        "options": {**options.described(), "plan": _plan_options(plan)},
        "functions": {**options.functions(), **_plan_functions(plan)},
        "data": source.described(),
    }
    known, changes = manifest.begin(out, told, order, accept_changes=options.accept_changes)
    source.use_order(_read_order(known.get("order"), out))
    return changes


class _Work:
    """One process's part of a harvest: the batches of its shards, one after another."""

    def __init__(
        self, model: nn.Module, source: BatchSource, out: Place, options: HarvestOptions, progress: Progress
    ) -> None:
        self.read: Callable[[Numbered], Mapping[str, Any]]
        self._source, self._out, self._options, self._progress = source, out, options, progress
        self._device = libraries.device_of(model)
        self._like: dict[tuple[str, str], WrittenTensor] = {}  # of every column: what its rows are in all shards

    def go_on(self, changes: tuple[str, ...]) -> None:
        """Do what is not done yet. On the way out, also by Ctrl-C, nothing half done is left behind."""
        sweep(self._out.drafts())
        size, (rank, ranks) = self._options.shard, distributed.place()
        there = {number: read_shard(self._out, number) for number in self._out.shards()}
        for known in there.values():
            self._like.update({("site", name): one for name, one in known.sites.items()})
            self._like.update({("label", name): one for name, one in known.labels.items()})
        batches = self._source.after(there, size, partial(_is_mine, rank, ranks), compares=not changes)
        most = self._known_end(there)
        for number, of_shard in groupby(batches, lambda given: given.number // size):
            self._write(number, of_shard, changes, most)
        self._end(there)
        leave(self._out.drafts())

    def _write(self, number: int, batches: Iterable[Numbered], changes: tuple[str, ...], most: int | None) -> None:
        """Make one shard. Raises RecordError for a batch behind ``most``, the end of the data at an earlier time."""
        with ShardWriter(self._out, number, self._like) as writer:
            shard = _OpenShard(writer, number * self._options.shard, self._options)
            for given in batches:
                if most is not None and given.number >= most:
                    raise RecordError(f"the data had {most} batches, and has more now: it is another")
                rows = shard.take(given, self.read(self._moved(given)))
                self._progress(given.number, self._source.expected, rows)
            shard.commit(changes)

    def _known_end(self, there: Mapping[int, Shard]) -> int | None:
        """How many batches the data had, where that is known: it was noted, or a shard is not full."""
        if self._out.holds(manifest.END):
            return int(manifest.read(self._out, manifest.END)["batches"])
        return min((one.batches[1] for one in there.values() if one.batches[1] % self._options.shard), default=None)

    def _end(self, there: Mapping[int, Shard]) -> None:
        """Note how many batches the data had. Raises RecordError where shards that were there hold others."""
        count, size = self._source.count, self._options.shard
        if not count:
            raise PlanError("the data gave no batch: expected some; a generator can be gone through only once")
        for number, shard in there.items():
            if shard.batches != (number * size, min((number + 1) * size, count)):
                raise RecordError(
                    f"shard {number} holds batches {shard.batches[0]} to {shard.batches[1] - 1}, and the data has "
                    f"{count} now: it is another"
                )
        manifest.end(self._out, count)

    def _moved(self, given: Numbered) -> Numbered:
        """The batch's arguments on the device of the model."""
        args, kwargs = map_tensors(
            (given.args, given.kwargs), lambda tensor: tensor.to(self._device, non_blocking=True)
        )
        return given._replace(args=args, kwargs=kwargs)


def _is_mine(rank: int, ranks: int, shard: int) -> bool:
    return shard % ranks == rank


class _OpenShard:
    """The shard that is being written, and what is counted along the way."""

    def __init__(self, writer: ShardWriter, first: int, options: HarvestOptions) -> None:
        self.writer = writer
        self._options = options
        self._batches = (first, first)
        self._nonfinite: dict[str, int] = {}
        self._inputs = self._first = 0

    def take(self, given: Numbered, values: Mapping[str, Any]) -> int:
        """Write the rows of a batch; how many they were. Raises PlanError for a NaN where that is to be refused."""
        if self._batches[0] == self._batches[1]:
            self._first = checksum_of(given.tensors())
        self._inputs = checksum_of(given.tensors(), self._inputs)
        selection = Selection(given, self._options.rows, self._options.mask)
        sites = {address: selection.of(address, value) for address, value in values.items()}
        labels = selection.labels(own_columns(given.batch, self._options.labels))
        broken = {address: bad for address, rows in sites.items() if (bad := _nonfinite(rows)) is not None}
        for address, bad in broken.items():
            self._nonfinite[address] = self._nonfinite.get(address, 0) + int(bad.sum())
            if self._options.nonfinite == "refuse":
                sample = int(labels["sample"][bad][0])
                raise PlanError(f"{address}: a NaN or an infinity in batch {given.number}, sample {sample}: expected "
                                "finite values, or nonfinite='count' or 'mark'")  # fmt: skip
        if self._options.nonfinite == "mark":
            finite = torch.ones(len(labels["sample"]), dtype=torch.bool)
            for bad in broken.values():
                finite &= ~bad
            labels["finite"] = finite
        if self._options.is_rounded:
            for address, rows in sites.items():
                sites[address], labels[SCALE_OF + address] = _rounded(address, rows)
        self.writer.append(sites, labels)
        self._batches = (self._batches[0], given.number + 1)
        return len(labels["sample"])

    def commit(self, changes: tuple[str, ...]) -> Shard:
        """Put the shard in its place."""
        return self.writer.commit(self._batches, self._inputs, self._first, self._nonfinite, changes)


def _nonfinite(rows: Tensor) -> Tensor | None:
    """Which rows hold a NaN or an infinity; None where none does, which one sum tells nearly always."""
    if not (rows.is_floating_point() or rows.is_complex()) or not rows.numel():
        return None
    exact = rows.float() if rows.dtype.itemsize < 2 else rows  # torch adds up no float8
    if bool(torch.isfinite(exact.sum())):
        return None
    bad: Tensor = ~torch.isfinite(exact).flatten(1).all(1) if rows.dim() > 1 else ~torch.isfinite(exact)
    return bad if bool(bad.any()) else None


def _rounded(address: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as whole numbers from -127 to 127, and the float32 by which they are to be multiplied."""
    if not rows.is_floating_point():
        raise PlanError(f"{address}: is of {rows.dtype}: expected floating numbers for dtype='int8'")
    rows = rows.float()
    if not rows.numel():
        return rows.to(torch.int8), torch.zeros(len(rows))
    dims = tuple(range(1, rows.dim()))
    scale = (rows.abs().amax(dims) if dims else rows.abs()) / 127
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).view(-1, *(1 for _ in dims))
    whole = (rows / divisor).round().nan_to_num(0).clamp(-127, 127).to(torch.int8)
    return whole, torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))


def _arguments(model: nn.Module, options: HarvestOptions, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with. A column that is there for its label only does not go to a model without it."""
    args, kwargs = arguments(batch, options.inputs)
    if kwargs and options.inputs is None and not callable(options.labels):
        known = inspect.signature(model.forward).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            columns = set(options.labels.values()) - known.keys()
            kwargs = {name: one for name, one in kwargs.items() if name not in columns}
    return args, kwargs


def _written_order(order: list[list[int]], out: Place) -> Any:
    """Write down which samples each batch has, and say where; None where the data has no indices."""
    if not order:
        return None
    pairs = torch.tensor([[number, sample] for number, batch in enumerate(order) for sample in batch])
    name = f"order-{checksum_of([pairs]):08x}.safetensors"
    with draft_in(out.drafts(), 0) as folder, TensorFile(folder / name, _ORDER, pairs) as file:
        file.append(pairs)
        told = file.close().to_dict()
        out.send(folder / name, name)
    return told


def _read_order(told: Any, out: Place) -> list[list[int]]:
    """The samples of each batch. Raises RecordError where the file is damaged."""
    if told is None:
        return []
    written = WrittenTensor.from_dict(told)
    pairs = out.rows(written.file, _ORDER, written).run(0, written.rows)
    counts = torch.bincount(pairs[:, 0]).tolist()
    return [one.tolist() for one in pairs[:, 1].split(counts)]


def _told(value: Any) -> Any:
    """An option as text that is the same in another process: a function by its name."""
    if value is None or isinstance(value, (str, int, float, dict)):
        return value
    if isinstance(value, partial):
        return f"partial({_told(value.func)}, {value.args!r}, {value.keywords!r})"
    name = getattr(value, "__qualname__", None)
    if name is None and " at 0x" in repr(value):  # an address of memory, which is another each time
        name = f"{type(value).__qualname__}()"
    return f"{value.__module__}.{name}" if name is not None else f"{value!r}"
