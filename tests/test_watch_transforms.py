"""Models that are watched though they are not complete yet, or run inside a transform of ``torch.func``."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import gaff


def test_lazy_layers_behind_an_ordinary_one_are_watched(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1)))
    with gaff.watch(out=tmp_path / "run", every=1) as watch:
        model(torch.randn(4, 3))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(30):
            x = torch.randn(64, 3)
            loss = (model(x)[:, 0] - x.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert record.steps == 30
    assert "1.2.weight:grad" in record.sites


def test_a_model_that_runs_inside_transforms_is_watched_and_its_batch_is_not_run_again(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    weights = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def value(time):
        return functional_call(model, weights, (time[None],))[0]

    losses = []
    with gaff.watch(out=tmp_path / "run", every=1) as watch:
        for step in range(40):
            times = torch.rand(64) * (float("nan") if step == 39 else 2)
            slope = vmap(grad(value))(times)
            loss = (slope + vmap(value)(times)).square().mean() + (value(torch.zeros(())) - 1) ** 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values[:-1] == losses[:-1]
    assert any(one.rule == "nonfinite" for one in record.findings)
    assert all("inside a torch.func transform" in one for one in record.notes)


def test_a_watch_that_fails_at_the_first_model_leaves_a_record_of_that(tmp_path, monkeypatch):
    def broken(root):
        raise ValueError("for the test")

    monkeypatch.setattr("gaff.training.watch.models.routings_of", broken)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(out=tmp_path / "run", every=1) as watch:
        for _ in range(5):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert "ValueError: for the test" in watch.failure
    verdict = gaff.load(tmp_path / "run").verdict
    assert verdict.state == "not enough"
    assert "for the test" in verdict.cause
