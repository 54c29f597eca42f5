"""Runs that train one model after another: each training is judged by itself, and what it was is told."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gaff
from gaff.record.finding import Finding
from gaff.record.run_case import RunCase, SingleSteps
from gaff.record.sample import Sample
from gaff.record.statistics import WIDTH, Numbers
from gaff.record.trainings import Training, _settled, trainings
from gaff.record.verdict import judge_all
from gaff.training.rules.judge import Judge
from gaff.training.rules.registry import Hit, Rule

EVER = 1 << 62


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({}, [Training([], [(0, EVER)])]),
        ({"loss": (0, 99)}, [Training(["loss"], [(0, EVER)])]),
        ({"d": (0, 99), "g": (1, 99)}, [Training(["d", "g"], [(0, EVER)])]),
        ({"rec": (0, 87), "ce": (88, 300)}, [Training(["rec"], [(0, 88)]), Training(["ce"], [(88, EVER)])]),
        ({"rec": (0, 87), "ce": (88, 100)}, [Training(["rec", "ce"], [(0, 88), (88, EVER)])]),  # too short
        ({"loss": (0, 87), "loss#2": (88, 300)}, [Training(["loss", "loss#2"], [(0, 88), (88, EVER)])]),  # folds
        ({"a": (0, 60), "b": (61, 140), "a#2": (141, 200), "b#2": (201, 280)},
         [Training(["a", "a#2"], [(0, 61), (141, 201)]), Training(["b", "b#2"], [(61, 141), (201, EVER)])]),
        ({"warm": (0, 9), "loss": (10, 300)}, [Training(["warm"], [(0, 10)]), Training(["loss"], [(10, EVER)])]),
    ],
)  # fmt: skip
def test_losses_of_steps_that_do_not_overlap_are_of_several_trainings(spans, expected):
    assert trainings(spans) == expected


def test_a_training_knows_its_steps():
    told = Training(["loss"], [(0, 61), (141, EVER)])
    assert [told.has(step) for step in (0, 60, 61, 140, 141)] == [True, True, False, False, True]
    assert (told.length(50), told.length(100), told.length(200)) == (50, 61, 61 + 59)


def looks(kept: Judge, steps, loss, model="m"):
    for step in steps:
        sample = Sample(step, "train", 0.0, losses={loss: 1.0})
        sample.rows[model, "a:output"] = Numbers([0.0] * WIDTH)
        kept.look(sample)


@pytest.fixture
def asked():
    def check(sample, past):
        if "bad" in sample.losses:
            yield Hit(("m", ""), age=sample.age)

    return Rule("r", check, "warning", "means", "cause", "remedy", "train", 3, 0.9, 0, ())


def test_another_training_begins_where_all_losses_are_new(asked):
    kept = Judge([asked])
    looks(kept, range(20), "good")
    looks(kept, range(20, 26), "bad")
    (found,) = kept.findings  # six of 26 looks would be too few
    assert (found.since, found.share, found.evidence) == (20, 1.0, {"age": 5})
    looks(kept, range(26, 40), "good")  # known before: not a third one, and no look of them has found it
    (found,) = kept.findings if kept.findings else (None,)
    assert found is None or found.is_over


def test_what_a_training_has_found_stays_when_another_model_is_trained(asked):
    kept = Judge([asked])
    looks(kept, range(20), "bad")
    looks(kept, range(20, 60), "good", model="other")
    assert [(one.since, one.last, one.is_over) for one in kept.findings] == [(0, 19, False)]
    kept = Judge([asked])
    looks(kept, range(20), "bad")
    looks(kept, range(20, 60), "good")
    assert [one.is_over for one in kept.findings] == [True]  # the same model, in which it is seen no more


def test_what_a_training_has_found_at_two_places_is_told_of_both():
    kept = Judge([])
    for site in ("a", "b"):
        kept.add(Finding("nonfinite", site, "", 3, "error", f"at {site}", "", "", last=3))
    assert sorted(one.site for one in kept.findings) == ["a", "b"]


def test_the_worst_training_is_told():
    short = RunCase((), 3, 3)
    told = judge_all([RunCase((), 100, 20), short, RunCase((), 80, 10, single=SingleSteps(began=103))])
    assert told.state == "healthy"
    assert "nothing wrong was found in 183 steps, of which 33 were looked at" in told.cause
    assert "3 steps are too few to judge" in told.cause
    assert judge_all([short, short]).state == "not enough"


def run(tmp_path, spoil=lambda net: None, shuffle=False, lr=1e-3, every=None):
    """An autoencoder, and then a classifier on top of it, of handwritten digits."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    labels = y[torch.randperm(len(y))] if shuffle else y
    first = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    rest = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with gaff.watch(every=every, out=tmp_path / "run", tell=lambda line: None):
        opt = torch.optim.Adam(first.parameters(), lr=1e-3)
        for step in range(120):
            batch = x[step * 32 % 1760 :][:32]
            rec = F.mse_loss(first(batch), batch)
            opt.zero_grad()
            rec.backward()
            opt.step()
        spoil(rest)
        both = nn.Sequential(first[0], nn.ReLU(), *rest)
        other = torch.optim.Adam(both.parameters(), lr=lr)
        for step in range(240):
            at = slice(step * 32 % 1760, step * 32 % 1760 + 32)
            ce = F.cross_entropy(both(x[at]), labels[at])
            other.zero_grad()
            ce.backward()
            other.step()
    return gaff.load(tmp_path / "run").verdict


