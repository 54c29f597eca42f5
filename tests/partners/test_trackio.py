"""Runs of trackio hold what the record tells; one that is the user's stays open."""

import pytest
import trackio
from trackio.context_vars import current_run
from trackio.sqlite_storage import SQLiteStorage

import gaff
from gaff.errors import PlanError
from gaff.integrations.trackio import Trackio
from made_records import HOSTILE, SITES, MadeRun, make, metrics_of

pytestmark = pytest.mark.filterwarnings("ignore")
STATS = ["mean", "rms", "nonfinite"]


def logs(project):
    [run] = SQLiteStorage.get_runs(project)
    return SQLiteStorage.get_logs(project, run)


def metrics(rows):
    found = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("gaff/") and name != "gaff/findings":
                found.setdefault(name, []).append((row["step"], repr(float(value))))
    return {name: sorted(pairs) for name, pairs in found.items()}


@pytest.mark.parametrize("sites", [SITES, HOSTILE], ids=["plain", "hostile"])
def test_metrics_are_the_records_series_and_our_run_is_finished(tmp_path, sites):
    record = gaff.load(make(tmp_path / "run", (0, 1), sites))
    project = f"ours-{len(sites)}"
    with Trackio(stats=STATS, project=project) as sender:
        count = sender.send(record)
        assert current_run.get() is sender.run
    assert current_run.get() is None
    rows = logs(project)
    wanted = metrics_of(record, STATS)
    assert metrics(rows) == wanted
    assert count == sum(map(len, wanted.values()))
    [text] = [row["gaff/findings"] for row in rows if "gaff/findings" in row]
    assert "**warning: dead_units**\n\n    at m.fc1, rank 0" in text["_value"]


def test_your_own_run_is_used_and_left_open(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    own = trackio.init("own", embed=False)
    trackio.log({"mine": 1.0})
    with Trackio(stats=STATS) as sender:
        sender.send(record)
    assert current_run.get() is own
    with pytest.raises(PlanError, match="project='q': a run of trackio is active and would be used; finish it first"):
        Trackio(project="q")
    trackio.log({"mine": 2.0})
    trackio.finish()
    rows = logs("own")
    assert [row["mine"] for row in rows if "mine" in row] == [1.0, 2.0]
    assert metrics(rows) == metrics_of(record, STATS)


def test_what_grows_is_sent_once(tmp_path):
    run = MadeRun(tmp_path / "run")
    record = gaff.load(tmp_path / "run")
    with Trackio(stats=["mean"], project="growing") as sender:
        assert sender.send(record) == 0
        for step in range(3):
            run.look(step)
            run.steps(step, [0.5])
            record.refresh()
            assert sender.send(record) == 5
        assert sender.send(record) == 0
    assert metrics(logs("growing")) == metrics_of(record, ["mean"])
