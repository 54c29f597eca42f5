"""Four threads on one model: each session sees the runs of its own thread only."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import gaff


def test_no_cross_talk():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    wrong = []

    def work(number):
        x = torch.full((2, 4), float(number))
        true = torch.tanh(model[0](x)).detach()
        for _ in range(50):
            with gaff.capture(model, "1", "0:grad_output") as got:
                model(x).sum().backward()
            if not torch.equal(got["1"], true) or got["0:grad_output"] is None:
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_all_threads_on_request_and_runs_kept_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inputs = [torch.full((1, 4), float(number)) for number in range(8)]
    with gaff.capture(model, ":input", "1", threads="all") as got, ThreadPoolExecutor(4) as pool:
        list(pool.map(model, inputs))
    assert got.receipt.runs == 8
    for run in range(8):
        x = got.run(run)[":input"]
        assert torch.equal(got.run(run)["1"], model(x))


def test_another_threads_run_does_not_fire_by_default():
    model = nn.Linear(3, 3)
    with pytest.raises(gaff.NeverFiredError, match="never called inside the session.*on another thread"):
        with gaff.capture(model, ":output"), ThreadPoolExecutor(1) as pool:
            pool.submit(model, torch.randn(1, 3)).result()
