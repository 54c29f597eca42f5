"""``gaff.harvest`` into an object store: the same files as in a folder, committed by a create that is refused twice."""

import json
import pickle
import re
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gaff
from gaff.cli import main

obstore = pytest.importorskip("obstore")
server = pytest.importorskip("moto.server")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(rows=100):
    made = torch.Generator().manual_seed(1)
    table = TensorDataset(torch.randn(rows, 4, generator=made), torch.arange(rows))
    return DataLoader(table, batch_size=8, shuffle=True)


@pytest.fixture(scope="module")
def endpoint():
    """An S3-compatible server of this machine."""
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}".replace("0.0.0.0", "127.0.0.1")
    running.stop()


@pytest.fixture
def url(endpoint, monkeypatch, request):
    """A prefix in a new bucket, with the settings in the environment from which a URL takes them."""
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "ENDPOINT_URL": endpoint,
                        "ALLOW_HTTP": "true", "REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = re.sub("[^a-z0-9]+", "-", request.node.name).strip("-")[:60]
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")).close()
    return f"s3://{bucket}/deep/acts"


def paths(store):
    return sorted(one["path"] for page in store.list() for one in page)


def test_what_is_in_a_bucket_is_what_is_in_a_folder(url, tmp_path):
    model, loader = net(), data()
    torch.manual_seed(3)
    there = gaff.harvest(model, loader, "0", "1", out=url, shard=4, labels={"target": 1})
    torch.manual_seed(3)
    here = gaff.harvest(model, loader, "0", "1", out=tmp_path / "acts", shard=4, labels={"target": 1})
    assert there.rows == here.rows == 100
    wanted = torch.tensor([99, 0, 50, 31, 32])
    for site in ("0", "1"):
        assert torch.equal(there[site][:], here[site][:])
        assert torch.equal(there[site][30:70], here[site][30:70])
        assert torch.equal(there[site][wanted], here[site][wanted])
        assert torch.equal(there[site][-1], here[site][-1])
    assert torch.equal(there.labels["target"][:], here.labels["target"][:])
    assert there.is_complete
    assert there.check() == []
    assert not list(there.place.drafts().glob("*"))  # nothing is left on this machine
    opened = gaff.load(url, "harvest")
    rows = [torch.cat(list(store.loader("1", batch=32, shuffle=0))) for store in (opened, here)]
    assert torch.equal(*rows)


def test_a_bucket_that_is_copied_to_a_folder_is_a_store_and_the_other_way_round(url, tmp_path):
    there = gaff.harvest(net(), data(), "0", out=url, shard=4)
    store = obstore.store.from_url(url)
    for path in paths(store):
        place = tmp_path / "copy" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(store.get(path).bytes()))
    copied = gaff.load(tmp_path / "copy")
    assert copied.check() == []
    assert torch.equal(copied["0"][:], there["0"][:])
    memory = obstore.store.MemoryStore()
    for path in paths(store):
        memory.put(path, bytes(store.get(path).bytes()))
    again = gaff.harvest(net(), data(), "0", out=memory, shard=4)
    assert torch.equal(again["0"][:], there["0"][:])


def test_one_that_was_broken_off_goes_on(url):
    model, loader, calls = net(), data(), []

    def failing(x):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return x * 2

    with pytest.raises(KeyboardInterrupt):
        gaff.harvest(model, loader, "0", out=url, shard=2, reduce=failing)
    store = obstore.store.from_url(url)
    before = {path: bytes(store.get(path).bytes()) for path in paths(store)}
    assert sum(path.endswith("shard.json") for path in before) == 3
    done = gaff.harvest(model, loader, "0", out=url, shard=2, reduce=failing)
    assert all(bytes(store.get(path).bytes()) == content for path, content in before.items())
    assert sorted(done.labels["sample"][:].tolist()) == list(range(100))
    assert done.is_complete


def test_files_without_a_shard_that_names_them_are_no_rows(url):
    """As a kill leaves them between the upload of the rows and the commit."""
    done = gaff.harvest(net(), data(), "0", out=url, shard=2)
    expected = done["0"][:]
    store = obstore.store.from_url(url)
    store.delete("shards/000003/shard.json")
    store.delete("end.json")
    cut = gaff.load(url)
    assert not cut.is_complete
    assert cut.rows == 100 - 16
    again = gaff.harvest(net(), data(), "0", out=url, shard=2)
    assert again.is_complete
    assert torch.equal(again["0"][:], expected)


