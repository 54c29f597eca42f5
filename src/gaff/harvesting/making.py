"""One shard, made of its batches: run the model, take the rows, write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import map_tensors
from gaff.compat import elements, libraries
from gaff.errors import PlanError, RecordError, SiteError
from gaff.harvesting import manifest
from gaff.harvesting.batches import Numbered
from gaff.harvesting.location import Location, shard_path
from gaff.harvesting.options import HarvestOptions
from gaff.harvesting.rows import NORM_OF, PLACE_OF, SCALE_OF, Selection, is_reserved, own_columns
from gaff.harvesting.shard import Shard, ShardWriter
from gaff.harvesting.tensor_file import WrittenTensor, checksum_of
from gaff.harvesting.values import Norms, reader_of
from gaff.sessions.plan import Plan

Told = Callable[[int, int], None]  # the number of a batch, and how many rows it gave


_ROWS = 4  # of a batch, of which most may not be off at the same place
_FAINT = 127 * 2.0**-142  # the largest number of a row below which its scale is itself off by 0.4 % in float32


@dataclass(frozen=True)
class Job:
    """What all shards of a harvest have in common, also those that another process makes.

    ``like``: by kind and name, the rows of shards that are there, with which others must agree. ``changes``: what is
    another than at the beginning. ``end``: how many batches the data had at an earlier time, where that is known.
    """

    model: nn.Module
    plan: Plan
    options: HarvestOptions
    out: Location
    like: dict[tuple[str, str], WrittenTensor]
    changes: list[str] = field(default_factory=list)
    end: int | None = None
    norms: Norms | None = None

    def differs(self, text: str) -> None:
        """Note that what there is is not what would be made now. Raises RecordError where that is not accepted."""
        if not self.options.accept_changes:
            raise RecordError(f"{text}: expected the same again, another out=, or accept_changes=True")
        if not self.changes:  # further ones follow from the first
            self.changes.append(text)


class ShardMaker:
    """Makes the shards of a job, one after another, from batches. The model is in the mode that it is to run in."""

    def __init__(self, job: Job) -> None:
        self.read = reader_of(job.model, job.plan, job.options.loss, job.norms)
        self._job = job
        self._device = libraries.device_of(job.model)

    def make(self, number: int, batches: Iterable[Numbered], tell: Told) -> None:
        """Make one shard.

        Raises RecordError for a batch behind the end of the data at an earlier time, and where the harvest was deleted.
        """
        job = self._job
        with ShardWriter(job.out, number, job.like) as writer:
            shard = _OpenShard(writer, number * job.options.shard, job.options)
            for given in batches:
                if job.end is not None and given.number >= job.end:
                    raise RecordError(f"the data had {job.end} batches, and has more now: it is another")
                shard.note(given)  # before the model runs, which may write into what it is given
                tell(given.number, shard.take(given, self.read(self.moved(given))))
            shard.commit(tuple(job.changes), manifest.identity(job.out))

    def compare(self, given: Numbered, shard: Shard) -> bool:
        """Make the rows of the first batch of a shard that has any once more, and tell the job where they are others.

        Returns whether there were rows.

        What a function closes over, a hook or an edit does, and settings of modules are not told by any name: only what
        they make of a batch shows that they are the same.
        """
        again = _Again(self._job, shard, given.number - shard.batches[0])
        return _OpenShard(again, given.number, self._job.options).take(given, self.read(self.moved(given))) > 0

    def moved(self, given: Numbered) -> Numbered:
        """The batch's arguments on the device of the model, in memory of their own: it may write into what it is given,
        and rows and labels are told by the batch as it came. A tensor that is given twice stays one."""
        known: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = tensor.to(self._device, non_blocking=True, copy=True)
            return known[id(tensor)]

        args, kwargs = map_tensors((given.args, given.kwargs), move)
        batch = given.batch
        if self._job.options.loss is not None:  # which may write into it, too
            with suppress(TypeError):  # of another class, which cannot be made anew
                batch = map_tensors(batch, Tensor.clone)
        return given._replace(args=args, kwargs=kwargs, batch=batch)


class _Again:
    """Takes the rows of a batch of a shard that is there, and compares them with those that were written.

    Each batch was written as a block of each file: this is number ``at`` of them.
    """

    def __init__(self, job: Job, shard: Shard, at: int) -> None:
        self._job, self._shard, self._at = job, shard, at

    def append(self, sites: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Tell the job of rows that differ by more than processors do (``_is_alike``), and of labels that are not the
        same bits."""
        held, made = {**self._shard.sites, **self._shard.labels}, {**sites, **labels}
        for name in dict.fromkeys((*made, *held)):
            if name not in held or name not in made or not self._is_same(name, held[name], made[name], name in sites):
                self._job.differs(
                    f"{name}: the first batch of shard {self._shard.number} gives other rows than it did (a hook, an "
                    "edit, a function or a setting of the model is another, or a label)"
                )

    def _is_same(self, name: str, known: WrittenTensor, rows: Tensor, is_site: bool) -> bool:
        """Whether the rows are those that were written."""
        if len(rows) != known.blocks[self._at][0]:
            return False
        first = sum(count for count, _ in known.blocks[: self._at])
        stored = self._job.out.rows(shard_path(self._shard.number, known.file), name, known).run(
            first, first + len(rows)
        )
        if elements.has_bits(stored, rows):
            return True
        is_own = not is_site and not is_reserved(name)
        return not is_own and _is_alike(stored, rows, int(is_site and self._job.options.is_rounded))


