"""The record of a run: nothing but the last frame can be lost, nothing wrong is read, nothing hostile harms."""

import json
import os
import random
import signal
import subprocess
import sys
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaff.errors import RecordError
from gaff.inspection.saved import load
from gaff.record.finding import Finding
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogReader, LogWriter
from gaff.record.matrix import Layout, pack, pack_series, share_of, to_bytes, unpack, unpack_series
from made_records import byte_of

LAYOUT_OF_TWO = Layout(0, "activations", (("m", "a"), ("m", "b")), (("count", "d"), ("mean", "f")), True)


def table(mean):
    return pack(0, "train", [to_bytes("d", [3.0, 4.0]), to_bytes("f", [mean, -mean]), bytes(128)])


def write(folder, steps=10):
    folder.mkdir(exist_ok=True)
    log = LogWriter(folder / "rank0.gaff")
    log.write_json(LAYOUT, LAYOUT_OF_TWO.to_json())
    for step in range(steps):
        log.write(MATRIX, table(float(step)), step)
        log.write(SERIES, pack_series({"step": [float(step)], "seconds": [0.5], "loss:l": [1.0 / (1 + step)]}), step)
    log.close()
    return folder / "rank0.gaff"


def test_what_is_written_is_read(tmp_path):
    write(tmp_path / "run")
    record = load(tmp_path / "run")
    assert record.series("a", "mean").values == [float(step) for step in range(10)]
    assert record.series("b", "mean").steps == list(range(10))
    assert record.series("m.b", "count").values == [4.0] * 10
    assert record.scalar("loss").values == [1.0 / (1 + step) for step in range(10)]
    assert record.steps == 10
    assert not record.notes


def test_a_record_cut_anywhere_gives_what_was_whole_before(tmp_path):
    data = write(tmp_path / "run").read_bytes()
    ends = [0]
    lengths = []
    for cut in range(8, len(data), 7):
        path = tmp_path / "cut"
        path.mkdir(exist_ok=True)
        (path / "rank0.gaff").write_bytes(data[:cut])
        record = load(path)
        lengths.append(record.steps)
        assert not record.notes
        ends.append(cut)
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 9


def test_a_record_is_read_on_while_it_grows(tmp_path):
    data = write(tmp_path / "whole").read_bytes()
    growing = tmp_path / "growing"
    growing.mkdir()
    with (growing / "rank0.gaff").open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        record = load(growing)
        some = record.steps
        file.write(data[len(data) // 2 :])
        file.flush()
        record.refresh()
    assert some < record.steps == 10
    assert record.series("a", "mean").values == [float(step) for step in range(10)]


def test_damage_is_passed_over_and_told(tmp_path):
    path = write(tmp_path / "run")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    record = load(tmp_path / "run")
    assert any("1 places in the record are damaged" in note for note in record.notes)
    assert 8 <= len(record.series("a", "mean")) + 0 <= 10


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_never_gives_a_wrong_number_or_another_error(tmp_path, seed):
    path = write(tmp_path / "run")
    data = bytearray(path.read_bytes())
    generator = random.Random(seed)
    for _ in range(generator.randint(1, 8)):
        at = generator.randrange(len(data))
        if generator.random() < 0.3:
            del data[at : at + generator.randint(1, 50)]
        else:
            data[at] = generator.randrange(256)
    path.write_bytes(data)
    try:
        record = load(tmp_path / "run")
        series = record.series("a", "mean")
    except RecordError:
        return
    assert all(value == step for step, value in series)


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = LogWriter(folder / "rank0.gaff")
    log.write_json(LAYOUT, LAYOUT_OF_TWO.to_json())
    log.write(MATRIX, pack(0, "train", [])[:8] + zlib.compress(bytes(200_000_000), 9), 1)
    log.close()
    with pytest.raises(RecordError, match="a table of layout 0"):
        load(folder).magnitudes("a")


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (LAYOUT, b"[1]", "holds a list, expected an object"),
        (LAYOUT, b'{"number": 0}', "a layout cannot be read: KeyError"),
        (LAYOUT, b'{"number":0,"group":"g","rows":[],"columns":[["a","z"]],"magnitudes":false}', "is none of gaff's"),
        (EVENT, b"{" * 100_000, "holds no JSON"),
        (SERIES, b'{"columns":["step"],"rows":99999999999}\n', "a series of 99999999999 rows"),
        (SERIES, b'{"columns":["step"],"rows":3}\nxx', "a series cannot be decompressed"),
    ],
)
def test_hostile_frames_are_refused_in_words(tmp_path, kind, payload, message):
    log = LogWriter(tmp_path / "rank0.gaff")
    log.write(kind, payload)
    log.close()
    with pytest.raises(RecordError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "is not there: expected the folder of a run"),
        (lambda path: path.mkdir(), r"holds no file \*.gaff"),
        (lambda path: (path.mkdir(), (path / "rank0.gaff").write_bytes(b"PK\x03\x04....")), "is no record of gaff"),
        (lambda path: (write(path), (path / "run.json").write_text('{"version": 99}')), "version 99 of the format"),
        (lambda path: (write(path), (path / "run.json").write_text("{")), "cannot be read"),
    ],
)
def test_what_is_no_record_is_told(tmp_path, prepare, message):
    prepare(tmp_path / "run")
    with pytest.raises(RecordError, match=message):
        load(tmp_path / "run")


