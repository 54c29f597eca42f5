"""The batches of a data set, each with its number and the numbers of its samples, begun anywhere.

A ``DataLoader`` over a data set with indices is asked for the order of its samples once; the order is kept with the
harvest, so that one which shuffles goes on where it was, and batches that are there already are not loaded again. Any
other iterable is gone through from its beginning: what it gives is compared with what it gave the first time.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from gaff.address.nested import iter_tensors
from gaff.errors import PlanError
from gaff.harvesting.shard import Shard
from gaff.harvesting.tensor_file import checksum_of

Prepare = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]  # from a batch to the arguments of the model
Differs = Callable[[str], None]  # told what is another than it was when the shards that are there were written


class Numbered(NamedTuple):
    """A batch, its number in the data, and the number of each of its samples (int64, one dimension)."""

    number: int
    samples: Tensor
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """What the model is given, in order, and what else the batch holds, as labels and masks are made of it.

        Numbers and texts of Python's, and arrays, come as one tensor of their bytes.
        """
        given = [tensor for _, tensor in iter_tensors((self.args, self.kwargs))]
        known = set(map(id, given))
        given += [tensor for _, tensor in iter_tensors(self.batch) if id(tensor) not in known]
        others = list(_plain(self.batch))
        text = bytearray(repr(others).encode("utf-8", "surrogatepass"))
        return [*given, torch.frombuffer(text, dtype=torch.uint8)] if others else given


class BatchSource(Protocol):
    """Where batches come from."""

    def described(self) -> dict[str, Any]:
        """What tells this data from other data, as JSON."""

    def draw_order(self) -> list[list[int]]:
        """The samples of each batch, in the order in which the data gives them now; empty where it has no indices."""

    def use_order(self, order: list[list[int]]) -> None:
        """Take the samples in this order, that of the first start, from now on.

        Raises PlanError where the data has other samples now.
        """

    def after(
        self, shards: Mapping[int, Shard], size: int, is_mine: Callable[[int], bool], differs: Differs | None
    ) -> Iterator[Numbered]:
        """The batches that are still to be done, ``size`` of them a shard, of shards for which ``is_mine``.

        ``differs`` is told where the data does not give what it gave for ``shards``; None where that is not compared.
        """

    # about batches of the first shard that is there and has rows, where it compares; whether this one has some
    ask: Callable[[Numbered], bool] | None

    def spare(self) -> Numbered:
        """Any batch, for a process that has none of its own and runs the model for others."""

    @property
    def count(self) -> int:
        """How many batches there are; known of an iterable when it has ended."""

    @property
    def expected(self) -> int:
        """How many batches there will be, for a bar; 0 where nobody can say."""


def source_of(data: Any, prepare: Prepare) -> BatchSource:
    """The source for what a user gives as data. Raises PlanError for what is none."""
    if isinstance(data, (Mapping, Tensor)) or hasattr(data, "keys"):  # one batch
        data = [data]
    if _is_plain(data) and not isinstance(data.dataset, IterableDataset) and data.batch_sampler is not None:
        return LoaderSource(data, prepare)
    if not isinstance(data, Iterable):
        raise PlanError(
            f"data is a {type(data).__name__}: expected a DataLoader, an iterable of batches, or one batch (a dict or "
            "a tensor; one that is a tuple stands in a list: [batch])"
        )
    _warn_of_order(data)
    return IterableSource(data, prepare)


def _is_plain(data: Any) -> bool:
    """Whether data is a ``DataLoader`` that gives its batches as torch's own does: a class that changes how may not."""
    if not isinstance(data, DataLoader):
        return False
    own = [kind for kind in type(data).__mro__ if issubclass(kind, DataLoader) and kind is not DataLoader]
    changed = {name for kind in own for name in vars(kind) if name == "__iter__" or not name.startswith("__")}
    return changed.isdisjoint(vars(DataLoader))


def _warn_of_order(data: Any) -> None:
    """Say so where samples will be numbered as they come though a loader inside shuffles, as in a progress bar."""
    known = [data, *getattr(data, "__dict__", {}).values()]
    loader: Any = next((one for one in known if isinstance(one, DataLoader)), None)
    if loader is None or isinstance(loader.dataset, IterableDataset):
        return
    sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler or loader.sampler)
    if not isinstance(sampler, SequentialSampler):
        warnings.warn(
            f"data is a {_kind(data)}, which does not tell which samples of the data set its batches hold, and it "
            f"takes them in the order of a {type(sampler).__name__}: the label 'sample' will be the number in which "
            "each came; give the DataLoader itself to have it number them as the data set does",
            stacklevel=2,
        )


