"""How a training is set up: each fault is named by the verdict, and what merely looks like it is not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gaff
from gaff.engine.process.functions import LOSSES
from gaff.record.trainings import cases
from gaff.training.watch import step_facts

STEPS = 40


def watched(model, optimizer, step, tmp_path, steps=STEPS):
    with gaff.watch(out=tmp_path / "run", every=1):
        for number in range(steps):
            step(number)
            optimizer.step()
    return gaff.load(tmp_path / "run").verdict


def regression(loss_of, tmp_path, optimizer=None, model=None, steps=STEPS, data=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), 1e-2) if optimizer is None else optimizer(model.parameters())
    x = torch.randn(256, 6)
    y = x.sum(1, keepdim=True).tanh()

    def step(number):
        rows = torch.randint(0, 256, (16,))
        given = (x[rows], y[rows]) if data is None else data(x, y, number)
        optimizer.zero_grad()
        loss = loss_of(model, *given)
        loss.backward()

    return watched(model, optimizer, step, tmp_path, steps)


@pytest.mark.parametrize("turned", [lambda loss: -loss, lambda loss: 0 - loss, lambda loss: -1.0 * loss])
def test_a_minus_too_many(tmp_path, turned):
    told = regression(lambda model, x, y: turned(F.mse_loss(model(x), y)), tmp_path)
    assert (told.state, told.name) == ("wrong", "loss_sign")
    assert "the negative of a mean squared error" in told.cause


def test_a_negative_loss_that_is_meant(tmp_path):
    told = regression(lambda model, x, y: -(model(x) * y).tanh().mean(), tmp_path)
    assert told.state == "healthy"


def test_every_output_against_every_target(tmp_path):
    with pytest.warns(UserWarning, match="different to the input size") as warned:
        told = regression(lambda model, x, y: F.mse_loss(model(x), y[:, 0]), tmp_path)
    assert {one.filename for one in warned} == {__file__}  # where the script calls it
    assert (told.state, told.name) == ("wrong", "broadcast")
    assert "outputs of shape [16, 1] and targets of shape [16]" in told.cause
    assert all(not hasattr(getattr(F, name), "__wrapped__") for name in LOSSES if name != "cross_entropy")


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_quantiles_that_are_compared_within_an_example_are_no_fault(tmp_path):
    def loss_of(model, x, y):
        quantiles = model(x).expand(-1, 5) * torch.linspace(0.5, 1.5, 5)
        return F.smooth_l1_loss(quantiles[:, :, None], y[:, None, :].expand(-1, 1, 4), reduction="none").mean()

    assert regression(loss_of, tmp_path).name != "broadcast"


BY_HAND = {
    "rms": lambda away, y: away.square().mean().sqrt(),
    "norm": lambda away, y: away.norm(),
    "half": lambda away, y: (away**2 / 2).mean(),
    "weighted": lambda away, y: (away**2 * (1 + y**2)).mean(),
    "in parts": lambda away, y: (away / (y.abs() + 0.5)).abs().mean(),
    "quantile": lambda away, y: torch.maximum(0.9 * away, -0.1 * away).mean(),
    "log cosh": lambda away, y: away.cosh().log().mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_every_output_against_every_target_in_losses_by_hand(name, tmp_path):
    loss_of = BY_HAND[name]
    told = regression(lambda model, x, y: loss_of(model(x) - y[:, 0], y[:, 0]), tmp_path / "bad")
    assert (told.state, told.name) == ("wrong", "broadcast")
    assert "outputs of shape [16, 1]" in told.cause
    assert regression(lambda model, x, y: loss_of(model(x) - y, y), tmp_path / "good").state == "healthy"


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_one_target_for_all_is_no_fault(tmp_path):
    def loss_of(model, x, y):
        return F.mse_loss(model(x) - y, torch.zeros(1)) + 0 * F.l1_loss(model(x), y)

    assert regression(loss_of, tmp_path).name not in ("broadcast", "labels_constant")


@pytest.mark.slow
def test_labels_that_are_all_the_same(tmp_path):
    told = regression(lambda model, x, y: F.mse_loss(model(x), torch.full_like(y, 0.7)), tmp_path)
    assert (told.state, told.name) == ("suspicious", "labels_constant")
    residual = regression(lambda model, x, y: F.mse_loss(model(x) - y, torch.zeros_like(y)), tmp_path / "zero")
    assert residual.name != "labels_constant"  # an equation that is to hold


def loader_of(shuffle):
    x = torch.randn(64, 6)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=shuffle)


@pytest.mark.parametrize(("shuffle", "name"), [(False, "same_batch"), (True, "")])
def test_a_loader_that_is_begun_anew_in_every_step(tmp_path, shuffle, name):
    loader = loader_of(shuffle)
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path, data=lambda *_: next(iter(loader)))
    assert told.name == name


@pytest.mark.parametrize(("is_kept", "name"), [(True, "one_batch"), (False, "")])
def test_a_batch_that_was_taken_before_the_loop(tmp_path, is_kept, name):
    loader, kept = loader_of(True), []
    batches = (batch for _ in range(10) for batch in loader)

    def given(*_):
        kept.append(next(batches))
        return kept[0 if is_kept else -1]

    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path, data=given, steps=40)
    assert (told.state, told.name) == (("suspicious" if name else "healthy"), name)
    assert not is_kept or "the same batch at each of " in told.cause


@pytest.mark.parametrize("way", ["nodes of one graph", "a grid beside the data"])
def test_what_is_given_again_beside_others_is_no_one_batch(tmp_path, way):
    loader, whole = loader_of(True), torch.randn(64, 6)
    batches = (batch for _ in range(10) for batch in loader)

    def loss_of(model, x, y):
        if way == "nodes of one graph":
            return F.mse_loss(model(whole)[:16], y)
        return model(whole).square().mean() + F.mse_loss(model(x), y)

    assert regression(loss_of, tmp_path, data=lambda *_: next(batches), steps=40).name != "one_batch"


def test_a_checksum_on_a_device_tells_batches_apart():
    batch = torch.randn(16, 6)
    other = batch.clone()
    other[3, 4] += 1e-3
    turned = batch.flip(0)
    sums = [
        step_facts.summed_bytes(one).item() for one in (batch, batch.clone(), batch.T.contiguous().T, other, turned)
    ]
    assert sums[0] == sums[1] == sums[2]
    assert len(set(sums[2:])) == 3
    assert step_facts.device_checksum((batch,), {}) is None  # the CPU's is read at once
    turned = torch.randn(3, dtype=torch.complex64)
    assert step_facts.summed_bytes(turned.conj()).item() == step_facts.summed_bytes(turned.conj().resolve_conj()).item()


def test_all_data_in_every_step_is_no_fault(tmp_path):
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path, data=lambda x, y, _: (x, y))
    assert told.state == "healthy"


@pytest.mark.parametrize(("inside", "name"), [(nn.Dropout(0.1), "eval_mode_in_training"), (nn.ReLU(), "")])
def test_training_in_eval_mode(tmp_path, inside, name):
    model = nn.Sequential(nn.Linear(6, 16), inside, nn.Linear(16, 1)).eval()
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path, model=model)
    assert told.name == name
    assert told.state == ("suspicious" if name else "healthy")


def fine_tuned(tmp_path, model, parameters, evaluated=None, epochs=6, train=False):
    """The record of a small training, and the losses of the evaluation that each epoch begins with."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y, losses = (x.sum(1) > 0).long(), []
    optimizer = torch.optim.Adam(parameters, 1e-2)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(epochs):
            if evaluated is not None:
                evaluated.eval()
                with torch.no_grad():
                    losses.append(F.cross_entropy(model(x), y).item())
                evaluated.train(train)
            for at in range(0, 256, 16):
                optimizer.zero_grad()
                F.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
                optimizer.step()
    return gaff.load(tmp_path / "run"), losses


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def test_a_frozen_body_in_eval_mode_below_a_head_that_is_trained_is_meant(tmp_path):
    model = classifier().eval()
    model[:3].requires_grad_(False)
    model[3:].train()
    record, _ = fine_tuned(tmp_path, model, model[3:].parameters())
    assert record.verdict.state == "healthy"
    assert not record.findings
    assert set(record.scalar("samples").values) == {16}


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_every_evaluation_is_heard_whatever_mode_the_model_is_trained_in(tmp_path, train):
    model = classifier()
    record, losses = fine_tuned(tmp_path, model, model.parameters(), evaluated=model, train=train)
    told = [event["losses"]["cross_entropy"] for _, event in record.events("evaluated")]
    assert told == pytest.approx(losses)
    assert set(record.scalar("samples").values) == {16}
    assert [finding.rule for finding in record.findings] == ([] if train else ["eval_mode_in_training"])


