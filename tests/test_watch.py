"""Watching in code: nothing changes, the numbers are those of float64, what is found is named rightly."""

import copy
import functools
import gc
import io
import math
import os
import pickle
import shutil
import signal
import sys
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import gaff
from gaff.address.nested import iter_tensors
from gaff.compat.signals import is_of_handler
from gaff.errors import PlanError, RecordError, SiteError
from gaff.training.watch.pace import Pace
from gaff.training.watch.sampled_step import SampledStep
from gaff.views import run_text
from zoo import ZOO, loss_of


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def train(model, optimizer, steps, data=lambda: torch.randn(5, 6), loss=lambda out: out.square().mean()):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(data())).backward()
        optimizer.step()


def watched(model, optimizer, tmp_path, steps=3, **options):
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, **options) as watch:
        train(model, optimizer, steps)
    assert watch.failure is None
    return gaff.load(tmp_path / "run")


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


# what must not change


def steps_of(model, args, kwargs):
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        loss_of(output).backward()
        found += [tensor.detach().clone() for _, tensor in iter_tensors(output)]
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
    return [*found, *(one.clone() for one in model.state_dict().values()), torch.rand(3)]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("build", ZOO, ids=lambda build: build.__name__)
def test_watched_steps_have_the_bits_of_bare_ones(build, is_training):
    model, args, kwargs = build()
    model.train(is_training)
    twin, args2, kwargs2 = copy.deepcopy((model, args, kwargs))
    bare = steps_of(twin, args2, kwargs2)
    with gaff.watch(model, every=1) as watch:
        seen = steps_of(model, args, kwargs)
    assert watch.failure is None
    assert watch.step == 3
    assert all(torch.equal(one, other) for one, other in zip(bare, seen, strict=True))


def test_files_of_torch_save_are_in_the_record_with_their_steps(tmp_path):
    model = Small()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        torch.save(model.state_dict(), tmp_path / "start.pt")
        train(model, optimizer, 2)
        torch.save(model.state_dict(), str(tmp_path / "two.pt"))
        torch.save(model.state_dict(), io.BytesIO())  # a copy in memory is no file
        with (tmp_path / "open.pt").open("wb") as file:
            torch.save(obj={}, f=file)
        with pytest.raises(RuntimeError, match="Parent directory"):
            torch.save({}, tmp_path / "nowhere" / "lost.pt")
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        train(model, optimizer, 1)
    assert watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert record.saved() == tuple((step, str(tmp_path / name)) for step, name in
                                   ((0, "start.pt"), (2, "two.pt"), (2, "open.pt")))  # fmt: skip
    assert torch.load(tmp_path / "two.pt").keys() == model.state_dict().keys()
    assert f"torch.save wrote 3 files, the last one {tmp_path / 'open.pt'} after 2 steps" in run_text.report(record)


class Remote(io.BytesIO):
    @property
    def name(self):
        raise RuntimeError("asked")


class Place:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


def test_odd_files_and_wrappers_of_others_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", torch.save)  # as it was, in the end
    model = Small()
    with gaff.watch(model, sgd(model), out=tmp_path / "a", every=1) as watch:
        torch.save({}, Remote())
        torch.save({}, Place(tmp_path / "x.pt"))
        ours = torch.save
        torch.save = lambda *args, **more: ours(*args, **more)  # somebody else's, which stays
        train(model, sgd(model), 1)
    assert watch.failure is None
    assert [file for _, file in gaff.load(tmp_path / "a").saved()] == [str(tmp_path / "x.pt")]
    with gaff.watch(model, sgd(model), out=tmp_path / "b", every=1):
        torch.save({}, tmp_path / "y.pt")
        train(model, sgd(model), 1)
    assert len(gaff.load(tmp_path / "b").saved()) == 1


def test_the_last_file_before_anything_was_wrong_is_told(tmp_path):
    model = Small()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(6):
            if step == 4:
                with torch.no_grad():
                    model.fc1.weight.fill_(float("nan"))
            train(model, optimizer, 1)
            torch.save(model.state_dict(), tmp_path / f"{step}.pt")
    told = run_text.report(gaff.load(tmp_path / "run"))
    assert f"the last one before the first problem, at step 4, is {tmp_path / '3.pt'} after 4" in told


def test_nothing_is_left_when_it_closes():
    def surroundings():
        scaler = torch.amp.GradScaler
        return (
            torch.save,
            torch.serialization.save,
            torch.nn.utils.clip_grad_norm_,
            torch.nn.utils.clip_grad.clip_grad_norm_,
            torch.autograd.backward,
            scaler.scale,
            scaler.step,
            torch.compile,
            Small.__call__,
            "__call__" in vars(Small),
        )

    before = surroundings()
    model = Small()
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    watch = gaff.watch(model, every=1)
    assert surroundings() != before
    train(model, sgd(model), 2)
    watch.remove()
    watch.remove()
    assert surroundings() == before
    for name, module in model.named_modules():
        assert vars(module).keys() == state[name].keys()
        assert not module._forward_hooks


def test_watches_that_close_in_any_order_leave_nothing():
    def surroundings():
        scaler = torch.amp.GradScaler
        return torch.autograd.backward, scaler.scale, scaler.step, torch.compile, "__call__" in vars(Small)

    before = surroundings()
    model = Small()
    first, second = gaff.watch(model, every=1), gaff.watch(model, every=1)
    train(model, sgd(model), 2)
    first.remove()
    train(model, sgd(model), 2)
    second.remove()
    assert (first.step, second.step) == (2, 4)  # the second train has an optimizer of its own: its steps count on
    assert surroundings() == before


