"""What a harvest has written, read back: ``gaff.load("acts/")["h.3.mlp"][:8]``.

Nothing is read before it is asked for, and nothing is handed out that is not what was written: the first row that is
asked of a block has the whole block compared with its checksum.
"""

from __future__ import annotations

import operator
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.errors import PlanError, RecordError, SiteError
from gaff.harvesting import manifest
from gaff.harvesting.folder import location_of
from gaff.harvesting.index import read_shards
from gaff.harvesting.loader import RowLoader
from gaff.harvesting.location import TOLD, StoredRows, shard_path
from gaff.harvesting.rows import SCALE_OF
from gaff.harvesting.shard import Shard
from gaff.harvesting.tensor_file import WrittenTensor, dtype_of
from gaff.views.text import counted


class Column:
    """One site, or one label, over all shards: ``column[5]``, ``column[:8]``, ``column[[3, 1, 4]]``.

    Always copies, on the CPU, in the dtype that was written; only the rows that are asked for are read, and those with
    which they share a block the first time. Raises RecordError where they are not what was written.
    """

    def __init__(self, name: str, parts: Sequence[StoredRows], rows: Sequence[int], like: Any) -> None:
        self.name = name
        self._parts = parts
        self._ends = list(accumulate(rows))
        self.dtype = dtype_of(like)
        self.nbytes = sum(part.nbytes for part in parts)
        self.shape = torch.Size((self._ends[-1], *like.shape))

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        return f"<gaff column {self.name!r}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}>"

    def __iter__(self) -> Iterator[Tensor]:
        return (self._row(number) for number in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        """A row, a slice of rows, or the rows of these numbers (a list, or a tensor of int64 or bool)."""
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                return self.gather(torch.tensor(range(first, last, step), dtype=torch.int64, device="cpu"))
            return self._run(first, max(first, last))
        is_truth = isinstance(index, bool) or (getattr(index, "shape", None) == () and "bool" in str(index.dtype))
        if isinstance(index, tuple) or is_truth or index is None or index is Ellipsis:
            raise IndexError(f"{index!r}: expected a row, a slice of rows, or a list of them, and no second index")
        index = list(index) if isinstance(index, range) else index
        index = index.to_numpy().copy() if hasattr(index, "to_numpy") else index  # a column of a table, writable
        if not isinstance(index, list) and getattr(index, "shape", ()) == ():
            try:
                return self._row(operator.index(index))
            except TypeError:  # no number at all, or a floating one
                raise IndexError(f"{index!r:.60}: expected a row, a slice of rows, or a list of them") from None
        try:
            found = torch.as_tensor(index, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise IndexError(f"rows {index!r:.60}: expected whole numbers, or one bool for each row: {error}") from None
        is_empty = isinstance(index, list) and not index
        wanted = torch.empty(0, dtype=torch.int64, device="cpu") if is_empty else found
        if wanted.dtype == torch.bool:
            if wanted.shape != (len(self),):
                raise IndexError(f"a mask of shape {list(wanted.shape)} for {len(self)} rows")
            wanted = wanted.nonzero().flatten()
        if wanted.dtype == torch.uint8 and not isinstance(index, list):
            raise IndexError("rows by uint8, a mask or numbers: expected bool for a mask, int64 for numbers")
        return self.gather(wanted)

    def gather(self, wanted: Tensor) -> Tensor:
        """Copies of the rows of these numbers (one dimension of integers), in their order."""
        if wanted.dim() != 1 or wanted.is_floating_point():
            raise IndexError(f"rows {wanted!r:.60}: expected numbers in one dimension")
        wanted = wanted.long()
        wanted = torch.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < len(self)):
            raise IndexError(f"rows {int(wanted.min())} to {int(wanted.max())} asked of {len(self)}")
        if len(self._parts) == 1:
            return self._parts[0].gather(wanted)
        place = torch.bucketize(wanted, torch.tensor(self._ends, device="cpu"), right=True)
        found = torch.empty((len(wanted), *self.shape[1:]), dtype=self.dtype, device="cpu")
        for part in place.unique().tolist():
            here = (place == part).nonzero().flatten()
            rows = self._parts[part].gather(wanted[here] - (self._ends[part - 1] if part else 0))
            elements.signed(found)[here] = elements.signed(rows)
        return found

    def check(self) -> Iterator[str]:
        """Read everything; what is damaged, one text a file."""
        for part in self._parts:
            try:
                part.check()
            except RecordError as error:
                yield str(error)

    def _row(self, number: int) -> Tensor:
        size = self._ends[-1]
        if not -size <= number < size:
            raise IndexError(f"row {number} asked of {size}")
        number %= size
        part = bisect_right(self._ends, number)
        return self._parts[part].row(number - (self._ends[part - 1] if part else 0))

    def _run(self, first: int, last: int) -> Tensor:
        found, start = [], 0
        for part, end in zip(self._parts, self._ends, strict=True):
            if first < end and last > start:
                found.append(part.run(max(first, start) - start, min(last, end) - start))
            start = end
        if not found:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device="cpu")
        return found[0] if len(found) == 1 else torch.cat(found)