WRITTEN_OUT = {
    "softmax, logarithm": lambda z, y, dim: -torch.log(z.softmax(dim)[torch.arange(len(y)), y] + 1e-8).mean(),
    "gathered": lambda z, y, dim: -z.softmax(dim).gather(1, y[:, None]).clamp(min=1e-9).log().mean(),
    "log_softmax": lambda z, y, dim: -z.log_softmax(dim)[torch.arange(len(y)), y].sum() / len(y),
    "with a little added": lambda z, y, dim: F.nll_loss(torch.log(z.softmax(dim) + 1e-9), y),
    "from a little on": lambda z, y, dim: F.nll_loss(z.softmax(dim).clamp_min(1e-9).log(), y),
}


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_a_likelihood_that_is_written_out_normalises_over_the_classes(tmp_path, kind, dim):
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(5, (96,))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for at in range(60):
            optimizer.zero_grad()
            chosen = torch.arange(at, at + 32) % 96
            WRITTEN_OUT[kind](model(x[chosen]), y[chosen], dim).backward()
            optimizer.step()
    assert [one.rule for one in gaff.load(tmp_path / "run").findings] == (["softmax_axis"] if dim == 0 else [])


def test_a_teacher_in_eval_mode_does_not_train(tmp_path):
    torch.manual_seed(0)
    student, teacher = classifier(), classifier().eval()
    optimizer = torch.optim.SGD(student.parameters(), 1e-2)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(12):
            optimizer.zero_grad()
            x = torch.randn(8, 8)
            F.mse_loss(student(x), teacher(x).detach()).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert set(record.scalar("samples").values) == {8}
    assert not record.findings