def test_copies_and_pickles_made_while_watched_know_nothing_of_it():
    model = Small()
    bare = pickle.dumps(model)
    with gaff.watch(model, every=1):
        assert pickle.dumps(model) == bare
        twin = copy.deepcopy(model)
        torch.jit.script(model)
        torch.export.export(model, (torch.randn(2, 6),))
    assert not any(vars(module).get("_forward_hooks") for module in twin.modules())


def test_models_batches_and_optimizers_are_let_go():
    model = Small()
    optimizer = sgd(model)
    inputs = []

    def data():
        x = torch.randn(5, 6)
        inputs.append(weakref.ref(x))
        return x

    with gaff.watch(every=1) as watch:
        train(model, optimizer, 4, data)
        refs = [weakref.ref(model), weakref.ref(optimizer)]
        assert [one() for one in inputs[:-1]] == [None] * 3
        del model, optimizer
        gc.collect()
        assert [one() for one in refs] == [None, None]
    assert watch.step == 4


def test_an_error_of_ours_ends_the_watching_only(monkeypatch):
    def broken(*arguments):
        raise ValueError("of ours")

    told = []
    model = Small()
    twin = copy.deepcopy(model)
    monkeypatch.setattr(SampledStep, "left", broken)
    with gaff.watch(model, every=1, tell=told.append) as watch:
        train(model, sgd(model), 3)
    torch.manual_seed(0)
    assert "ValueError: of ours" in watch.failure
    assert len([one for one in told if "training goes on" in one]) == 1
    assert len(twin.state_dict()) == len(model.state_dict())


def test_an_error_of_the_users_passes_and_the_next_step_is_seen(tmp_path):
    model = Small()
    optimizer = sgd(model)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        train(model, optimizer, 2)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(2, 5))
        train(model, optimizer, 2)
    record = gaff.load(tmp_path / "run")
    assert record.steps == 4
    assert record.series("fc1", "count").values == [40.0] * 4


# the numbers


def numbers(tensor):
    tensor = tensor.detach().double()
    return {
        "count": tensor.numel(),
        "mean": tensor.mean().item(),
        "std": tensor.std(correction=0).item(),
        "min": tensor.min().item(),
        "max": tensor.max().item(),
        "zeros": (tensor == 0).double().mean().item(),
        "rms": tensor.square().mean().sqrt().item(),
    }


def check(record, site, tensor, at=0, phase="train"):
    for name, value in numbers(tensor).items():
        found = record.series(site, name, phase).values[at]
        assert found == pytest.approx(value, rel=3e-6, abs=1e-7), (site, name)


def test_numbers_are_those_of_the_moment(tmp_path):
    class Net(nn.Module):
        """Writes into what a module returned, calls one twice, returns a tuple, uses a functional activation."""

        def __init__(self):
            super().__init__()
            self.fc1, self.relu, self.twice = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)
            self.rnn, self.last = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            self.seen = {"fc1": (first := self.fc1(x)).clone()}
            first += 1
            x = self.relu(first)
            one = self.twice(x)
            two = self.twice(one)
            self.seen["twice"] = torch.stack([one, two])
            out, hidden = self.rnn(two[None])
            self.seen["rnn:output[0]"], self.seen["rnn:output[1]"] = out.clone(), hidden.clone()
            x = torch.tanh(out[0])
            self.seen["last:input"] = x
            self.seen["last"] = self.last(x)
            return self.seen["last"]

    model = Net()
    optimizer = sgd(model, weight_decay=0.1, momentum=0.9)
    x = torch.randn(5, 6)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        out = model(x)
        seen = model.seen
        for tensor in seen.values():
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()
        out.square().mean().backward()
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
        optimizer.step()
        after = {name: one.detach().clone() for name, one in model.named_parameters()}
    assert watch.failure is None
    record = gaff.load(tmp_path / "run")
    check(record, ":input", x)
    check(record, "fc1", seen["fc1"])
    check(record, "twice", seen["twice"])
    check(record, "rnn:output[0]", seen["rnn:output[0]"])
    check(record, "rnn:output[1]", seen["rnn:output[1]"])
    check(record, "last:input", seen["last:input"])
    check(record, ":output", seen["last"])
    check(record, "last:grad_output", seen["last"].grad)
    for name in before:
        check(record, f"{name}:param", before[name])
        check(record, f"{name}:grad", gradients[name])
        check(record, f"{name}:update", after[name] - before[name])
    ratio = numbers(after["fc1.weight"] - before["fc1.weight"])["rms"] / numbers(before["fc1.weight"])["rms"]
    assert record.series("fc1.weight:param", "update_ratio").values[0] == pytest.approx(ratio, rel=1e-5)
    norm = math.sqrt(sum(one.square().sum().item() for one in gradients.values()))
    assert record.scalar("grad_norm").values[0] == pytest.approx(norm, rel=1e-5)
    assert record.scalar("loss").values == pytest.approx([out.square().mean().item()])


