"""A watch follows the thread that trains, whatever other threads do before it, beside it and after it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gaff

LEFT_OUT = "steps that optimizers made on other threads than the one that trains are not counted"


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


def test_steps_on_other_threads_of_a_pool_are_left_out_and_counted(tmp_path):
    model, losses = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at_once, seen = threading.Barrier(2), []
    with ThreadPoolExecutor(2) as pool, gaff.watch(model, optimizer, out=tmp_path / "run"):
        both = [pool.submit(lambda: (at_once.wait(), threading.get_ident())[1]) for _ in range(2)]
        assert len({one.result() for one in both}) == 2
        for _ in range(6):
            pool.submit(lambda: (seen.append(threading.get_ident()), _epoch(model, optimizer, losses))).result()
    others = 20 * sum(one != seen[0] for one in seen)
    record = gaff.load(tmp_path / "run")
    assert record.steps == 120 - others
    assert record.notes == ([f"{LEFT_OUT}: {others}"] if others else [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_server_that_runs_a_frozen_model_beside_the_training_notices_nothing(tmp_path):
    model, losses, errors = nn.Linear(4, 3), [], []
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval()))
    over = threading.Event()

    def serve():
        while not over.is_set():
            try:
                frozen(torch.randn(2, 4))
            except AttributeError as error:
                errors.append(error)

    with gaff.watch(out=tmp_path / "run", every=1):
        thread = threading.Thread(target=serve)
        thread.start()
        _epoch(model, torch.optim.SGD(model.parameters(), lr=0.1), losses, 200)
        over.set()
        thread.join()
    assert not errors
    told = gaff.load(tmp_path / "run").scalar("loss").values
    assert len(told) >= 190  # the server may be inside its model as the training begins
    assert told == pytest.approx(losses[-len(told) :])


def test_two_trainings_that_begin_at_once_do_not_mix(tmp_path):
    nets, losses = [nn.Linear(4, 3) for _ in range(2)], [[], []]
    begin = threading.Barrier(2)

    def train(at):
        begin.wait()
        _epoch(nets[at], torch.optim.Adam(nets[at].parameters(), lr=0.01), losses[at], 300)

    with gaff.watch(out=tmp_path / "run"):
        threads = [threading.Thread(target=train, args=(at,)) for at in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    record = gaff.load(tmp_path / "run")
    assert not [one.rule for one in record.findings if one.rule == "stepped_again"]
    [note] = record.notes
    assert record.steps + int(note.removeprefix(f"{LEFT_OUT}: ")) == 600
    told = [one for name in record.scalars if name.startswith("loss:") for one in record.scalar(name).values]
    assert any(told[-100:] == pytest.approx(one[-100:]) for one in losses)


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
    assert record.notes == [f"{LEFT_OUT}: 10"]