LIKELIHOODS = {
    "no minus": (lambda p, y: p[torch.arange(len(y)), y].mean(), ["loss_sign"]),
    "two": (lambda p, y: -(-p.gather(1, y[:, None]).squeeze(1)).mean() / 2, ["loss_sign"]),
    "by one advantage": (lambda p, y: -p.gather(1, y[:, None]).mean() * -0.5, []),
    "by a cost": (lambda p, y: p.gather(1, y[:, None]).mean() * 3.0, []),
    "behind": (lambda p, y: p[torch.arange(len(y)), y].mean() * -1, []),
    "inside": (lambda p, y: (-p.gather(1, y[:, None])).sum() / len(y), []),
    "by advantages": (lambda p, y: (p[torch.arange(len(y)), y] * torch.linspace(-1, 1, len(y))).mean(), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_likelihood_without_its_minus(tmp_path, kind):
    torch.manual_seed(0)
    x, (loss_of, rules) = torch.randn(96, 8), LIKELIHOODS[kind]
    y, model = x[:, :5].argmax(1), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with gaff.watch(out=tmp_path / "run", every=1):
        for at in range(40):
            optimizer.zero_grad()
            chosen = torch.arange(at, at + 32) % 96
            loss_of(model(x[chosen]).log_softmax(1), y[chosen]).backward()
            optimizer.step()
    assert [one.rule for one in gaff.load(tmp_path / "run").findings] == rules


def test_labels_that_are_learned_by_heart_in_epochs_of_four_batches(tmp_path):
    torch.manual_seed(0)
    x, y, others, theirs = (
        torch.randn(160, 20),
        torch.randint(10, (160,)),
        torch.randn(99, 20),
        torch.randint(10, (99,)),
    )
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    with gaff.watch(out=tmp_path / "run", every=5):
        for _ in range(40):
            for at in range(0, 160, 40):
                optimizer.zero_grad()
                F.cross_entropy(model(x[at : at + 40]), y[at : at + 40]).backward()
                optimizer.step()
            with torch.no_grad():
                losses.append(F.cross_entropy(model.eval()(others), theirs).item())
            model.train()
    record = gaff.load(tmp_path / "run")
    assert [told["losses"]["cross_entropy"] for _, told in record.events("evaluated")] == pytest.approx(losses)
    assert "memorises the training examples" in record.verdict.cause


@pytest.mark.parametrize(("kept", "name"), [(1, "frozen_by_accident"), (2, "")])
def test_what_is_frozen(tmp_path, kept, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    for parameter in list(model.parameters())[:-kept]:
        parameter.requires_grad_(False)
    told = regression(
        lambda model, x, y: F.mse_loss(model(x), y), tmp_path, model=model,
        optimizer=lambda parameters: torch.optim.SGD([one for one in parameters if one.requires_grad], 1e-3),
    )  # fmt: skip
    assert told.name == name


@pytest.mark.slow
def test_weights_that_begin_all_alike(tmp_path):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path, model=model)
    assert (told.state, told.name) == ("wrong", "symmetric_units")
    side = regression(
        lambda model, x, y: sum(F.mse_loss(head(x), y) for head in model), tmp_path / "side", steps=80,
        model=nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)]).apply(
            lambda layer: nn.init.zeros_(layer.weight) if isinstance(layer, nn.Linear) else None),
    )  # fmt: skip
    assert side.state == "healthy"  # side by side, each learns
    deep = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 1))
    for parameter in deep.parameters():
        nn.init.constant_(parameter, 0.1)
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path / "deep", steps=120, model=deep)
    assert told.name == "symmetric_units"  # though the loss falls
    alone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    nn.init.zeros_(alone[-1].weight)  # the last layer only, as many begin
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path / "last", model=alone)
    assert told.name != "symmetric_units"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decay", "name"),
    [
        (torch.optim.Adam, 2.0, "weight_decay_too_high"),
        (torch.optim.AdamW, 100.0, "weight_decay_too_high"),
        (torch.optim.AdamW, 0.01, ""),
    ],
)
def test_weight_decay(tmp_path, kind, decay, name):
    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path, steps=80,
                      optimizer=lambda parameters: kind(parameters, 5e-3, weight_decay=decay))  # fmt: skip
    assert told.name == name


