"""Records of several processes: groups that came one after another, and which of them failed first."""

import json
import os

import pytest

import gaff
import gaff.record.log as log_module
from gaff.errors import RecordError
from gaff.record.finding import Finding
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogWriter
from gaff.record.matrix import Layout, pack, pack_series, to_bytes
from gaff.training.watch.record_place import prepare
from gaff.training.watch.settings import Settings
from gaff.views.run_text import report, verdict

COLUMNS = (("count", "d"), ("mean", "f"), ("std", "f"), ("min", "f"), ("max", "f"))
BANG = "RuntimeError: bang"
CLOSED = "RuntimeError: Connection closed by peer"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes one process's log: a parameter's mean at each of three steps, and its end at a time of its own."""
    now = [1000.0]
    monkeypatch.setattr(log_module.time, "time", lambda: now[0])

    def written(name, mean, *, world=2, error=None, ends_at=None, findings=(), **begun):
        now[0] += 1
        log = LogWriter(tmp_path / f"{name}.gaff")
        log.write_json(LAYOUT, Layout(0, "parameters", (("m", "w:param"),), COLUMNS, False).to_json())
        log.write_json(EVENT, {"kind": "begin", **begun})
        log.write_json(EVENT, {"kind": "model", "name": "m", "replicated": [0, 1], "world": world})
        for step in range(3):
            values = (2.0, mean + step, 1.0, 0.0, 1.0)
            cells = [to_bytes(code, [value]) for (_, code), value in zip(COLUMNS, values, strict=True)]
            log.write(MATRIX, pack(0, "train", cells), step)
            log.write_json(EVENT, {"kind": "look", "phase": "train"}, step)
            log.write(SERIES, pack_series({"step": [float(step)], "lr": [0.1]}), step)
        log.write_json(EVENT, {"kind": "findings", "findings": [one.to_dict() for one in findings]}, 2)
        before, now[0] = now[0], ends_at or now[0]
        log.write_json(EVENT, {"kind": "end", "error": error, "overhead": 0.0, "seconds": 1.0}, 2)
        now[0] = before
        log.close()

    return written


def test_a_helper_that_trains_is_no_part_of_the_run_that_has_started_it(tmp_path, write):
    write("rank0", 5.0, world=1, process=12, started_by=[11], findings=[nan("a helper's")])
    write("rank0-11", 0.0, world=1, process=11, started_by=[10])
    write("rank0-13", 7.0, world=1, process=13, started_by=[11, 12])
    record = gaff.load(tmp_path)
    assert record.groups == [[1], [2], [0]]
    assert record.series("w:param", "mean").values == [0.0, 1.0, 2.0]
    assert record.series("w:param", "mean", rank=1).values == [5.0, 6.0, 7.0]
    with pytest.raises(RecordError, match=r"were in 3 groups \(\[1\]; \[2\]; \[0\]\): .* such as rank=0"):
        record.series("w:param", "mean", rank="all")
    assert [one.rank for one in record.findings] == [1]


def test_processes_that_nobody_who_trains_has_started_are_together(tmp_path, write):
    for number, name in enumerate(("rank0", "rank0-12", "rank0-13")):
        write(name, float(number), world=1, process=11 + number, started_by=[10])
    assert gaff.load(tmp_path).groups == [[0, 1, 2]]


def nan(message, **evidence):
    return Finding("nonfinite", "", "m", 2, "error", message, "a cause", "a remedy", evidence, last=2)


def test_a_second_group_of_processes_is_compared_within_itself(tmp_path, write):
    for name, mean in (("rank0", 0.0), ("rank1", 0.0), ("rank0-9", 5.0), ("rank1-8", 5.5)):
        write(name, mean)
    record = gaff.load(tmp_path)
    assert record.groups == [[0, 1], [2, 3]]
    [finding] = record.findings
    assert (finding.rule, finding.rank, finding.message) == (
        "rank_divergence", 3, "rank 3 has other weights than rank 2"
    )  # fmt: skip
    assert record.series("w:param", "mean", rank=1).values == [0.0, 1.0, 2.0]
    assert record.series("w:param", "mean", rank=2).values == [5.0, 6.0, 7.0]
    told = r"were in 2 groups \(\[0, 1\]; \[2, 3\]\).*expected one process, such as rank=2"
    with pytest.raises(RecordError, match=told):
        record.series("w:param", "mean", rank="all")
    with pytest.raises(RecordError, match=told):
        record.scalar("grad_norm", rank="all")
    assert "(4 processes in 2 groups)" in verdict(record)


def test_groups_of_several_sizes_are_told_apart(tmp_path, write):
    for name, world in (("rank0", 2), ("rank1", 2), ("rank0-9", 3), ("rank1-8", 3), ("rank2", 3)):
        write(name, float(world), world=world)
    record = gaff.load(tmp_path)
    assert record.groups == [[0, 1], [2, 3, 4]]
    assert not record.findings


def test_processes_without_a_group_stay_together(tmp_path, write):
    for name in ("rank0", "rank0-7", "rank0-9"):
        write(name, 0.0, world=None)
    record = gaff.load(tmp_path)
    assert (record.ranks, record.groups) == ([0, 1, 2], [[0, 1, 2]])
    assert "(3 processes)" in verdict(record)


@pytest.mark.parametrize("knows_who", [True, False])
def test_the_error_that_came_first_ended_the_run(tmp_path, write, knows_who):
    write("rank0", 0.0, error=CLOSED, ends_at=2000.0)
    write("rank1", 0.0, error=BANG, ends_at=2000.0 if knows_who else 1999.0)
    gone = {"gone": {"rank": 1, "how": "exit code 1"}} if knows_who else {}
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "code": 1, **gone}))
    record = gaff.load(tmp_path)
    assert str(record.verdict).startswith("failed: the run ended with RuntimeError: bang, on rank 1")
    assert "; ended with RuntimeError: bang on rank 1" in report(record, plain=True)
    assert CLOSED not in report(record, plain=True)


def test_who_left_before_an_error_is_told(tmp_path, write):
    write("rank0", 0.0, error=CLOSED, ends_at=2000.0)
    write("rank1", 0.0, ends_at=1999.0)
    assert f"ended with {CLOSED}, on rank 0, after rank 1 had ended" in str(gaff.load(tmp_path).verdict)


def test_a_run_that_was_begun_again_and_ended_well_has_not_failed(tmp_path, write):
    for name, error in (("rank0", CLOSED), ("rank1", BANG), ("rank0-9", None), ("rank1-8", None)):
        write(name, 0.0, error=error)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "code": 0}))
    assert gaff.load(tmp_path).verdict.state != "failed"


def test_a_nan_is_told_by_the_process_that_knows_where_it_began(tmp_path, write):
    write("rank0", 0.0, findings=[nan("the gradient is not finite, but all ops are finite")])
    write("rank1", 0.0, findings=[nan("the loss is not finite: inf made by /log#0", op="log")])
    record = gaff.load(tmp_path)
    assert "inf made by /log#0, on rank 1" in str(record.verdict)
    assert [one.rank for one in record.findings] == [1, 0]


def test_rank_1_is_not_taken_for_rank_10(tmp_path):
    for name in ("rank10.gaff", f"rank11-{os.getpid()}.gaff"):
        (tmp_path / name).touch()
    prepare(Settings(out=tmp_path, rank=1))
    for rank in (10, 11):
        with pytest.raises(RecordError, match="holds a run already"):
            prepare(Settings(out=tmp_path, rank=rank))


def test_a_folder_of_a_command_that_trained_nothing_is_told_as_that(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "code": 1}))
    told = "the command trained no torch model that was seen, and ended with exit code 1: no record"
    with pytest.raises(RecordError, match=told):
        gaff.load(tmp_path)
