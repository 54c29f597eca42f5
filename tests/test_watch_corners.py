"""Legal trainings with something unusual in them: a watch goes on, and its numbers are those of a plain computation."""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import gaff
from gaff.errors import RecordError
from gaff.inspection.nonfinite.unsafe_ops import unsafe_op
from gaff.record.log import EVENT, SERIES, LogWriter
from gaff.record.matrix import pack_series
from gaff.record.statistics import EMPTY, Numbers
from gaff.training.statistics import plain
from gaff.training.watch import passes


def watched(tmp_path, model, loss, optimizer=None, steps=6, **options):
    """The record of some steps; fails where watching has ended before they have."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3) if optimizer is None else optimizer
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, tell=lambda line: None, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.steps == steps, record.notes
    assert not [one for one in record.notes if "Error" in one]
    return record


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids, *more):
        return self.head(self.table(ids))


def next_token(rows):
    def loss(model):
        ids = torch.randint(16, (rows, 12))
        scores = model(ids)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    return loss


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_language_models_with_batches_of_one_and_none(tmp_path, rows):
    watched(tmp_path, Language(), next_token(rows))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_beside_tokens_is_left_out(tmp_path):
    pieces = torch.nested.nested_tensor([torch.zeros(3, dtype=torch.long), torch.zeros(2, dtype=torch.long)])
    watched(tmp_path, Language(), lambda model: model(torch.randint(16, (4, 12)), pieces).square().mean())


class Own(torch.optim.SGD):
    """Finds its own learning rate, and has two numbers where others have one."""

    def __init__(self, parameters):
        super().__init__(parameters, 1e-3)
        for group in self.param_groups:
            group["lr"], group["eps"], group["betas"] = None, (1e-30, 1e-3), (0.9, 0.999)

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["step"] = state.get("step", 0) + 1
                state["exp_avg_sq"] = one.grad.square() + 1e-8
                one.data.add_(one.grad, alpha=-1e-3)


def test_an_optimizer_without_a_learning_rate_and_with_a_pair_of_eps(tmp_path):
    model = nn.Linear(8, 4)
    watched(tmp_path, model, lambda model: model(torch.randn(16, 8)).square().mean(), Own(model.parameters()))


@pytest.mark.parametrize("combine", [lambda y: (y * 1j).exp().real.mean(), lambda y: (y / (1 + 2j)).abs().mean()])
def test_complex_factors_in_a_loss(tmp_path, combine):
    watched(tmp_path, nn.Linear(8, 4), lambda model: combine(model(torch.randn(16, 8))))


def test_an_empty_batch_of_attention(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))
    watched(tmp_path, model, lambda model: model(torch.randn(0, 4, 6, 6)).sum())


def test_an_output_of_mkldnn(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(x) if self.training else self.fc(x).to_mkldnn()

    def loss(model):
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
        model.train()
        return model(torch.randn(4, 8)).square().mean()

    watched(tmp_path, Model(), loss)


def test_a_softmax_over_channels_is_no_attention(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Softmax(dim=1))
    record = watched(tmp_path, model, lambda model: model(torch.randn(2, 3, 8, 8)).square().mean())
    assert math.isnan(record.latest("1").get("entropy", math.nan))
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Softmax(dim=-1))
    record = watched(tmp_path / "other", model, lambda model: model(torch.randn(2, 3, 8, 8)).square().mean())
    assert 0.0 < record.latest("1")["entropy"] < 1.0


@pytest.mark.parametrize(
    ("function", "value", "share"),
    [
        (nn.Hardtanh(-4, 4), 2.0, 0.0),
        (nn.Hardtanh(-4, 4), 5.0, 1.0),
        (nn.Hardsigmoid(), 2.9, 0.0),
        (nn.Hardsigmoid(), 3.1, 1.0),
        (nn.Tanh(), 2.0, 0.0),
        (nn.Tanh(), 2.2, 1.0),
        (nn.Sigmoid(), 4.1, 0.0),
        (nn.Sigmoid(), -4.3, 1.0),
    ],
)
def test_saturated_is_where_a_function_is_flat(tmp_path, function, value, share):
    model = nn.Sequential(nn.Linear(3, 3), function)
    with torch.no_grad():
        model[0].weight.fill_(1e-6)
        model[0].bias.fill_(value)
    record = watched(tmp_path, model, lambda model: model(torch.randn(4, 3)).sum(), steps=1)
    assert record.latest("1")["saturated"] == share


class Router(nn.Module):
    def __init__(self, features, experts, kind):
        super().__init__()
        self.score = nn.Linear(features, experts)
        self.kind = kind

    def forward(self, x):
        scores = self.score(x)
        if self.kind == "mask":
            return scores, F.one_hot(scores.argmax(-1), scores.shape[-1])
        return scores, scores.argmax(-1) if self.kind == "one" else scores.topk(3).indices


class Mixture(nn.Module):
    def __init__(self, experts, kind):
        super().__init__()
        self.router = Router(4, experts, kind)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x):
        scores, self.chosen = self.router(x)
        shares = scores.softmax(-1)
        return sum(shares[..., at : at + 1] * one(x) for at, one in enumerate(self.experts))


@pytest.mark.parametrize("shape", [(8,), (4, 8), (32, 9)])
@pytest.mark.parametrize("kind", ["one", "several", "mask"])
def test_where_tokens_go_is_told_whatever_the_shapes_are(tmp_path, shape, kind):
    model = Mixture(8, kind)
    record = watched(tmp_path, model, lambda model: model(torch.randn(*shape, 4)).square().mean(), steps=1)
    chosen = (
        model.chosen.flatten(0, -2).sum(0) if kind == "mask" else torch.bincount(model.chosen.flatten(), minlength=8)
    )
    (told,) = [
        known for site in record.sites if "load" in (known := record.latest(site)) and known["load"] == known["load"]
    ]
    assert told["load"] == pytest.approx(float(chosen.max() * 8 / chosen.sum()))
    assert told["idle"] == pytest.approx(float((chosen == 0).float().mean()))
    assert told["dropped"] == 0.0


def test_units_of_complex_outputs_are_features(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(4, 8, dtype=torch.complex64)

        def forward(self, x):
            return self.w(x)

    model = Model()
    with torch.no_grad():
        model.w.weight[:3] = 0
        model.w.bias[:3] = 0
    x = torch.randn(16, 4, dtype=torch.complex64)
    record = watched(tmp_path, model, lambda model: model(x)[:, 3:].abs().mean(), steps=1)
    assert record.latest(":output")["dead"] == pytest.approx(3 / 8)


def test_units_of_an_image_without_a_batch_are_its_channels(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:] = torch.tensor([-100.0, -100.0, 100.0, 100.0])
    record = watched(tmp_path, model, lambda model: model(torch.randn(1, 9, 9)).mean(), steps=1)
    assert record.latest("1")["dead"] == 0.5


def test_the_median_magnitude_counts_zeros():
    for zeros in (0, 400, 600):
        values, row = torch.zeros(1000), torch.tensor(EMPTY, dtype=torch.float64)
        values[zeros:] = 2.0 ** torch.linspace(-8, 8, 1000 - zeros)
        plain.observe_(values, row, True)
        middle = values.median().item()
        assert middle <= Numbers(row.tolist()).median_magnitude <= 2 * middle


@pytest.mark.parametrize(
    "backward",
    [
        lambda scaler, loss: scaler.scale(loss).backward(),
        lambda scaler, loss: (scaler.scale(loss * 4) / 4).backward(),
        lambda scaler, loss: torch.autograd.backward(scaler.scale([loss])),
        lambda scaler, loss: (scaler.scale(loss / 2) + scaler.scale(loss / 2)).backward(),
        lambda scaler, loss: scaler.scale(loss[None].expand(3)).mean().backward(),
    ],
)
def test_losses_and_gradients_are_told_without_a_scaler_however_it_is_used(tmp_path, backward):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(8, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-9), torch.amp.GradScaler("cpu")
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, tell=lambda line: None):
        for step in range(6):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if step < 4:
                backward(scaler, loss)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    middle = model[0](x).detach().requires_grad_()
    loss = model[1](middle).square().mean()
    loss.backward()
    record = gaff.load(tmp_path / "run")
    (name,) = [one for one in record.scalars if one.startswith("loss:")][:1]
    assert record.scalar(name).values[0] == pytest.approx(loss.item(), rel=1e-4)
    assert record.series("0:grad_output", "norm").values[0] == pytest.approx(middle.grad.norm().item(), rel=1e-4)
    assert record.scalar("scale").steps == [0, 1, 2, 3]


WEIGHTS = torch.tensor([0.1, 1.0, 2.0])


@pytest.mark.parametrize(
    ("loss", "whole"),
    [
        (lambda a, y: F.cross_entropy(a, y, weight=WEIGHTS), lambda a, y: F.cross_entropy(a, y, weight=WEIGHTS)),
        (lambda a, y: F.cross_entropy(a, y, weight=WEIGHTS, reduction="sum"),
         lambda a, y: F.cross_entropy(a, y, weight=WEIGHTS)),
        (lambda a, y: F.cross_entropy(a, F.one_hot(y, 3).float(), reduction="sum"), F.cross_entropy),
        (lambda a, y: F.multilabel_margin_loss(a, F.pad(y[:, None], (0, 2), value=-1), reduction="sum"),
         lambda a, y: F.multilabel_margin_loss(a, F.pad(y[:, None], (0, 2), value=-1))),
    ],
)  # fmt: skip
def test_losses_of_evaluations_are_means_as_torch_has_them(tmp_path, loss, whole):
    model, x, y = nn.Linear(4, 3), torch.randn(60, 4), torch.arange(3).repeat_interleave(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gaff.watch(model, optimizer, out=tmp_path / "run", tell=lambda line: None):
        for step in range(30):
            model.train()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    for at in range(0, 60, 20):
                        loss(model(x[at : at + 20]), y[at : at + 20])
    (told,) = gaff.load(tmp_path / "run").evaluated().values()
    assert [value for _, value in told] == pytest.approx([whole(model(x), y).item()] * 3)


def test_limits_hold_where_a_scaler_scales_something_else():
    weight, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), torch.amp.GradScaler("cpu")
    with gaff.clip_gradients(optimizer, value=1.0, when="backward", nonfinite="zero") as clipped:
        scaler.scale(other.sum())
        (weight * torch.tensor([math.inf, 1e6, 0.5])).sum().backward()
        optimizer.step()
    assert weight.tolist() == [0.0, -1.0, -0.5]
    assert clipped.audit.clipped == 1


@pytest.mark.filterwarnings("ignore:gaff. inf made by")
def test_a_sum_that_overflows_is_no_infinite_value_that_is_meant():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, c):
            return (self.fc(x).abs() + 1) * c * c

    model = Model().eval()
    with torch.no_grad(), gaff.guard(model, action="warn") as guard:
        for _ in range(3):
            assert model(torch.ones(4096, 4), 5e18).isfinite().all()
        assert model(torch.ones(4096, 4), 1e30).isinf().all()
    assert len(guard.reports) == 1
    assert not guard.notes


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "evaluated"},
        {"kind": "evaluated", "losses": [1]},
        {"kind": "look", "phase": "train", "guess": 1.0, "guess_of": "l", "labels": ["x"]},
        {"kind": "look", "phase": "train", "guess": 1.0},
        {"kind": "look", "phase": "train", "reach": [1.0]},
        {"kind": "look", "phase": "train", "factor_of": "l", "weight": "x"},
        {"kind": "made", "steps": 0, "backwards": "x"},
    ],
)
def test_an_event_that_is_none_of_gaffs_is_an_error_of_the_record(tmp_path, event):
    log = LogWriter(tmp_path / "rank0.gaff")
    log.write_json(EVENT, {"kind": "begin"})
    log.write(SERIES, pack_series({"step": [0.0, 1.0], "loss:l": [1.0, 2.0], "lr": [0.1, 0.1]}))
    log.write_json(EVENT, event, 1)
    log.close()
    with pytest.raises(RecordError, match="an event that cannot be read"):
        assert gaff.load(tmp_path).verdict


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("gaff.training.watch.token_facts.TokenFacts.given", "sequences of tokens"),
        ("gaff.training.watch.batch_layout.BatchLayout.given", "what lies where in a batch"),
        ("gaff.training.watch.target_facts.target_of", "targets"),
        ("gaff.training.watch.losses.facts_of_graph", "the graphs behind losses"),
        ("gaff.training.watch.attention.shown_by", "attention"),
    ],
)
def test_an_error_in_one_fact_costs_that_fact_alone(tmp_path, monkeypatch, part, what):
    def fail(*args, **kwargs):
        raise LookupError("nothing there")

    monkeypatch.setattr(part, fail)
    monkeypatch.setattr("gaff.training.watch.shield.Shield.is_strict", False)
    torch.manual_seed(0)
    model = nn.Sequential(Language(), nn.Dropout(0.1))
    optimizer, ids = torch.optim.SGD(model.parameters(), 1e-2), torch.randint(16, (4, 12))
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, tell=lambda line: None):
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert len(record.looks) == 30
    told = f"{what}: not looked at any more, by an error of gaff's own: LookupError: nothing there (in "
    assert [one.startswith(told) for one in record.notes].count(True) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_first_overflows_of_a_scaler_are_no_finding(tmp_path, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(torch.randn(16, 8)).float(), torch.randn(16, 3))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**22
    assert [one.rule for one in gaff.load(tmp_path / "run").findings if one.rule == "nonfinite"] == []


def test_a_penalty_on_scaled_gradients_that_overflow_is_no_finding(tmp_path):
    """As torch's documentation has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    losses = []
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(torch.randn(16, 8)).float(), torch.randn(16, 3))
            scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            penalty = sum((one.float() / scaler.get_scale()).square().sum() for one in scaled).sqrt()
            losses.append((loss + 0.01 * penalty).item())
            scaler.scale(loss + 0.01 * penalty).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not math.isfinite(losses[0])
    assert math.isfinite(losses[-1])
    assert [one.rule for one in gaff.load(tmp_path / "run").findings if one.rule == "nonfinite"] == []


