"""``gaff.harvest`` by workers of a local Ray cluster: the bytes of one process, whoever is killed on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import gaff
from gaff.integrations.ray import Extract, OnRay
from test_harvest import Tokens, loader, net, texts, tree

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TWO = OnRay(workers=2)


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def data():
    return loader(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def kept(folder):
    return {name: one for name, one in tree(folder).items() if name != "harvest.json"}


def not_the_same(found, wanted):
    """The names of files that are in one alone, or hold other bytes."""
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process with one thread writes."""
    out, threads = tmp_path_factory.mktemp("whole") / "acts", torch.get_num_threads()
    torch.set_num_threads(1)
    gaff.harvest(net(), data(), "0", "1", out=out, labels={"target": 1}, shard=3)
    torch.set_num_threads(threads)
    return kept(out)


class DiesOnce:
    """Makes inputs of batches; the process that it runs in is killed once, in the middle of a shard."""

    def __init__(self, folder, always=False):
        self.folder, self.always, self.calls = Path(folder), always, 0

    def __call__(self, batch):
        self.calls += 1
        mark = self.folder / "died"
        if self.calls == 5 and (self.always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch[0]


def test_the_bytes_are_those_of_one_process(cluster, whole, tmp_path):
    store = gaff.harvest(net(), data(), "0", "1", out=tmp_path / "acts", labels={"target": 1}, shard=3, engine=TWO)
    assert store.is_complete
    assert not_the_same(kept(tmp_path / "acts"), whole) == []
    assert ray.is_initialized()  # one that was running is left running


def test_a_worker_that_is_killed(cluster, tmp_path):
    one = gaff.harvest(net(), data(), "0", out=tmp_path / "one", shard=3)
    store = gaff.harvest(net(), data(), "0", out=tmp_path / "acts", inputs=DiesOnce(tmp_path), shard=3, engine=TWO)
    assert (tmp_path / "died").exists()
    torch.testing.assert_close(store["0"][:], one["0"][:])
    assert sorted(store.labels["sample"][:].tolist()) == list(range(210))


def test_a_shard_that_kills_every_worker_is_told(cluster, tmp_path):
    with pytest.raises(gaff.RecordError, match=r"shard \d+: its worker died 3 times"):
        gaff.harvest(
            net(), data(), "0", out=tmp_path / "acts", inputs=DiesOnce(tmp_path, always=True), shard=8, engine=TWO
        )
    assert not gaff.load(tmp_path / "acts").is_complete
    assert gaff.load(tmp_path / "acts").check() == []


def test_batches_that_only_the_driver_has(cluster, tmp_path):
    """A generator is gone through here, and its batches are sent."""
    torch.manual_seed(0)
    model, held = Tokens(), torch.zeros(3, 4, dtype=torch.int64)

    def again():
        for number in range(7):  # writes into one tensor again and again
            held.fill_(number)
            yield {"input_ids": held}

    here = gaff.harvest(model, texts(), "block", out=tmp_path / "here", rows="token", shard=1)
    there = gaff.harvest(model, texts(), "block", out=tmp_path / "there", rows="token", shard=1, engine=TWO)
    torch.testing.assert_close(there["block"][:], here["block"][:])
    assert torch.equal(there.labels["token"][:], here.labels["token"][:])
    same = gaff.harvest(model, again(), "embed", out=tmp_path / "same", rows="token", shard=2, engine=TWO)
    assert same.labels["token"][:].tolist() == [number for number in range(7) for _ in range(12)]
    torch.testing.assert_close(same["embed"][:], model.embed(same.labels["token"][:]).detach())


def test_a_folder_that_is_told_from_here(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # workers are elsewhere
    store = gaff.harvest(net(), data(), "0", out="acts", shard=3, engine=TWO)
    assert store.is_complete
    assert store.rows == 210


def test_gradients_and_functions_go_along(cluster, tmp_path):
    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    options = {"loss": loss, "reduce": lambda x: x * 2, "shard": 3}
    here = gaff.harvest(net(), data(), "0:grad_output", out=tmp_path / "here", **options)
    there = gaff.harvest(net(), data(), "0:grad_output", out=tmp_path / "there", **options, engine=TWO)
    torch.testing.assert_close(there["0:grad_output"][:], here["0:grad_output"][:])


def test_what_is_wrong_is_told_as_without_ray(cluster, tmp_path):
    with pytest.raises(gaff.SiteError, match="head: has shape"):
        gaff.harvest(Tokens(), texts(), "head", out=tmp_path / "acts", rows="token", engine=TWO)
    model = net()
    with gaff.edit(model, {"0": lambda value: value * 0}):
        model(torch.zeros(1, 4))  # an edit that never acts would be told
        with pytest.raises(
            gaff.PlanError, match="a session of gaff is open on the model .* which workers of Ray would not"
        ):
            gaff.harvest(model, data(), "0", out=tmp_path / "edit", engine=TWO)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(gaff.PlanError, match="autocast is on, which workers"):
        gaff.harvest(model, data(), "0", out=tmp_path / "cast", engine=TWO)
    with pytest.raises(ZeroDivisionError):
        gaff.harvest(model, data(), "0", out=tmp_path / "zero", inputs=lambda batch: 1 / 0, engine=TWO)
    model.lock = threading.Lock()
    with pytest.raises(gaff.PlanError, match=r"cannot be sent to workers of Ray \(cannot pickle '_thread.lock'"):
        gaff.harvest(model, data(), "0", out=tmp_path / "lock", engine=TWO)
    with pytest.raises(gaff.PlanError, match="too few for 9 workers"):
        gaff.harvest(net(), data(), "0", out=tmp_path / "more", engine=OnRay(workers=9))
    with pytest.raises(gaff.PlanError, match="workers=0: expected 1 or more"):
        OnRay(workers=0)
    with pytest.raises(gaff.PlanError, match="engine='spark' is not known"):
        gaff.harvest(net(), data(), "0", out=tmp_path / "none", engine="spark")


PROGRAM = """
import sys, torch, gaff
from test_on_ray import TWO, data, net
gaff.harvest(net(), data(), "0", "1", out=sys.argv[1], labels={"target": 1}, shard=3, engine=TWO)
"""


def test_a_driver_that_is_killed_is_begun_again(whole, tmp_path):
    """With a Ray of its own, which goes away with it."""
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent, *Path(gaff.__path__[0]).parents[:1])))
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "acts")]
    environment = {**os.environ, "PYTHONPATH": paths}
    kills = 0
    for _ in range(3):
        child = subprocess.Popen(line, env=environment, start_new_session=True)
        shards = tmp_path / "acts" / "shards"
        before = len(list(shards.glob("*")))
        while child.poll() is None and len(list(shards.glob("*"))) < before + 4:
            time.sleep(0.005)
        child.kill()
        kills += child.wait(100) == -signal.SIGKILL
        if (tmp_path / "acts" / "harvest.json").exists():
            assert gaff.load(tmp_path / "acts").check() == []
    assert kills
    assert subprocess.run(line, env=environment, timeout=120, check=False).returncode == 0
    odd = not_the_same(kept(tmp_path / "acts"), whole)
    # workers of a killed driver live on for a moment: the draft of one that died after the last start is swept by the next
    assert [name for name in odd if not name.startswith(("open/", "."))] == []


