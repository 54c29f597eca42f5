"""What leaves a record is what the record tells: nothing less, nothing twice, nothing that harms."""

import csv
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from array import array
from pathlib import Path

import pytest
import torch
from torch import nn

import gaff
from gaff.cli import export
from gaff.compat.extras import need
from gaff.errors import PlanError, RecordError
from gaff.integrations.mlflow import MLflow
from gaff.integrations.partners import Findings, Sender, as_text, points, refuse_options, tag
from gaff.integrations.rows import Cursor, Row, looks, numbers, scalars, site_filter
from gaff.integrations.tables import findings_path, to_csv, to_jsonl, to_parquet
from gaff.integrations.tensorboard import TensorBoard
from gaff.integrations.trackio import Trackio
from gaff.integrations.wandb import Wandb
from gaff.record import part
from gaff.record.absent import ABSENT
from gaff.record.log import LAYOUT
from gaff.record.matrix import Layout
from made_records import COLUMNS, HOSTILE, SITES, MadeRun, make, series_of


def grouped(rows):
    found = {}
    for row in rows:
        found.setdefault((row.rank, row.phase, row.site, row.stat), []).append((row.step, repr(row.value)))
    return found


def rows_of_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    assert head == list(Row._fields)
    kinds = (int, str, int, float, str, str, float)
    return [Row(*(kind(cell) for kind, cell in zip(kinds, line, strict=True))) for line in lines]


def rows_of_jsonl(path):
    found = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        told = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
        special = told.pop("nonfinite", None)
        assert (special is None) == (told["value"] is not None)
        found.append(Row(**{**told, "value": float(special or told["value"])}))
    return found


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_rows_are_those_of_the_records_series(tmp_path, ranks):
    record = gaff.load(make(tmp_path / "run", ranks))
    found = grouped([*scalars(record), *numbers(record)])
    assert found == series_of(record)
    assert {key[0] for key in found} == set(ranks)
    assert found[0, "train", "fc1", "mean"][1] == (1, "nan")
    assert [step for step, _ in found[0, "train", ":output", "rms"]] == [0, 1]  # nothing of it in the last look


def test_rows_of_a_watched_run_are_those_of_its_series(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    rows = [*scalars(record), *numbers(record)]
    found = grouped(rows)
    for site in record.sites:
        for stat in ("count", "mean", "std", "rms", "norm", "nonfinite", "max"):
            assert found[0, "train", site, stat] == [(step, repr(value)) for step, value in record.series(site, stat)]
    for stat in ("update_ratio", "adam_rms", "momentum", "lr"):
        expected = [(step, repr(value)) for step, value in record.series("0.weight:param", stat) if value == value]
        assert expected
        assert found[0, "train", "0.weight:param", stat] == expected
    assert found[0, "train", "", "grad_norm"] == [(step, repr(value)) for step, value in record.scalar("grad_norm")]
    assert all(row.time > 1e9 for row in rows)
    assert not any(math.isnan(row.value) for row in rows)


@pytest.mark.parametrize(("write", "read"), [(to_csv, rows_of_csv), (to_jsonl, rows_of_jsonl)])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_file_holds_all_of_it_and_the_findings_are_beside_it(tmp_path, write, read, ranks):
    record = gaff.load(make(tmp_path / "run", ranks))
    path = tmp_path / "out" / "run.table"
    path.parent.mkdir()
    count = write(record, path)
    rows = read(path)
    assert len(rows) == count
    assert grouped(rows) == series_of(record)
    found = [json.loads(line) for line in findings_path(path).read_text().splitlines()]
    assert [(one["rule"], one["site"], one["rank"]) for one in found] == [("dead_units", "fc1", rank) for rank in ranks]
    assert found[0]["evidence"] == {"dead": "nan"}
    assert sorted(one.name for one in path.parent.iterdir()) == ["run.findings.jsonl", "run.table"]


@pytest.mark.parametrize(("write", "read"), [(to_csv, rows_of_csv), (to_jsonl, rows_of_jsonl)])
def test_names_that_are_meant_to_harm_come_out_as_names(tmp_path, write, read):
    record = gaff.load(make(tmp_path / "run", sites=HOSTILE))
    path = tmp_path / "run.table"
    write(record, path)
    found = grouped(read(path))
    expected = series_of(record)
    if write is to_csv:
        marked = {
            key: (*key[:2], f"'{key[2]}" if key[2][:1] in tuple("=-@") and key[2] else key[2], key[3])
            for key in expected
        }
        expected = {marked[key]: value for key, value in expected.items()}
        with path.open(newline="") as file:
            assert not any(cell.startswith(("=", "+", "@", "-2")) for line in csv.reader(file) for cell in line[4:6])
    assert found == expected


def test_a_selection_limits_sites_and_stats(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    path = tmp_path / "run.csv"
    to_csv(record, path, sites=["fc1**"], stats=["rms", "dead"])
    rows = [row for row in rows_of_csv(path) if row.site]
    assert {row.site for row in rows} == {"fc1", "fc1.weight:grad"}
    assert {row.stat for row in rows} == {"rms", "dead"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("fc1", ["fc1"]),
        ("*", ["fc1"]),
        ("fc1**", ["fc1", "fc1.weight:grad"]),
        ("**:grad", ["fc1.weight:grad"]),
        ("fc*.w*:*", ["fc1.weight:grad"]),
        ("**", SITES),
        ("f.*", []),
    ],
)
def test_a_star_stands_for_part_of_a_name_and_two_for_anything(pattern, expected):
    assert list(filter(site_filter([pattern]), SITES)) == expected


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"sites": ["fc2"]}, "no site 'fc2' in .* of 3 sites; nearest: fc1"),
        ({"stats": ["rsm"]}, "no stat 'rsm' in .*: expected one of count, .*, rms, norm, nonfinite"),
    ],
)
def test_what_the_record_has_not_is_told_and_nothing_is_written(tmp_path, chosen, message):
    record = gaff.load(make(tmp_path / "run"))
    with pytest.raises(RecordError, match=message):
        to_csv(record, tmp_path / "run.csv", **chosen)
    assert not list(tmp_path.glob("*.csv"))


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    record = gaff.load(make(tmp_path / "run"))
    path = tmp_path / "run.csv"
    path.write_text("old")

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RecordError, match="cannot be written: No space left on device"):
        to_csv(record, path)
    assert path.read_text() == "old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "run.csv"]