def test_gradients_of_activations_are_the_total_that_arrives(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.y = self.a(x)
            return self.y + self.b(self.y)

    model = Net()
    with gaff.watch(model, out=tmp_path / "run", every=1):
        out = model(torch.randn(3, 4))
        model.y.retain_grad()
        (out * torch.arange(12.0).view(3, 4)).sum().backward()
        gradient = model.y.grad
        sgd(model).step()
    check(gaff.load(tmp_path / "run"), "a:grad_output", gradient)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_is_counted_once_and_its_gradients_are_seen(use_reentrant, tmp_path):
    class Net(Small):
        def forward(self, x):
            return self.fc2(checkpoint(lambda y: self.act(self.fc1(y)), x, use_reentrant=use_reentrant))

    model = Net()
    x = torch.randn(5, 6, requires_grad=True)
    with gaff.watch(model, out=tmp_path / "run", every=1) as watch:
        loss = model(x).square().mean()
        loss.backward()
        sgd(model).step()
    assert watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert record.series("fc1", "count").values == [40.0]
    assert record.series("fc1:grad_output", "count").values == [40.0]


def test_accumulated_batches_merge(tmp_path):
    model = Small()
    optimizer = sgd(model)
    batches = [torch.randn(5, 6), torch.randn(2, 6)]
    outputs = []
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for x in batches:
            outputs.append(model.fc1(x).detach())
            (model(x).square().mean() / 2).backward()
        gradient = model.fc1.weight.grad.clone()
        optimizer.step()
    record = gaff.load(tmp_path / "run")
    check(record, "fc1.weight:grad", gradient)
    assert record.series("fc1", "count").values[0] == 2 * 56  # called by itself, and inside the model


def test_scaled_gradients_are_told_as_those_of_the_loss(tmp_path):
    model = Small()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(5, 6)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        out = model(x)
        out.retain_grad()
        scaler.scale(out.square().mean()).backward()
        gradient = model.fc1.weight.grad / 1024
        activation = out.grad / 1024
        scaler.step(optimizer)
        scaler.update()
    record = gaff.load(tmp_path / "run")
    check(record, "fc1.weight:grad", gradient)
    check(record, "fc2:grad_output", activation)
    assert record.scalar("loss").values == pytest.approx([out.square().mean().item()])


def test_steps_that_a_scaler_skips_are_no_steps(tmp_path):
    model = Small()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with gaff.watch(model, out=tmp_path / "run", every=1) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(5, 6)).square().mean() * 1e6).backward()
            scaler.step(optimizer)
            scaler.update()
    record = gaff.load(tmp_path / "run")
    done = 8 - int(math.log2(2.0**120 / scaler.get_scale()))
    assert record.steps == watch.step == done
    assert not watch.findings


