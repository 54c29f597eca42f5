"""A record as one long table in a file: a row a number. CSV and JSON lines need nothing, Parquet needs pyarrow.

Columns: rank, phase, step, time, site, stat, value, as ``gaff.integrations.rows.Row``; scalars of the run come first,
with an empty site. Findings go to a second file beside it, ``NAME.findings.jsonl``, an object a line.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gaff.compat.extras import need
from gaff.compat.files import replacing
from gaff.errors import RecordError
from gaff.integrations.rows import Row, check, numbers, scalars
from gaff.record.run import Record

_AT_ONCE = 1 << 16  # rows of one group of a Parquet file
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with these a spreadsheet begins to compute


def to_csv(
    record: Record, path: str | os.PathLike[str], *, sites: Collection[str] = (), stats: Collection[str] = ()
) -> int:
    """Write a record to ``path`` as CSV; returns the number of rows.

    UTF-8, a head line; values as ``nan``, ``inf``, ``-inf`` or numbers with all their digits. A name that a spreadsheet
    would take for a formula gets an apostrophe before it. ``sites``, ``stats``: as of
    ``gaff.integrations.rows.numbers``. Raises RecordError for a site or stat that the record has not, and where the
    file cannot be written.
    """

    def write(rows: Iterator[Row], to: Path) -> int:
        count = 0
        with to.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(Row._fields)
            for count, row in enumerate(rows, 1):  # noqa: B007
                lines.writerow([*row[:4], _text(row.site), _text(row.stat), row.value])
        return count

    return _write(record, Path(path), write, sites, stats)


def to_jsonl(
    record: Record, path: str | os.PathLike[str], *, sites: Collection[str] = (), stats: Collection[str] = ()
) -> int:
    """Write a record to ``path`` as JSON lines, an object a number; returns how many.

    JSON has no NaN and inf: such a value is null, and ``"nonfinite"`` says which: "nan", "inf" or "-inf". Raises as
    ``to_csv``.
    """

    def write(rows: Iterator[Row], to: Path) -> int:
        count = 0
        with to.open("w", encoding="utf-8", newline="\n") as file:
            for count, row in enumerate(rows, 1):  # noqa: B007
                told: dict[str, Any] = row._asdict()
                if row.value - row.value != 0:
                    told.update(value=None, nonfinite=str(row.value))
                file.write(json.dumps(told) + "\n")
        return count

    return _write(record, Path(path), write, sites, stats)


def to_parquet(
    record: Record, path: str | os.PathLike[str], *, sites: Collection[str] = (), stats: Collection[str] = ()
) -> int:
    """Write a record to ``path`` as Parquet; returns the number of rows.

    Times and values are float64; NaN and inf stay what they are. Raises as ``to_csv``, and PlanError where pyarrow is
    not installed.
    """
    arrow, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    kinds = (arrow.int32(), arrow.string(), arrow.int64(), arrow.float64(), arrow.string(), arrow.string(),
             arrow.float64())  # fmt: skip
    schema = arrow.schema(list(zip(Row._fields, kinds, strict=True)))

    def write(rows: Iterator[Row], to: Path) -> int:
        count = 0
        with parquet.ParquetWriter(to, schema) as writer:
            while some := list(islice(rows, _AT_ONCE)):
                columns = zip(*some, strict=True)
                arrays = [arrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
                writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
                count += len(some)
        return count

    return _write(record, Path(path), write, sites, stats)


def findings_path(path: str | os.PathLike[str]) -> Path:
    """The file beside a table to which the record's findings go: ``a.findings.jsonl`` for ``a.csv``."""
    file = Path(path)
    stem = file.stem if file.suffix[1:].isalpha() else file.name  # of "lr0.1" all of it
    return file.with_name(f"{stem}.findings.jsonl")


def _write(
    record: Record,
    path: Path,
    write: Callable[[Iterator[Row], Path], int],
    sites: Collection[str],
    stats: Collection[str],
) -> int:
    """Check what is asked for, then write the table and the findings; returns the number of rows.

    Either file takes its name only when it is complete: a failure halfway leaves an older one as it was.
    """
    check(record, sites, stats)
    try:
        path.stat()
    except FileNotFoundError:
        pass  # it is to be made
    except (OSError, ValueError) as error:  # too long, or with what no file system takes
        raise RecordError(f"{str(path)!r:.80} is no name of a file: {error!s:.60}") from None
    if path.is_dir():
        raise RecordError(f"{str(path)!r} is a folder: expected the path of a file")
    if path.exists() and not path.is_file():
        raise RecordError(f"{str(path)!r}: it is no ordinary file: expected the path of one")
    rows = chain(scalars(record), numbers(record, sites=sites, stats=stats))
    lines = [json.dumps(_plain(one.to_dict())) + "\n" for one in record.findings]
    with replacing(path) as made:
        count = write(rows, made)
    with replacing(findings_path(path)) as made:
        made.write_text("".join(lines), encoding="utf-8", newline="\n")
    return count


def _text(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA) else name


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: NaN and inf as texts."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
