"""A watch follows the thread that trains, whatever other threads do before it, beside it and after it."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gaff


def _epoch(model, optimizer, losses, steps=20):
    for _ in range(steps):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def _on_a_thread(target, *given):
    thread = threading.Thread(target=target, args=given)
    thread.start()
    thread.join()


BESIDE = {
    "a call": lambda model, file: model(torch.randn(2, 4)),
    "saving": lambda model, file: torch.save(model.state_dict(), file),
    "loading": lambda model, file: model.load_state_dict(model.state_dict()),
    "a batch": lambda model, file: next(iter(DataLoader(TensorDataset(torch.randn(4, 4)), 2))),
}


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("name", BESIDE)
def test_a_thread_that_does_not_train_is_not_the_one_that_is_watched(name, is_given, tmp_path):
    model, losses = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(*((model, optimizer) if is_given else ()), out=tmp_path / "run", every=1):
        _on_a_thread(BESIDE[name], model, tmp_path / "file")
        _epoch(model, optimizer, losses)
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(losses)
    assert list(record.looks) == list(range(20))
    assert record.notes == []
    [site] = [one for one in record.sites if one.endswith(":output")] or [None]
    assert site is None or len(record.series(site, "rms")) == 20


def test_epochs_on_threads_one_after_the_other_are_one_training(tmp_path):
    model, losses = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(3):
            ended = threading.Thread(target=_epoch, args=(model, optimizer, losses))
            ended.start()
            other = threading.Thread(target=time.sleep, args=(0.01,))  # so that the next one has another identity
            ended.join()
            other.start()
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(losses)
    assert record.notes == []


def test_epochs_on_a_pool_lose_one_step_for_each_thread_and_say_so(tmp_path):
    model, losses = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at_once = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool, gaff.watch(model, optimizer, out=tmp_path / "run"):
        both = [pool.submit(lambda: (at_once.wait(), threading.get_ident())[1]) for _ in range(2)]
        first = {one.result() for one in both}
        assert len(first) == 2
        seen = []
        for _ in range(6):
            pool.submit(lambda: (seen.append(threading.get_ident()), _epoch(model, optimizer, losses))).result()
    moves = sum(one != other for one, other in itertools.pairwise(seen))
    record = gaff.load(tmp_path / "run")
    assert record.steps == 120 - moves
    what = "steps that optimizers made on other threads than the one that trains are not counted"
    assert record.notes == ([f"{what}: {moves}"] if moves else [])


def test_of_two_that_train_side_by_side_the_first_is_watched_and_the_other_counted(tmp_path):
    model, other, losses = nn.Linear(4, 3), nn.Linear(4, 3), []
    turn = threading.Barrier(2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def beside():
        aside = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(10):
            turn.wait()
            _epoch(other, aside, [], 1)
            turn.wait()

    with gaff.watch(out=tmp_path / "run", every=1):
        _epoch(model, sgd, losses, 1)
        thread = threading.Thread(target=beside)
        thread.start()
        for _ in range(10):
            turn.wait()
            turn.wait()
            _epoch(model, sgd, losses, 1)
        thread.join()
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(losses)
    assert record.notes == ["steps that optimizers made on other threads than the one that trains are not counted: 10"]
