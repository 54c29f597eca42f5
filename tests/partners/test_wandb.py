"""Runs of wandb, offline, hold what the record tells; one that is the user's stays open."""

import json
import struct
import time

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

import gaff
from gaff.errors import PlanError
from gaff.integrations.wandb import Wandb
from made_records import HOSTILE, SITES, MadeRun, make, metrics_of

STATS = ["mean", "rms", "nonfinite"]
BLOCK = 32768  # of a transaction log: records never reach beyond one, but in pieces


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if wandb.run is not None:
        wandb.run.finish()


def offline(folder):
    return {"project": "p", "mode": "offline", "dir": str(folder)}


def records_in(path):
    """The protocol's records; of each piece the head tells checksum, length and type (1 whole, 2 first, 3, 4 last)."""
    content, at, pieces = path.read_bytes(), 7, []
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + length > len(content):
            return  # still being written
        pieces.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(b"".join(pieces))
            pieces = []


def history(folder):
    """Rows of the only run in a folder, in their order."""
    [path] = folder.rglob("*.wandb")
    for _ in range(100):  # wandb's service writes on for a moment after finish() has returned
        records = list(records_in(path))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("wandb's service never wrote the end of the run")
    for record in records:
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def metrics(rows):
    found = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("gaff/") and name != "gaff/step" and "findings" not in name:
                found.setdefault(name, []).append((row["gaff/step"], repr(float(value))))
    return found


@pytest.mark.parametrize("sites", [SITES, HOSTILE], ids=["plain", "hostile"])
def test_metrics_are_the_records_series_and_our_run_is_finished(tmp_path, sites):
    record = gaff.load(make(tmp_path / "run", (0, 1), sites))
    with Wandb(stats=STATS, **offline(tmp_path)) as sender:
        count = sender.send(record)
        assert wandb.run is sender.run
    assert wandb.run is None
    rows = list(history(tmp_path))
    assert metrics(rows) == metrics_of(record, STATS)
    assert count == sum(map(len, metrics_of(record, STATS).values()))
    [table] = [row for row in rows if "gaff/findings._type" in row]
    assert [table[f"gaff/findings.{name}"] for name in ("_type", "nrows", "ncols")] == ["table-file", 2, 5]
    [file] = tmp_path.rglob("findings*.table.json")
    told = json.loads(file.read_text())
    assert [one[:4] for one in told["data"]] == [["warning", "dead_units", "m.fc1", rank] for rank in ("0", "1")]


def test_your_own_run_is_used_and_left_open_and_keeps_its_metrics(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    own = wandb.init(**offline(tmp_path))
    own.log({"mine": 1.0})
    with Wandb(stats=STATS) as sender:
        sender.send(record)
    own.log({"mine": 2.0})
    assert wandb.run is own
    with pytest.raises(PlanError, match="project='q': a run of wandb is active and would be used; finish it first"):
        Wandb(project="q")
    own.finish()
    rows = list(history(tmp_path))
    assert [row["mine"] for row in rows if "mine" in row] == [1.0, 2.0]
    assert metrics(rows) == metrics_of(record, STATS)


def test_what_grows_is_sent_once(tmp_path):
    run = MadeRun(tmp_path / "run")
    record = gaff.load(tmp_path / "run")
    with Wandb(stats=["mean"], **offline(tmp_path)) as sender:
        assert sender.send(record) == 0
        for step in range(3):
            run.look(step)
            run.steps(step, [0.5])
            record.refresh()
            assert sender.send(record) == 5
        assert sender.send(record) == 0
    assert metrics(history(tmp_path)) == metrics_of(record, ["mean"])
