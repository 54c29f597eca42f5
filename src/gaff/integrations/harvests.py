"""A harvest as files of others: NumPy, Parquet (Arrow), data sets of Hugging Face, Zarr. Each needs its package.

Everything is read and written in runs of some thousand rows, so memory holds one. Rows keep their order; of each site
and each label there is a column. The numbers are the same, but bfloat16 and float8, which none of these know, become
float32, which holds them exactly. What is damaged in the store is told as when it is read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaff.compat.extras import need
from gaff.errors import PlanError, RecordError
from gaff.harvesting.store import Column, Store
from gaff.harvesting.tensor_file import file_name

_AT_ONCE = 1 << 13  # rows that are in memory


def to_numpy(store: Store, folder: str | os.PathLike[str], *, sites: Collection[str] = ()) -> list[Path]:
    """Write a file ``.npy`` for each column into a new folder; returns them.

    Any NumPy opens them, also mapped into memory: ``numpy.load(file, mmap_mode="r")``. ``sites``: those of the store
    that are wanted, all where none is named; labels always come along. Raises SiteError for a site that the store has
    not, RecordError where the folder is there already.
    """
    numpy = need("numpy", "page", for_="an export to NumPy")
    columns = _columns(store, sites)
    with _new(Path(folder)) as draft:
        draft.mkdir()
        for name, column in columns.items():
            like = _plain(column[:0]).numpy()
            kept = numpy.lib.format.open_memmap(
                draft / file_name(name, ".npy"), mode="w+", dtype=like.dtype, shape=tuple(column.shape)
            )
            for first, rows in _runs(column):
                kept[first : first + len(rows)] = rows.numpy()
            kept.flush()
    return sorted(Path(folder).iterdir())


def record_batches(store: Store, *, sites: Collection[str] = ()) -> Iterator[Any]:
    """The rows as Arrow's ``RecordBatch`` of up to 8,192 rows each, one after another; none where there are no rows.

    A row of several numbers is a ``FixedSizeList``; where it has several dimensions they lie one behind the other, and
    the field's metadata says its ``shape`` as JSON. ``sites``, and what is raised: as of ``to_numpy``.
    """
    arrow = need("pyarrow", "parquet", for_="an export to Arrow")
    columns = _columns(store, sites)
    schema = _schema(arrow, columns)
    for first in range(0, store.rows, _AT_ONCE):
        rows = {name: _plain(column[first : first + _AT_ONCE]) for name, column in columns.items()}
        yield arrow.record_batch([_array(arrow, one) for one in rows.values()], schema=schema)


def to_parquet(store: Store, path: str | os.PathLike[str], *, sites: Collection[str] = ()) -> int:
    """Write one Parquet file with a column for each site and label, as ``record_batches``; returns the number of rows.

    Vectors are not compressed, since that takes long and saves little. Raises as ``to_numpy``.
    """
    arrow = need("pyarrow", "parquet", for_="an export to Parquet")
    writer_of = need("pyarrow.parquet", "parquet").ParquetWriter
    schema = _schema(arrow, _columns(store, sites))
    with _new(Path(path)) as draft, writer_of(draft, schema, compression="none") as writer:
        for batch in record_batches(store, sites=sites):
            writer.write_batch(batch)
    return store.rows


def to_datasets(store: Store, folder: str | os.PathLike[str], *, sites: Collection[str] = ()) -> int:
    """Write a data set that ``datasets.load_from_disk`` opens; returns the number of rows. Raises as ``to_numpy``."""
    of_file = need("datasets", for_="an export to a data set of Hugging Face").Dataset.from_parquet
    if not store.rows:
        raise RecordError(f"{str(store.place)!r} has no row: a data set of none cannot be written")
    with _new(Path(folder)) as draft, tempfile.TemporaryDirectory() as between:
        to_parquet(store, Path(between) / "rows.parquet", sites=sites)
        of_file(f"{between}/rows.parquet", cache_dir=between).save_to_disk(draft)
    return store.rows


def to_zarr(store: Store, folder: str | os.PathLike[str], *, sites: Collection[str] = ()) -> list[str]:
    """Write a Zarr group with an array ``[rows, ...]`` for each column; returns their names.

    A name is that of the column, with ``%2F`` for a slash and the like; the attribute ``address`` has it as it is.
    Raises as ``to_numpy``.
    """
    zarr = need("zarr", for_="an export to Zarr")
    columns, names = _columns(store, sites), []
    with _new(Path(folder)) as draft:
        group = zarr.open_group(draft, mode="w-")
        for name, column in columns.items():
            like = _plain(column[:0]).numpy()
            names.append(file_name(name, ""))
            chunks = (min(_AT_ONCE, max(1, len(column))), *column.shape[1:])
            kept = group.create_array(
                names[-1], shape=tuple(column.shape), dtype=like.dtype, chunks=chunks, attributes={"address": name}
            )
            for first, rows in _runs(column):
                kept[first : first + len(rows)] = rows.numpy()
    return names


def _columns(store: Store, sites: Collection[str]) -> dict[str, Column]:
    """Sites, then labels; a label whose name is taken gets a word in front of it. Raises PlanError for a text."""
    if isinstance(sites, str):
        raise PlanError(f"sites={sites!r} is a text: expected a list of sites, such as [{sites!r}]")
    found = {name: store[name] for name in (sites or store)}
    for name, column in store.labels.items():
        free = name
        while free in found or (free != name and free in store.labels):
            free = f"label {free}"
        found[free] = column
    return found


def _runs(column: Column) -> Iterator[tuple[int, Tensor]]:
    """The number of the first row, and some thousand rows."""
    for first in range(0, len(column), _AT_ONCE):
        yield first, _plain(column[first : first + _AT_ONCE])


def _plain(rows: Tensor) -> Tensor:
    """The same numbers in a dtype that NumPy knows."""
    is_known = not rows.is_floating_point() or (rows.dtype.itemsize > 1 and rows.dtype != torch.bfloat16)
    return rows if is_known else rows.float()


def _schema(arrow: Any, columns: dict[str, Column]) -> Any:
    fields = []
    for name, column in columns.items():
        if column.dtype.is_complex or 0 in column.shape[1:]:
            what = "complex" if column.dtype.is_complex else f"of shape {list(column.shape[1:])}, without an element"
            raise PlanError(f"{name}: its rows are {what}, which a table cannot hold: expected other sites, or numpy")
        kind = _array(arrow, _plain(column[:1])).type
        fields.append(arrow.field(name, kind, metadata={"shape": json.dumps(list(column.shape[1:]))}))
    return arrow.schema(fields)


def _array(arrow: Any, rows: Tensor) -> Any:
    """Rows as an array of numbers, or of lists of one length."""
    if rows.dim() == 1:
        return arrow.array(rows.numpy())
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return arrow.FixedSizeListArray.from_arrays(arrow.array(flat.flatten().numpy()), flat.shape[1])


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, which becomes ``path`` when all went well and is taken away otherwise."""
    if path.exists():
        raise RecordError(f"{str(path)!r} is there already: expected a new path")
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield draft
        draft.rename(path)
    except OSError as error:
        raise RecordError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