class ScaledColumn(Column):
    """A site that was written as whole numbers from -127 to 127, each row with its own scale: handed out as float32.

    A row that held a NaN or an infinity comes back as NaN.
    """

    def __init__(self, whole: Column, scales: Column) -> None:
        self.name, self.shape, self.dtype = whole.name, whole.shape, torch.float32
        self.nbytes = whole.nbytes + scales.nbytes
        self._whole, self._scales = whole, scales
        self._ends = whole._ends

    def gather(self, wanted: Tensor) -> Tensor:
        """Copies of the rows of these numbers (one dimension of integers), in their order."""
        return self._scaled(self._whole.gather(wanted), self._scales.gather(wanted))

    def check(self) -> Iterator[str]:
        """Read everything; what is damaged, one text a file."""
        yield from self._whole.check()

    def _row(self, number: int) -> Tensor:
        return self._whole._row(number) * self._scales._row(number)

    def _run(self, first: int, last: int) -> Tensor:
        return self._scaled(self._whole._run(first, last), self._scales._run(first, last))

    @staticmethod
    def _scaled(rows: Tensor, scales: Tensor) -> Tensor:
        return rows * scales.view(-1, *(1 for _ in rows.shape[1:]))


class Labels(dict[str, Column]):
    """The labels of a harvest by name; a name that is none is an error with those that there are."""

    def __missing__(self, name: str) -> Column:
        raise SiteError(f"{name!r} is no label of this harvest: expected one of {', '.join(self)}")