@pytest.mark.parametrize("every", [1, 100])
def test_the_loss_of_a_step_that_a_scaler_skips_is_of_no_step(tmp_path, every):
    model = Small()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    with gaff.watch(model, out=tmp_path / "run", every=every):
        for number in range(8):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 6)).square().mean() * (1e38 if number == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(losses[:4] + losses[5:])
    assert record.scalar("samples").values == [5.0] * 7


def test_evaluation_is_kept_apart(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    optimizer = sgd(model)
    x = torch.randn(20, 6)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        train(model, optimizer, 2)
        model.eval()
        with torch.no_grad():
            expected = model(x)
    record = gaff.load(tmp_path / "run")
    check(record, "2", expected, phase="eval")
    assert record.series("0", "count").values == [40.0, 40.0]


def test_only_asked_modules_are_looked_at(tmp_path):
    model = Small()
    record = watched(model, sgd(model), tmp_path, only=["fc*"], skip=["fc2"])
    assert [name for name in record.sites if ":" not in name] == ["fc1"]


def test_magnitudes_are_kept(tmp_path):
    model = Small()
    record = watched(model, sgd(model), tmp_path)
    step, shares = record.magnitudes("fc1")[0]
    assert step == 0
    assert sum(shares) == pytest.approx(1.0, rel=0.05)


def test_batches_are_counted_and_told_apart_and_what_is_left_out_is_told(tmp_path):
    class Net(Small):
        def forward(self, x):
            return self.act(self.fc1(x)).to_sparse()

    model, x = Net(), torch.randn(5, 6)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for data in (x, x, torch.randn(3, 6)):
            model(data).to_dense().mean().backward()
            sgd(model).step()
    record = gaff.load(tmp_path / "run")
    assert record.scalar("samples").values == [5.0, 5.0, 3.0]
    prints = [one["fingerprint"] for _, one in record._parts[0].events if one["kind"] == "look"]
    assert prints[0] == prints[1] != prints[2]
    count = record.series(":output", "count").values
    assert count or any("is not looked at" in note for note in record.notes)


# names and findings


def test_models_and_losses_are_found_and_named(tmp_path):
    class Trainer:
        def __init__(self):
            self.actor = Small()
            self.nets = {"critic": Small()}

        def fit(self):
            optimizers = [sgd(self.actor), sgd(self.nets["critic"])]
            for _ in range(3):
                x = torch.randn(4, 6)
                policy_loss = self.actor(x).mean()
                policy_loss.backward()
                value_loss = self.nets["critic"](x).square().mean()
                value_loss.backward()
                for one in optimizers:
                    one.step()
                    one.zero_grad()

    with gaff.watch(out=tmp_path / "run", every=1):
        Trainer().fit()
    record = gaff.load(tmp_path / "run")
    assert {"self.actor.fc1", "self.nets['critic'].fc1"} <= set(record.sites)
    assert {"loss:policy_loss", "loss:value_loss"} <= set(record.scalars)
    with pytest.raises(RecordError, match=r"'fc1' is in several models: expected one of self.actor.fc1"):
        record.series("fc1", "rms")


def test_a_part_that_is_called_by_itself_belongs_to_its_model(tmp_path):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)

    auto = Auto()
    optimizer = sgd(auto)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            auto.decoder(auto.encoder(torch.randn(4, 6))).square().mean().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.describe("model")["name"] == "auto"
    assert len(record.series("encoder", "rms")) == len(record.series("decoder:grad_output", "rms")) == 3


def test_a_nan_is_told_with_the_op_that_made_it(tmp_path):
    class Net(Small):
        def forward(self, x):
            return self.fc2(torch.log(self.fc1(x) - 100))

    told = []
    model = Net()
    with gaff.watch(model, out=tmp_path / "run", tell=told.append, every=1):
        train(model, sgd(model), 2)
    [finding] = gaff.load(tmp_path / "run").findings
    assert (finding.rule, finding.site, finding.since, finding.severity) == ("nonfinite", "/log#0", 0, "error")
    assert "test_watch.py" in finding.evidence["line"]
    assert "torch.log" in finding.evidence["code"]
    assert "nonfinite" in told[0]
    assert "remedy:" in told[0]


def test_a_spike_names_the_batch_and_the_sample():
    model = Small()
    optimizer = sgd(model, lr=1e-4)
    with gaff.watch(model, optimizer) as watch:
        train(model, optimizer, 40)

        def data():
            x = torch.randn(5, 6)
            x[3] *= 1000
            return x

        train(model, optimizer, 1, data)
    [finding] = [one for one in watch.findings if one.rule == "loss_spike"]
    assert finding.since == 40
    assert finding.evidence["batch_indices"] == [3]
    assert len(finding.evidence["batch_checksum"]) == 8


def test_a_rule_of_ones_own():
    from gaff.training.rules.registry import RULES, Hit, rule

    @rule("wide", severity="warning", means="a layer is wide", cause="c", remedy="r", least=2)
    def wide(sample, past):
        for key, row in sample.port("output").items():
            if row.count > 30 and past.looks:
                yield Hit(key, count=row.count)

    @rule("broken", severity="warning", means="m", cause="c", remedy="r")
    def broken(sample, past):
        raise KeyError("mine")

    try:
        model = Small()
        with gaff.watch(model, every=1) as watch:
            train(model, sgd(model), 4)
        assert [(one.rule, one.site, one.also) for one in watch.findings] == [("wide", "fc1", ("act",))]
        with gaff.watch(model, every=1, rules_off=["wide"]) as watch:
            train(model, sgd(model), 4)
        assert not watch.findings
        assert watch.failure is None
    finally:
        del RULES["wide"], RULES["broken"]


# what is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"out": ""}, PlanError, "out='': expected the name of a new folder, or None to keep no record"),
        ({"out": 3}, PlanError, "out=3: expected the name of a new folder, or None to keep no record"),
        ({"model": {3: Small()}}, PlanError, "name 3 of a model: expected a text, such as {'generator': model}"),
        ({"out": __file__}, RecordError, r"test_watch.py' is a file: expected the name of a new folder"),
        ({"every": 0}, PlanError, "every=0: expected a number of steps, 1 or more"),
        ({"budget": 2}, PlanError, "budget=2: expected a share of the time between 0 and 1"),
        ({"only": "fc1"}, PlanError, r"only='fc1': expected a list of patterns, such as \['fc1'\]"),
        ({"only": ["fc9"]}, SiteError, "no module 'fc9' in Small of .* nearest: fc"),
        ({"skip": ["fc1:grad_output"]}, SiteError, "filter 'fc1:grad_output' names more than modules"),
        ({"rules_off": ["deadd"]}, PlanError, "no rule 'deadd': expected one of eval_drift,"),
        ({"optimizer": "sgd"}, PlanError, "optimizer=str: expected a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_installed(options, error, message):
    before = torch.autograd.backward
    with pytest.raises(error, match=message):
        gaff.watch(**{"model": Small(), **options})
    assert torch.autograd.backward is before


class TimeIsUp(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10**9])
def test_what_a_signal_handler_of_the_program_raises_reaches_the_program(every, tmp_path):
    def stop(*_):
        raise TimeIsUp

    gc.collect()  # Python itself loses what is raised while it calls back for something that dies: nothing may, here
    before = signal.signal(signal.SIGALRM, stop)
    reached, alive = 0, []
    try:
        for trial in range(12):
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
            optimizer, x = sgd(model), torch.randn(8, 16)
            torch.set_grad_enabled(True)  # an exception between the two halves of entering ``no_grad`` leaves it off
            with gaff.watch(model, optimizer, every=every, out=tmp_path / str(trial)) as watch:
                alive.append((model, optimizer, watch))
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.0017 * trial)
                    end = time.monotonic() + 5
                    while time.monotonic() < end:
                        optimizer.zero_grad()
                        model(x).square().mean().backward()
                        optimizer.step()
                except TimeIsUp:
                    reached += 1
            assert watch.failure is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)
    assert reached == 12


@pytest.mark.parametrize("make", [lambda stop: stop, lambda stop: functools.partial(stop), lambda stop: Caller(stop),
                                  lambda stop: Caller(stop).call])  # fmt: skip
def test_handlers_of_every_kind_are_known(make):
    def stop(*_):
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, make(stop))
    try:
        with pytest.raises(TimeIsUp) as caught:
            signal.raise_signal(signal.SIGALRM)
        assert is_of_handler(caught.value)
        assert not is_of_handler(ValueError())
    finally:
        signal.signal(signal.SIGALRM, before)