def test_a_folder_is_no_file_of_a_table(tmp_path, monkeypatch):
    record = gaff.load(make(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match="'.' is a folder: expected the path of a file"):
        to_csv(record, ".")


def test_a_record_without_anything_gives_a_head_and_no_rows(tmp_path):
    MadeRun(tmp_path / "run", sites=[]).log.close()
    record = gaff.load(tmp_path / "run")
    assert to_csv(record, tmp_path / "a.csv") == to_jsonl(record, tmp_path / "a.jsonl") == 0
    assert (tmp_path / "a.csv").read_text() == ",".join(Row._fields) + "\n"
    assert (tmp_path / "a.jsonl").read_text() == findings_path(tmp_path / "a.csv").read_text() == ""


def test_a_growing_record_is_read_on_and_nothing_comes_twice(tmp_path):
    whole = make(tmp_path / "whole", (0, 1))
    growing = tmp_path / "growing"
    growing.mkdir()
    parts = {path.name: path.read_bytes() for path in whole.glob("*.gaff")}
    for name, content in parts.items():
        (growing / name).write_bytes(content[:8])
    record, cursor, found = gaff.load(growing), Cursor(), []
    sizes = []
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        for name, content in parts.items():
            (growing / name).write_bytes(content[: int(share * len(content))])
        record.refresh()
        new = [*scalars(record, since=cursor), *numbers(record, since=cursor)]
        assert not [*scalars(record, since=cursor), *numbers(record, since=cursor)]
        sizes.append(len(new))
        found += new
    assert sum(size > 0 for size in sizes) > 2
    assert grouped(found) == series_of(gaff.load(whole))


def test_a_look_counts_as_read_when_the_next_one_is_asked_for(tmp_path):
    record, cursor = gaff.load(make(tmp_path / "run")), Cursor()
    some = looks(record, since=cursor)
    first = next(some)
    assert (next(looks(record, since=cursor)).step, first.step) == (0, 0)
    second = next(some)
    some.close()
    assert [look.step for look in looks(record, since=cursor)] == [second.step, 2, 2]


def test_what_the_ring_has_of_a_step_is_sent_at_once_and_the_rest_when_the_log_has_it(tmp_path, monkeypatch):
    run = MadeRun(tmp_path / "run")
    run.steps(0, [2.0])
    ring = {"step": [1.0, 2.0], "seconds": [0.4, 0.4], "lr": [math.nan, 0.1], "loss:l": [1.5, ABSENT]}
    columns = {name: array("d", values) for name, values in ring.items()}
    monkeypatch.setattr(part, "_late", lambda path, last: columns if last < 1 else {})
    record, cursor = gaff.load(tmp_path / "run"), Cursor()
    early = [row for row in scalars(record, since=cursor) if row.step > 0]
    assert [(row.step, row.stat) for row in early] == [(1, "loss:l"), (2, "lr")]
    assert not list(scalars(record, since=cursor))
    run.steps(1, [1.5, math.nan])
    record.refresh()
    late = list(scalars(record, since=cursor))
    assert not {(row.step, row.stat) for row in early} & {(row.step, row.stat) for row in late}
    whole = [row for row in scalars(gaff.load(tmp_path / "run")) if row.step > 0]
    assert sorted(map(str, (row[:3] + row[5:] for row in (*early, *late)))) == sorted(
        map(str, (row[:3] + row[5:] for row in whole))
    )


def test_a_step_has_a_time_before_anything_is_in_the_log(tmp_path, monkeypatch):
    MadeRun(tmp_path / "run")
    ring = {"step": [0.0], "seconds": [0.5], "loss:l": [1.5]}
    monkeypatch.setattr(part, "_late", lambda path, last: {name: array("d", ring[name]) for name in ring})
    times = [row.time for row in scalars(gaff.load(tmp_path / "run"))]
    assert times
    assert all(map(math.isfinite, times))


def test_a_second_model_never_takes_the_name_that_a_first_one_has(tmp_path):
    run = MadeRun(tmp_path / "run", sites=("n.fc1",))
    run.look(0)
    record, cursor = gaff.load(tmp_path / "run"), Cursor()
    assert {row.site for row in numbers(record, since=cursor)} == {"n.fc1"}
    run.log.write_json(LAYOUT, Layout(1, "activations", (("n", "fc1"),), COLUMNS, True).to_json())
    record.refresh()
    assert cursor.catch_up(record) == {("m", "n.fc1"): "n.fc1", ("n", "fc1"): "n.fc1#2"}


def test_a_cursor_is_of_one_record(tmp_path):
    cursor = Cursor()
    list(scalars(gaff.load(make(tmp_path / "one")), since=cursor))
    with pytest.raises(PlanError, match="is another record than .*one"):
        list(scalars(gaff.load(make(tmp_path / "other")), since=cursor))


class Told(Sender):
    """A sender that keeps what it is to send."""

    def __init__(self, sites=(), stats=("rms",)):
        super().__init__(sites, stats)
        self.names = []

    def _send(self, record):
        new = [name for _, named in self._points(record) for name in named]
        self.names += new
        return len(new)

    def _close(self):
        self.names.append("closed")


def test_a_sender_is_loud(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    for n in range(16):
        MadeRun(tmp_path / "long", rank=n).look(0)
    many = gaff.load(tmp_path / "long")
    for words, what in (({"stats": "rms"}, "stats='rms' is a text"), ({"sites": "fc1"}, "sites='fc1' is a text")):
        with pytest.raises(PlanError, match=what):
            Told(**words)
    with Told() as sender:
        sender.send(record)
        with pytest.raises(PlanError, match="another record"):
            sender.send(many)
    sender.close()
    assert sender.names.count("closed") == 1
    with pytest.raises(PlanError, match="this Told is closed"):
        sender.send(record)


@pytest.mark.parametrize("words", [{"stats": ["rmss"]}, {"sites": ["weihgt:param"]}])
def test_a_sender_refuses_what_a_run_has_not(tmp_path, words):
    run = MadeRun(tmp_path / "run")
    run.look(0)
    record, sender = gaff.load(tmp_path / "run"), Told(**words)
    sender.send(record)  # there may be more of it later
    for step in range(1, 16):
        run.look(step)
    record.refresh()
    with pytest.raises(RecordError, match="no (site|stat)"):
        sender.send(record)


def test_the_names_of_ranks_do_not_depend_on_who_comes_first(tmp_path):
    MadeRun(tmp_path / "run", rank=1).steps(0, [2.0])
    record, sender = gaff.load(tmp_path / "run"), Told()
    sender.send(record)
    assert "gaff/rank1/loss/l" in sender.names
    MadeRun(tmp_path / "run", rank=0).steps(0, [2.0])
    record.refresh()
    sender.send(record)
    assert sender.names.count("gaff/loss/l") == 1


def test_a_site_keeps_its_name_when_another_model_is_found(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.look(0)
    record, cursor = gaff.load(tmp_path / "run"), Cursor()
    before = {row.site for row in numbers(record, since=cursor)}
    run.log.write_json(LAYOUT, Layout(1, "activations", (("n", "fc1"),), COLUMNS, True).to_json())
    run.look(1)
    record.refresh()
    assert record.sites == ["m.fc1", "m.fc1.weight:grad", "m:output", "n.fc1"]
    assert before == {row.site for row in numbers(record, since=cursor)} == set(SITES)
    assert {row.site for row in numbers(record)} == set(record.sites[:3])


def test_times_of_steps_go_back_from_when_they_were_written(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    times = [row.time for row in scalars(record) if row.stat == "loss:l"]
    assert times == pytest.approx([times[2] - 1.0, times[2] - 0.5, times[2]])
    written = next(numbers(record)).time
    assert 0 <= written - times[2] < 60


def test_damage_is_passed_over(tmp_path):
    path = make(tmp_path / "run") / "rank0.gaff"
    content = bytearray(path.read_bytes())
    content[content.index(b"GFRM", 600) + 40] ^= 1  # inside the first series
    path.write_bytes(content)
    record = gaff.load(tmp_path / "run")
    assert record.notes
    assert grouped([*scalars(record), *numbers(record)]) == series_of(record)


def test_points_are_named_for_trackers(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    found = list(points(record, ["fc1"], ["rms"], Cursor()))
    assert [(point.step, list(point.values)) for point in found] == [
        (0, ["run/seconds", "loss/l"]),
        (1, ["run/seconds", "loss/l", "run/lr"]),
        (2, ["run/seconds", "loss/l", "run/lr"]),
        (0, ["fc1/rms"]),
        (1, ["fc1/rms"]),
        (2, ["fc1/rms"]),
        (2, ["fc1/eval_rms"]),
    ]
    assert tag(Row(0, "train", 0, 0.0, "", "loss:a:b", 0.0)) == "loss/a:b"
    assert tag(Row(0, "train", 0, 0.0, "loss", "mean", 0.0)) == "loss:output/mean"  # and not a loss called mean


def test_findings_are_told_when_they_change_and_hold_no_markup(tmp_path):
    run = MadeRun(tmp_path / "run")
    record, findings, told = gaff.load(tmp_path / "run"), Findings(), []
    findings.tell(record, told.append)
    assert told == []
    run.finding(1, site="<script>\n# x\u2028# y")
    record.refresh()

    def fails(found):
        raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        findings.tell(record, fails)
    findings.tell(record, told.append)
    [found] = told
    assert found[0][:2] == ["warning", "dead_units"]
    lines = as_text(found).splitlines()
    assert lines[0] == "**warning: dead_units**"
    assert all(not line or line.startswith("    ") for line in lines[1:])
    findings.tell(record, told.append)
    assert len(told) == 1
    run.log.close()


def test_what_is_not_installed_is_told_with_what_to_install():
    with pytest.raises(PlanError, match=r"'no_such' is needed, which is not installed: pip install 'gaff\[them\]'"):
        need("no_such.part", "them")
    with pytest.raises(ModuleNotFoundError, match="json.nothing"):
        need("json.nothing", "them")
    with pytest.raises(PlanError, match="project='x': a run of them is active"):
        refuse_options("them", object(), {"project": "x"})


@pytest.mark.parametrize(
    ("package", "extra", "make_sender"),
    [
        ("tensorboard", "tensorboard", lambda path: TensorBoard(path)),
        ("wandb", "wandb", lambda path: Wandb()),
        ("mlflow", "mlflow", lambda path: MLflow()),
        ("trackio", "trackio", lambda path: Trackio()),
        ("pyarrow", "parquet", lambda path: to_parquet(gaff.load(make(path / "run")), path / "a.parquet")),
    ],
)
def test_a_partner_that_is_missing_is_named_and_nothing_is_written(tmp_path, monkeypatch, package, extra, make_sender):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        PlanError, match=rf"'{package}' is needed, which is not installed: pip install 'gaff\[{extra}\]'"
    ):
        make_sender(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == (["run"] if package == "pyarrow" else [])


def test_a_record_is_exported_without_torch(tmp_path):
    make(tmp_path / "run")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gaff.inspection.saved import load\n"
        "from gaff.integrations import mlflow, tables, tensorboard, trackio, wandb\n"
        "record = load(sys.argv[1])\n"
        "print(tables.to_csv(record, sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "run", tmp_path / "run.csv"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == len(rows_of_csv(tmp_path / "run.csv"))


# the command


def options(run, to, out=None, site=(), stat=()):
    return Namespace(run=str(run), to=to, out=out and str(out), site=list(site), stat=list(stat))


def test_the_command_writes_beside_the_run_and_tells_where(tmp_path, capsys):
    make(tmp_path / "run")
    assert export.run(options(tmp_path / "run", "csv")) == 0
    count = len(rows_of_csv(tmp_path / "run.csv"))
    assert capsys.readouterr().out == (
        f"wrote {count} rows to {tmp_path / 'run.csv'}, 1 findings to {tmp_path / 'run.findings.jsonl'}\n"
    )
    assert export.run(options(tmp_path / "run", "jsonl", tmp_path / "a", site=["fc1"], stat=["rms"])) == 0
    assert {row.site for row in rows_of_jsonl(tmp_path / "a")} == {"", "fc1"}


def test_the_command_refuses_what_cannot_be(tmp_path):
    make(tmp_path / "run")
    with pytest.raises(RecordError, match="no site 'fc9'"):
        export.run(options(tmp_path / "run", "wandb", site=["fc9"]))
    with pytest.raises(RecordError, match="no stat 'magnitudes'"):
        export.run(options(tmp_path / "run", "csv", stat=["magnitudes"]))
    with pytest.raises(PlanError, match="--out 'x': mlflow keeps its runs where it is set up to"):
        export.run(options(tmp_path / "run", "mlflow", out="x"))
    with pytest.raises(RecordError, match="cannot be written: No such file or directory"):
        export.run(options(tmp_path / "run", "csv", out=tmp_path / "no" / "a.csv"))


def test_every_destination_is_documented():
    page = (Path(__file__).parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
    for name in (*export.WRITERS, *export.TRACKERS, "tensorboard", "--out", "--site", "--stat"):
        assert name in page


def test_a_link_stays_and_a_pipe_is_no_file_of_a_table(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    target, link, pipe = tmp_path / "target.csv", tmp_path / "link.csv", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    to_csv(record, link)
    assert link.is_symlink()
    assert target.read_text().startswith("rank,")
    os.mkfifo(pipe)
    with pytest.raises(RecordError, match="it is no ordinary file"):
        to_csv(record, pipe)
    assert pipe.is_fifo()


@pytest.mark.slow
def test_steps_that_only_the_ring_of_a_killed_run_has_are_rows_too(tmp_path):
    code = (
        "import os, signal, sys, torch, gaff\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-2)\n"
        "gaff.watch(model, optimizer, out=sys.argv[1])\n"
        "for step in range(200):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 3)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    record = gaff.load(tmp_path / "run")
    [part] = record._parts
    assert len(part.series["step"]) > len(part.logged.get("step", ()))
    rows = [one for one in scalars(record) if one.stat == "loss:loss" or one.stat.startswith("loss")]
    assert [one.step for one in rows] == list(record.scalar("loss").steps)
    times = [one.time for one in rows]
    assert times == sorted(times)


def test_findings_of_names_with_a_number_behind_a_dot_do_not_meet():
    assert findings_path("out/lr0.1").name == "lr0.1.findings.jsonl"
    assert findings_path("out/a.csv").name == "a.findings.jsonl"


@pytest.mark.parametrize("name", ["a\0b.csv", "x" * 300 + ".csv"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    record = gaff.load(make(tmp_path / "run"))
    with pytest.raises(gaff.RecordError, match="is no name of a file"):
        to_csv(record, tmp_path / name)