@pytest.mark.parametrize(("lr", "name"), [(1e-5, "updates_round_away"), (1e-2, "")])
def test_steps_that_are_rounded_away(tmp_path, lr, name):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
    told = regression(lambda model, x, y: F.mse_loss(model(x.bfloat16()).float(), y), tmp_path, model=model,
                      optimizer=lambda parameters: torch.optim.Adam(parameters, lr))  # fmt: skip
    assert told.name == name


def test_a_low_limit_that_adam_divides_out_is_no_fault(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(number):
        optimizer.zero_grad()
        x = torch.randn(16, 6)
        (model(x) * torch.randn(16, 1) * 100).mean().backward()  # as a policy's loss, which does not fall
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)

    assert watched(model, optimizer, step, tmp_path).name != "clipped_to_nothing"


@pytest.mark.parametrize(("most", "name"), [(1e-6, "clipped_to_nothing"), (1.0, "")])
def test_gradients_that_are_clipped_away(tmp_path, most, name):
    def loss_of(model, x, y):
        loss = F.mse_loss(model(x), y)
        loss.register_hook(lambda gradient: None)
        return loss

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(256, 6)

    def step(number):
        optimizer.zero_grad()
        rows = x[torch.randint(0, 256, (16,))]
        loss_of(model, rows, rows.sum(1, keepdim=True)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), most)

    assert watched(model, optimizer, step, tmp_path).name == name


def test_an_input_that_was_lost(tmp_path):
    told = regression(lambda model, x, y: F.mse_loss(model(x - x), y), tmp_path)
    assert (told.state, told.name) == ("wrong", "input_not_used")


def test_updates_by_hand_are_told_as_what_they_are(tmp_path):
    model = nn.Linear(4, 1)
    with gaff.watch(model, out=tmp_path / "run"):
        for _ in range(30):
            model(torch.randn(8, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    told = gaff.load(tmp_path / "run").verdict
    assert (told.state, told.name) == ("not enough", "no_steps")
    assert "30 backward passes were seen, and no step of a torch.optim.Optimizer" in told.cause


def test_functions_of_losses_are_torchs_own_afterwards(tmp_path):
    before = {name: getattr(F, name) for name in LOSSES}
    with pytest.raises(ZeroDivisionError):
        regression(lambda model, x, y: F.mse_loss(model(x), y) / 0 if 1 / 0 else None, tmp_path)
    assert {name: getattr(F, name) for name in LOSSES} == before
    assert not hasattr(DataLoader.__iter__, "__wrapped__")


def _softmax(model, x):
    return model(x).softmax(-1)


def _ensemble(model, x):
    return torch.stack([_softmax(model, x), _softmax(model, -x)])


def _mixture(model, x):
    experts = torch.stack([model(x), model(-x), model(2 * x)], 1).softmax(-1)
    return _softmax(model, 3 * x)[:, :, None] * experts


SOFT = torch.rand(8, 3).softmax(-1)


@pytest.mark.parametrize(
    ("loss_of", "told"),
    [
        (lambda model, x, y: F.cross_entropy(model(x), y), {"classes"}),
        (lambda model, x, y: F.cross_entropy(model(x).log_softmax(-1), y), {"classes"}),  # the same again: no fault
        (lambda model, x, y: F.cross_entropy(_softmax(model, x), y), {"classes", "doubled"}),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x).clamp(1e-6, 1), y), {"classes", "doubled"}),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x) * 1.0, y), {"classes", "doubled"}),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x).double(), y), {"classes", "doubled"}),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x), SOFT), {"doubled"}),
        (lambda model, x, y: F.cross_entropy(model(x), SOFT), set()),
        (
            lambda model, x, y: F.binary_cross_entropy_with_logits(model(x).sigmoid().clamp(0, 1), SOFT),
            {"doubled", "mean_of"},
        ),
        (lambda model, x, y: F.cross_entropy(model(x), y) + model.weight.square().sum(), set()),
        (lambda model, x, y: -F.cross_entropy(model(x), y), {"negated"}),
        (lambda model, x, y: F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y), set()),  # not of pairs
        (lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1), {"classes"}),
        (
            lambda model, x, y: 0.5 * F.cross_entropy(_softmax(model, x), y, label_smoothing=0.1),
            {"classes", "doubled", "factor"},
        ),
        (lambda model, x, y: model(x).square().mean() + 0.5 * F.cross_entropy(_softmax(model, x), y), {"doubled"}),
        (lambda model, x, y: sum(F.cross_entropy(_softmax(model, x), y) for _ in range(14)), {"doubled"}),
        (
            lambda model, x, y: torch.stack([model(x).square().mean(), F.nll_loss(model(x).log_softmax(0), y)]).sum(),
            {"axis"},
        ),
        (
            lambda model, x, y: model(x).square().mean() + (model(x)[:, :1] - model(x)[:, 0].detach()).square().mean(),
            {"spread"},
        ),
        (lambda model, x, y: model(x).square().mean() - F.cross_entropy(_softmax(model, x), y), set()),
        (
            lambda model, x, y: model(x).square().mean() + (model(x)[:, 0][:, None] - torch.randn(8)).square().mean(),
            set(),
        ),
        (lambda model, x, y: model(x).square().mean() + F.nll_loss(model(x).log_softmax(0).T[:, :3], y[:3]), set()),
        (lambda model, x, y: model(x).square().mean() + F.nll_loss(_softmax(model, x).log(), y), set()),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x) * model(x), y), {"classes"}),  # a gate
        (lambda model, x, y: F.cross_entropy(_softmax(model, x) * 20 + model(x), y), {"classes"}),
        (lambda model, x, y: F.binary_cross_entropy_with_logits(20 * model(x).sigmoid() - 10, SOFT), {"mean_of"}),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x) * torch.ones(3), y), {"classes", "doubled"}),
        (lambda model, x, y: F.cross_entropy(_ensemble(model, x).mean(0), y), {"classes", "doubled"}),
        (lambda model, x, y: F.nll_loss(_ensemble(model, x).mean(0).log(), y), {"nll"}),
        (
            lambda model, x, y: F.cross_entropy((_softmax(model, x) + _softmax(model, -x)) / 2, y),
            {"classes", "doubled"},
        ),
        (lambda model, x, y: F.cross_entropy(_softmax(model, x) + model(x), y), {"classes"}),
        (lambda model, x, y: F.cross_entropy(_mixture(model, x).sum(1), y), {"classes", "doubled", "scores"}),
        (lambda model, x, y: F.cross_entropy(_mixture(model, x).sum(-2), y), {"classes", "doubled", "scores"}),
        (
            lambda model, x, y: F.cross_entropy(_mixture(model, x).sum(2), y),
            {"classes", "scores"},
        ),  # how alike they are
        (lambda model, x, y: F.cross_entropy(_mixture(model, x).sum(-1), y), {"classes", "scores"}),
    ],
)
def test_what_the_graph_behind_a_loss_tells(loss_of, told):
    from gaff.training.watch.loss_graph import facts_of_graph

    loss = loss_of(nn.Linear(4, 3), torch.randn(8, 4), torch.randint(0, 3, (8,)))
    assert set(facts_of_graph(loss, "loss")) - {"part", "terms"} == told  # which have tests of their own


