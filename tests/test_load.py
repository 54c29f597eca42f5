"""``gaff.load`` reads what gaff has saved, and says of anything else what it is."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import gaff
import made_records
from gaff.errors import RecordError


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_an_anatomy_comes_back_as_it_was(net, tmp_path):
    told = gaff.anatomy(net, torch.randn(2, 3))
    told.save(tmp_path / "a.json")
    found = gaff.load(tmp_path / "a.json", "anatomy")
    assert found == told
    assert str(found) == str(told)
    told.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_a_trace_and_a_run_come_back_by_the_same_name(net, tmp_path):
    trace = gaff.trace(net, torch.randn(2, 3))
    trace.save(tmp_path / "t.json")
    assert gaff.load(tmp_path / "t.json") == trace
    made_records.make(tmp_path / "run")
    assert gaff.load(str(tmp_path / "run"), "run").steps
    with pytest.raises(RecordError, match=r"t\.json' is of kind 'trace': expected one of kind 'run'"):
        gaff.load(tmp_path / "t.json", "run")
    with pytest.raises(RecordError, match=r"kind='runs' is not known: expected one of 'run', 'trace', 'anatomy'"):
        gaff.load(tmp_path / "run", "runs")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.json",
            json.dumps({"gaff_plan": 1}),
            "is a plan: expected a run, a trace, an anatomy, a capture or a harvest; gaff.Plan.load",
        ),
        ("x.json", "[1, 2]", "is other JSON: expected a run, a trace, an anatomy, a capture or a harvest"),
        ("x.txt", "hello", "is a text that is no JSON"),
        ("x", "", "is empty"),
        ("x.html", "<html>", "is a page: .* open it in a browser"),
        ("x.pt", "", "is a file of torch: .* torch.load"),
        ("x.safetensors", "", "is a file of tensors"),
        ("rank0.gaff", "", "is the log of one process of a run: .* give its folder"),
        ("t.json", json.dumps({"gaff_trace": 7}), "trace cannot be read: .*another format"),
        ("a.json", json.dumps({"gaff_anatomy": 1, "nodes": 3}), "anatomy cannot be read"),
    ],
)
def test_anything_else_is_told_for_what_it_is(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(RecordError, match=message):
        gaff.load(tmp_path / name)


def test_folders_and_what_is_not_there(tmp_path):
    with pytest.raises(RecordError, match="is not there: expected the folder of a run, or a file that gaff has saved"):
        gaff.load(tmp_path / "none")
    (tmp_path / "runs").mkdir()
    with pytest.raises(RecordError, match=r"holds no file \*.gaff"):
        gaff.load(tmp_path / "runs")
    made_records.make(tmp_path / "runs" / "a")
    with pytest.raises(RecordError, match=r"is a folder of 1 run: expected one of them, such as .*a"):
        gaff.load(tmp_path / "runs")
    made_records.make(tmp_path / "runs" / "b")
    with pytest.raises(RecordError, match=r"is a folder of 2 runs: expected one of them, such as .*a, .*b"):
        gaff.load(tmp_path / "runs")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RecordError, match="is no text"):
        gaff.load(tmp_path / "binary")


def test_records_and_addresses_open_without_torch(net, tmp_path):
    gaff.anatomy(net, torch.randn(2, 3)).save(tmp_path / "a.json")
    code = (
        "import gaff.record, gaff.address, gaff, sys; assert 'torch' not in sys.modules; "
        f"gaff.load({str(tmp_path / 'a.json')!r}); import gaff.record.run, gaff.views.run_text, gaff.views.trace_text; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