@pytest.mark.parametrize("which", ["first", "second", "after a mask"])
def test_the_example_that_makes_a_loss_jump_is_told_of_any_call_of_the_step(tmp_path, which):
    torch.manual_seed(0)
    true = torch.randn(8, 3)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, mask=None):
            return self.layer(x if mask is None else x * mask)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=10):
        for step in range(60):
            one, other = torch.randn(16, 8), torch.randn(16, 8)
            if step == 50:
                (other if which == "second" else one)[2] *= 100
            optimizer.zero_grad()
            if which == "after a mask":
                loss = F.mse_loss(model(mask=torch.ones(16, 1), x=one), one @ true)
            else:
                loss = F.mse_loss(model(one), one @ true) + F.mse_loss(model(other), other @ true)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    (found,) = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "loss_spike"]
    assert found.evidence["batch_indices"] == [2]
    call = {"first": "of call 1 of 2", "second": "of call 2 of 2", "after a mask": "of the batch"}[which]
    assert f"the inputs at [2] {call}" in found.message


@pytest.mark.parametrize(
    "made",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda one: prune.l1_unstructured(one, "weight", 0.1)],
    ids=["weight_norm", "spectral_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_origin_is_found_in_a_model_that_holds_what_no_copy_takes(tmp_path, made):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = made(nn.Linear(8, 3))

        def forward(self, x):
            self.kept = self.layer(x)  # an activation as an attribute
            return torch.log(self.kept * 0)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    (found,) = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "nonfinite"]
    assert found.site == "/log#0"


