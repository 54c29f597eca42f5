"""What gaff try changes in a process, how outcomes are compared, and what is concluded from them."""

import json
import math
import random
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gaff.engine.process.models import RootCalls
from gaff.errors import PlanError, RecordError
from gaff.record.causes import claims
from gaff.record.experiments import KINDS, Experiment, compare, read_tried
from gaff.record.run_case import RunCase
from gaff.record.verdict import judge
from gaff.training.diagnosis import changes, data
from gaff.training.diagnosis.trial import MAKERS, Trial
from gaff.views.trials_text import trials_table


@pytest.mark.parametrize(
    ("word", "kind", "value", "is_factor", "name"),
    [
        ("lr=0.1x", "lr", 0.1, True, "lr=0.1x"),
        ("lr=1e-3", "lr", 1e-3, False, "lr=0.001"),
        ("lr", "lr", 0.1, True, "lr=0.1x"),
        ("warmup=50", "warmup", 50, False, "warmup=50"),
        ("clip", "clip", 1, False, "clip=1"),
        ("decay", "decay", 0, False, "decay=0"),
        (" scramble", "scramble", None, False, "scramble"),
    ],
)
def test_experiments_are_read_as_they_are_written(word, kind, value, is_factor, name):
    told = Experiment.parse(word)
    assert (told.kind, told.value, told.is_factor, told.name) == (kind, value, is_factor, name)
    assert Experiment.parse(told.name) == told


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("lrr=2", "'lrr=2' is no experiment: expected one of lr, warmup"),
        ("scramble=2", "scramble takes no value"),
        ("clip=0", "expected a number, such as 'clip=1'"),
        ("lr=fast", "expected a number, such as 'lr=0.1x'"),
        ("decay=-1", "expected a number"),
        ("clip=2x", "expected a number"),
    ],
)
def test_what_is_no_experiment_is_refused(word, words):
    with pytest.raises(PlanError, match=words.replace("(", r"\(")):
        Experiment.parse(word)


def test_every_kind_can_be_made():
    assert set(MAKERS) == set(KINDS)
    for kind in KINDS:
        assert isinstance(MAKERS[kind](Experiment.parse(kind)), changes.Change)


# what is changed


def stepped(change, lr=0.1, steps=1, **more):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 2 * lr}], lr=lr, **more)
    seen = []
    for _ in range(steps):
        model(torch.ones(4, 3)).sum().backward()
        change.before_step(optimizer)
        seen.append([dict(group) for group in optimizer.param_groups])
        optimizer.step()
        change.after_step(optimizer)
    return model, optimizer, seen


def test_learning_rates_are_others_during_the_step_only():
    for value, is_factor, expected in ((0.1, True, [0.01, 0.02]), (0.5, False, [0.5, 0.5])):
        change = changes.learning_rate(value, is_factor=is_factor)
        _, optimizer, seen = stepped(change)
        assert [group["lr"] for group in seen[0]] == pytest.approx(expected)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        assert change.acted == 2


