"""Programs that do on purpose what is a fault elsewhere: each beside the fault itself, which is told."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import gaff

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def digits():
    known = load_digits()
    return torch.tensor(known.data, dtype=torch.float32) / 8 - 1, torch.tensor(known.target)


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def told_of(tmp_path, model, optimizer, loss_of, steps=120, after=lambda step: None, at_end=lambda: None):
    """What the verdict says; and every finding by its rule."""
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=4, tell=lambda line: None):
        for step in range(steps):
            loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(step)
        at_end()
    record = gaff.load(tmp_path / "run")
    return record.verdict, {one.rule for one in record.findings}


def on_digits(model):
    x, y = digits()
    drawn = torch.Generator().manual_seed(0)

    def loss_of(_step):
        rows = torch.randint(0, len(x), (64,), generator=drawn)
        return F.cross_entropy(model(x[rows]), y[rows])

    return loss_of


@pytest.mark.parametrize("is_meant", [True, False])
@pytest.mark.parametrize("every", [1, 30])
def test_weights_are_limited_by_way_of_their_state(tmp_path, is_meant, every):
    model = classifier()
    optimizer, kept = torch.optim.Adam(model.parameters(), 3e-3), model.state_dict()

    def after(step):
        if step % every == every - 1:
            state = model.state_dict() if is_meant else kept
            for value in state.values() if is_meant else ():
                value.clamp_(-0.3, 0.3)
            model.load_state_dict(state)

    told, rules = told_of(tmp_path, model, optimizer, on_digits(model), after=after)
    assert ("loads_itself" in rules) is not is_meant, told


@pytest.mark.parametrize(("limit", "is_meant"), [(1e9, True), (1.0, False)])
def test_a_norm_that_is_logged_after_the_step(tmp_path, limit, is_meant):
    model = classifier()
    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 3e-3), on_digits(model),
                          after=lambda step: nn.utils.clip_grad_norm_(model.parameters(), limit))  # fmt: skip
    assert ("clipped_too_early" in rules) is not is_meant, told


@pytest.mark.parametrize("is_meant", [True, False])
def test_a_base_rate_that_is_kept_on_the_optimizer(tmp_path, is_meant):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.lr = 0.1

    drawn = on_digits(model)

    def loss_of(step):
        if is_meant:
            optimizer.param_groups[0]["lr"] = optimizer.lr * (step + 1) / 120
        return drawn(step)

    told, rules = told_of(tmp_path, model, optimizer, loss_of)
    assert ("set_for_nothing" in rules) is not is_meant, told


@pytest.mark.parametrize("is_meant", [True, False])
def test_a_margin_that_is_reached_beside_a_penalty(tmp_path, is_meant):
    torch.manual_seed(0)
    centers = 2 * torch.randn(10, 32)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss_of(step):
        one = torch.randint(0, 10, (64,))
        others = (one + torch.randint(1, 10, (64,))) % 10
        first, same, other = (model(centers[at] + 0.5 * torch.randn(64, 32)) for at in (one, one, others))
        if not is_meant:
            first, same, other = first.detach().round(), same.round(), other.round()
        return F.triplet_margin_loss(first, same, other, margin=3.0) + 1e-4 * sum(
            one.square().sum() for one in model.parameters()
        )

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 3e-3), loss_of, 200)
    assert ("loss_gives_nothing" in rules) is not is_meant, told


@pytest.mark.parametrize("is_meant", [True, False])
def test_an_optimizer_that_begins_later(tmp_path, is_meant):
    model = classifier()
    body, head = torch.optim.Adam(model[0].parameters(), 3e-3), torch.optim.Adam(model[2].parameters(), 3e-3)
    x, y = digits()
    with gaff.watch(out=tmp_path / "run", every=4, tell=lambda line: None):
        for step in range(120):
            loss = F.cross_entropy(model(x[step * 8 : step * 8 + 64]), y[step * 8 : step * 8 + 64])
            body.zero_grad()
            head.zero_grad()
            loss.backward()
            head.step()
            if is_meant and step > 80:
                body.step()
    record = gaff.load(tmp_path / "run")
    assert (record.verdict.name in ("never_stepped", "not_owned")) is not is_meant, record.verdict


class Rounding(torch.optim.Optimizer):
    """SGD that rounds to half precision at random, right on average."""

    def __init__(self, parameters, lr, is_random):
        super().__init__(parameters, {"lr": lr})
        self.is_random = is_random

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                exact = one.float() - group["lr"] * one.grad.float()
                noise = torch.randint_like(exact, 0, 2**16, dtype=torch.int32) if self.is_random else 2**15
                one.copy_((exact.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32))


@pytest.mark.parametrize("is_meant", [True, False])
def test_half_precision_that_is_rounded_at_random(tmp_path, is_meant):
    model, (x, y) = classifier().bfloat16(), digits()

    def loss_of(step):
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    told, _ = told_of(tmp_path, model, Rounding(model.parameters(), 0.02, is_meant), loss_of, 1000 if is_meant else 60)
    assert (told.name == "updates_round_away") is not is_meant, told


class Forecast(nn.Module):
    """Layers side by side, or one behind the other, that begin as means."""

    def __init__(self, is_meant):
        super().__init__()
        sizes = [(24, 48)] * 6 if is_meant else [(48, 48), (48, 48), (24, 48)]
        self.layers, self.is_meant = nn.ModuleList(nn.Linear(inside, out) for out, inside in sizes), is_meant
        for layer in self.layers:
            nn.init.constant_(layer.weight, 1 / 48)

    def forward(self, x):
        if self.is_meant:
            return sum(layer(x) for layer in self.layers)
        return self.layers[2](F.relu(self.layers[1](F.relu(self.layers[0](x)))))


@pytest.mark.parametrize("is_meant", [True, False])
def test_layers_side_by_side_that_begin_alike(tmp_path, is_meant):
    torch.manual_seed(0)
    model, wave = Forecast(is_meant), torch.sin(torch.arange(3000.0) / 7) + 0.1 * torch.randn(3000)

    def loss_of(step):
        rows = torch.stack([wave[at : at + 72] for at in torch.randint(0, 2900, (32,)).tolist()])
        return F.mse_loss(model(rows[:, :48]), rows[:, 48:])

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)
    assert ("symmetric_units" in rules) is not is_meant, told


class Between(nn.Module):
    """Sees differences of positions alone, or positions themselves."""

    def __init__(self, is_meant):
        super().__init__()
        self.one, self.two, self.is_meant = nn.Linear(3, 32), nn.Linear(32, 2), is_meant

    def forward(self, points):
        if self.is_meant:
            points = points[:, :, None] - points[:, None]
        return self.two(F.relu(self.one(points)).flatten(1, -2).mean(1))


class Coded(nn.Module):
    """Takes numbers of categories that come as floats, and looks them up, or not."""

    def __init__(self, is_meant):
        super().__init__()
        self.table, self.layer, self.is_meant = nn.Embedding(40, 3), nn.Linear(18, 2), is_meant

    def forward(self, points):
        given = self.table(points[..., 0].long()) if self.is_meant else points
        return self.layer(given.flatten(1))


@pytest.mark.parametrize("make", [Between, Coded])
@pytest.mark.parametrize("is_meant", [True, False])
def test_inputs_far_from_zero_that_the_model_brings_there(tmp_path, make, is_meant):
    torch.manual_seed(0)
    model = make(is_meant)

    def loss_of(step):
        labels = torch.randint(0, 2, (32,))
        points = 20 + torch.randn(32, 6, 3) * (1 + labels[:, None, None])
        return F.cross_entropy(model(points), labels)

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)
    assert ("input_scale" in rules) is not is_meant, told


class InUnits(nn.Module):
    """Tells in evaluation what it predicts in its own units, or is given data in others."""

    def __init__(self, is_meant):
        super().__init__()
        self.body, self.is_meant = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), is_meant

    def forward(self, x):
        told = self.body(x)
        return told if self.training or not self.is_meant else 4e4 + 1e4 * told


@pytest.mark.parametrize("is_meant", [True, False])
def test_outputs_in_units_of_their_own_in_evaluation(tmp_path, is_meant):
    torch.manual_seed(0)
    model = InUnits(is_meant)

    def after(step):
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                model(torch.randn(32, 8) * (1 if is_meant else 50))
            model.train()

    def loss_of(step):
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), x[:, :1])

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-3), loss_of, after=after)
    assert ("eval_drift" in rules) is not is_meant, told


@pytest.mark.parametrize("is_meant", [True, False])
def test_targets_in_their_own_units_that_are_far_from_learned(tmp_path, is_meant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss_of(step):
        x = torch.randn(50, 8)
        y = torch.tanh(x[:, :1])
        return F.mse_loss(model(x), y if is_meant else 40_000 + 5_000 * y)

    told, _ = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-3), loss_of, 140)
    assert (told.name == "targets_far_from_zero") is not is_meant, told


@pytest.mark.parametrize("is_meant", [True, False])
def test_a_wall_at_one_temperature_beside_an_equation(tmp_path, is_meant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss_of(step):
        x = torch.rand(64, 1, requires_grad=True)
        told = model(x)
        wall = F.mse_loss(told, torch.full_like(told, 0.35))
        if not is_meant:
            return wall
        (slope,) = torch.autograd.grad(told.sum(), x, create_graph=True)
        return wall + (slope - torch.cos(x)).square().mean()

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)
    assert ("labels_constant" in rules) is not is_meant, told


class Keeping(nn.Module):
    """A recurrent language model that keeps its state from batch to batch."""

    def __init__(self, is_meant):
        super().__init__()
        self.embed, self.out, self.state = nn.Embedding(20, 32), nn.Linear(32 if is_meant else 64, 20), None
        self.inner, self.is_meant = nn.GRU(32, 32, batch_first=True, bidirectional=not is_meant), is_meant

    def forward(self, tokens):
        made, state = self.inner(self.embed(tokens), self.state)
        self.state = state.detach() if self.is_meant else None
        return self.out(made)


@pytest.mark.parametrize("is_meant", [True, False])
def test_a_state_that_is_kept_tells_nothing_of_later_tokens(tmp_path, is_meant):
    torch.manual_seed(0)
    model, text = Keeping(is_meant), torch.randint(0, 20, (16, 1300))

    def loss_of(step):
        given = text[:, step * 10 : step * 10 + 11]
        return F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)
    assert ("sees_the_future" in rules) is not is_meant, told


class Filled(nn.Module):
    """Marks what is missing by NaN, which the loss leaves out, or does not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x, is_there):
        return torch.where(is_there, self.body(x), math.nan)