class Store(Mapping[str, Column]):
    """A harvest: its sites by address, its labels by name, and what it was begun with.

    Made by ``gaff.load``. It holds the shards that were there when it was opened; ``refresh`` looks for more. Raises
    RecordError, with the file, where one is missing, of another length, or none that gaff has written.
    """

    def __init__(self, path: Any) -> None:
        self.place = location_of(path)
        self.manifest = manifest.read(self.place)
        self.refresh()

    def refresh(self) -> None:
        """Open the shards that are there now; where some in the middle are missing, reading warns."""
        self._has_warned = False
        self.shards: list[Shard] = read_shards(self.place)
        own = manifest.identity(self.place) if self.shards else ""
        other = next((shard for shard in self.shards if shard.harvest not in ("", own)), None)
        if other is not None:
            raise RecordError(f"{self.place}/{shard_path(other.number, TOLD)}: belongs to another harvest")
        filled = [shard for shard in self.shards if shard.rows] or self.shards
        columns = self._columns([(shard, shard.sites) for shard in filled])
        self.labels: Mapping[str, Column] = Labels(self._columns([(shard, shard.labels) for shard in filled]))
        self._sites = {
            name: ScaledColumn(column, self.labels[SCALE_OF + name]) if SCALE_OF + name in self.labels else column
            for name, column in columns.items()
        }

    def __getitem__(self, site: str) -> Column:
        """The rows of a site. Raises SiteError for one that was not harvested."""
        if not isinstance(site, str) or site not in self._sites:
            raise SiteError(
                f"{site!r:.60} is not in {str(self.place)!r}: expected one of {', '.join(self._sites) or 'none'}"
            )
        self._warn_of_holes()
        return self._sites[site]

    def __contains__(self, site: object) -> bool:
        return site in self._sites

    def get(self, site: str, default: Any = None, /) -> Any:
        """The rows of a site, ``default`` where it was not harvested."""
        return self._sites.get(site, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def rows(self) -> int:
        """How many rows each site and each label has."""
        return sum(shard.rows for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows on disk, without labels."""
        return sum(column.nbytes for column in self._sites.values())

    @property
    def nonfinite(self) -> dict[str, int]:
        """By address: how many rows hold a NaN or an infinity; sites without any are left out."""
        found: dict[str, int] = {}
        for shard in self.shards:
            for site, count in shard.nonfinite.items():
                found[site] = found.get(site, 0) + count
        return found

    @property
    def is_complete(self) -> bool:
        """Whether the data was gone through to its end, and every shard is there."""
        if not self.place.holds(manifest.END):
            return False
        batches = manifest.end_of(self.place)
        return sum(shard.batches[1] - shard.batches[0] for shard in self.shards) == batches

    @property
    def changes(self) -> list[str]:
        """What was another than at the beginning when some of the shards were written, by their numbers."""
        return [f"shard {shard.number}: {'; '.join(shard.changes)}" for shard in self.shards if shard.changes]

    def loader(
        self, *sites: str, batch: int = 4096, shuffle: int | None = None, labels: Sequence[str] = ()
    ) -> RowLoader:
        """Batches of rows, as a torch ``IterableDataset`` that is the same each time; see ``RowLoader``.

        Args:
            sites: addresses; one gives tensors, several (or ``labels``) dicts by name.
            batch: rows in each; the last one may be smaller.
            shuffle: a seed; None: in the order of the store.
            labels: columns of labels that come along.
        """
        if isinstance(labels, str):
            raise PlanError(f"labels={labels!r}: expected a list of names, such as [{labels!r}]")
        both = set(sites) & set(labels)
        if both:
            raise PlanError(f"{both.pop()!r} is asked for as a site and as a label: expected one, or a loader for each")
        columns = {**{site: self[site] for site in sites}, **{name: self.labels[name] for name in labels}}
        if not columns:
            raise SiteError(f"the loader was given no site: expected some of {', '.join(self._sites) or 'none'}")
        return RowLoader(columns, batch=batch, shuffle=shuffle)

    def check(self) -> list[str]:
        """Read every file and compare it with its checksums; what is wrong, with the file, empty where nothing is."""
        columns = [*self._sites.values(), *self.labels.values()]
        return [text for column in columns for text in column.check()] + list(self._check_order())

    def _check_order(self) -> Iterator[str]:
        """Read the file with the order of the samples, where there is one."""
        told = self.manifest.get("order")
        try:
            if told is not None:
                written = WrittenTensor.from_dict(told)
                self.place.rows(written.file, manifest.ORDER, written).check()
        except RecordError as error:
            yield str(error)
        except (LookupError, TypeError, ValueError):
            yield f"{self.place}: what it says of the order of the samples is damaged"

    def _warn_of_holes(self) -> None:
        """Warn, once, where shards are missing before the last one that is there: others have not written theirs."""
        ends = [0, *(shard.batches[1] for shard in self.shards)]
        missing = sum(shard.batches[0] - end for shard, end in zip(self.shards, ends, strict=False))
        if missing and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"gaff: {self.place} has no rows of {missing} of the batches before those that are there: "
                "another process has not written its shards; is_complete tells when all are there, and "
                "refresh() looks for more",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        how = "complete" if self.is_complete else "not complete"
        held = ", ".join(
            (counted(len(self), "site"), counted(self.rows, "row"), counted(len(self.shards), "shard"), how)
        )
        return f"<gaff store {str(self.place)!r}: {held}>"

    def _columns(self, shards: Sequence[tuple[Shard, Mapping[str, Any]]]) -> dict[str, Column]:
        """By name: the column over all shards. Raises RecordError where they do not hold the same."""
        found = {}
        for name in dict.fromkeys(name for _, columns in shards for name in columns):
            parts, like = [], None
            for shard, columns in shards:
                one = columns.get(name)
                like = like or one
                if one is None or like is None or (one.dtype, one.shape) != (like.dtype, like.shape):
                    raise RecordError(
                        f"{self.place}/{shard_path(shard.number)}: its {name!r} is not as in the shards before: made "
                        "by another plan, or moved from another store"
                    )
                parts.append(self.place.rows(shard_path(shard.number, one.file), name, one))
            found[name] = Column(name, parts, [shard.rows for shard, _ in shards], like)
        return found