def test_slips_are_answered_with_what_there_is(tmp_path):
    write(tmp_path / "run")
    record = load(tmp_path / "run")
    with pytest.raises(RecordError, match=r"no site 'aa' in .* of 2 sites; nearest: a"):
        record.series("aa", "mean")
    with pytest.raises(RecordError, match="'a' has no 'median': expected one of count, mean"):
        record.series("a", "median")
    with pytest.raises(RecordError, match="no scalar 'los'.*: expected one of seconds, loss:l"):
        record.scalar("los")
    for ask in (lambda phase: record.series("a", "mean", phase), lambda phase: record.latest("a", phase)):
        with pytest.raises(RecordError, match=r"no phase 'training' in .*: expected 'train' or 'eval'"):
            ask("training")
    with pytest.raises(RecordError, match=r"no rank 3 .*: expected one of \[0\]"):
        record.series("a", "mean", rank=3)


def test_a_log_is_never_written_over(tmp_path):
    LogWriter(tmp_path / "one").close()
    with pytest.raises(FileExistsError):
        LogWriter(tmp_path / "one")


def test_what_a_killed_process_has_written_is_there(tmp_path):
    code = (
        "import sys, pathlib; sys.path.insert(0, 'tests'); import test_record as t\n"
        "log = t.LogWriter(pathlib.Path(sys.argv[1]) / 'rank0.gaff')\n"
        "log.write_json(t.LAYOUT, t.LAYOUT_OF_TWO.to_json())\n"
        "for step in range(10**9):\n"
        "    log.write(t.MATRIX, t.table(float(step)), step)\n"
        "    print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged >= 50:
                os.kill(process.pid, signal.SIGKILL)
                break
    series = load(tmp_path).series("a", "mean")
    assert len(series) > acknowledged
    assert all(value == step for step, value in series)


@given(st.lists(st.floats(width=32), max_size=30))
def test_columns_are_kept_bit_for_bit(values):
    layout = Layout(1, "g", tuple(("m", str(at)) for at in range(len(values))), (("x", "f"), ("y", "d")), False)
    back = unpack(layout, pack(1, "eval", [to_bytes("f", values), to_bytes("d", values)]))
    assert back.phase == "eval"
    assert back.columns["x"].tobytes() == array("f", values).tobytes()
    assert back.columns["y"].tobytes() == array("d", values).tobytes()
    series = unpack_series(pack_series({"step": values}))
    assert series["step"].tobytes() == array("d", values).tobytes()


@given(st.floats(2.0**-23, 1.0))
def test_shares_are_kept_within_their_precision(share):
    assert share_of(byte_of(share)) == pytest.approx(share, rel=0.034)


def test_findings_go_to_json_and_back():
    finding = Finding("r", "s", "m", 3, "error", "text", "c", "x", {"a": 1.5}, also=("t",))
    assert Finding.from_dict(finding.to_dict()) == finding
    with pytest.raises(RecordError, match="severity 'bad'"):
        Finding.from_dict({**finding.to_dict(), "severity": "bad"})
    with pytest.raises(RecordError, match="a finding cannot be read"):
        Finding.from_dict({"rule": "r"})


def test_ranks_are_held_against_those_that_they_are_replicas_of(tmp_path):
    """Two groups of two, each with weights of its own, and one model that no process has a replica of."""
    layout = Layout(0, "parameters", (("m", "fc.weight:param"),), (("count", "d"), ("mean", "f"), ("std", "f")), False)
    for rank in range(4):
        log = LogWriter(tmp_path / f"rank{rank}.gaff")
        log.write_json(LAYOUT, layout.to_json())
        log.write_json(EVENT, {"kind": "model", "name": "m", "replicated": [0, 2] if rank % 2 == 0 else [1, 3]})
        for step in range(4):
            mean = float(rank % 2) + (0.25 if rank == 3 and step >= 2 else 0.0)
            log.write(
                MATRIX, pack(0, "train", [to_bytes("d", [9.0]), to_bytes("f", [mean]), to_bytes("f", [1.0])]), step
            )
        log.close()
    [finding] = load(tmp_path).findings
    assert (finding.rule, finding.rank, finding.since) == ("rank_divergence", 3, 2)
    assert finding.message == "rank 3 has other weights than rank 1"


def test_ranks_that_should_be_alike_and_are_not_are_told(tmp_path):
    layout = Layout(0, "parameters", (("m", "fc.weight:param"),), (("count", "d"), ("mean", "f"), ("std", "f")), False)
    for rank in (0, 1):
        log = LogWriter(tmp_path / f"rank{rank}.gaff")
        log.write_json(LAYOUT, layout.to_json())
        log.write_json(EVENT, {"kind": "model", "name": "m", "replicated": [0, 1]})
        for step in range(4):
            mean = 0.5 + (0.25 if rank and step >= 2 else 0.0)
            log.write(
                MATRIX, pack(0, "train", [to_bytes("d", [9.0]), to_bytes("f", [mean]), to_bytes("f", [1.0])]), step
            )
        log.close()
    [finding] = load(tmp_path).findings
    assert (finding.rule, finding.site, finding.since, finding.rank) == ("rank_divergence", "fc.weight:param", 2, 1)


def test_reading_needs_no_torch(tmp_path):
    write(tmp_path / "run")
    code = (
        f"import gaff, sys; gaff.load({str(tmp_path / 'run')!r}).series('a', 'mean'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    report = f"from gaff.cli import main; import sys; main(['report', {str(tmp_path / 'run')!r}]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", report], check=True, capture_output=True)


def test_frames_of_kinds_from_later_versions_are_skipped(tmp_path):
    write(tmp_path / "run")
    reader = LogReader(tmp_path / "run" / "rank0.gaff")
    assert len(list(reader.frames())) == 21
    path = tmp_path / "other"
    path.mkdir()
    log = LogWriter(path / "rank0.gaff")
    log.write(200, b"anything")
    log.write(SERIES, pack_series({"step": [0.0], "seconds": [1.0]}))
    log.close()
    assert load(path).steps == 1


def test_a_run_of_1000_sites_and_2000_looks_is_within_100_mb(tmp_path):
    """Fifty looks of real activations and gradients stand for two thousand; compression sees one table at a time."""
    import torch

    from gaff.record.sample import Sample
    from gaff.record.statistics import EMPTY
    from gaff.training.statistics import kernel, plain
    from gaff.training.watch.recorder import Recorder

    ops = kernel.load() or plain
    keys = [
        ("model", f"layers.{at}.mlp.fc:output" if at % 2 else f"layers.{at}.mlp.fc:grad_output") for at in range(1000)
    ]
    recorder = Recorder(lambda: tmp_path / "rank0.gaff")
    recorder.open()
    for step in range(50):
        rows = torch.tensor(EMPTY, dtype=torch.float64).repeat(1000, 1)
        data = torch.randn(1000, 300) * torch.logspace(-4, 1, 1000)[:, None]
        data[::2] *= (torch.rand(500, 300) > 0.5) * 1e-3
        ops.observe_many_(list(data), rows, True)
        recorder.look(Sample(step, "train", 0.0), keys, rows)
    recorder.close()
    size = (tmp_path / "rank0.gaff").stat().st_size
    assert size * 40 < 100e6, f"{size * 40 / 1e6:.0f} MB"


def test_a_rank_that_stopped_while_others_went_on_is_told(tmp_path):
    def write_rank(rank, steps, *, has_ended):
        log = LogWriter(tmp_path / f"rank{rank}.gaff")
        log.write_json(EVENT, {"kind": "begin"})
        log.write(SERIES, pack_series({"step": [float(one) for one in range(steps)]}), 0)
        if has_ended:
            log.write_json(EVENT, {"kind": "end"}, steps)
        log.close()

    write_rank(0, 9, has_ended=True)
    write_rank(1, 9, has_ended=False)
    assert load(tmp_path).findings == []  # it may still say so
    write_rank(2, 4, has_ended=False)
    [finding] = load(tmp_path).findings
    assert (finding.rule, finding.rank, finding.since) == ("rank_lost", 2, 4)
    assert finding.message == "rank 2 wrote nothing after step 3, others went on"


def write_batches(folder, rank, marks, *, replicated=(0, 1)):
    log = LogWriter(folder / f"rank{rank}.gaff")
    log.write_json(EVENT, {"kind": "model", "name": "m", "replicated": list(replicated)})
    for step, mark in enumerate(marks):
        log.write_json(EVENT, {"kind": "look", "fingerprint": mark}, step)
    log.close()


MARKS = [f"{step:08x}" for step in range(12)]


@pytest.mark.parametrize(
    ("marks", "replicated", "is_told"),
    [
        (MARKS, (0, 1), True),
        ([*MARKS[:5], "other", *MARKS[6:]], (0, 1), False),
        (MARKS[:7], (0, 1), False),
        (MARKS, (), False),
    ],
)
def test_ranks_that_are_given_the_same_batches_are_told(tmp_path, marks, replicated, is_told):
    write_batches(tmp_path, 0, MARKS, replicated=replicated)
    write_batches(tmp_path, 1, marks, replicated=replicated)
    found = load(tmp_path).findings
    assert [(one.rule, one.rank) for one in found] == ([("rank_same_batches", 1)] if is_told else [])
    assert not is_told or "at all 12 steps that both looked at" in found[0].message


def test_ranks_with_one_batch_all_the_time_are_no_finding_of_theirs(tmp_path):
    for rank in (0, 1):
        write_batches(tmp_path, rank, ["same"] * 12)
    assert load(tmp_path).findings == []


def write_times(folder, rank, late_s, *, model=None, steps=12):
    """A rank of a run whose steps take 100 ms, and that begins its backward pass after 20 ms and ``late_s``."""
    log = LogWriter(folder / f"rank{rank}.gaff")
    log.write_json(EVENT, {"kind": "model", "name": "m", **(model or {"replicated": [0, 1]})})
    columns = {
        "step": [float(one) for one in range(steps)],
        "seconds": [0.1] * steps,
        "to_forward": [0.01] * steps,
        "to_backward": [0.02 + (late_s if one != 5 else 0.0) for one in range(steps)],
    }
    log.write(SERIES, pack_series(columns), 0)
    log.close()


def test_a_rank_for_which_the_others_wait_is_told(tmp_path):
    for rank, late_s in enumerate((0.0, 0.03, 0.001)):
        write_times(tmp_path, rank, late_s)
    [finding] = load(tmp_path).findings
    assert (finding.rule, finding.rank, finding.since, finding.severity) == ("rank_slow", 1, 2, "warning")
    assert "rank 1 begins its backward pass 29.5 ms after the others, 30% of a step" in finding.message


@pytest.mark.parametrize(
    ("late_s", "model", "steps"),
    [
        (0.005, None, 12),  # a twentieth of a step
        (0.03, None, 9),  # too few
        (0.03, {}, 12),  # processes that have nothing to do with each other
        (0.03, {"places": {"w": "0"}}, 12),  # forward passes gather weights: what comes after is together
    ],
)
def test_ranks_that_nobody_waits_for_are_not_told(tmp_path, late_s, model, steps):
    for rank in (0, 1):
        write_times(tmp_path, rank, late_s * rank, model=model if model is None else {"x": 0, **model}, steps=steps)
    assert load(tmp_path).findings == []


def test_the_rank_that_was_gone_first_is_told_where_a_launcher_stopped_the_others(tmp_path):
    for rank in (0, 1):
        write_times(tmp_path, rank, 0.0)
    head = {"version": 1, "gone": {"rank": 1, "how": "SIGKILL"}}
    (tmp_path / "run.json").write_text(json.dumps(head))
    [finding] = load(tmp_path).findings
    assert (finding.rule, finding.rank, finding.since) == ("rank_lost", 1, 12)
    assert finding.message == "rank 1 ended first (SIGKILL), and the launcher stopped the others"
    (tmp_path / "run.json").write_text(json.dumps({**head, "gone": {"rank": 1, "how": ""}}))
    [finding] = load(tmp_path).findings
    assert finding.message == "rank 1 ended first (it was not seen how), and the launcher stopped the others"
    for odd in (7, {"rank": 5, "how": "x"}, {}):
        (tmp_path / "run.json").write_text(json.dumps({**head, "gone": odd}))
        assert load(tmp_path).findings == []


def test_a_watch_that_ended_by_an_error_of_its_own_says_that_and_not_that_no_step_was_made(tmp_path):
    log = LogWriter(tmp_path / "rank0.gaff")
    log.write_json(EVENT, {"kind": "begin"})
    log.write_json(EVENT, {"kind": "failure", "error": "NameError: name 'x' is not defined (in losses.py, line 3)"})
    log.close()
    told = load(tmp_path).verdict
    assert told.state == "not enough"
    assert told.cause.startswith("watching has ended by an error of gaff's own")
    assert "NameError: name 'x' is not defined" in told.cause


def test_a_step_that_one_of_two_ranks_has_looked_at_says_nothing_of_both(tmp_path):
    layout = Layout(0, "parameters", (("m", "fc.weight:param"),), (("count", "d"), ("mean", "f"), ("std", "f")), False)
    for rank in (0, 1):
        log = LogWriter(tmp_path / f"rank{rank}.gaff")
        log.write_json(LAYOUT, layout.to_json())
        log.write_json(EVENT, {"kind": "model", "name": "m", "replicated": []})
        log.write_json(EVENT, {"kind": "spread", "name": "m", "replicated": [0, 1]})  # it was wrapped later
        for step in range(4 + rank):
            mean = 0.5 + (0.25 if rank and step >= 2 else 0.0)
            log.write(
                MATRIX, pack(0, "train", [to_bytes("d", [9.0]), to_bytes("f", [mean]), to_bytes("f", [1.0])]), step
            )
        log.close()
    [finding] = load(tmp_path).findings
    assert (finding.rule, finding.since, finding.rank) == ("rank_divergence", 2, 1)