@pytest.mark.parametrize(
    ("loss_of", "is_told"),
    [
        (lambda z, y: F.binary_cross_entropy_with_logits(z, y), True),
        (lambda z, y: (F.binary_cross_entropy_with_logits(z, y, reduction="none") * (y >= 0)).mean(), False),
        (lambda z, y: F.binary_cross_entropy_with_logits(z, y, weight=(y >= 0).float()), False),
        (lambda z, y: F.binary_cross_entropy_with_logits(z, (y + 1) / 2 + 1e-6), False),
    ],
)
def test_targets_of_what_is_left_out_may_be_anything(loss_of, is_told):
    from gaff.training.watch.loss_graph import facts_of_graph

    z, y = torch.randn(8, 3, requires_grad=True), torch.randint(0, 2, (8, 3)).float() * 2 - 1
    assert ("outside" in facts_of_graph(loss_of(z, y), "loss")) is is_told


def test_nothing_is_guessed_of_targets_between_zero_and_one():
    from gaff.training.watch.target_facts import target_of

    name, soft = "binary_cross_entropy_with_logits", torch.rand(64)
    assert math.isinf(target_of(name, soft, soft, {})["spread"])
    assert 0.6 < target_of(name, soft, (soft > 0.5).float(), {})["spread"] < 0.8