def _is_alike(one: Tensor, other: Tensor, step: int = 0) -> bool:
    """Whether rows are the same but for what another processor makes of them.

    A number may be off by 1e-4, in half precision by 2e-2, of its size plus the median size in its row (so that one
    that is far larger than the others hides nothing); one in a thousand by twenty times as much, if it is not the same
    in most of four rows or more. All chosen. Whole numbers may be off by ``step``: 1 where they were rounded to int8.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other) or (step > 0 and bool(((one.int() - other.int()).abs() <= step).all()))
    share = 2e-2 if one.dtype.itemsize < 4 else 1e-4
    a, b = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (one, other))
    is_finite = a.isfinite()
    if not torch.equal(is_finite, b.isfinite()) or not a.numel():
        return not a.numel()
    sizes = torch.where(is_finite, a.abs(), 0).reshape(len(a), -1)
    away = torch.where(is_finite, (a - b).abs(), 0).reshape(len(a), -1)
    limit = share * (sizes + sizes.median(1, keepdim=True).values)
    odd = (away > limit).double()
    is_scattered = len(odd) < _ROWS or bool(odd.mean(0).max() <= 0.5)
    return is_scattered and bool(odd.mean() <= 1e-3) and not bool((away > 20 * limit).any())


class _OpenShard:
    """The shard that is being written, and what is counted along the way."""

    def __init__(self, writer: ShardWriter | _Again, first: int, options: HarvestOptions) -> None:
        self._writer = writer
        self._options = options
        self._batches = (first, first)
        self._nonfinite: dict[str, int] = {}
        self._inputs = self._first = 0

    def note(self, given: Numbered) -> None:
        """Note the checksum of a batch that comes next."""
        if self._batches[0] == self._batches[1]:
            self._first = checksum_of(given.tensors())
        self._inputs = checksum_of(given.tensors(), self._inputs)

    def take(self, given: Numbered, values: Mapping[str, Any]) -> int:
        """Write the rows of a batch; how many they were. Raises PlanError for a NaN where that is to be refused."""
        selection = Selection(given, self._options.rows, self._options.mask)
        sites, places = self._sites(selection, values)
        labels = {**selection.labels(own_columns(given.batch, self._options.labels)), **places}
        labels |= {one: selection.of_samples(one, values[one]) for one in values if one.startswith(NORM_OF)}
        small = self._options.small
        broken = {address: bad for address, rows in sites.items() if (bad := _nonfinite(rows, small)) is not None}
        for address, bad in broken.items():
            self._nonfinite[address] = self._nonfinite.get(address, 0) + int(bad.sum())
            if self._options.nonfinite == "refuse":
                sample = int(labels["sample"][bad][0])
                beyond = "" if small is None else f" (or a number beyond {torch.finfo(small).max:g})"
                raise PlanError(f"{address}: a NaN or an infinity{beyond} in batch {given.number}, sample {sample}: "
                                "expected finite values, or nonfinite='count' or 'mark'")  # fmt: skip
        if self._options.nonfinite == "mark":
            finite = torch.ones(len(labels["sample"]), dtype=torch.bool, device="cpu")
            for bad in broken.values():
                finite &= ~bad
            labels["finite"] = finite
        if small is not None:
            sites = {one: elements.cast(rows, small) if rows.is_floating_point() else rows
                     for one, rows in sites.items()}  # fmt: skip
        if self._options.is_rounded:
            for address, rows in sites.items():
                sites[address], labels[SCALE_OF + address] = _rounded(address, rows)
        self._writer.append(sites, labels)
        self._batches = (self._batches[0], given.number + 1)
        return len(labels["sample"])

    def _sites(self, selection: Selection, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The rows of each site, and of which numbers they are, where only the largest are kept."""
        sites, places = {}, {}
        for address, value in values.items():
            if address.startswith(NORM_OF):
                continue
            if self._options.top is None:
                sites[address] = selection.of(address, value)
                continue
            found, place = _largest(address, value, self._options.top, selection.dims)
            dtype = self._options.after_top
            found = elements.cast(found, dtype) if dtype is not None and found.is_floating_point() else found
            sites[address] = selection.of(address, found)
            places[PLACE_OF + address] = selection.of(address, place)
        return sites, places

    def commit(self, changes: tuple[str, ...], harvest: str) -> None:
        """Put the shard in its place. ``harvest`` is the identity of the manifest to which it belongs."""
        assert isinstance(self._writer, ShardWriter)
        self._writer.commit(self._batches, self._inputs, self._first, self._nonfinite, changes, harvest)