def test_an_exception_of_the_programs_own_while_listening_ends_is_no_error_later(monkeypatch):
    """A timeout by a signal handler, which may raise anywhere."""

    ahead = []

    def interrupt():
        raise TimeoutError

    def at_each(ask):
        listening = ExitStack()
        ahead.append(ask)
        listening.callback(ahead.clear)
        listening.callback(interrupt)
        return listening

    monkeypatch.setattr(passes, "backward_passes", SimpleNamespace(at_each=at_each))
    listener = passes.PassListener(lambda outputs: None, shield=None)
    listener.switch(is_on=True)
    assert len(ahead) == 1
    with pytest.raises(TimeoutError):
        listener.switch(is_on=False)
    listener.switch(is_on=False)
    assert ahead == []


def test_a_logarithm_that_a_where_leaves_out_is_not_what_makes_a_loss_infinite():
    model = nn.Linear(4, 3)
    p = F.relu(model(torch.randn(8, 4)))
    entropy = -torch.where(p > 0, p * torch.log(p), torch.zeros_like(p)).sum(1)
    mask = torch.zeros(8)
    assert unsafe_op((entropy * mask).sum() / mask.sum()) == "a division is by 0 at 1 of 1 elements"
    assert unsafe_op(torch.where(p >= 0, p * torch.log(p), 0 * p).sum()).startswith("log is given 0 or less")