@pytest.mark.parametrize("count", [64, 1000])
def test_guessing_by_how_often_each_class_comes(count):
    from gaff.training.watch.target_facts import target_of

    labels = torch.tensor([0, 0, 0, 1]).repeat(count // 4)
    entropy = target_of("cross_entropy", torch.zeros(count, 3), labels, {})["entropy"]
    expected = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert float(entropy) == pytest.approx(float(expected), rel=0.06 if count < 100 else 1e-5)
    ignored = torch.cat([labels, torch.full((count,), -100)])
    assert float(target_of("cross_entropy", torch.zeros(2 * count, 3), ignored, {})["entropy"]) == float(entropy)


def least_of_one_answer(loss_of, width):
    """The least loss of one answer for all examples, by minimising it."""
    answer = torch.zeros(width, requires_grad=True)
    optimizer = torch.optim.LBFGS([answer], max_iter=200)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(answer)
        loss.backward()
        return loss

    for _ in range(5):
        loss = optimizer.step(closure)
    return float(loss.detach())


WEIGHTS = torch.tensor([1.0, 3.0, 7.0])


@pytest.mark.parametrize(
    "known",
    [{"weight": WEIGHTS}, {"label_smoothing": 0.1}, {"weight": WEIGHTS, "label_smoothing": 0.2}, {"ignore_index": 0}],
)
def test_guessing_counts_weights_smoothing_and_labels_left_out(known):
    from gaff.training.watch.target_facts import target_of

    torch.manual_seed(0)
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 3000, replacement=True)
    expected = least_of_one_answer(lambda answer: F.cross_entropy(answer.expand(3000, 3), labels, **known), 3)
    told = target_of("cross_entropy", torch.zeros(3000, 3), labels, {}, known)
    assert float(told["entropy"]) == pytest.approx(expected, rel=1e-4)


def test_guessing_counts_weights_of_positive_targets():
    from gaff.training.watch.target_facts import target_of

    torch.manual_seed(0)
    targets, weight = (torch.rand(500, 3) < torch.tensor([0.1, 0.3, 0.5])).float(), torch.tensor([9.0, 2.0, 1.0])
    loss = F.binary_cross_entropy_with_logits
    expected = least_of_one_answer(lambda answer: loss(answer.expand(500, 3), targets, pos_weight=weight), 3)
    told = target_of(loss.__name__, torch.zeros(500, 3), targets, {}, {"pos_weight": weight})
    assert float(told["spread"]) == pytest.approx(expected, rel=0.01)
    assert "spread" not in target_of(loss.__name__, torch.zeros(500, 3), targets, {}, {"weight": torch.rand(500, 3)})


def test_a_weighted_loss_is_held_to_the_guess_with_its_weights(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(320, 4)
    y = torch.multinomial(torch.tensor([0.9, 0.07, 0.03]), 320, replacement=True)
    model, loss_of = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=1 / torch.bincount(y).float())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for step in range(40):
            rows = slice(step % 10 * 32, step % 10 * 32 + 32)
            loss = loss_of(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    guess = cases(gaff.load(tmp_path / "run"))[0].guess
    assert guess["loss"] == pytest.approx(math.log(3), rel=0.01)  # inverse frequencies make all classes alike


def test_a_report_names_the_next_command(tmp_path):
    import json

    from gaff.views import run_text

    told = regression(lambda model, x, y: F.mse_loss(model(x), y), tmp_path,
                      optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-12))  # fmt: skip
    assert told.name == "learning_rate_too_low"
    head = tmp_path / "run" / "run.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "command": ["python", "my train.py", "--lr", "1"]}))
    text = run_text.report(gaff.load(tmp_path / "run"))
    assert "to be sure: gaff try --only lr=10x,lr=" in text
    assert "-- python 'my train.py' --lr 1" in text


def test_targets_of_other_kinds_are_left_out(tmp_path):
    """A wrapper that knows no least and largest, and a batched tensor: watching goes on."""

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "aminmax":
                raise NotImplementedError  # what the test is about: a kind of tensor that cannot tell its range
            return super().__torch_function__(func, types, args, kwargs or {})

    told = regression(
        lambda model, x, y: F.mse_loss(model(x), y.as_subclass(Wrapped)).as_subclass(torch.Tensor), tmp_path
    )
    assert told.state == "healthy"
    assert gaff.load(tmp_path / "run").notes == []
    mapped = regression(
        lambda model, x, y: torch.func.vmap(lambda a, b: F.mse_loss(a, b))(model(x), y).mean(), tmp_path / "vmap"
    )
    assert mapped.state == "healthy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaled", "by"),
    [
        (lambda loss: loss / 4, 0.25),
        (lambda loss: 0.5 * loss, 0.5),
        (lambda loss: loss * torch.tensor(2.0) / 8, 0.25),
        (lambda loss: loss, None),
        (lambda loss: loss / loss.detach().clamp(min=10).requires_grad_(), None),
    ],
)
def test_what_a_loss_is_multiplied_by_is_told_and_allowed_for(scaled, by, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(64, 6), torch.randint(0, 4, (64,))

    def step(number):
        optimizer.zero_grad()
        loss = scaled(F.cross_entropy(model(x), y))
        loss.backward()

    verdict = watched(model, optimizer, step, tmp_path)
    looks = [one for _, one in gaff.load(tmp_path / "run").part(0).events if one["kind"] == "look"]
    assert looks[0].get("factor") == by
    assert ("multiplied by" in verdict.cause) == (by is not None)
    if by is not None:
        assert looks[0]["guess"] < 1.4 * by


def test_a_loss_that_is_multiplied_by_a_negative_number_has_a_wrong_sign(tmp_path):
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(64, 6), torch.randint(0, 4, (64,))

    def step(number):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * -1).backward()

    assert watched(model, optimizer, step, tmp_path).name == "loss_sign"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["learned", "random"])