class LoaderSource:
    """A ``DataLoader`` that makes its batches from indices: samples are numbered as its data set does."""

    def __init__(self, loader: DataLoader[Any], prepare: Prepare) -> None:
        if isinstance(getattr(loader.batch_sampler, "sampler", None), DistributedSampler):
            raise PlanError(
                "the loader's DistributedSampler gives each process other samples: expected the whole data set in "
                "each, of which every process does its own shards"
            )
        self._loader, self._prepare = loader, prepare
        self.ask: Callable[[Numbered], bool] | None = None
        self._order: list[list[int]] = []

    def described(self) -> dict[str, Any]:
        """The classes of data set and sampler, and the numbers of samples and batches."""
        loader: Any = self._loader
        return {
            "dataset": _kind(loader.dataset),
            "fingerprint": _fingerprint(loader.dataset),
            "samples": _length(loader.dataset),
            "sampler": [_kind(one) for one in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))],
            "batch_size": getattr(loader.batch_sampler, "batch_size", None),
            "batches": _length(loader.batch_sampler),
            **_weights(getattr(loader.batch_sampler, "sampler", None)),
        }

    def draw_order(self) -> list[list[int]]:
        """The samples of each batch, as the loader would take them now: it draws a seed for its workers first."""
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._loader.generator)
        batches: Iterable[Any] = self._loader.batch_sampler or ()
        self._order = [[_index(one) for one in batch] for batch in batches]  # as they come: one list may serve for all
        return self._order

    def use_order(self, order: list[list[int]]) -> None:
        """Take the samples in this order, that of the first start.

        Raises PlanError where the loader would take others now, and takes the same ones whenever it is asked: one that
        draws them at random has drawn others then, and only the first are kept.
        """
        now = self._order
        if now is not order and _counts(now) != _counts(order):
            new = sorted(_counts(now) - _counts(order)) or sorted(_counts(order) - _counts(now))
            is_fixed = sum(map(len, now)) != sum(map(len, order)) or _counts(self.draw_order()) == _counts(now)
            if is_fixed:
                raise PlanError(
                    f"the loader gives other samples than when this harvest was begun ({sum(map(len, order))} then, "
                    f"{sum(map(len, now))} now, such as sample {new[0]}): expected the same ones, or another out="
                )
        self._order = order

    @property
    def count(self) -> int:
        """How many batches there are."""
        return len(self._order)

    @property
    def expected(self) -> int:
        """As many as there are."""
        return len(self._order)

    def after(
        self, shards: Mapping[int, Shard], size: int, is_mine: Callable[[int], bool], differs: Differs | None
    ) -> Iterator[Numbered]:
        """Load only batches that are still to be done, after one that is there, which is compared if there is one.

        So it is where nothing is to be done, too: what there is is about to be handed out as what this call makes.
        """
        wanted = [
            number for number in range(len(self._order)) if number // size not in shards and is_mine(number // size)
        ]
        if differs is not None:
            self.compare(shards, size, differs)
        yield from self.only(wanted)

    def compare(self, shards: Mapping[int, Shard], size: int, differs: Differs) -> None:
        """Load the first batch of the first shard that is there, and tell where it is another.

        Of one that gives no rows nothing can be asked: then further ones are, until some come.
        """
        if not shards:
            return
        known = first_with_rows(shards)
        batches = self.only(range(*shards[known].batches))
        first = next(batches)
        if checksum_of(first.tensors()) != shards[known].first:
            differs(f"batch {known * size} of the data is not what it was when shard {known} was written")
        elif self.ask is not None and not self.ask(first):
            any(map(self.ask, batches))

    def spare(self) -> Numbered:
        """The first batch."""
        return next(self.only(range(1)))

    def only(self, wanted: Sequence[int]) -> Iterator[Numbered]:
        """The batches of these numbers."""
        for number, batch in zip(wanted, self._load(wanted), strict=True):
            yield self._numbered(number, batch)

    def _numbered(self, number: int, batch: Any) -> Numbered:
        args, kwargs = self._prepare(batch)
        found, expected = batch_size((args, kwargs)), len(self._order[number])
        if found != expected:
            raise PlanError(
                f"batch {number} was made of {expected} samples and holds {found}: its rows cannot be told apart by "
                "sample; give an iterable of batches"
            )
        return Numbered(number, torch.tensor(self._order[number], device="cpu"), batch, args, kwargs)

    def _load(self, wanted: Sequence[int]) -> Iterable[Any]:
        """The batches of these numbers, by a loader with the workers and settings of the user's own."""
        one: Any = self._loader
        own = {
            name: getattr(one, name)
            for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
                         "multiprocessing_context", "generator", "prefetch_factor")
        }  # fmt: skip
        return DataLoader(one.dataset, batch_sampler=[self._order[number] for number in wanted], **own)


