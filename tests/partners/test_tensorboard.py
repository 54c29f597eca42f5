"""Event files, read back by TensorBoard's own reader, hold what the record tells."""

import math
from argparse import Namespace
from array import array

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import gaff
from gaff.cli import export
from gaff.errors import PlanError
from gaff.integrations.rows import numbers
from gaff.integrations.tensorboard import TensorBoard, bins_of
from gaff.record.statistics import lower_edge
from made_records import CORE, EXTRAS, HOSTILE, SITES, MadeRun, make, series_of

ALL = (*CORE, *EXTRAS, "rms", "norm", "nonfinite", "magnitudes")


def read(folder):
    """By plugin and tag, the (wall time, step, array or number) of each event."""
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    found = {"scalars": {}, "histograms": {}, "text": {}}
    for tag in reader.Tags()["scalars"]:
        found["scalars"][tag] = [(one.wall_time, one.step, one.value) for one in reader.Scalars(tag)]
    for tag in reader.Tags()["tensors"]:
        events = [(one.wall_time, one.step, make_ndarray(one.tensor_proto)) for one in reader.Tensors(tag)]
        found[reader.SummaryMetadata(tag).plugin_data.plugin_name][tag] = events
    return found


def expected_tags(record, rank, stats=None):
    found = {}
    for (of, phase, site, stat), pairs in series_of(record, stats).items():
        name = stat if phase == "train" else f"{phase}_{stat}"
        tag = f"{site}/{name}" if site else stat.replace("loss:", "loss/") if "loss" in stat else f"run/{stat}"
        if of == rank:
            found[tag] = [(step, repr(to_float32(float(value)))) for step, value in pairs]
    return found


def to_float32(value):
    return array("f", [value])[0]


def pairs_of(events):
    return [(step, repr(float(value))) for _, step, value in events]


@pytest.mark.parametrize("sites", [SITES, HOSTILE], ids=["plain", "hostile"])
def test_scalars_are_the_records_series(tmp_path, sites):
    record = gaff.load(make(tmp_path / "run", sites=sites))
    with TensorBoard(tmp_path / "events", stats=ALL) as sender:
        sender.send(record)
    found = read(tmp_path / "events")
    assert {tag: pairs_of(events) for tag, events in found["scalars"].items()} == expected_tags(record, 0)
    assert len(found["histograms"]) == 2 * len(sites)


def test_events_have_the_times_of_the_run(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    with TensorBoard(tmp_path / "events", stats=["rms"]) as sender:
        sender.send(record)
    [(time, _, _), *_] = read(tmp_path / "events")["scalars"]["fc1/rms"]
    assert time == next(row.time for row in numbers(record, sites=["fc1"], stats=["rms"]))


def test_a_histogram_counts_elements_between_powers_of_two(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    with TensorBoard(tmp_path / "events") as sender:
        sender.send(record)
    events = read(tmp_path / "events")["histograms"]
    assert [step for _, step, _ in events["fc1/magnitudes"]] == [0, 2]  # in step 1 nothing was finite
    [(_, step, bins)] = events[":output/eval_magnitudes"]
    count = record.series(":output", "count", "eval").values[0]
    assert (step, bins[:, 0].tolist(), bins[:, 1].tolist()) == (2, [0.0, 1.0], [1.0, 2.0])
    assert bins[:, 2].tolist() == pytest.approx([count / 2, count / 4], rel=0.033)


def test_buckets_keep_their_edges():
    whole = bins_of([1 / 64] * 64, 6400.0)
    assert [one[0] for one in whole] == [float(lower_edge(bucket)) for bucket in range(64)]
    assert [one[1] for one in whole[:-1]] == [one[0] for one in whole[1:]]
    assert whole[-1][1] == 128.0
    assert [one[2] for one in whole] == [100.0] * 64
    assert bins_of([0.0] * 64, 5.0) == bins_of([], 5.0) == []


def test_ranks_have_folders_of_their_own_and_findings_are_text(tmp_path):
    record = gaff.load(make(tmp_path / "run", (0, 1)))
    with TensorBoard(tmp_path / "events", stats=ALL) as sender:
        sender.send(record)
    for rank in (0, 1):
        found = read(tmp_path / "events" / f"rank{rank}")
        assert {tag: pairs_of(events) for tag, events in found["scalars"].items()} == expected_tags(record, rank)
    [(_, step, text)] = read(tmp_path / "events" / "rank0")["text"]["findings"]
    assert step == record.steps == 3
    assert b"**warning: dead_units**\n\n    at m.fc1, rank 0" in text.item()
    assert b"\n    remedy: lower it" in text.item()


def test_what_grows_is_sent_once(tmp_path):
    run = MadeRun(tmp_path / "run")
    record = gaff.load(tmp_path / "run")
    with TensorBoard(tmp_path / "events", stats=["mean"]) as sender:
        assert sender.send(record) == 0
        sent = []
        for step in range(4):
            run.look(step)
            run.steps(step, [math.inf])
            run.finding(step, last=step)
            record.refresh()
            sent.append(sender.send(record))
            assert [one[1] for one in read(tmp_path / "events")["scalars"]["fc1/mean"]] == list(range(step + 1))
        assert sender.send(record) == 0
    assert sent == [5, 5, 5, 5]
    found = read(tmp_path / "events")
    assert {tag: pairs_of(events) for tag, events in found["scalars"].items()} == expected_tags(record, 0, ["mean"])
    assert len(found["text"]["findings"]) == 4


def test_a_folder_with_events_is_left_alone(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    with TensorBoard(tmp_path / "events") as sender:
        sender.send(record)
    before = sorted(tmp_path.rglob("*.tfevents.*"))
    with pytest.raises(PlanError, match="holds event files already: expected a new folder"):
        TensorBoard(tmp_path / "events")
    assert sorted(tmp_path.rglob("*.tfevents.*")) == before


def test_an_empty_record_writes_nothing(tmp_path):
    MadeRun(tmp_path / "run", sites=[]).log.close()
    with TensorBoard(tmp_path / "events") as sender:
        assert sender.send(gaff.load(tmp_path / "run")) == 0
    assert not (tmp_path / "events").exists()


def test_the_command_writes_a_folder_beside_the_run(tmp_path, capsys):
    run = make(tmp_path / "run")
    assert (
        export.run(Namespace(run=str(run), to="tensorboard", out=None, site=["fc1"], stat=["rms", "magnitudes"])) == 0
    )
    found = read(tmp_path / "run-tensorboard")
    assert {tag for tag in found["scalars"] if tag.startswith("fc1")} == {"fc1/rms", "fc1/eval_rms"}
    assert set(found["histograms"]) == {"fc1/magnitudes", "fc1/eval_magnitudes"}
    assert "tensorboard --logdir" in capsys.readouterr().out