class Caller:
    def __init__(self, function):
        self.function = function

    def __call__(self, *given):
        self.function(*given)

    call = __call__


class Mapped(nn.Module):
    """Calls one of its layers inside a transform."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.vmap(self.two)(self.one(x))


def test_what_runs_inside_a_transform_is_passed_over(tmp_path):
    model = Mapped()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, every=1, out=tmp_path / "run") as watch:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    assert watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert len(record.series("one", "rms")) == 5
    assert "two: what passes inside a torch.func transform (vmap, grad ...) is not looked at" in record.notes


def test_a_recomputation_that_stops_early_leaves_the_recursion_limit_as_it_was():
    class Recomputed(Mapped):
        def forward(self, x):
            return checkpoint(lambda y: self.two(self.one(y)), x, use_reentrant=False)

    model, limit = Recomputed(), sys.getrecursionlimit()
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, every=1):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            assert sys.getrecursionlimit() == limit
    assert sys.getrecursionlimit() == limit


class Wrapped(torch.Tensor):
    """Does all operations on the tensor inside, and tells nobody of it."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, strides=inside.stride())

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda one: one.inside if isinstance(one, cls) else one, (args, kwargs or {}))
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, function(*args, **kwargs))


def test_losses_of_a_class_that_makes_no_lists_are_read(tmp_path):
    model, losses = Mapped(), []
    optimizer = sgd(model)
    with gaff.watch(model, optimizer, every=1, out=tmp_path / "run") as watch:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model.two(model.one(Wrapped(torch.randn(4, 6)))).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    assert watch.failure is None
    assert gaff.load(tmp_path / "run").scalar("loss").values == losses


