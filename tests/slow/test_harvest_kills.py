"""Whatever ends a harvest, and whoever else writes into the same folder: no row is lost, twice, or made of zeros."""

import errno
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch

import gaff
from ranks import of_ranks
from test_harvest import loader, net, tree

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
KILLS = 100


def begun(folder, shard=1, **options):
    """A child process that harvests; it ends with 0, or with 1 where it was told of something."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            data = loader(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
            gaff.harvest(net(), data, "0", "1", "2", out=folder, labels={"target": 1}, shard=shard, **options)
            code = 0
        finally:
            os._exit(code)
    return child


def rows_of(folder):
    return {name: one for name, one in tree(folder).items() if not name.startswith(("order", "open"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "acts"
    assert os.waitpid(begun(out), 0)[1] == 0
    return rows_of(out)


def test_a_hundred_kills(tmp_path, whole):
    drawn, kills, known = random.Random(1), 0, {}
    for _ in range(50 * KILLS):
        out = tmp_path / f"{kills // 10}"  # ten kills each, then to the end
        child = begun(out)
        time.sleep(drawn.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if (out / "harvest.json").exists():
            assert gaff.load(out).check() == []
        there = {name: one for name, one in rows_of(out).items() if name.startswith("shards")} if out.exists() else {}
        for name, one in known.get(out, {}).items():
            assert there[name] == one  # what was committed stays as it was
        known[out] = there
        if kills >= KILLS:
            break
    assert kills >= KILLS
    for folder in known:
        assert os.waitpid(begun(folder), 0)[1] == 0
        assert {**rows_of(folder), "harvest.json": b""} == {**whole, "harvest.json": b""}
        assert not (folder / "open").exists()


def test_many_that_write_at_once(tmp_path, whole):
    """All begin every shard: of each one stays, and it holds the rows that everybody has made."""
    children = [begun(tmp_path / "acts") for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert {**rows_of(tmp_path / "acts"), "harvest.json": b""} == {**whole, "harvest.json": b""}


def test_a_disk_that_is_full(tmp_path, whole, monkeypatch):
    """Writing fails somewhere: the error gets out, what is there is right, and going on completes it."""
    out = tmp_path / "acts"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 600, 4096 + 600))
            data = loader(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
            gaff.harvest(net(), data, "0", "1", "2", out=out, labels={"target": 1}, shard=8)
        except gaff.errors.RecordError as error:
            code = 7 if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG else 8
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not any((out / "open").glob("*"))
    shutil.rmtree(out)
    assert os.waitpid(begun(out), 0)[1] == 0
    assert {**rows_of(out), "harvest.json": b""} == {**whole, "harvest.json": b""}


def test_a_folder_that_is_gone(tmp_path):
    """The error is told; nothing is said to be complete, whatever of the folder the deleting has overlooked."""
    told = 0
    for turn in range(20):
        out = tmp_path / f"{turn}"
        child = begun(out)
        while not (out / "shards").is_dir():
            time.sleep(0.002)
        shutil.rmtree(out, ignore_errors=True)
        told += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with pytest.raises(gaff.GaffError):
            gaff.load(out)
    assert told > 10  # the others had ended before


def found_by(rank, out):
    """What a rank of DDP has harvested: its own shards, into the folder of all."""
    model = torch.nn.parallel.DistributedDataParallel(net())
    data = loader(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    gaff.harvest(model, data, "0", "1", "2", out=out, labels={"target": 1}, shard=1)
    return [shard.number for shard in gaff.load(out).shards]


def test_ranks_of_ddp_share_a_harvest(tmp_path, whole):
    of_ranks(found_by, 2, str(tmp_path / "acts"))
    assert {**rows_of(tmp_path / "acts"), "harvest.json": b""} == {**whole, "harvest.json": b""}
    assert gaff.load(tmp_path / "acts").is_complete