def test_a_learning_rate_that_is_a_tensor_keeps_its_identity():
    lr = torch.tensor(0.1)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=lr, foreach=False)
    change = changes.learning_rate(0.1, is_factor=True)
    parameter.grad = torch.ones(2)
    change.before_step(optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    optimizer.step()
    change.after_step(optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(0.1)


def test_warmup_rises_evenly():
    _, optimizer, seen = stepped(changes.warmup(4), steps=6)
    assert [groups[0]["lr"] for groups in seen] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_step_that_raised_is_put_right_by_the_next():
    change = changes.learning_rate(0.1, is_factor=True)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    change.before_step(optimizer)  # and the step raises
    change.before_step(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    change.after_step(optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_decay_norms_and_clearing():
    change = changes.weight_decay(0.0)
    _, optimizer, seen = stepped(change, weight_decay=0.3)
    assert [group["weight_decay"] for group in seen[0]] == [0, 0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]
    assert change.acted == 2
    idle = changes.weight_decay(0.0)
    stepped(idle)
    assert (idle.acted, idle.why_not) == (0, "weight decay was 0 already")
    clip = changes.LimitNorm(1.0)
    model, _, _ = stepped(clip)
    assert clip.acted == 1
    assert math.hypot(model.weight.grad.norm(), model.bias.grad.norm()) == pytest.approx(1, rel=1e-4)
    clear = changes.ClearGradients()
    model, optimizer, _ = stepped(clear, steps=3)
    assert model.weight.grad is not None  # a script may look at it
    clear.around(model, ((), {}), ExitStack())  # when the next call begins
    assert model.weight.grad is None
    assert (clear.acted, type(optimizer).__name__) == (3, "SGD")


def call(change, module, *args, **kwargs):
    from contextlib import ExitStack

    with ExitStack() as stack:
        return change.around(module, (args, kwargs), stack)


def test_what_is_frozen_or_left_out_is_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([model[1].weight], lr=0.1)
    change = changes.Unfreeze()
    call(change, model, torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    change.before_step(optimizer)
    change.before_step(optimizer)
    assert all(one.requires_grad for one in model.parameters())
    assert {id(one) for one in optimizer.param_groups[0]["params"]} == {id(one) for one in model.parameters()}
    assert len(optimizer.param_groups[0]["params"]) == 4
    assert change.acted == 5


def test_training_mode_lasts_for_the_call():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).eval()
    change = changes.TrainMode()
    modes = []
    model[0].register_forward_hook(lambda module, given, output: modes.append(module.training))
    from contextlib import ExitStack

    with ExitStack() as stack:
        change.around(model, ((), {}), stack)
        model(torch.ones(3, 2))
    assert modes == [True]
    assert not any(one.training for one in model.modules())
    assert change.acted == 1


def test_autocast_is_off_whoever_turns_it_on(monkeypatch):
    monkeypatch.setattr(torch.autocast, "__enter__", torch.autocast.__enter__)
    change = changes.FullPrecision()
    change.install()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert change.acted == 1


def test_seeds_are_others(monkeypatch):
    numpy = pytest.importorskip("numpy")
    for owner, name in ((torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed"),
                        (numpy.random, "seed"), (numpy.random, "default_rng")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with torch.random.fork_rng():
        seed = torch.manual_seed
        expected = seed(8).seed and torch.randn(3)
        changes.Seed(1).install()
        torch.manual_seed(7)
        assert torch.equal(torch.randn(3), expected)
        assert numpy.random.default_rng(4).random() == numpy.random.Generator(numpy.random.PCG64(5)).random()


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x, y=None, attention_mask=None, labels=None):
        return self.lin(x)


def test_rows_are_permuted_against_what_is_the_truth():
    rows, truth = torch.arange(12.0).view(6, 2), torch.arange(6)
    mask = torch.arange(6)[:, None].expand(6, 3)
    change, module = data.Scramble(), Masked()
    state = torch.get_rng_state()
    args, kwargs = call(change, module, rows, truth, attention_mask=mask, labels=truth)
    assert torch.equal(torch.get_rng_state(), state)
    assert args[1] is truth  # named y
    assert kwargs["labels"] is truth
    order = kwargs["attention_mask"][:, 0]
    assert torch.equal(args[0], rows[order])
    assert sorted(order.tolist()) == list(range(6))
    assert not (order == torch.arange(6)).any()  # no row stays
    assert torch.equal(rows, torch.arange(12.0).view(6, 2))  # the script's own is as it was
    nested = {"pixel_values": rows, "labels": truth}
    args, _ = call(data.Scramble(), Masked(), nested)
    assert args[0]["labels"] is truth
    assert not torch.equal(args[0]["pixel_values"], rows)
    alone = data.Scramble()
    call(alone, Masked(), rows[:1])
    assert (alone.acted, alone.why_not) == (0, "no batch has two rows or more")


def test_inputs_are_zeros_and_what_another_module_returned_stays():
    hidden = torch.ones(2, 2, requires_grad=True) * 2
    args, kwargs = call(data.Blind(), Masked(), hidden, attention_mask=torch.ones(2, 2), labels=torch.ones(2))
    assert args[0] is hidden
    assert float(kwargs["attention_mask"].sum()) == 4
    args, _ = call(data.Blind(), Masked(), torch.ones(2, 2))
    assert float(args[0].sum()) == 0


@pytest.fixture
def as_before(monkeypatch):
    from gaff.engine.process.functions import LOSSES

    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    for name in LOSSES:
        monkeypatch.setattr(F, name, getattr(F, name))


def test_the_first_batch_of_a_loader_comes_again(as_before):
    change = data.OneBatch()
    change.install()
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4)
    batches = [one[0].tolist() for _ in range(2) for one in loader]
    assert batches == [[0, 1, 2, 3]] * 6
    assert len(iter(loader)) == 3
    with torch.no_grad():
        assert [one[0].tolist() for one in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    first = next(iter(loader))[0]
    first.zero_()  # a batch that the script writes into
    assert next(iter(loader))[0].tolist() == [0, 1, 2, 3]


def test_without_a_loader_inputs_and_targets_come_again(as_before):
    change, model = data.OneBatch(), nn.Linear(2, 3)
    change.install()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    losses = []
    batches = [(torch.randn(5, 2), torch.randint(0, 3, (5,))) for _ in range(3)]
    for x, y in batches:
        args, _ = call(change, model, x)
        losses.append(nn.CrossEntropyLoss()(model(*args), y).item())
        change.after_step(optimizer)
    assert losses == [losses[0]] * 3
    other = torch.randn(4, 2)
    assert call(change, model, other)[0][0] is other  # of another shape


def test_outermost_calls_only():
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    def around(module, call, args, kwargs):
        seen.append(module)
        return call(args[0] + 1, **kwargs)

    x = torch.randn(1, 2)
    before = nn.Module.__call__
    with RootCalls(around):
        got = model(x)
    assert seen == [model]
    assert torch.equal(got, model(x + 1))
    assert nn.Module.__call__ is before


# what came of it


def falling(to, steps=100, start=2.3):
    return [to + (start - to) * 0.95**step + 0.01 * (step % 3) for step in range(steps)]


def made(bare, **runs):
    told = [("again", bare, {}), ("seed=1", [one + 0.005 for one in bare], {})]
    told += [(name.replace("_", "="), losses, {"acted": 1}) for name, losses in runs.items()]
    return compare(100, "loss", bare, told)


def test_outcomes_are_compared_with_the_noise():
    known = made(falling(0.5), **{"lr_0.1x": falling(2.0), "lr_10x": falling(0.505), "clip_1": [math.nan] * 100})
    assert known.is_repeatable
    assert [known.effect(one) for one in known.changed] == ["same", "higher", "same", "higher"]
    assert known.bare.start == pytest.approx(2.3)
    assert known.get("lr=0.1x").loss == pytest.approx(2.0, abs=0.05)
    short = compare(
        100, "loss", falling(0.5), [("clip=1", falling(0.5)[:20], {}), ("fp32", [], {"why_not": "never on"})]
    )
    assert [(one.loss, one.why_not) for one in short.changed] == [(None, "it ended after 20 steps"), (None, "never on")]
    assert short.is_repeatable is None
    assert made(falling(0.5)).to_dict()["changed"][0]["loss"] is not None
    assert compare(9, "loss", falling(1), [("again", falling(1.1), {})]).is_repeatable is False


def verdict(known, steps=100, **more):
    return judge(RunCase((), steps, 40, experiments=known, **more))


STUCK = [2.3 + 0.005 * (step % 3) for step in range(100)]


@pytest.mark.parametrize(
    ("bare", "runs", "name"),
    [
        (falling(1.7), {"decay_0": falling(0.01), "lr_0.1x": falling(0.9)}, "weight_decay_too_high"),
        ([2.3, *[900.0] * 99], {"lr_0.1x": falling(0.02), "clip_1": falling(0.05)}, "learning_rate_too_high"),
        ([2.3] * 5 + [math.nan] * 95, {"lr_0.1x": falling(0.02)}, "learning_rate_too_high"),
        (STUCK, {"lr_100x": falling(0.5)}, "learning_rate_too_low"),
        (STUCK, {"unfreeze": falling(0.5), "lr_10x": falling(2.2)}, "frozen_by_accident"),
        (STUCK, {"train-mode": falling(0.5)}, "eval_mode_in_training"),
        (STUCK, {"fp32": falling(0.5), "lr_0.1x": falling(0.5)}, "half_range"),
        (STUCK, {"zero-grad": falling(0.5), "clip_1": falling(0.6)}, "not_cleared"),
        (STUCK, {"scramble": [one + 0.001 for one in STUCK], "one-batch": falling(0.1)}, "labels_do_not_belong"),
        (STUCK, {"scramble": STUCK, "blind": STUCK, "one-batch": STUCK}, "input_not_used"),
    ],
)
def test_what_helps_is_the_cause(bare, runs, name):
    told = verdict(made(bare, **runs))
    assert (told.state, told.name) == ("wrong", name)
    assert told.evidence
    assert told.remedy


def test_healthy_runs_stay_healthy_after_experiments():
    told = verdict(made(falling(0.6), **{"lr_0.1x": falling(1.9), "lr_10x": falling(0.4), "scramble": falling(2.3),
                                        "one-batch": falling(0.1)}))  # fmt: skip
    assert told.state == "healthy"


def test_a_target_inside_the_model_tells_nothing_about_labels():
    """An autoencoder whose loss is computed inside: rows in another order, and the same loss."""
    told = verdict(made(STUCK, scramble=STUCK, blind=falling(0.1), **{"one-batch": falling(0.1)}))
    assert told.state == "healthy"


def test_what_an_experiment_has_ruled_out_is_not_claimed():
    from test_verdict import curve, finding

    loss = [3.0] + [2.0 + 0.1 * step for step in range(99)]
    case = RunCase((finding("dead_units"),), 100, 40, {"loss": curve(loss)})
    assert "learning_rate_too_high" in [one.name for one in claims(case)]
    known = made(loss, **{"lr_0.1x": loss, "warmup_100": loss, "clip_1": loss, "one-batch": falling(0.1, start=3.0)})
    told = claims(RunCase((finding("dead_units"),), 100, 40, {"loss": curve(loss)}, experiments=known))
    assert told == []


def test_a_loss_of_a_thousandth_is_lower_though_all_of_it_is_little_of_the_first():
    losses = {end: [2.3] * 20 + [end] * 80 for end in (0.0152, 0.0151, 3e-6)}
    known = made(losses[0.0152], unfreeze=losses[3e-6], blind=losses[0.0151])
    assert [known.effect(one) for one in known.changed if one.kind in ("unfreeze", "blind")] == ["lower", "same"]


def test_the_table_says_what_each_outcome_says():
    known = made(falling(0.6), **{"lr_0.1x": falling(1.9), "scramble": falling(2.3), "one-batch": falling(0.1)})
    text = trials_table(known)
    assert "twice the same" in text
    assert "two runs that mean the same differ by" in text
    assert "lr=0.1x" in text
    assert "each label is learned for its input, by rule or by heart" in text
    assert "the model can learn" in text
    failed = compare(100, "loss", falling(0.5), [("fp32", [], {"why_not": "autocast was never on"})])
    assert "cannot be told: autocast was never on" in trials_table(failed)
    broken = [math.nan] * 100
    assert "not finite with another seed, too" in trials_table(compare(100, "loss", broken, [("seed=1", broken, {})]))


def test_a_healthy_run_says_which_change_lowers_the_loss():
    from test_verdict import curve

    losses = falling(0.6)
    known = curve(losses)
    for other, told in ((0.05, "with lr=10x it is lower"), (0.6, "nothing that was changed helps")):
        case = RunCase((), 100, 40, {"loss": known}, experiments=made(losses, lr_10x=falling(other)))
        assert told in judge(case).cause


def test_a_damaged_list_of_experiments_is_told(tmp_path):
    assert read_tried(tmp_path) is None
    (tmp_path / "try.json").write_text(json.dumps({"steps": 3}))
    with pytest.raises(RecordError, match=r"try\.json cannot be read"):
        read_tried(tmp_path)


@pytest.mark.parametrize("is_left", [True, False])
def test_runs_that_go_on_from_a_checkpoint_are_not_compared(is_left):
    """The second run as it is begins where the first had ended, and every later one where the one before had."""
    bare = [2.0 - 0.01 * at for at in range(100)]
    again = [1.0 - 0.005 * at for at in range(100)] if is_left else [2.05 - 0.01 * at for at in range(100)]
    helped = [0.3 - 0.001 * at for at in range(100)]
    known = compare(100, "loss", bare, [("again", again, {}), ("zero-grad", helped, {"acted": 100})])
    assert known.goes_on == is_left
    assert (known.effect(known.changed[0]), known.gain(known.changed[0]) > 0) == (
        ("none", False) if is_left else ("lower", True)
    )
    told = trials_table(known)
    assert ("goes on from what an earlier run has left on disk" in told) == is_left
    assert ("not compared" in told) == is_left
    assert known.to_dict()["goes_on"] == is_left


@pytest.mark.parametrize(
    "word", ["seed=1234567", "lr=0.12345678x", "clip=1e-07", "lr=0.1x", "lr=10x", "clip=1", "blind"]
)
def test_the_name_of_an_experiment_is_read_back_as_it_is(word):
    one = Experiment.parse(word)
    assert one.name == word
    assert Experiment.parse(one.name) == one


@pytest.mark.parametrize(
    "told",
    ['{"steps": 10, "runs": {"a": {}}}', '{"steps": 10, "runs": {"a": 3}}', '{"steps": 1e999, "runs": {}}',
     "[]", "[" * 100_000],
)  # fmt: skip
def test_a_damaged_list_of_experiments_is_refused(tmp_path, told):
    (tmp_path / "try.json").write_text(told)
    with pytest.raises(RecordError, match="cannot be read"):
        read_tried(tmp_path)


def test_parameters_that_another_optimizer_has_are_not_missing():
    change, model = changes.Unfreeze(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in model]
    change._models[model] = None
    for _ in range(3):
        for one in optimizers:
            change.before_step(one)
    assert change.acted == 0
    assert [len(one.param_groups[0]["params"]) for one in optimizers] == [2, 2]


def test_clipping_beside_a_fused_step_is_of_gradients_as_the_optimizer_makes_them():
    change, weight = changes.LimitNorm(1.0), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.grad = torch.tensor([512.0])
    optimizer.grad_scale = torch.tensor(1024.0)
    change.before_step(optimizer)
    assert (change.acted, weight.grad.item()) == (0, 512.0)
    weight.grad = torch.tensor([2048.0])
    change.before_step(optimizer)
    assert (change.acted, round(weight.grad.item())) == (1, 1024)


def test_clipping_where_gradients_come_inside_the_step_cannot_be_told():
    trial = Trial(None, Experiment.parse("clip=1"), 10)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([5.0])
    optimizer = torch.optim.SGD([weight], 0.1)
    trial._stepping(optimizer, True)
    assert (trial._change.acted, weight.grad.item()) == (0, 5.0)
    assert "the step is given a closure" in trial._change.why_not
    trial._stepping(optimizer, False)
    assert (trial._change.acted, round(weight.grad.item(), 3)) == (1, 1.0)