class IterableSource:
    """Anything that gives batches: samples are numbered as they come."""

    def __init__(self, data: Iterable[Any], prepare: Prepare) -> None:
        self._data, self._prepare = data, prepare
        self.ask: Callable[[Numbered], bool] | None = None
        self._last: Numbered
        self.count = 0

    @property
    def expected(self) -> int:
        """What the iterable says of its length."""
        return _length(self._data) or 0

    def described(self) -> dict[str, Any]:
        """The class of the iterable; what it gives is compared batch by batch."""
        return {"iterable": _kind(self._data)}

    def spare(self) -> Numbered:
        """The last batch."""
        return self._last

    def draw_order(self) -> list[list[int]]:
        """None: the order is that in which batches come."""
        return []

    def use_order(self, order: list[list[int]]) -> None:
        """Nothing is to be done."""

    def after(
        self, shards: Mapping[int, Shard], size: int, is_mine: Callable[[int], bool], differs: Differs | None
    ) -> Iterator[Numbered]:
        """Go through everything; of shards that are there, compare what comes with what was written."""
        sample, checksum = 0, 0
        asked = first_with_rows(shards) if shards else -1
        for number, batch in enumerate(self._data):
            args, kwargs = self._prepare(batch)
            rows = batch_size((args, kwargs))
            shard = number // size
            self.count = number + 1
            self._last = given = Numbered(
                number, torch.arange(sample, sample + rows, device="cpu"), batch, args, kwargs
            )
            if shard in shards:
                checksum = checksum_of(given.tensors(), checksum if number % size else 0)
                is_same = number % size > 0 or checksum == shards[shard].first
                if differs is not None and self.ask is not None and shard == asked and is_same and self.ask(given):
                    asked = -1
                is_last = number + 1 == shards[shard].batches[1]
                if differs is not None and is_last and checksum != shards[shard].inputs:
                    differs(
                        f"batches {shard * size} to {number} of the data are not what they were when shard {shard} was "
                        "written"
                    )
            elif is_mine(shard):
                yield given
            sample += rows


def first_with_rows(shards: Mapping[int, Shard]) -> int:
    """The first shard that holds rows; the first of all where none does."""
    return min((number for number, shard in shards.items() if shard.rows), default=min(shards))


def batch_size(given: Any) -> int:
    """The size of the first dimension of the first tensor. Raises PlanError where there is none, and for packed
    sequences, whose first dimension are steps of all of them."""
    if any(isinstance(one, PackedSequence) for one in _inside(given)):
        raise PlanError("a batch holds a PackedSequence, whose rows are steps of several samples: expected sequences "
                        "that are padded, and a mask; the model may pack them itself")  # fmt: skip
    first = next((one for _, one in iter_tensors(given) if one.dim()), None)
    if first is None:
        raise PlanError("a batch holds no tensor with a dimension: expected one whose first dimension are the samples")
    return int(first.shape[0])


def _inside(value: Any, depth: int = 4) -> Iterator[Any]:
    """A value, and what lies in it if it is a list, tuple or mapping."""
    yield value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    kinds = (list, tuple, Mapping)
    has_more = (
        depth and not isinstance(value, PackedSequence) and isinstance(next(iter(inside), None), (*kinds, Tensor))
    )
    for one in inside if has_more else ():  # a list of numbers holds nothing else
        yield from _inside(one, depth - 1) if isinstance(one, kinds) else ()


def _plain(value: Any, depth: int = 8) -> Iterator[Any]:
    """The numbers and texts of Python's in a batch, and of arrays kind, shape and bytes, in order."""
    if isinstance(value, (str, bytes, int, float, complex)):
        yield value
    elif hasattr(value, "__array_interface__"):
        is_bare = value.dtype.kind != "O"
        yield str(value.dtype), value.shape, value.tobytes() if is_bare else list(_plain(value.tolist(), depth - 1))
    elif isinstance(value, (Mapping, list, tuple)) and depth:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _plain(one, depth - 1)


def _fingerprint(dataset: Any) -> str | None:
    """What a data set says of its content, as those of Hugging Face do, or the checksum of its tensors; else None."""
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and all(isinstance(one, Tensor) for one in tensors):
        return f"{checksum_of(tensors):08x}"
    told = getattr(dataset, "_fingerprint", None) or getattr(dataset, "fingerprint", None)
    return told if isinstance(told, str) else None


def _counts(order: list[list[int]]) -> Counter[int]:
    """How often each sample comes."""
    return Counter(sample for batch in order for sample in batch)


def _weights(sampler: Any) -> dict[str, str]:
    """The checksum of the weights by which a sampler draws, where it has some."""
    weights = getattr(sampler, "weights", None)
    return {"weights": f"{checksum_of([weights]):08x}"} if isinstance(weights, Tensor) else {}


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def _kind(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _index(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise PlanError(
            f"the sampler gives {value!r:.40} for a sample: expected a whole number; give an iterable of batches"
        ) from None