def test_two_that_write_one_shard_leave_the_first_and_other_rows_are_an_error(url):
    from gaff.harvesting.folder import location_of
    from gaff.harvesting.shard import ShardWriter

    def write(rows):
        with ShardWriter(location_of(url), 0) as writer:
            writer.append({"0": rows}, {"sample": torch.arange(3)})
            return writer.commit((0, 1), 0, 0, {}, (), "")

    first = write(torch.ones(3, 2))
    assert write(torch.ones(3, 2)) == first
    with pytest.raises(gaff.RecordError, match="another process has written other rows"):
        write(torch.zeros(3, 2))
    assert location_of(url).shards() == [0]


def test_what_is_damaged_is_refused_by_its_name(url, capsys):
    gaff.harvest(net(), data(), "0", out=url, shard=4)
    store = obstore.store.from_url(url)
    file = next(path for path in paths(store) if path.startswith("shards/000001/0-"))
    content = bytearray(store.get(file).bytes())
    content[-1] ^= 1
    store.put(file, bytes(content))
    opened = gaff.load(url)
    assert opened["0"][:32].shape == (32, 8)
    with pytest.raises(gaff.RecordError, match=rf"{url}/{file}: rows 24 to 31 are not what was written"):
        opened["0"][60]
    store.put(file, bytes(content[:-40]))
    with pytest.raises(gaff.RecordError, match=f"{file}: "):
        gaff.load(url)["0"][60]
    store.put(file, b"x" * len(content))
    with pytest.raises(gaff.RecordError, match="its header is not what was written"):
        gaff.load(url)["0"][40]
    store.delete(file)
    with pytest.raises(gaff.RecordError, match=f"{file}: is not there"):
        gaff.load(url)["0"][40]
    assert main(["check", url]) == 3
    assert file in capsys.readouterr().out
    store.put("shards/000001/shard.json", b"{}")
    with pytest.raises(gaff.RecordError, match=r"shards/000001/shard.json: is damaged"):
        gaff.load(url)


def test_a_place_that_is_none(url, tmp_path):
    store = obstore.store.from_url(url)
    store.put("notes.txt", b"mine")
    with pytest.raises(gaff.PlanError, match="holds something else"):
        gaff.harvest(net(), data(), "0", out=url)
    with pytest.raises(gaff.RecordError, match="harvest.json is not there: expected the folder of a harvest"):
        gaff.load(url)
    with pytest.raises(gaff.PlanError, match="'nothing://x' is no object store"):
        gaff.load("nothing://x")
    with pytest.raises(gaff.PlanError, match="expected a path, a URL, or a store of obstore"):
        gaff.harvest(net(), data(), "0", out=7)
    (tmp_path / "file").write_text("x")
    with pytest.raises(gaff.PlanError, match="is a file"):
        gaff.harvest(net(), data(), "0", out=tmp_path / "file")


def test_columns_go_to_workers(url):
    done = gaff.harvest(net(), data(), "0", out=url, shard=4)
    column = pickle.loads(pickle.dumps(done["0"]))
    assert torch.equal(column[:], done["0"][:])


def test_the_command_lines(url, tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 2))\nbatches = list(torch.ones(3, 5, 4))\n"
    )
    line = ["harvest", f"{file}:model", f"{file}:batches", "0", "--out", url]
    assert main(line) == 0
    assert url in capsys.readouterr().out
    assert main(["check", url]) == 0
    assert json.loads(bytes(obstore.store.from_url(url).get("end.json").bytes()))["batches"] == 3


def test_a_store_of_obstore_is_written_and_read(tmp_path):
    memory = obstore.store.MemoryStore()
    done = gaff.harvest(net(), data(), "0", out=memory, shard=4)
    assert str(done.place) == "<obstore MemoryStore>"
    assert torch.equal(gaff.load(memory)["0"][:], done["0"][:])
    with pytest.raises(gaff.PlanError, match="was a URL before it became a Path"):
        gaff.harvest(net(), data(), "0", out=Path("s3://bucket/acts"))