def test_an_exported_graph_that_is_gone_is_looked_at_no_more():
    model, x = Mapped().one, torch.randn(4, 6)
    optimizer = sgd(model)
    with gaff.watch(every=1) as watch:
        for step in range(6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 2:
                torch.export.export(model, (x,)).module()(x)
                gc.collect()
    assert watch.failure is None
    assert watch.step == 6


def test_a_model_without_shapes_is_asked_to_run_first():
    with pytest.raises(PlanError, match=r"0.weight is not initialised yet \(lazy\): run the model once first"):
        gaff.watch(nn.Sequential(nn.LazyLinear(3)))


def test_a_model_must_be_a_module():
    with pytest.raises(PlanError, match=r"expected a model \(torch.nn.Module\), got the class Small: make one first"):
        gaff.watch(Small)


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    model = Small()
    watched(model, sgd(model), tmp_path)
    with pytest.raises(RecordError, match="holds a run already: expected a new folder"):
        gaff.watch(model, out=tmp_path / "run")


def test_what_comes_when_no_thread_can_be_started_is_done_at_once(monkeypatch):
    import _thread

    from gaff.training.watch.worker import Worker

    def refuse(function, args):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    done = []
    Worker(done.append).put(lambda: done.append("job"))
    assert done == ["job"]


# how often


@given(st.floats(1e-5, 2.0), st.floats(1e-6, 1.0), st.integers(1, 4000))
def test_the_pace_keeps_to_its_budget_beyond_its_allowance(step_s, cost_s, steps):
    pace = Pace(0.01)
    pace.looked(step_s + cost_s, cost_s)
    for step in range(1, steps):
        if pace.is_due(step):
            pace.looked(step_s + cost_s, cost_s)
        else:
            pace.passed(step_s)
    assert pace.spent_s <= 0.5 + 0.0101 * pace.total_s + 5 * cost_s  # five looks tell what one costs


def test_short_runs_are_seen_and_a_fixed_distance_is_kept():
    pace = Pace(0.01)
    looks = [0]
    pace.looked(0.002, 0.001)
    for step in range(1, 300):
        if pace.is_due(step):
            looks.append(step)
            pace.looked(0.002, 0.001)
        else:
            pace.passed(0.001)
    assert looks[:20] == list(range(20))
    assert 80 < len(looks) < 200
    fixed = Pace(0.01, every=7)
    assert [step for step in range(30) if fixed.is_due(step)] == [0, 7, 14, 21, 28]


def test_a_state_dict_saved_while_watched_is_plain():
    model = Small()
    with gaff.watch(model, every=1):
        train(model, sgd(model), 1)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    assert set(torch.load(io.BytesIO(file.getvalue()))) == set(model.state_dict())


def test_functional_heads_are_seen_where_they_enter_a_layer(tmp_path):
    class Net(Small):
        def forward(self, x):
            self.hidden = F.relu(self.fc1(x))
            return self.fc2(self.hidden)

    model = Net()
    with gaff.watch(model, out=tmp_path / "run", every=1):
        model(torch.randn(5, 6)).mean().backward()
        sgd(model).step()
    check(gaff.load(tmp_path / "run"), "fc2:input", model.hidden)


def test_an_evaluation_is_not_compared_with_training_of_long_ago():
    """Weights grow by 4 % a step: between a look and the next evaluation by more than what the rule allows."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.04)
    x = torch.randn(64, 4)
    with gaff.watch(model, optimizer, every=50) as watch:
        for step in range(200):
            optimizer.zero_grad()
            (model(x).sum() * 0 - 0.5 * model.weight.square().sum()).backward()
            optimizer.step()
            if step % 50 == 47:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
    assert not [one for one in watch.findings if one.rule == "eval_drift"]


def test_training_without_an_optimizer_of_torch_is_looked_at_and_said(tmp_path):
    model = Small()
    with gaff.watch(model, out=tmp_path):
        for _ in range(20):
            model.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.01 * one.grad
    record = gaff.load(tmp_path)
    assert (
        "no optimizer that is watched made a step: all runs count as one step, and its loss is their mean"
        in record.notes
    )
    assert len(record.series("fc1", "rms")) == 1


def test_a_file_that_the_program_closed_is_not_written_to(tmp_path, capsys):
    """The number of the record's file may be another file's by then."""
    model = Small()
    with gaff.watch(model, out=tmp_path / "run", every=1) as watch:
        train(model, sgd(model), 2)
        assert watch.findings == []
        number = watch._watcher.reporter._recorder._log._file
        os.close(number)
        mine = os.open(tmp_path / "mine", os.O_WRONLY | os.O_CREAT)
        assert mine == number
        train(model, sgd(model), 2)
    os.close(mine)
    assert (tmp_path / "mine").read_bytes() == b""
    assert "the program has closed the file of the record" in watch.failure
    assert "the record is not written any further, training goes on" in capsys.readouterr().err
    record = gaff.load(tmp_path / "run")
    assert not record.is_complete
    assert record.notes[-1].startswith("the record ends before the run: [Errno 9] the program has closed the file")


def test_a_folder_that_is_removed_is_told(tmp_path, capsys):
    model = Small()
    with gaff.watch(model, out=tmp_path / "run", every=1) as watch:
        train(model, sgd(model), 2)
        shutil.rmtree(tmp_path / "run")
        train(model, sgd(model), 2)
    assert "the file was removed while it was written" in watch.failure
    assert "training goes on" in capsys.readouterr().err


def test_a_nan_in_a_model_that_cannot_be_copied_is_told_where_it_was_seen():
    """As FSDP2's, which refuses ``deepcopy``: that no op was found does not mean that every op is fine."""

    class Uncopied(Small):
        def __deepcopy__(self, memo):
            raise AssertionError("no copies of this one")

    model = Uncopied()
    with gaff.watch(model, every=1) as watch:
        train(model, sgd(model), 1, loss=lambda out: out.square().mean())
        model.act.register_forward_hook(lambda module, args, out: out * float("nan"))
        train(model, sgd(model), 1)
    [found] = [one for one in watch.findings if one.rule == "nonfinite"]
    assert found.site == "fc2:input"
    assert "is not finite; the first NaN of the step is at fc2:input; the batch could not be run again" in found.message
    assert "(AssertionError: no copies of this one)" in found.message


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_module_has_changed_in_place_is_looked_at_again(mode, tmp_path):
    """Also where torch does not count writes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Sequential(nn.Identity()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(16, 4)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with mode():
            model.eval()
            out = model(x)
    record = gaff.load(tmp_path / "run")
    for site in ("1", "2", "2.0", ":output"):
        assert record.series(site, "rms", phase="eval").values[-1] == pytest.approx(float(out.square().mean().sqrt()))


def test_gradients_are_those_that_the_step_is_made_of(tmp_path):
    """Hooks on the optimizer change them last, gaff's own clipping among them; of that the norm before is told, too."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def shrink(*_):
        for one in model.parameters():
            one.grad.mul_(0.1)

    optimizer.register_step_pre_hook(shrink)
    made, norms = [], []
    optimizer.register_step_post_hook(lambda *_: made.append(model.weight.grad.norm().item()))
    with (
        gaff.watch(model, optimizer, out=tmp_path / "run", every=1),
        gaff.clip_gradients(optimizer, model=model, norm=0.01),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            norms.append(0.1 * math.hypot(*(one.grad.norm().item() for one in model.parameters())))
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.series("weight:grad", "norm").values == pytest.approx(made, rel=1e-4)
    told = {name: [value for _, value in record.scalar(name)] for name in ("grad_norm", "unclipped_norm")}
    assert told["grad_norm"] == pytest.approx([0.01] * 3, rel=1e-3)
    assert told["unclipped_norm"] == pytest.approx(norms, rel=1e-3)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


class Parts(nn.Module):
    """Whose parts a program calls one by one."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 2)


def test_parts_that_are_called_by_themselves_have_inputs_of_their_own(tmp_path):
    torch.manual_seed(0)
    model, x = Parts(), torch.randn(60, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            hidden = model.encoder(x) * 1000
            model.decoder(hidden).square().mean().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    for site, true in (("encoder:input", x), ("decoder:input", hidden.detach())):
        assert record.series(site, "rms").values[-1] == pytest.approx(float(true.square().mean().sqrt()), rel=1e-4)
    assert [value for _, value in record.scalar("samples")] == [60, 60, 60]
    assert "input_scale" not in {one.rule for one in record.findings}


def test_the_origin_in_a_part_that_was_called_by_itself(tmp_path):
    model, x = Parts(), torch.ones(6, 4)
    model.decoder = nn.Sequential(nn.Linear(4, 4), Logarithm())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        model.decoder(model.encoder(x)).sum().backward()
        optimizer.step()
    [finding] = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "nonfinite"]
    assert finding.site == "decoder.1/log#0"
    assert "decoder.1/log#0" in finding.message


class Logarithm(nn.Module):
    def forward(self, x):
        return (-x.abs()).log()


class Either(nn.Module):
    """Returns what the one child or the other has returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, is_b=False):
        return self.b(x) if is_b else self.a(x)


def test_a_container_that_returns_another_childs_output_has_not_the_numbers_of_the_first(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = Either(), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.block.a(self.block(self.block(x), True)))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.block.b.weight *= 100
    optimizer, true = torch.optim.SGD(model.parameters(), 0.0), []
    model.block.register_forward_hook(lambda module, args, output: true.append(output.detach().clone()))
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            true.clear()
            model(torch.ones(5, 4)).sum().backward()
            optimizer.step()
    told = gaff.load(tmp_path / "run").series("block", "norm")
    assert told.steps == [1, 2]  # of the first look nothing is known
    assert told.values == pytest.approx([float(torch.cat(true).norm())] * 2)


def test_losses_of_several_models_from_one_line_are_told_apart(tmp_path):
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in models]
    true = [[], []]
    with gaff.watch({"a": models[0], "b": models[1]}, out=tmp_path / "run", every=1):
        for _ in range(4):
            for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = model(torch.randn(5, 4)).square().mean()
                loss.backward()
                optimizer.step()
                true[at].append(loss.item())
    record = gaff.load(tmp_path / "run")
    for name, values in zip(("loss:loss", "loss:loss#2"), true, strict=True):
        told = [value for _, value in record.scalar(name) if value == value]
        assert told == pytest.approx(values)


