"""What watching costs is kept small, and told in full: runs that are only counted, the rhythm of looks, their sum."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff.record.sample import address_of, path_of, port_of
from gaff.training.watch import step_facts
from gaff.training.watch.pace import Pace
from gaff.training.watch.worker import Worker


def policy():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def learn(model, optimizer, calls):
    loss = sum(model(torch.randn(3, 4)).square().mean() for _ in range(calls))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 1e-2)


# steps with hundreds of runs


def test_runs_that_are_only_counted_lose_no_sample(tmp_path):
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=3) as watch:
        for calls in (1, 16, 17, 200, 40, 33):
            learn(model, optimizer, calls)
    assert watch.failure is None
    assert gaff.load(tmp_path / "run").scalar("samples").values == [3 * calls for calls in (1, 16, 17, 200, 40, 33)]


def test_of_a_step_of_hundreds_of_runs_some_are_looked_at_and_the_others_counted(tmp_path):
    model = policy()
    optimizer = sgd(model)
    seen = []
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        reporter = watch._watcher.reporter
        hand_on = reporter.look
        reporter.look = lambda sampled, *rest: (seen.append(sampled), hand_on(sampled, *rest))
        for calls in (40, 45, 8, 9):
            learn(model, optimizer, calls)
    assert watch.failure is None
    record, looked = gaff.load(tmp_path / "run"), [40, 8 + 1, 8, 8]  # of the first step all: it finds the models
    assert [one.runs.all for one in seen] == [40, 45, 8, 9]
    assert record.scalar("samples").values == [3 * calls for calls in (40, 45, 8, 9)]
    assert record.series("0", "count").values == [3 * 8 * calls for calls in looked]
    assert record.series("0:grad_output", "count").values == [3 * 8 * calls for calls in looked]
    assert record.series("0.weight:grad", "count").values == [32] * 4


def test_what_a_checkpoint_recomputes_is_looked_at_after_runs_that_were_only_counted(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.fc, x, use_reentrant=True)

    model = nn.Sequential(nn.Linear(4, 4), Block())
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        for _ in range(2):
            learn(model, optimizer, 20)
    assert watch.failure is None
    counts = gaff.load(tmp_path / "run").series("1.fc:grad_output", "count").values
    assert counts[0] == 20 * 12
    assert counts[1] >= 8 * 12


def test_runs_of_other_kinds_between_those_that_are_only_counted_are_told():
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, every=1000) as watch:
        learn(model, optimizer, 1)
        batches = watch._watcher._batches
        for _ in range(17):
            model(torch.randn(3, 4)).sum()
        assert watch._watcher._calls.passing.left > 0
        model(input=torch.randn(5, 4)).sum()  # a keyword
        assert batches.samples + watch._watcher._calls.passing._samples == 17 * 3 + 5
        assert batches.kept[-1][1].kwargs["input"].shape == (5, 4)
        model.eval()
        with torch.no_grad():
            model(torch.randn(7, 4))
        model.train()
        model(torch.randn(2, 4)).sum().backward()
        assert watch._watcher._calls.passing.left == 0
        assert batches.samples + watch._watcher._calls.passing._samples == 17 * 3 + 5 + 2
        optimizer.step()
    assert watch.failure is None
    assert "__call__" not in vars(nn.Sequential)


def test_a_batch_that_makes_a_nan_is_found_among_hundreds(tmp_path):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(x).sqrt()

    model = Root()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1000) as watch:
        for _ in range(2):
            learn(model, optimizer, 100)
    assert [one.rule for one in watch.findings] == ["nonfinite"]
    assert watch.findings[0].evidence["op"].startswith("sqrt")


def test_of_a_long_evaluation_as_many_runs_are_looked_at_as_before(tmp_path):
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        learn(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            for _ in range(250):
                model(torch.randn(3, 4))
        model.train()
        learn(model, optimizer, 1)
    assert watch.failure is None
    looks = [told for _, told in gaff.load(tmp_path / "run").events("look") if told["phase"] == "eval"]
    assert len(looks) == 3  # the first, the tenth, the hundredth


def test_rollouts_between_looks_are_only_counted_and_change_no_count(tmp_path):
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=100) as watch:
        for _ in range(3):
            learn(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            for _ in range(150):
                model(torch.randn(3, 4))
        looks = watch._watcher._looks
        assert looks._evaluations["model"].runs + watch._watcher._calls.passing.passed == 150
        model.train()
        learn(model, optimizer, 1)
    assert watch.failure is None
    looks = [told for _, told in gaff.load(tmp_path / "run").events("look") if told["phase"] == "eval"]
    assert len(looks) == 3


def test_two_who_follow_one_class_both_see_every_run(tmp_path):
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "a", every=1000):
        for _ in range(2):
            learn(model, optimizer, 50)
        with gaff.watch(model, optimizer, out=tmp_path / "b", every=1000):
            learn(model, optimizer, 50)
        learn(model, optimizer, 50)
    assert gaff.load(tmp_path / "a").scalar("samples").values == [150.0] * 4
    assert gaff.load(tmp_path / "b").scalar("samples").values == [150.0]


# the rhythm


def run(pace, steps, step_s, cost_of, presence_s=0.0):
    looks = []
    for step in range(steps):
        if step == 0 or pace.is_due(step):
            cost = cost_of(len(looks))
            looks.append(step)
            pace.stepped(step, step_s + presence_s + cost, presence_s + cost, True)
        else:
            pace.stepped(step, step_s + presence_s, presence_s, False)
    return looks


def test_a_first_look_that_took_long_is_a_matter_of_starting():
    usual, slow = Pace(0.01), Pace(0.01)
    looks = run(usual, 3000, 0.01, lambda number: 0.002)
    assert run(slow, 3000, 0.01, lambda number: 30.0 if number == 0 else 0.002) == looks
    assert slow.startup_s == pytest.approx(30.0)
    assert slow.overhead == usual.overhead < 0.02


def test_one_look_that_took_long_by_accident_keeps_few_later_ones_away():
    for slow in (1, 2, 7, 100):
        pace = Pace(0.01)
        looks = run(pace, 20_000, 0.01, lambda number, slow=slow: 3.0 if number == slow else 0.002)
        assert len(looks) > 250
        gaps = [after - before for before, after in itertools.pairwise(looks)]
        assert max(gaps) <= 2000  # the time of five such looks, where it was the only one that had told a cost
        assert pace.spent_s == pytest.approx(3.0 + 0.002 * (len(looks) - 2))


def test_what_every_step_costs_comes_out_of_the_budget_and_leaves_half_of_it():
    few = len(run(Pace(0.01), 30_000, 0.002, lambda number: 0.004))
    fewer = len(run(Pace(0.01), 30_000, 0.002, lambda number: 0.004, presence_s=0.00001))
    least = len(run(Pace(0.01), 30_000, 0.002, lambda number: 0.004, presence_s=0.0001))
    assert few > fewer >= least > 0.4 * few


# all of it is told


def test_all_that_gaff_does_is_in_its_share(tmp_path):
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=2) as watch:
        shield = watch._watcher.shield
        shield.note(100.0)  # of the first step and before
        learn(model, optimizer, 1)
        assert watch.startup_s > 100
        assert watch.overhead == 0
        shield.note(50.0)
        learn(model, optimizer, 1)
        assert watch._watcher.pace.spent_s > 50
        watch._watcher.reporter._worker.looks_s += 20.0
        watch._watcher.reporter._worker.others_s += 10.0
        learn(model, optimizer, 1)
        assert watch._watcher.pace.spent_s > 80
    [(_, told)] = gaff.load(tmp_path / "run").events("end")
    assert told["startup"] > 100
    assert told["overhead"] > 1


def test_a_look_that_holds_much_waits_alone():
    started, done = [], []
    worker = Worker(done.append)
    worker._thread = type("Busy", (), {"is_over": False, "ident": 1})()  # takes no job
    for number in range(4):
        worker.put_look(lambda number=number: started.append(number), 40 << 20)
    assert worker.dropped == 3
    worker._thread = None
    worker._drain()
    assert started == [0]
    assert not done
    worker.put_look(lambda: started.append("after"), 1 << 30)
    worker.stop()
    assert started == [0, "after"]


# addresses and checksums


@pytest.mark.parametrize(
    ("address", "path", "port"),
    [
        ("fc1", "fc1", "output"),
        ("", "", "output"),
        (":input", "", "input"),
        ("a.0.b:grad_output", "a.0.b", "grad_output"),
        ("a.0:update", "a.0", "update"),
        ("a:output[0]", "a", "output"),
    ],
)
def test_path_and_port_of_an_address(address, path, port):
    assert (path_of(address), port_of(address)) == (path, port)


def test_odd_names_are_told_apart_as_the_grammar_prints_them():
    for name in ("a:b", "a b", "ä", "x[0]"):
        for port in ("param", "grad", "update"):
            told = address_of(f"0.{name}", port) if "." not in name else ""
            assert port_of(told) == port
    assert address_of("fc.weight", "grad") == "fc.weight:grad"


def test_a_checksum_is_of_the_beginning_of_a_tensor():
    wide = torch.randn(6, 3, 50, 50)
    flat = wide.reshape(-1)[:1024]
    assert step_facts.fingerprint((wide,), {}, 4096) == step_facts.fingerprint((flat,), {}, 4096)
    strange = wide.to(memory_format=torch.channels_last)
    assert step_facts.fingerprint((strange,), {}, 4096) == step_facts.fingerprint((flat,), {}, 4096)


# looks where something happens


def test_a_loss_that_leaves_what_it_was_is_looked_at_closely(tmp_path):
    torch.manual_seed(0)
    model = policy()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run") as watch:
        pace = watch._watcher.pace
        pace.is_due = lambda step: bool(pace._wanted) and Pace.is_due(pace, step)  # else no step is looked at
        for step in range(200):
            factor = 3 if step >= 150 else 1
            (model(torch.randn(32, 4)).square().mean() * 0 + factor + 0.01 * (step % 7)).backward()
            optimizer.step()
            optimizer.zero_grad()
    looks = gaff.load(tmp_path / "run").looks
    assert [step for step in looks if 140 <= step < 170] == [151, 152, 153]


def test_no_more_is_looked_at_where_looks_have_cost_much():
    pace = Pace(0.01, allowance_s=0.0)
    pace.looked(1.0, 0.5)
    pace.want()
    assert pace._wanted == 0
    fixed = Pace(0.01, every=7)
    fixed.want()
    assert not fixed.is_due(8)
    pace = Pace(0.01)
    pace.want()
    assert [pace.is_due(step) for step in (1001, 1002, 1003)] == [True, True, True]
    assert pace._wanted == 0
