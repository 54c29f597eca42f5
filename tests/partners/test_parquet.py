"""A Parquet file, read back by pyarrow, holds what the record tells."""

import math

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest

import gaff
from gaff.integrations import tables
from gaff.integrations.rows import Row
from gaff.integrations.tables import findings_path, to_parquet
from made_records import HOSTILE, SITES, MadeRun, make, series_of


def grouped(table):
    found = {}
    for line in table.to_pylist():
        row = Row(**line)
        found.setdefault((row.rank, row.phase, row.site, row.stat), []).append((row.step, repr(row.value)))
    return found


@pytest.mark.parametrize("sites", [SITES, HOSTILE], ids=["plain", "hostile"])
def test_all_of_it_comes_back(tmp_path, sites, monkeypatch):
    monkeypatch.setattr(tables, "_AT_ONCE", 50)  # several groups of rows
    record = gaff.load(make(tmp_path / "run", (0, 1), sites))
    path = tmp_path / "run.parquet"
    count = to_parquet(record, path)
    table = pyarrow.parquet.read_table(path)
    assert table.num_rows == count
    assert pyarrow.parquet.ParquetFile(path).num_row_groups > 1
    assert grouped(table) == series_of(record)
    assert len(findings_path(path).read_text().splitlines()) == 2


def test_columns_have_types_of_numbers_and_nan_is_no_null(tmp_path):
    to_parquet(gaff.load(make(tmp_path / "run")), tmp_path / "run.parquet", stats=["mean"])
    table = pyarrow.parquet.read_table(tmp_path / "run.parquet")
    kinds = ["int32", "string", "int64", "double", "string", "string", "double"]
    assert [(field.name, str(field.type)) for field in table.schema] == list(zip(Row._fields, kinds, strict=True))
    assert table["value"].null_count == 0
    assert sum(map(math.isnan, table["value"].to_pylist())) == 2  # a loss and a mean


def test_an_empty_record_gives_an_empty_table(tmp_path):
    MadeRun(tmp_path / "run", sites=[]).log.close()
    assert to_parquet(gaff.load(tmp_path / "run"), tmp_path / "run.parquet") == 0
    assert pyarrow.parquet.read_table(tmp_path / "run.parquet").schema.names == list(Row._fields)