def test_a_model_that_returns_a_loss_in_training_and_a_measure_in_evaluation(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 4)

        def forward(self, x, y):
            scores = self.net(x)
            return F.cross_entropy(scores, y) if self.training else (scores.argmax(1) == y).float().mean()

    torch.manual_seed(0)
    model = Both()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    x = torch.randn(256, 8)
    y = x[:, :4].argmax(1)
    with gaff.watch(out=tmp_path / "run", every=5):
        for step in range(120):
            model.train()
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
            if step % 15 == 14:
                model.eval()
                with torch.no_grad():
                    model(x, y)
    assert "eval_drift" not in [one.rule for one in gaff.load(tmp_path / "run").findings]


@pytest.mark.parametrize("together", [False, True])
def test_a_nan_in_a_loss_beside_a_scaler_is_told(tmp_path, together):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with gaff.watch(out=tmp_path / "run", every=1):
        for step in range(6):
            optimizer.zero_grad()
            mask = torch.zeros(4) if step == 4 else torch.ones(4)
            made = [(model(torch.randn(4, 8)).square().mean(1) * mask).sum() / mask.sum() for _ in range(2)]
            if together:
                sum(scaler.scale(one) for one in made).backward()
            else:
                for one in made:
                    scaler.scale(one).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "nonfinite" in [one.rule for one in gaff.load(tmp_path / "run").findings]