def test_what_guessing_gives_among_many_classes_is_of_the_labels_of_all_looks(kind, tmp_path):
    """A batch holds a few of 500 classes: its own entropy is far below that of all labels."""
    torch.manual_seed(0)
    centres = torch.randn(500, 32)
    model = nn.Linear(32, 500)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def step(number):
        labels = torch.randint(0, 500, (64,))
        x = torch.randn(64, 32) if kind == "random" else centres[labels] + 0.3 * torch.randn(64, 32)
        optimizer.zero_grad()
        F.cross_entropy(model(x) * 0.2, labels).backward()

    told = watched(model, optimizer, step, tmp_path, steps=150)
    record = gaff.load(tmp_path / "run")
    guess = [one["guess"] for _, one in record.events("look") if "guess" in one][-1]
    assert abs(guess - math.log(500)) < 0.15
    assert told.state == ("healthy" if kind == "learned" else "suspicious")
    assert told.name == ("" if kind == "learned" else "labels_do_not_belong")


class Tabular(nn.Module):
    """Numbers beside a category that is embedded before them."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 3), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers, category):
        embedded = self.embed(category)
        return self.layers(torch.cat([numbers, embedded], 1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(3, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_inputs_that_were_not_standardised_are_told_before_a_layer_that_bounds_them(tmp_path, kind, scale):
    torch.manual_seed(0)
    model = Recurrent(kind)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(10):
            optimizer.zero_grad()
            model(scale * torch.randn(16, 7, 3)).square().mean().backward()
            optimizer.step()
    told = [one.rule for one in gaff.load(tmp_path / "run").findings]
    assert ("input_scale" in told) is (scale > 1)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_inputs_that_were_not_standardised_are_told_beside_embeddings(tmp_path, scale):
    torch.manual_seed(0)
    model = Tabular()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(10):
            optimizer.zero_grad()
            model(scale * torch.rand(16, 3), torch.randint(0, 5, (16,))).square().mean().backward()
            optimizer.step()
    told = [one.rule for one in gaff.load(tmp_path / "run").findings]
    assert ("input_scale" in told) is (scale > 1)


class Factors(nn.Module):
    """What users think of items: both are embeddings, as are the means of either."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(60, 8)
        self.user_mean, self.item_mean = nn.Embedding(40, 1), nn.Embedding(60, 1)
        for one in (self.user_mean, self.item_mean):
            nn.init.zeros_(one.weight)

    def forward(self, pairs):
        users, items = pairs.unbind(1)
        return (self.user(users) * self.item(items)).sum(1) + (self.user_mean(users) + self.item_mean(items))[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "symmetric_units", "weight_decay_too_high"])
def test_a_model_of_embeddings_alone_is_judged_by_these(tmp_path, fault):
    torch.manual_seed(0)
    model, truth = Factors(), Factors()
    for one in model.parameters():
        one.data *= 0 if fault == "symmetric_units" else 0.3
    optimizer = torch.optim.Adam(model.parameters(), 3e-2, weight_decay=1.0 if fault == "weight_decay_too_high" else 0)

    def step(number):
        pairs = torch.stack([torch.randint(40, (256,)), torch.randint(60, (256,))], 1)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(pairs), (truth(pairs) > 0).float()).backward()

    told = watched(model, optimizer, step, tmp_path, 120)
    assert told.name == fault, told


def test_embeddings_of_single_numbers_may_begin_at_zero(tmp_path):
    torch.manual_seed(0)
    person, item = nn.Embedding(40, 1), nn.Embedding(60, 1)
    model = nn.ModuleList([person, item])
    truth = torch.randn(40), torch.randn(60)
    for one in model:
        nn.init.zeros_(one.weight)

    def step(number):
        at = torch.randint(40, (256,)), torch.randint(60, (256,))
        optimizer.zero_grad()
        wanted = torch.bernoulli((truth[0][at[0]] + truth[1][at[1]]).sigmoid())
        F.binary_cross_entropy_with_logits((person(at[0]) + item(at[1]))[:, 0], wanted).backward()

    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    assert watched(model, optimizer, step, tmp_path, 60).name != "symmetric_units"


def test_a_sum_that_is_negative_says_nothing_of_the_likelihood_in_it(tmp_path):
    def loss(model, x, y):
        scores = torch.cat([model(x), torch.zeros_like(y)], 1)
        likelihood = F.nll_loss((scores.softmax(1) + 1e-8).log(), (y[:, 0] > 0).long())
        return likelihood - 3 * F.cosine_similarity(scores, scores + 1).mean()

    assert regression(loss, tmp_path).name != "nll_of_scores"


