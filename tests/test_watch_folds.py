"""A script that makes one model after the other, as cross-validation does: each is followed from its first call on."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaff


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.inner(x)


def _fold(losses, steps=30, bad_at=-1):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        outputs = net(x)
        loss = cross_entropy(outputs.log() if step == bad_at else outputs, (x.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def test_each_fold_has_its_samples_and_its_losses(tmp_path):
    losses = []
    with gaff.watch(out=tmp_path / "run", budget=0.001):
        for _ in range(4):
            _fold(losses)
    record = gaff.load(tmp_path / "run")
    assert record.scalar("samples").values == [16.0] * 120
    for fold in range(4):
        series = record.scalar("loss" if not fold else f"loss#{fold + 1}")
        assert series.steps == list(range(30 * fold, 30 * fold + 30))
        assert series.values == pytest.approx(losses[30 * fold : 30 * fold + 30])


def test_a_nan_in_a_later_fold_is_traced(tmp_path):
    with gaff.watch(out=tmp_path / "run", budget=0.001):
        _fold([])
        _fold([], steps=6, bad_at=5)
    [finding] = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "nonfinite"]
    assert finding.cause.startswith("between the model and its loss, log is given 0 or less")


def test_of_a_model_that_is_gone_nothing_is_kept_and_its_name_is_not_used_again(tmp_path):
    shared = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with gaff.watch(out=tmp_path / "run", every=1) as watch:
        for _ in range(12):
            local = copy.deepcopy(shared)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(local(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long)).backward()
                optimizer.step()
            del local, optimizer
            gc.collect()
        assert len(watch._watcher._models.all) <= 3
    record = gaff.load(tmp_path / "run")
    names = {one for one in record.scalars if one.startswith("loss:")}
    assert len(names) == 12
    assert record.steps == 24


@pytest.mark.parametrize("how", ["a new head", "other parameters"])
def test_an_optimizer_for_what_was_replaced_takes_the_place_of_the_one_that_was_given(how, tmp_path):
    net, losses = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gaff.watch(net, optimizer, out=tmp_path / "run"):
        for step in range(20):
            if step == 10:
                if how == "a new head":
                    net.inner[2] = nn.Linear(8, 3)
                else:
                    net.load_state_dict({name: one.clone() for name, one in net.state_dict().items()}, assign=True)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            loss = cross_entropy(net(x), (x.sum(1) > 0).long())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(losses)
    assert record.steps == 20


def test_an_optimizer_of_other_parameters_of_the_model_does_not_count_where_one_was_given(tmp_path):
    net = Net()
    given = torch.optim.SGD(net.inner[0].parameters(), lr=0.1)
    other = torch.optim.SGD(net.inner[2].parameters(), lr=0.1)
    with gaff.watch(net, given, out=tmp_path / "run"):
        for step in range(12):
            net(torch.randn(16, 4)).square().mean().backward()
            (given if step % 3 == 2 else other).step()
            net.zero_grad()
    assert gaff.load(tmp_path / "run").steps == 4


def test_what_is_trained_by_hand_after_the_optimizers_last_step_is_no_step(tmp_path):
    net, losses = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gaff.watch(net, out=tmp_path / "run"):
        for step in range(30):
            net.zero_grad()
            loss = net(torch.randn(16, 4)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step < 10:
                optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(losses[:10])
    assert record.notes[0].startswith("20 backward passes came after the last step of an optimizer that counts")


def test_a_given_optimizer_of_what_is_no_models_keeps_its_place(tmp_path):
    net, delta = Net(), torch.zeros(4, requires_grad=True)
    given, other = torch.optim.SGD([delta], lr=0.1), torch.optim.SGD(net.parameters(), lr=0.001)
    with gaff.watch(net, given, out=tmp_path / "run"):
        for _ in range(12):
            for one in (given, other):
                one.zero_grad()
            net(torch.randn(16, 4) + delta).square().mean().backward()
            for one in (given, other):
                one.step()
    record = gaff.load(tmp_path / "run")
    assert record.steps == 12
    assert set(record.scalar("lr").values) == {0.1}