def zeros(net):
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.1)


def test_a_second_training_that_goes_well_is_told_with_the_first(tmp_path):
    told = run(tmp_path, every=5)
    assert told.state == "healthy", told
    assert "from step 0 on the loss 'rec' went from" in told.cause
    assert "from step 120 on the loss 'ce' went from" in told.cause


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ({"spoil": zeros}, "symmetric_units"),
        ({"shuffle": True}, "labels_do_not_belong"),
        ({"lr": 3.0}, "learning_rate_too_high"),
    ],
)
def test_what_is_wrong_with_a_second_training_is_told_of_it(tmp_path, fault, name):
    told = run(tmp_path, **fault)
    assert (told.state in ("wrong", "suspicious"), told.name, told.since in (120, 121)) == (True, name, True), told
    assert "(in the training from step 120 on, of the loss 'ce')" in told.cause


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({"l1": (0, 99), "l2": (100, 100), "l2#2": (101, 300)}, {"l1": (0, 99), "l2#2": (100, 300)}),
        ({"loss": (0, 0), "loss#2": (1, 300)}, {"loss#2": (0, 300)}),
        ({"loss": (0, 99), "loss#2": (100, 300)}, {"loss": (0, 99), "loss#2": (100, 300)}),  # folds
        ({"warm": (0, 0), "loss": (1, 300)}, {"warm": (0, 0), "loss": (1, 300)}),
    ],
)
def test_a_loss_that_has_another_name_at_its_first_step_is_one(spans, expected):
    assert _settled(spans) == expected


def warmed(tmp_path, *, is_trained):
    """A head on a frozen random body, which cannot be learned from, and then both of them."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    for one in body.parameters():
        nn.init.normal_(one, std=0.01)
    head = nn.Linear(32, 10)
    body.requires_grad_(False)
    model = nn.Sequential(body, head)
    with gaff.watch(out=tmp_path / "run", tell=lambda line: None):
        first = torch.optim.SGD(head.parameters(), 1e-2)
        for step in range(130):
            at = slice(step * 32 % 1760, step * 32 % 1760 + 32)
            loss1 = F.cross_entropy(model(x[at]), y[at])
            first.zero_grad()
            loss1.backward()
            first.step()
        body.requires_grad_(is_trained)
        both = torch.optim.Adam(model.parameters() if is_trained else head.parameters(), 3e-3 if is_trained else 1e-5)
        for step in range(230):
            at = slice(step * 32 % 1760, step * 32 % 1760 + 32)
            loss2 = F.cross_entropy(model(x[at]), y[at])
            both.zero_grad()
            loss2.backward()
            both.step()
    return gaff.load(tmp_path / "run").verdict


@pytest.mark.parametrize("is_trained", [True, False])
def test_where_a_later_training_learns_the_first_has_something_to_learn_from(tmp_path, is_trained):
    assert (warmed(tmp_path, is_trained=is_trained).state == "healthy") is is_trained


@pytest.mark.parametrize("is_weak", [True, False])
def test_a_weak_signal_that_evaluations_tell_is_no_fault(tmp_path, is_weak):
    torch.manual_seed(0)
    x = torch.randn(6000, 16)
    y = (torch.rand(6000) < torch.sigmoid(0.5 * x[:, 0] if is_weak else torch.zeros(6000))).long()
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=5, tell=lambda line: None):
        for _ in range(4):
            for at in range(0, 4000, 64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[at : at + 64]), y[at : at + 64]).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(x[4000:]), y[4000:])
            model.train()
    assert (gaff.load(tmp_path / "run").verdict.state == "healthy") is is_weak
