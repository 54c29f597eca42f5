"""A harvest as files of others: the same numbers, in the same order, whatever reads them."""

import json
from pathlib import Path

import pytest
import torch

import gaff
from gaff.cli import main
from gaff.integrations import harvests
from test_harvest import ROWS, Tokens, loader, net, texts

numpy = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Rows of several dimensions, labels, and more than one shard."""
    out = tmp_path_factory.mktemp("exported") / "acts"
    return gaff.harvest(net(), loader(), "0", "1:input", out=out, labels={"target": 1}, shard=3, reduce=twice)


def twice(value):
    return value.unflatten(1, (2, -1))


def columns(store):
    return {name: one[:] for name, one in (*store.items(), *store.labels.items())}


def test_numpy(store, tmp_path):
    files = harvests.to_numpy(store, tmp_path / "out")
    assert [one.name for one in files] == ["0.npy", "1%3Ainput.npy", "sample.npy", "target.npy"]
    for file, name in zip(files, ("0", "1:input", "sample", "target"), strict=True):
        assert torch.equal(torch.from_numpy(numpy.load(file)), columns(store)[name])
    [only] = [one for one in harvests.to_numpy(store, tmp_path / "one", sites=["0"]) if one.name[0] in "01"]
    assert only.name == "0.npy"


def test_arrow_and_parquet(store, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    assert harvests.to_parquet(store, tmp_path / "rows.parquet") == ROWS
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == ["0", "1:input", "sample", "target"]
    assert json.loads(table.schema.field("0").metadata[b"shape"]) == [2, 4]
    for name, expected in columns(store).items():
        found = numpy.stack(table[name].to_numpy()) if expected.dim() > 1 else table[name].to_numpy()
        assert torch.equal(torch.from_numpy(found.copy()).view(expected.shape), expected)


def test_a_data_set_of_hugging_face(store, tmp_path):
    datasets = pytest.importorskip("datasets")
    harvests.to_datasets(store, tmp_path / "out")
    table = datasets.load_from_disk(str(tmp_path / "out")).with_format("torch")
    for name, expected in columns(store).items():
        assert torch.equal(table[name][:].view(expected.shape), expected)


def test_zarr(store, tmp_path):
    zarr = pytest.importorskip("zarr")
    names = harvests.to_zarr(store, tmp_path / "out")
    assert names == ["0", "1%3Ainput", "sample", "target"]
    group = zarr.open_group(tmp_path / "out", mode="r")
    for name in names:
        assert torch.equal(torch.from_numpy(group[name][:]), columns(store)[group[name].attrs["address"]])


def test_what_numpy_does_not_know_becomes_float32(tmp_path):
    half = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "acts", rows="token", dtype="bfloat16")
    files = harvests.to_numpy(half, tmp_path / "out")
    found = torch.from_numpy(numpy.load(files[0]))
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), half["block"][:])


def test_nothing_is_written_over_and_nothing_half(store, tmp_path):
    (tmp_path / "out").mkdir()
    for write in (harvests.to_numpy, harvests.to_parquet, harvests.to_zarr):
        with pytest.raises(gaff.RecordError, match="is there already: expected a new path"):
            write(store, tmp_path / "out")
    with pytest.raises(gaff.SiteError, match="'2' is not in"):
        harvests.to_numpy(store, tmp_path / "new", sites=["2"])
    damaged = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    file = tmp_path / "acts" / "shards" / "000000" / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(gaff.RecordError, match="are not what was written"):
        harvests.to_numpy(damaged, tmp_path / "new")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["acts", "out"]


def test_the_command(store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    acts = str(store.place)
    assert main(["export", acts, "--to", "numpy", "--out", "arrays", "--site", "0"]) == 0
    assert capsys.readouterr().out == f"wrote {ROWS} rows to arrays\n"
    assert (tmp_path / "arrays" / "0.npy").exists()
    assert main(["export", acts, "--to", "zarr"]) == 0
    assert Path(f"{acts}-zarr").is_dir()  # beside the run, wherever the command is
    for line, told in (
        (["--to", "csv"], "--to csv is for a run"),
        (["--to", "numpy", "--stat", "rms"], "--stat is for a"),
    ):
        assert main(["export", acts, *line]) == 1
        assert told in capsys.readouterr().err


def test_a_label_whose_name_is_taken_is_not_lost(tmp_path):
    labels = {"0": 1, "label 0": 1, "label label 0": 1, ".": 1}
    both = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", labels=labels)
    assert len(harvests.to_numpy(both, tmp_path / "out")) == 6
    pytest.importorskip("zarr")
    assert len(harvests.to_zarr(both, tmp_path / "zarr")) == 6


def test_no_row_at_all(tmp_path):
    def none(batch):
        return torch.zeros(len(batch[0]), dtype=torch.bool)

    empty = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", rows=none)
    assert numpy.load(harvests.to_numpy(empty, tmp_path / "out")[0]).shape == (0, 8)
    pytest.importorskip("datasets")
    with pytest.raises(gaff.RecordError, match="has no row"):
        harvests.to_datasets(empty, tmp_path / "table")


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint32, torch.complex64])
def test_rarer_numbers_are_kept_and_exported(tmp_path, kind):
    def odd(value):
        return torch.complex(value, -value) if kind.is_complex else (value.abs() * 1000).to(kind)

    kept = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", reduce=odd)
    expected = torch.cat([odd(net()[0](batch[0])) for batch in loader()])
    assert torch.equal(kept["0"][:].view(torch.uint8), expected.view(torch.uint8))
    found = numpy.load(harvests.to_numpy(kept, tmp_path / "out")[0])
    assert numpy.array_equal(found, expected.detach().numpy())


@pytest.mark.parametrize(
    ("reduce", "what"),
    [(lambda value: value[:, :0], r"of shape \[0\], without an element"), (lambda value: value.cfloat(), "complex")],
)
def test_what_a_table_cannot_hold_is_refused(tmp_path, reduce, what):
    pytest.importorskip("pyarrow")
    kept = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", reduce=reduce)
    with pytest.raises(gaff.PlanError, match=f"0: its rows are {what}, which a table cannot hold"):
        harvests.to_parquet(kept, tmp_path / "table.parquet")


def test_a_run_is_no_harvest_to_be_checked(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 1
    assert "is not there: expected the folder of a harvest" in capsys.readouterr().err