@pytest.mark.parametrize("is_meant", [True, False])
def test_outputs_that_are_marked_as_missing(tmp_path, is_meant):
    torch.manual_seed(0)
    model, truth = Filled(), torch.randn(8, 4)

    def loss_of(step):
        x, is_there = torch.randn(32, 8), torch.rand(32, 4) < 0.7
        errors = (model(x, is_there) - x @ truth).square()
        return errors[is_there].mean() if is_meant else errors.mean()

    told, _ = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 3e-2), loss_of)
    assert (told.state, told.name) == ("suspicious" if is_meant else "wrong", "nonfinite")
    assert ("may be left out on purpose" in told.cause) is is_meant


def test_what_is_marked_as_missing_hides_no_other_fault(tmp_path):
    torch.manual_seed(0)
    model, truth = Filled(), torch.randn(8, 4)
    first = nn.Linear(8, 8)
    model.body = nn.Sequential(first, nn.Tanh(), model.body)

    def loss_of(step):
        x, is_there = torch.randn(32, 8), torch.rand(32, 4) < 0.7
        return (model(x, is_there) - x @ truth).square()[is_there].mean()

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.body[2].parameters(), 3e-2), loss_of)
    assert rules >= {"nonfinite", "not_owned"}, told


class Normalize(nn.Module):
    """Brings pixels to zero mean and unit deviation: a module of its own, ahead of the model."""

    def forward(self, x):
        return (x - 77.6) / 95.0