@pytest.mark.parametrize("how", ["removes itself", "adds another"])
def test_hooks_of_the_optimizer_may_change_their_own_table(how, tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def once(*_):
        if how == "removes itself":
            handle.remove()
        elif len(optimizer._optimizer_step_pre_hooks) == 1:
            optimizer.register_step_pre_hook(lambda *_: None)

    handle = optimizer.register_step_pre_hook(once)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert watch.failure is None
    assert len(gaff.load(tmp_path / "run").scalar("loss").values) == 3
    assert all(hook.__module__ == __name__ for hook in optimizer._optimizer_step_pre_hooks.values())


def test_one_loss_of_several_models_or_of_several_steps_is_one_series(tmp_path):
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in models]
    with gaff.watch({"a": models[0], "b": models[1]}, out=tmp_path / "run", every=1):
        for number in range(6):
            ordered = models if number % 2 else models[::-1]
            loss = sum(one(torch.ones(2, 4)).square().mean() for one in ordered)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [name for name in gaff.load(tmp_path / "run").scalars if name.startswith("loss")] == ["loss:loss"]


def test_the_norm_of_gradients_of_which_some_are_nan_is_no_finite_number(tmp_path):
    """NaN there is a look that was left out: infinite is what is told."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(6):
            optimizer.zero_grad()
            spoiled = (
                (model.weight.sum() - model.weight.sum()).sqrt() if step == 5 else 0
            )  # zero, with a gradient of NaN
            (model(torch.ones(8, 4)).square().mean() + spoiled).backward()
            optimizer.step()
    norms = gaff.load(tmp_path / "run").scalar("grad_norm").values
    assert [math.isfinite(one) for one in norms] == [True] * 5 + [False]


def test_a_finding_is_looked_into_by_the_number_that_it_goes_by(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, -50.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "a", every=1, tell=lambda _: None):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(64, 8)).square().mean().backward()
            optimizer.step()
    finding = next(one for one in gaff.load(tmp_path / "a").findings if one.rule == "dead_units")
    assert finding.look.endswith(".series('1', 'dead')")
    assert eval(finding.look).values[-1] == 1.0


class Forces(nn.Module):
    """Returns an energy and its gradient, for which the forward runs a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)
        self.came = []

    def forward(self, x):
        x = x.detach().requires_grad_()
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: self.came.append(gradient.detach().square().mean().sqrt().item()))
        energy = self.last(self.act(hidden)).sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]


def test_the_gradient_of_the_loss_is_not_mixed_with_those_that_the_forward_computes(tmp_path):
    torch.manual_seed(0)
    model = Forces()
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            (1000 * model(torch.randn(6, 4))[1].square().sum()).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    told = record.series("first:grad_output", "rms").values
    assert list(told) == pytest.approx(model.came[1::2], rel=1e-5)
    assert any("a pass that the forward itself runs" in note for note in record.notes)


def test_a_sparse_gradient_is_summed_where_a_row_came_several_times(tmp_path):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = sgd(model)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        model(torch.tensor([1, 1, 1, 2])).square().mean().backward()
        gradient = model[0].weight.grad.coalesce().values()
        optimizer.step()
    check(gaff.load(tmp_path / "run"), "0.weight:grad", gradient)


def test_a_model_on_the_meta_device_has_nothing_to_look_at(capsys):
    with torch.device("meta"):
        model, x = Small(), torch.randn(5, 6)
    optimizer = sgd(model)
    with gaff.watch(model, every=1) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert watch.step == 3
    assert "could not" not in capsys.readouterr().err


def test_what_gaff_itself_runs_is_no_part_of_the_training(tmp_path):
    model = Small()
    optimizer, x, losses = sgd(model), torch.randn(5, 6), []
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for _ in range(4):
            gaff.trace(model, x, backward=lambda y: y.square().mean() * 100)
            gaff.harvest(
                model,
                [x],
                "fc1:grad_output",
                out=tmp_path / f"rows{len(losses)}",
                loss=lambda y, _: y.sum(),
                progress=False,
            )
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    record = gaff.load(tmp_path / "run")
    assert [name for name in record.scalars if name.startswith("loss")] == ["loss:loss"]
    assert record.scalar("loss").values == pytest.approx(losses)
    assert record.scalar("samples").values == [5.0] * 4


