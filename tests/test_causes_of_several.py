"""Causes that lie in one part of a training: one of several optimizers, one summand of a loss, one of several inputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gaff
from gaff.training.watch.pace import Pace


def _verdict(tmp_path, steps, step, *given):
    with gaff.watch(*given, out=tmp_path / "run", every=1):
        for _ in range(steps):
            step()
    return gaff.load(tmp_path / "run").verdict


@pytest.mark.parametrize("which", [0, 1])
def test_a_rate_of_zero_of_one_of_two_optimizers_is_told(which, tmp_path):
    body, head = nn.Linear(4, 8), nn.Linear(8, 3)
    both = [torch.optim.SGD(one.parameters(), lr=0.0 if at == which else 1e-5) for at, one in enumerate((body, head))]

    def step():
        x = torch.randn(32, 4)
        for one in both:
            one.zero_grad()
        F.cross_entropy(head(body(x).relu()), (x.sum(1) > 0).long()).backward()
        for one in both:
            one.step()

    verdict = _verdict(tmp_path, 30, step)
    assert verdict.state == "wrong"
    assert "the learning rate of an optimizer of" in verdict.cause
    assert "parameters do not change" in verdict.cause


_PRODUCTS = {
    "hinge": lambda out, y: (1 - out * y).relu().mean(),
    "cross entropy": lambda out, y: -(y * F.logsigmoid(out) + (1 - y) * F.logsigmoid(-out)).mean(),
    "Poisson": lambda out, y: F.poisson_nll_loss(out, y),
    "weights": lambda out, y: (F.softplus(out) * y).mean(),
}


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("name", _PRODUCTS)
def test_a_product_of_each_output_with_every_target_is_told(name, is_flat, tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step():
        x = torch.randn(32, 4)
        y = (x[:, :1] > 0).float()
        optimizer.zero_grad()
        _PRODUCTS[name](model(x), y[:, 0] if is_flat else y).backward()
        optimizer.step()

    verdict = _verdict(tmp_path, 30, step)
    assert (verdict.name == "broadcast") is is_flat
    if is_flat:  # told by numbers that are others in another batch
        assert "outputs of shape [32, 1] and gets a product of shape [32, 32]" in verdict.cause


def test_a_grid_of_as_many_numbers_as_there_are_examples_is_no_broadcast(tmp_path):
    model, times = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.linspace(0, 2, 32)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step():
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        ((-model(x).exp() * times).exp() - (-x[:, :1].exp() * times).exp()).square().mean().backward()
        optimizer.step()

    assert _verdict(tmp_path, 30, step).name != "broadcast"


@pytest.mark.parametrize("form", ["policy + value - entropy", "value - entropy", "value - entropy + policy"])
def test_a_broadcast_in_a_loss_from_which_something_is_taken_is_told(form, tmp_path):
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        x, returns = torch.randn(16, 4), torch.randn(16)
        logits, value = model(x).split([4, 1], 1)
        policy = F.cross_entropy(logits, torch.randint(4, (16,)))
        value = 0.5 * ((value - returns) ** 2).mean()
        entropy = 0.01 * -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        {"policy + value - entropy": lambda: policy + value - entropy, "value - entropy": lambda: value - entropy,
         "value - entropy + policy": lambda: value - entropy + policy}[form]().backward()  # fmt: skip
        optimizer.step()

    verdict = _verdict(tmp_path, 30, step)
    assert "gets a difference of shape [16, 16]: each output is compared with every target" in verdict.cause


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_the_scale_of_the_input_is_asked_of_the_layer_that_is_given_it(scale, tmp_path):
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.first, self.last = nn.Linear(4, 16), nn.Linear(12, 16), nn.Linear(16, 12)

        def forward(self, x, t):
            time = self.time(torch.cat([(t * 3).sin(), (t * 3).cos()], 1))
            return self.last((self.first(x) + time).relu())

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        x = torch.rand(32, 12) * scale * 2 + (scale > 1) * scale
        optimizer.zero_grad()
        F.mse_loss(model(x, torch.rand(32, 2)), torch.randn(32, 12)).backward()
        optimizer.step()

    _verdict(tmp_path, 30, step)
    found = {one.rule for one in gaff.load(tmp_path / "run").findings}
    assert ("input_scale" in found) == (scale > 1)


def test_a_judge_that_is_in_no_optimizer_is_told_where_it_makes_more_steps_than_what_it_judges(tmp_path):
    generator, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    mine = torch.optim.Adam(generator.parameters(), lr=1e-3)
    theirs = torch.optim.Adam(generator.parameters(), lr=1e-3)  # the slip

    def step():
        for _ in range(4):
            theirs.zero_grad()
            (judge(generator(torch.randn(16, 4)).detach()).mean() - judge(torch.randn(16, 6)).mean()).backward()
            theirs.step()
        mine.zero_grad()
        (-judge(generator(torch.randn(16, 4))).mean()).backward()
        mine.step()

    verdict = _verdict(tmp_path, 20, step)
    assert "'judge' gets gradients, none of its parameters is in an optimizer" in verdict.cause
    assert "'generator' is in two optimizers" in verdict.cause


def test_a_training_that_begins_later_in_a_run_is_looked_at():
    pace = Pace(0.01, allowance_s=0.5)
    pace.stepped(0, 0.001, 0.1, True)
    for step in range(1, 400):
        is_look = pace.is_due(step)
        pace.stepped(step, 0.101 if is_look else 0.001, 0.1 if is_look else 0.0, is_look)
    assert not any(pace.is_due(step) for step in range(400, 450))
    pace.begins_again(450)
    assert [pace.is_due(step) for step in range(450, 453)] == [True, True, True]
    for again in range(30):  # a thousand folds are no reason to spend the time of them
        pace.begins_again(500 + again)
        while pace.is_due(501):
            pass
    assert pace._limits.allowance_s == pytest.approx(1.5)


def test_pairs_that_are_taken_from_pairs_are_the_distance_of_two_distributions(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step():
        x, y = model(torch.randn(16, 4)), 2 + torch.randn(16, 1)
        optimizer.zero_grad()
        (2 * (x - y.T).abs().mean() - (x - x.T).abs().mean() - (y - y.T).abs().mean()).backward()
        optimizer.step()

    _verdict(tmp_path, 30, step)
    assert "broadcast" not in {one.rule for one in gaff.load(tmp_path / "run").findings}


def test_a_part_that_is_frozen_by_a_rate_of_zero_is_no_cause_where_the_loss_falls(tmp_path):
    body, head = nn.Linear(4, 32), nn.Linear(32, 1)
    both = [torch.optim.Adam(head.parameters(), lr=0.05), torch.optim.SGD(body.parameters(), lr=0.0)]

    def step():
        x = torch.randn(64, 4)
        for one in both:
            one.zero_grad()
        F.mse_loss(head(body(x).relu()), 3 + x[:, :1]).backward()
        for one in both:
            one.step()

    assert _verdict(tmp_path, 100, step).state == "healthy"