def test_a_layer_that_was_replaced_and_is_in_a_variable_yet_is_no_model_that_is_not_trained(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(64, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    old = model[2]
    model[2] = nn.Linear(16, 3)

    def step(number):
        optimizer.zero_grad()
        model[2].zero_grad()
        F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()

    told = watched(model, optimizer, step, tmp_path)
    assert told.name == "not_owned", told
    assert old.weight.grad is None


def test_constant_labels_are_no_scale_for_the_first_loss(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(64, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(number):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.ones(64, dtype=torch.long)).backward()

    assert watched(model, optimizer, step, tmp_path, 100).name == "labels_constant"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 6), (6,)], ids=["images", "sequences"])
@pytest.mark.parametrize("kind", [0, 1, 2, -1, "classes last"])
def test_the_softmax_of_a_loss_over_images_runs_over_the_classes(tmp_path, sizes, kind):
    torch.manual_seed(0)
    x, y = torch.randn(64, 2, *sizes), torch.randint(3, (64, *sizes))
    conv = {1: nn.Conv1d, 2: nn.Conv2d}[len(sizes)]
    model = nn.Sequential(conv(2, 8, 3, padding=1), nn.ReLU(), conv(8, 3, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for at in range(40):
            optimizer.zero_grad()
            chosen = torch.arange(at, at + 16) % 64
            out = model(x[chosen])
            if kind == "classes last":
                logs = F.log_softmax(out.movedim(1, -1), -1).movedim(-1, 1).contiguous()
            else:
                logs = F.log_softmax(out, kind)
            F.nll_loss(logs, y[chosen]).backward()
            optimizer.step()
    found = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "softmax_axis"]
    assert bool(found) is (kind in (0, 2, -1))
    if found:
        dim = kind % (2 + len(sizes))
        assert f"runs over dimension {dim} of [16, 3, {', '.join(map(str, sizes))}]: nll_loss has" in found[0].message


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_probabilities_of_images_whose_logarithm_a_loss_is_given_run_over_the_classes(tmp_path, dim):
    x, y = torch.randn(64, 2, 5, 6), torch.randint(3, (64, 5, 6))
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Softmax(dim))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for at in range(40):
            optimizer.zero_grad()
            chosen = torch.arange(at, at + 16) % 64
            F.nll_loss(torch.log(model(x[chosen]) + 1e-8), y[chosen]).backward()
            optimizer.step()
    found = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "softmax_axis"]
    assert bool(found) is (dim != 1)


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_a_step_that_makes_nan_of_finite_gradients_is_told(tmp_path, eps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=eps)

    def step(number):
        optimizer.zero_grad()
        x = torch.randn(32, 6).clamp(min=-9)
        F.cross_entropy(model(x.half()).float(), (x[:, 0] > 0).long()).backward()

    verdict = watched(model, optimizer, step, tmp_path, 30)
    assert (verdict.name == "step_not_finite") is (eps == 1e-8)
    if eps == 1e-8:
        assert verdict.state == "wrong"
        assert "float16" in verdict.evidence[0]
        assert "eps=1e-4" in verdict.remedy


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.3, 3e-3])
def test_first_steps_that_replace_the_weights_are_told_where_the_loss_stays(tmp_path, lr):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    x = torch.randn(512, 16)
    y = x[:, :4].argmax(1)

    def step(number):
        rows = torch.randint(0, 512, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()

    verdict = watched(model, optimizer, step, tmp_path, 200)
    names = [verdict.name, *(one.name for one in verdict.alternatives)]
    assert ("learning_rate_too_high" in names) is (lr == 0.3)


def test_one_rare_class_is_not_said_to_be_learned_by_heart(tmp_path):
    """The median of single losses is far below their mean, which evaluations tell."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2), torch.randn(1600, 6)
    y = torch.rand(1600) < 0.02
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with gaff.watch(out=tmp_path / "run", every=1):
        for number in range(200):
            rows = torch.randint(0, 1200, (16,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows].long()).backward()
            optimizer.step()
            if number % 50 == 49:
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(x[1200:]), y[1200:].long())
                model.train()
    assert gaff.load(tmp_path / "run").verdict.state == "healthy"


def test_thousands_of_summands_are_looked_at_in_part():
    from gaff.training.watch.loss_graph import facts_of_graph
    from gaff.training.watch.loss_terms import terms_of

    model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = sum(model(x).square().mean() for _ in range(3000)) + F.cross_entropy(_softmax(model, x), y)
    assert len(terms_of(loss.grad_fn)) == 32
    assert set(facts_of_graph(loss, "loss")) == {"doubled", "part", "terms"}