def test_a_stage_of_ray_data(cluster):
    import numpy as np
    from ray.data import from_items

    def make():  # of this function, and so sent by what it does: workers cannot import this file
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    table = from_items([{"x": one.numpy(), "number": number} for number, one in enumerate(rows)])
    stage = table.map_batches(Extract, fn_constructor_args=(make, ["0", "1"], ["x"]), concurrency=2, batch_size=8)
    found = sorted(stage.take_all(), key=lambda row: row["number"])
    assert list(found[0]) == ["x", "number", "0", "1"]
    model = net()
    torch.testing.assert_close(torch.tensor(np.stack([row["0"] for row in found])), model[0](rows).detach())
    torch.testing.assert_close(torch.tensor(np.stack([row["1"] for row in found])), model[0](rows).detach().relu())
    extract = Extract(net, ["0"], {"input": "x"}, dtype=torch.float16)
    assert extract({"x": rows.numpy()})["0"].dtype == np.float16
    with pytest.raises(gaff.PlanError, match="no column 'x': expected one of y"):
        extract({"y": rows.numpy()})
    with pytest.raises(gaff.PlanError, match="column 'x' holds no numbers"):
        extract({"x": np.array([[1], [1, 2]], dtype=object)})
    with pytest.raises(gaff.PlanError, match="has a column '0' already"):
        extract({"x": rows.numpy(), "0": rows.numpy()})