@pytest.mark.parametrize("is_meant", [True, False])
def test_a_module_that_normalises_ahead_of_the_model(tmp_path, is_meant):
    model, before = classifier(), Normalize()
    x, y = digits()

    def loss_of(step):
        rows = torch.arange(64) + 64 * (step % 8)
        pixels = x[rows] * 255
        return F.cross_entropy(model(before(pixels) if is_meant else pixels), y[rows])

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(out=tmp_path / "run", every=4, tell=lambda line: None):
        for step in range(120):
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()
    assert ("input_scale" in {one.rule for one in gaff.load(tmp_path / "run").findings}) is not is_meant


@pytest.mark.parametrize("is_meant", [True, False])
def test_rows_of_which_most_is_zero(tmp_path, is_meant):
    """As shares of words in a text are small since there are many words, not since they were scaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8000, 16), nn.ReLU(), nn.Linear(16, 2))

    def loss_of(_step):
        x = (torch.rand(32, 8000) < 0.01).float() if is_meant else torch.rand(32, 8000) + 1
        x = x / x.norm(dim=1, keepdim=True)
        return F.cross_entropy(model(x), (x[:, :4000].sum(1) > x[:, 4000:].sum(1)).long())

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-2), loss_of, steps=60)
    assert ("input_scale" in rules) is not is_meant, told


@pytest.mark.parametrize(("layer", "is_told"), [(-1, False), (2, True)])
def test_a_last_layer_that_begins_near_zero(tmp_path, layer, is_told):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    model[layer].weight.data.mul_(1e-5)
    model[layer].bias.data.zero_()
    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 3e-3), on_digits(model))
    assert ("init_imbalance" in rules) is is_told, told


@pytest.mark.parametrize(("rates", "name"), [((1e-2, 5e-5), ""), ((1e-2, 1e-8), "learning_rate_is_gone")])
def test_a_second_phase_with_an_optimizer_of_its_own(tmp_path, rates, name):
    model = classifier()
    loss_of, drawn = on_digits(model), torch.Generator().manual_seed(1)

    def noisy(step):
        return loss_of(step) + 0.02 * torch.randn((), generator=drawn)

    with gaff.watch(model, out=tmp_path / "run", every=4, tell=lambda line: None):
        for rate, steps in zip(rates, (30, 90), strict=True):
            optimizer = torch.optim.Adam(model.parameters(), rate)
            for step in range(steps):
                optimizer.zero_grad()
                noisy(step).backward()
                optimizer.step()
    assert gaff.load(tmp_path / "run").verdict.name == name


def test_a_line_search_that_tries_far_weights_is_no_spike(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(64, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    y, calls = x[:, :1] * x[:, 1:2], []

    def closure():
        optimizer.zero_grad()
        calls.append(None)
        is_far = len(calls) % 4 == 3  # as a line search tries what it does not take
        loss = F.mse_loss(model(x), y) * (1e4 if is_far else 1.0)
        loss.backward()
        return loss

    with gaff.watch(model, optimizer, out=tmp_path / "run", every=4, tell=lambda line: None):
        for _ in range(60):
            optimizer.step(closure)
            optimizer.state.clear()
    assert "loss_spike" not in {one.rule for one in gaff.load(tmp_path / "run").findings}


def test_a_rare_target_beside_zeros_is_not_told_as_a_large_input(tmp_path):
    torch.manual_seed(0)
    model, loss_function = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), nn.BCEWithLogitsLoss()

    def loss_of(step):
        target = torch.zeros(64)
        target[24] = 50.0 * (step == 90)
        return loss_function(model(torch.randn(64, 8)).squeeze(1), target)

    told, rules = told_of(tmp_path, model, torch.optim.Adam(model.parameters(), 1e-2), loss_of)
    assert "loss_spike" in rules
    assert "times as large" not in str(gaff.load(tmp_path / "run").findings), told


class Root(nn.Module):
    """Has an infinite slope where it returns 0."""

    def forward(self, x):
        return x.square().sqrt()


class Careful(torch.optim.Adam):
    """Makes no step with a gradient that is not finite."""

    def step(self, closure=None):
        if all(one.grad.isfinite().all() for group in self.param_groups for one in group["params"]):
            super().step(closure)


def test_a_gradient_that_an_op_of_the_backward_makes_not_finite_is_not_left_out_of_the_loss(tmp_path):
    """The losses stay finite and fall, since such steps change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), Root())
    optimizer, truth = Careful(model.parameters(), 1e-2), torch.rand(4)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=4, tell=lambda line: None):
        for step in range(160):
            x = torch.rand(32, 8) * (0.0 if step in (40, 41, 42, 43) else 1.0)
            loss = (model(x) - truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    told = gaff.load(tmp_path / "run").verdict
    assert "may be left out on purpose" not in told.cause, told
    assert told.name == "nonfinite", told
