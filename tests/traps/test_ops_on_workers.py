"""Ops that a forward runs on another thread are no sites: asked for they raise, else the receipt tells of them."""

from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.pool import ThreadPool
from threading import Thread

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


def by_pool(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def by_thread_pool(work):
    with ThreadPool(1) as pool:
        return pool.apply_async(work).get()


def by_map(work):
    with ThreadPool(1) as pool:
        return pool.map(lambda _: work(), [0])[0]


def by_imap(work):
    with ThreadPool(1) as pool:
        return next(pool.imap(lambda _: work(), [0]))


def by_keyword(work):
    with ThreadPool(1) as pool:
        return pool.apply_async(func=work).get()


def by_thread(work):
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class OnTwoThreads(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.lin, self.run = nn.Linear(1, 1), run

    def forward(self, x):
        return x * 5 + self.run(lambda: self.lin(x) * 3)


@pytest.fixture(params=[by_pool, by_thread_pool, by_map, by_imap, by_keyword, by_thread])
def model(request):
    return OnTwoThreads(request.param)


def test_an_edit_of_such_an_op_raises(model):
    with (
        pytest.raises(gaff.PlanError, match="OnTwoThreads runs such an op on another thread"),
        gaff.edit(model, {"/mul": edits.zero()}),
    ):
        model(torch.ones(1))


def test_a_capture_of_such_an_op_raises(model):
    with pytest.raises(gaff.PlanError, match="where ops are no sites"), gaff.capture(model, "/mul"):
        model(torch.ones(1))


def test_other_ops_are_told_and_the_receipt_says_so(model):
    bare = model(torch.ones(1))
    with gaff.capture(model, "/add") as got:
        y = model(torch.ones(1))
    assert torch.equal(y, bare)
    assert torch.equal(got["/add"], bare)
    assert "runs ops on another thread, where they are no sites" in str(got.receipt)


def test_threads_are_as_they_were(model):
    before = Thread.start, ThreadPoolExecutor.submit, ThreadPool.apply_async
    with gaff.capture(model, "/add"), gaff.capture(model, "/add"):
        model(torch.ones(1))
        assert Thread.start is not before[0]
    assert (Thread.start, ThreadPoolExecutor.submit, ThreadPool.apply_async) == before


def test_threads_of_others_are_left_alone(model):
    with gaff.capture(model, "/add") as got:
        assert by_pool(lambda: torch.ones(1) * 2) == 2
        model(torch.ones(1))
    assert got["/add"].shape == (1,)


class Forgets(nn.Module):
    """Never looks at what its worker raised."""

    def __init__(self, start):
        super().__init__()
        self.start, self.lin = start, nn.Linear(4, 4)

    def forward(self, x):
        extra = torch.zeros_like(x)
        self.start(lambda: extra.copy_((x * 2).relu()))
        return self.lin(x) + extra


def waits_alone(work):
    with ThreadPoolExecutor(1) as pool:
        wait([pool.submit(work)])


def joins(work):
    thread = Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("start", [waits_alone, joins])
@pytest.mark.parametrize("address", ["/*", "/mul"])
@pytest.mark.parametrize("is_edited", [False, True])
def test_what_a_worker_raised_is_told_when_the_run_ends(start, address, is_edited):
    model = Forgets(start)
    session = gaff.edit(model, {address: edits.scale(1.0)}) if is_edited else gaff.capture(model, address)
    with pytest.raises(gaff.ExactnessError, match="caught an error .* runs such an op on another thread"), session:
        model(torch.ones(2, 4))


def test_a_list_of_sites_says_that_modules_were_called_elsewhere(model):
    told = str(gaff.sites(model, torch.ones(1)))
    assert "the forward called modules on another thread" in told