def test_an_optimizer_that_takes_over_goes_on_with_the_steps_of_its_parameters(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    with gaff.watch(model, out=tmp_path / "run", every=1):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 4)
        gc.collect()  # the first optimizer is gone
        train(model, torch.optim.SGD(model[2].parameters(), 0.01), 3)
    record = gaff.load(tmp_path / "run")
    assert list(record.series("2.weight:grad", "norm").steps) == list(range(7))
    assert list(record.series("2.weight:param", "lr").values) == pytest.approx([0.1] * 4 + [0.01] * 3)
    assert list(record.scalar("loss").steps) == list(range(7))


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_the_rate_of_a_parameter_is_that_of_its_step_and_not_what_a_scheduler_makes_next(tmp_path, is_given, kind):
    first, second = nn.Linear(6, 4), nn.Linear(4, 1)
    model = nn.Sequential(first, second)
    rate = (lambda value: value) if kind == "number" else torch.tensor
    optimizers = [torch.optim.SGD(one.parameters(), rate(lr)) for one, lr in ((first, 0.5), (second, 0.25))]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    with gaff.watch(model, optimizers if is_given else None, out=tmp_path / "run", every=1):
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            for one in (*optimizers, *schedulers):
                one.step()
    record = gaff.load(tmp_path / "run")
    assert list(record.series("0.weight:param", "lr").values) == [0.5, 0.25, 0.125]
    assert list(record.series("1.weight:param", "lr").values) == [0.25, 0.125, 0.0625]


def test_an_optimizer_without_a_rate_by_that_name_has_none_and_no_alarm(tmp_path):
    class Steps(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"step_size": 0.1})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for one in group["params"]:
                    one -= group["step_size"] * one.grad

    model = nn.Linear(6, 2)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        train(model, Steps(model.parameters()), 20)
    record = gaff.load(tmp_path / "run")
    assert all(map(math.isnan, record.series("weight:param", "lr").values))
    assert "lr_zero" not in {one.rule for one in record.findings}


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("is_given", [True, False])
def test_losses_of_steps_that_a_scaler_leaves_out_are_those_of_no_step(tmp_path, is_given, optimizers):
    first, second = nn.Linear(6, 4), nn.Linear(4, 1)
    model, skipped, truth = nn.Sequential(first, second), (0, 1, 4), []
    parts = [model] if optimizers == 1 else [first, second]
    stepping = [torch.optim.SGD(one.parameters(), 0.01) for one in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    with gaff.watch(model, stepping if is_given else None, out=tmp_path / "run", every=1):
        for step in range(8):
            model.zero_grad()
            loss = model(torch.randn(3 + step, 6)).square().mean()
            scaler.scale(loss).backward()
            if step in skipped:
                first.weight.grad[0, 0] = second.weight.grad[0, 0] = math.inf
            else:
                truth.append((loss.item(), 3.0 + step))
            for one in stepping:
                scaler.step(one)
            scaler.update()
    record = gaff.load(tmp_path / "run")
    assert list(record.scalar("loss:loss").values) == pytest.approx([loss for loss, _ in truth], rel=1e-6)
    assert list(record.scalar("samples").values) == [samples for _, samples in truth]


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_module_that_is_called_inside_a_checkpoint_and_outside_of_it_has_all_its_gradients(tmp_path, is_reentrant):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

        def forward(self, x):
            return checkpoint(lambda h: self.act(self.b(h)), self.act(self.a(x)), use_reentrant=is_reentrant)

    model, seen = Both(), []

    def follow(module, args, out):
        if out.requires_grad:
            out.register_hook(seen.append)

    with gaff.watch(model, out=tmp_path / "run", every=1):
        train(model, sgd(model), 1, data=lambda: torch.randn(8, 4))
        handle = model.act.register_forward_hook(follow)
        train(model, sgd(model), 1, data=lambda: torch.randn(8, 4))
        handle.remove()
    record = gaff.load(tmp_path / "run")
    assert list(record.series("act:grad_output", "count").values) == [64, 64]
    if is_reentrant:  # the hook of a plain recomputation is that of the first pass again
        truth = torch.cat(seen).norm().item()
        assert record.series("act:grad_output", "norm").values[1] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_block_that_ends_in_a_module_which_it_calls_twice_is_looked_at(tmp_path, in_place):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.relu = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(in_place)

        def forward(self, x):
            return self.relu(self.two(self.relu(self.one(x))) + x)

    model, outputs = nn.Sequential(Block(), Block(), nn.Linear(6, 2)), []
    handle = model[1].register_forward_hook(lambda module, args, out: outputs.append(out.detach().clone()))
    with gaff.watch(model, out=tmp_path / "run", every=1):
        train(model, sgd(model), 4)
    handle.remove()
    record = gaff.load(tmp_path / "run")
    for site in ("0", "1", "1:grad_output"):
        assert list(record.series(site, "rms").steps) == [1, 2, 3], site  # in the first look it is not known yet
    rms = [one.square().mean().sqrt().item() for one in outputs[1:]]
    assert list(record.series("1", "rms").values) == pytest.approx(rms, rel=1e-5)


def test_optimizers_that_share_parameters_in_one_step_count_alike(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    first, second = sgd(model), torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], 0.01)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            first.step()
            second.step()
    record = gaff.load(tmp_path / "run")
    assert list(record.series("0.weight:grad", "norm").steps) == list(range(4))
