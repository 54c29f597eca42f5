"""Numbers in findings and verdicts are those of the program: its learning rates, the scale of its losses, its guesses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.record.factors import guesses
from gaff.training.watch import target_facts

TEACHER = torch.randn(8, 5, generator=torch.Generator().manual_seed(5))


def labelled(count):
    x = torch.randn(count, 8)
    return x, (x @ TEACHER + 0.5 * torch.randn(count, 5)).argmax(1)


def trained(out, steps, step, groups=None, lr=0.05):
    """The record of so many steps, all looked at; ``step(number, model, optimizer)`` runs what one is made of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters() if groups is None else groups(model), lr)
    with gaff.watch(out=out, every=1):
        for number in range(steps):
            optimizer.zero_grad()
            step(number, model, optimizer)
            optimizer.step()
    return gaff.load(out)


def two_groups(first, second):
    return lambda model: [
        {"params": model[0].parameters(), "lr": first},
        {"params": model[2].parameters(), "lr": second},
    ]


def plain(_, model, optimizer):
    x, y = labelled(32)
    F.cross_entropy(model(x), y).backward()


def test_the_learning_rate_is_the_highest_of_the_groups_that_train(tmp_path):
    def frozen_soon(number, model, optimizer):
        if number == 20:
            optimizer.param_groups[0]["lr"] = 0.0
        plain(number, model, optimizer)

    record = trained(tmp_path / "run", 100, frozen_soon, two_groups(1e-3, 0.05))
    assert record.verdict.state == "healthy", record.verdict
    assert {value for _, value in record.scalar("lr")} == {0.05}


def test_a_rate_that_was_raised_is_the_one_that_is_too_high(tmp_path):
    def raised(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 if number < 150 else 30.0
        plain(number, model, optimizer)

    verdict = trained(tmp_path / "run", 200, raised).verdict
    assert "a learning rate of 30 is too high" in str(verdict)


def in_passes(sizes):
    """Gradients of several batches, each a sum divided by how many examples there are in all."""

    def step(_, model, optimizer):
        for size in sizes:
            x, y = labelled(size)
            loss = F.cross_entropy(model(x), y, reduction="sum") / sum(sizes)
            loss.backward()

    return step


def by_sum(size):
    def step(number, model, optimizer):
        x, y = labelled(size(number))
        loss = F.cross_entropy(model(x), y, reduction="sum") / 8
        loss.backward()

    return step


def by_scale(number, model, optimizer):
    x, y = labelled(32)
    scale = 2.0 ** (3 + number // 20)
    loss = F.cross_entropy(model(x), y)
    (loss * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= scale


def by_groups(number, model, optimizer):
    count = (1, 1, 4)[number % 3]
    for _ in range(count):
        x, y = labelled(32)
        loss = F.cross_entropy(model(x), y) / count
        loss.backward()


@pytest.mark.parametrize(
    ("step", "steps", "lr"),
    [
        (in_passes((48, 40, 32, 24)), 60, 0.02),
        (in_passes((60, 4)), 60, 0.02),
        (by_sum(lambda number: 4 + number % 29), 120, 0.005),
        (by_sum(lambda number: 4 + number // 4), 120, 0.005),
        (by_scale, 120, 0.05),
        (by_groups, 90, 0.01),
    ],
    ids=["passes", "a short pass", "all sizes", "sizes that grow", "a scale that doubles", "groups of other sizes"],
)
def test_a_loss_of_another_scale_is_no_loss_that_rises(step, steps, lr, tmp_path):
    record = trained(tmp_path / "run", steps, step, lr=lr)
    assert record.verdict.state == "healthy", record.verdict
    assert not record.findings


def test_a_sum_over_a_short_last_batch_is_of_the_usual_scale(tmp_path):
    record = trained(tmp_path / "run", 60, by_sum(lambda number: 5 if number % 20 == 19 else 32), lr=0.005)
    assert record.verdict.state == "healthy", record.verdict
    assert "(multiplied by 4 before its backward pass" in str(record.verdict)


def test_what_guessing_gives_is_of_the_usual_batch_where_the_last_is_short(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for step in range(60):
            size = 5 if step % 20 == 19 else 32
            optimizer.zero_grad()
            loss = F.mse_loss(model(torch.randn(size, 8)), torch.randn(size, 3)) * size
            loss.backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.verdict.state != "suspicious", record.verdict
    guess = guesses([(step, one) for step, one in record.events("look")])
    assert math.isclose(guess["loss"], 32.0, rel_tol=0.1)


def test_what_is_only_logged_tells_nothing_of_guessing(tmp_path):
    def logged(_, model, optimizer):
        x, y = labelled(64)
        rare = (torch.rand(64) < 0.1).long()
        F.cross_entropy(model(x)[:, :5], rare).item()
        F.cross_entropy(model(x), y).backward()

    verdict = trained(tmp_path / "run", 120, logged, lr=0.01).verdict
    assert verdict.state == "healthy", verdict


def test_trainings_have_targets_of_their_own(tmp_path):
    with gaff.watch(out=tmp_path / "run", every=1):
        for spread in (0.1, 3.0):
            torch.manual_seed(0)
            model = nn.Linear(8, 1)
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            for _ in range(40):
                x = torch.randn(32, 8)
                optimizer.zero_grad()
                F.mse_loss(model(x), spread * torch.randn(32, 1)).backward()
                optimizer.step()
    guesses = [event["guess"] for _, event in gaff.load(tmp_path / "run").events("look") if "guess" in event]
    assert math.isclose(guesses[39], 0.01, rel_tol=0.2)
    assert math.isclose(guesses[-1], 9.0, rel_tol=0.2)


@pytest.mark.parametrize("loss", ["l1_loss", "smooth_l1_loss", "huber_loss"])
def test_batches_that_are_groups_tell_together_what_guessing_gives(loss, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    levels, given = torch.randn(6) * 8, []
    with gaff.watch(out=tmp_path / "run", every=1):
        for step in range(150):
            given.append(levels[step % 6] + 0.5 * torch.randn(40, 1))
            optimizer.zero_grad()
            getattr(F, loss)(model(torch.randn(40, 3) + levels[step % 6] / 8), given[-1]).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    guess = [event["guess"] for _, event in record.events("look") if "guess" in event][-1]
    told = torch.cat(given)
    assert math.isclose(guess, getattr(F, loss)(told.median().expand_as(told), told), rel_tol=0.02)
    assert record.verdict.state == "healthy", record.verdict


def test_of_many_rows_of_targets_as_many_are_kept_as_there_is_room_for():
    seen, whole = {}, torch.arange(5000.0)[:, None].repeat(1, 512)
    for at in range(0, 5000, 37):
        rows = target_facts._rows(seen, "l1_loss", whole[at : at + 37])
    assert rows[:, 0].tolist() == list(range(0, 5000, 64))  # 128 rows of 512 fit


def test_updates_that_are_sampled_count_whole(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(out=tmp_path / "run", every=1):
        for step in range(30):
            before = [one.detach().clone() for one in model.parameters()]
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 1.0 if step == 25 else 0.01
            F.cross_entropy(model(torch.randn(16, 256)), torch.randint(0, 4, (16,))).backward()
            optimizer.step()
            if step == 25:
                norms = [(one.detach() - old).norm() for one, old in zip(model.parameters(), before, strict=True)]
    found = next(one for one in gaff.load(tmp_path / "run").findings if one.rule == "update_spike")
    assert found.since == 25
    assert math.isclose(found.evidence["norm"], torch.stack(norms).norm(), rel_tol=0.05)
