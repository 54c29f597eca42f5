"""Runs in a store of MLflow hold what the record tells; one that is the user's stays open."""

from argparse import Namespace

import mlflow
import pytest
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

import gaff
from gaff.cli import export
from gaff.errors import PlanError
from gaff.integrations.mlflow import MLflow, name_of
from gaff.integrations.partners import STATS as STATS_SENT
from gaff.integrations.rows import numbers, sound
from made_records import HOSTILE, SITES, MadeRun, make, metrics_of

pytestmark = pytest.mark.filterwarnings("ignore")
STATS = ["mean", "rms", "nonfinite"]


@pytest.fixture(autouse=True)
def _store(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path / 'store'}")
    yield
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def metrics(run_id):
    client = mlflow.MlflowClient()
    names = client.get_run(run_id).data.metrics
    return {
        name: sorted((one.step, repr(one.value)) for one in client.get_metric_history(run_id, name)) for name in names
    }


def wanted(record, stats):
    return {name_of(name): pairs for name, pairs in metrics_of(record, stats).items()}


@pytest.mark.parametrize("sites", [SITES, HOSTILE], ids=["plain", "hostile"])
def test_metrics_are_the_records_series_and_our_run_is_ended(tmp_path, sites):
    record = gaff.load(make(tmp_path / "run", (0, 1), sites))
    with MLflow(stats=STATS, experiment="mine") as sender:
        count = sender.send(record)
        assert mlflow.active_run() is None
    run = mlflow.get_run(sender.run_id)
    assert run.info.status == "FINISHED"
    assert mlflow.get_experiment(run.info.experiment_id).name == "mine"
    found = metrics(sender.run_id)
    assert found == wanted(record, STATS)
    assert sum(map(len, found.values())) == count
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/gaff/findings.md")
    assert "**warning: dead_units**" in text
    assert "    at m.fc1, rank 1" in text


def test_metrics_have_the_times_of_the_run(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    with MLflow(stats=["rms"]) as sender:
        sender.send(record)
    times = [one.timestamp for one in mlflow.MlflowClient().get_metric_history(sender.run_id, "gaff/fc1/rms")]
    assert times == [
        round(1000 * row.time) for row in numbers(record, sites=["fc1"], stats=["rms"]) if row.phase == "train"
    ]


def test_your_own_run_is_used_and_left_open(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    with mlflow.start_run() as own:
        mlflow.log_metric("mine", 1.0)
        with MLflow(stats=STATS) as sender:
            sender.send(record)
        assert mlflow.active_run().info.run_id == own.info.run_id == sender.run_id
        mlflow.log_metric("mine", 2.0)
        with pytest.raises(PlanError, match="experiment='x': a run of mlflow is active"):
            MLflow(experiment="x")
    assert metrics(own.info.run_id) == {"mine": [(0, "1.0"), (0, "2.0")], **wanted(record, STATS)}


def test_what_grows_is_sent_once_and_what_failed_is_sent_again(tmp_path, monkeypatch):
    run = MadeRun(tmp_path / "run")
    record = gaff.load(tmp_path / "run")
    with MLflow(stats=["mean"]) as sender:
        assert sender.send(record) == 0
        for step in range(3):
            run.look(step)
            run.steps(step, [0.5])
            record.refresh()
            with monkeypatch.context() as patch:
                patch.setattr(type(sender._client), "log_batch", lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    sender.send(record)
            sender.send(record)
        assert sender.send(record) == 0
    assert metrics(sender.run_id) == wanted(record, ["mean"])


def test_the_command_sends_to_a_tracker(tmp_path, capsys):
    run = make(tmp_path / "run")
    assert export.run(Namespace(run=str(run), to="mlflow", out=None, site=[], stat=STATS)) == 0
    [sent] = mlflow.search_runs(experiment_names=["gaff"], output_format="list")
    found = metrics(sent.info.run_id)
    assert found == wanted(gaff.load(run), STATS)
    assert capsys.readouterr().out.endswith(f"sent {sum(map(len, found.values()))} numbers to mlflow\n")


def test_many_numbers_go_in_several_requests(tmp_path):
    record = gaff.load(make(tmp_path / "run", sites=[f"layer{at}" for at in range(400)]))
    with MLflow(stats=["mean"]) as sender:
        assert sender.send(record) > 1600
    assert metrics(sender.run_id) == wanted(record, ["mean"])


@pytest.mark.parametrize("name", ["gaff/fc1:grad_output/rms", "gaff/a b-c.d/x", "gaff/loss/l"])
def test_names_that_are_allowed_are_kept(name):
    assert name_of(name) == name


def test_other_names_are_made_allowed_and_never_the_same():
    names = [
        *map(sound, HOSTILE),
        "a//b",
        "a/b/",
        "/a/b",
        "a/./b",
        "../a",
        "a[0]",
        "a(0)",
        "",
        ".",
        "x" * 251,
        "x" * 252,
    ]
    made = [name_of(name) for name in names]
    assert len(set(made)) == len(names)
    for name in made:
        _validate_metric_name(name)
        assert len(name) <= MAX_ENTITY_KEY_LENGTH


def test_a_store_that_cannot_be_used_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(PlanError, match=r"the store of MLflow cannot be used: .*: expected MLFLOW_TRACKING_URI"):
        MLflow()


def test_what_a_failed_request_held_is_sent_once_and_so_are_the_findings(tmp_path, monkeypatch):
    record, sent, texts, failures = gaff.load(make(tmp_path / "run", (0, 1))), [], [], []
    sender = MLflow()

    def once(what):
        if what not in failures:
            failures.append(what)
            raise OSError("the connection is lost")

    def log_batch(run_id, metrics):
        once("batch")
        sent.extend((one.key, one.step, one.timestamp) for one in metrics)

    def log_text(run_id, text, name):
        once("text")
        texts.append(text)

    monkeypatch.setattr(sender._client, "log_batch", log_batch)
    monkeypatch.setattr(sender._client, "log_text", log_text)
    for _ in range(2):
        with pytest.raises(OSError, match="connection"):
            sender.send(record)
    sender.send(record)
    sender.send(record)
    assert len(sent) == len(set(sent)) == sum(map(len, metrics_of(record, STATS_SENT).values()))
    assert [text.startswith("**") for text in texts] == [True]
