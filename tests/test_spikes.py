"""Spikes of losses, gradients and updates, and what came first."""

import pytest
import torch
from torch import nn

import gaff
from gaff.record.curve import Curve
from gaff.record.finding import Finding
from gaff.record.run_case import RunCase, SingleSteps
from gaff.record.sample import Sample
from gaff.record.verdict import judge
from gaff.training.rules.judge import Judge
from gaff.training.rules.registry import Hit, Rule
from gaff.training.watch.losses import Losses

BAD = 60  # the step whose batch is wrong


def run(tmp_path, clip=None, steps=90, every=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with gaff.watch(model, out=tmp_path / "run", every=every):
        for step in range(steps):
            x = torch.randn(16, 4)
            y = x.sum(1, keepdim=True) * (1000 if step == BAD else 1)
            loss = (model(x) - y).square().mean()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return gaff.load(tmp_path / "run")


def test_a_spike_of_gradients_is_told_with_the_parameter_that_grew_most(tmp_path):
    record = run(tmp_path)
    found = {one.rule: one for one in record.findings}
    assert found["gradient_spike"].since == BAD
    assert found["update_spike"].since == BAD
    assert found["gradient_spike"].severity == "info"
    assert "usually" in found["gradient_spike"].message


def test_the_norm_before_clipping_is_kept_of_every_step(tmp_path):
    record = run(tmp_path, clip=1.0, every=30)
    norms = record.scalar("unclipped_norm")
    assert len(norms) == 90
    assert norms.values[BAD] > 100 * sorted(norms.values)[45]


def test_without_clipping_there_is_no_such_series(tmp_path):
    assert "unclipped_norm" not in run(tmp_path, steps=5).scalars


def case(norms):
    found = Finding(rule="loss_spike", site="", model="", since=200, severity="warning", message="the loss jumped",
                    cause="", remedy="look at the batch", evidence={"loss": 9.0}, last=200)  # fmt: skip
    falling = Curve.of((step, 2.0 - step / 200) for step in range(300))
    return RunCase((found,), 300, 50, {"loss": falling}, single=SingleSteps(norms))


def test_gradients_that_grew_before_the_loss_jumped_are_its_cause():
    norms = tuple((step, 30.0 if step == 197 else 1.0) for step in range(300))
    verdict = judge(case(norms))
    assert verdict.name == "gradient_spike"
    assert verdict.since == 197
    assert "norm 30 at step 197, usually 1" in verdict.cause


def test_where_gradients_were_as_usual_it_is_the_batch():
    norms = tuple((step, 30.0 if step >= 200 else 1.0) for step in range(300))
    verdict = judge(case(norms))
    assert verdict.name == "loss_spike"
    assert "gradients were as usual before it (norm 1)" in verdict.cause
    assert judge(case(())).cause == "the loss jumped"


@pytest.mark.parametrize(("value", "is_spike"), [(9.0, True), (7.0, False)])
def test_a_loss_with_a_heavy_tail_has_no_spike_within_twice_its_largest(value, is_spike):
    losses = Losses()
    spikes = []
    for step in range(100):
        number = value if step == 99 else 4.0 if step == 40 else 1.0 + 0.01 * (step % 3)
        weight = torch.tensor(number, requires_grad=True)
        spikes.append(losses.note(weight * 1).spike)
    assert (spikes[99] is not None) == is_spike


@pytest.mark.parametrize(("scale", "state"), [(1e3, "wrong"), (1.0, "healthy")])
def test_one_example_that_is_far_too_large_is_named_and_not_the_learning_rate(tmp_path, scale, state):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True).tanh()
    x[37] *= scale
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with gaff.watch(out=tmp_path / "run", every=1):
        for step in range(60):
            rows = torch.arange(step * 8, step * 8 + 8) % 64
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    verdict = gaff.load(tmp_path / "run").verdict
    assert verdict.state == state
    if scale > 1:
        assert verdict.name == "odd_examples"
        assert "the loss jumps at the batch of step 4: its inputs at [5] are" in verdict.cause


def test_spikes_that_follow_one_another_are_told_by_the_first():
    kept = Judge([])
    for step in (102, 103, 110, 140):
        kept.add(Finding(rule="loss_spike", site="", model="", since=step, severity="warning", message=f"{step}",
                          cause="", remedy="", last=step))  # fmt: skip
        assert [(one.since, one.last) for one in kept.findings] == [(140, 140) if step == 140 else (102, step)]


def test_the_highest_of_a_stretch_is_a_value_that_was_there():
    warmed = Curve.of((step, min(1.0, (step + 1) / 100)) for step in range(240))
    assert (warmed.at(0), warmed.highest_from(0)) == (0.055, 0.2)
    assert warmed.highest_from(95) == warmed.highest_from(239) == 1.0


@pytest.mark.parametrize(("last", "is_over"), [(120, True), (400, False), (598, False)])
def test_what_was_seen_in_the_first_part_of_a_run_alone_is_over(last, is_over):
    """Looks become rarer, so that most of them lie in the first steps."""
    asked = Rule("r", lambda sample, past: [Hit(("m", "w:param"))] if sample.step <= last else [], "warning", "means",
                 "cause", "remedy", "train", 3, 0.5, 0, ())  # fmt: skip
    judged = Judge([asked])
    for step in (*range(0, 120, 4), 150, 250, 350, 450, 550, 599):
        judged.look(Sample(step, "train", 0.0))
    assert [one.is_over for one in judged.findings] == [is_over]