def _largest(address: str, value: Any, count: int, dims: int) -> tuple[Tensor, Tensor]:
    """The numbers of largest size in the last dimension, largest first, and their places there (int32).

    NaN counts as larger than all. Raises SiteError for a value with fewer of them.
    """
    if not isinstance(value, Tensor) or not elements.is_plain(value) or value.dim() <= dims or value.shape[-1] < count:
        what = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        raise SiteError(f"{address}: {what}: expected a dense tensor with {count} numbers or more in its last "
                        f"dimension, behind those of the rows, as top={count} says")  # fmt: skip
    if elements.is_small_float(value):  # torch picks none out of float8
        found, place = _largest(address, value.float(), count, dims)
        return found.to(value.dtype), place
    # of the most negative whole number torch's ``abs`` is that number again
    sizes = value.abs() if value.is_floating_point() or value.is_complex() else value.double().abs()
    place = sizes.topk(count, dim=-1).indices
    return elements.signed(value).gather(-1, place).view(value.dtype), place.to(torch.int32)


def _nonfinite(rows: Tensor, small: torch.dtype | None) -> Tensor | None:
    """Which rows hold a NaN, an infinity, or numbers beyond those of ``small``, the type that they are written in.

    None where none does, which one sum tells nearly always.
    """
    if not (rows.is_floating_point() or rows.is_complex()) or not rows.numel():
        return None
    exact = rows.float() if rows.dtype.itemsize < 2 else rows  # torch adds up no float8, nor small complex numbers
    exact = exact.to(torch.complex64) if exact.dtype == torch.complex32 else exact
    if bool(torch.isfinite(exact.sum())) and (small is None or bool(exact.abs().max() <= torch.finfo(small).max)):
        return None
    fits = torch.isfinite(exact) if small is None or exact.is_complex() else ~elements.is_beyond(exact, small)
    bad: Tensor = ~(fits.flatten(1).all(1) if rows.dim() > 1 else fits)
    return bad if bool(bad.any()) else None


def _rounded(address: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as whole numbers from -127 to 127, and the float32 by which they are to be multiplied."""
    if not rows.is_floating_point():
        raise PlanError(f"{address}: is of {rows.dtype}: expected floating numbers for dtype='int8'")
    given, rows = rows, rows.float()
    if not rows.numel():
        return rows.to(torch.int8), torch.zeros(len(rows), dtype=torch.float32, device="cpu")
    dims = tuple(range(1, rows.dim()))
    if given.dtype == torch.float64 and bool((rows.isinf() & given.isfinite()).any()):
        raise PlanError(f"{address}: holds numbers beyond those of float32: expected smaller ones for dtype='int8'")
    if given.dtype == torch.float64:
        largest = given.abs().amax(dims) if dims else given.abs()
        if bool(((largest > 0) & (largest < _FAINT)).any()):
            raise PlanError(
                f"{address}: holds rows below the numbers of float32: expected larger ones for dtype='int8'"
            )
    scale = (rows.abs().amax(dims) if dims else rows.abs()) / 127
    scale = torch.where((127 * scale).isinf() & scale.isfinite(), scale.nextafter(torch.zeros_like(scale)), scale)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).view(-1, *(1 for _ in dims))
    whole = (rows / divisor).round().nan_to_num(0).clamp(-127, 127).to(torch.int8)
    return whole, torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))
