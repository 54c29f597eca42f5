"""The verdict of a run: its state, and the cause behind the symptoms."""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.record.causes import _symptom, claims
from gaff.record.curve import Curve
from gaff.record.finding import Finding
from gaff.record.label_order import label_order
from gaff.record.run_case import Evaluations, RunCase, SingleSteps
from gaff.record.verdict import STATES, judge


def finding(rule, since=3, severity="warning", **more):
    return Finding(rule, "0.weight:grad", "model", since, severity, f"{rule} is", "a cause", "a remedy", **more)


def curve(values):
    return Curve.of(enumerate(values))


def falling(steps=200):
    return [3.0 * 0.98**step + 0.01 * (step % 3) for step in range(steps)]


def test_a_curve_is_told_by_medians():
    told = curve([5.0, 1.0, 1.0, float("nan"), 1.0, 2.0])
    assert told.values == (5.0, 1.0, 1.0, 1.0, 2.0)
    assert told.nonfinite_since == 3
    assert curve(falling()).fell()
    assert curve(falling()).rise() is None
    assert curve([1.0, 1.0, 1.0]).rise() is None
    assert not curve([1.0] * 60).fell()


def test_a_rise_is_told_from_the_step_at_which_the_loss_was_lowest():
    rise = curve([2.0 - 0.01 * step for step in range(100)] + [1.0 + 0.05 * step for step in range(140)]).rise()
    assert rise is not None
    assert 90 <= rise[0] <= 110
    assert rise[1] > 6
    jumped = curve([2.3, *([900.0] * 20), *([11.0 + step % 3 for step in range(200)])])
    assert jumped.rise() is not None
    assert jumped.rise()[0] == 0
    noisy = [1.0 + (step % 2) for step in range(200)]
    assert curve(noisy).rise() is None


@pytest.mark.parametrize(("first", "is_jump"), [(2.3, True), (6.0, True), (2e4, False)])
def test_a_cross_entropy_that_was_far_too_large_at_first_has_not_jumped(first, is_jump):
    """Where it doubles then, the first weights or inputs were too large, and not the steps."""
    losses = curve([first, 4 * first, *[first / (1 + step) for step in range(150)]])
    assert (RunCase((), 152, 152, {"loss": losses}, guess={"loss": 2.303}).jump is not None) is is_jump


@pytest.mark.parametrize(("last", "is_told"), [(0.01, False), (0.9, True)])
def test_a_run_that_has_converged_had_no_steps_that_were_too_large(last, is_told):
    losses = curve([1.0, 1.0, 12.0, *[last + (1 - last) * 0.9**step for step in range(200)]])
    case = RunCase((finding("dead_units", 5), finding("update_large", 1)), 203, 60, {"loss": losses})
    names = {one.name for one in claims(case)}
    assert ("learning_rate_too_high" in names) is is_told


@pytest.mark.parametrize("values", [(7.5, 760.0, 6.8), (2.0, 1.9, 1.8)])
def test_numbers_that_overflow_after_a_jump_come_from_the_steps(values):
    losses = curve([*values, *[math.nan] * 60])
    told = judge(RunCase((finding("nonfinite", 4, "error"),), 63, 63, {"loss": losses}))
    assert (told.name == "nonfinite") is (max(values) < 20)


@pytest.mark.parametrize("last", [0.2, 1.0])
def test_weights_that_are_written_back_are_the_cause_where_nothing_is_learned(last):
    losses = curve([1.0 + (last - 1.0) * step / 200 for step in range(200)])
    written = finding("written_back", 1, "error", share=0.3)
    told = judge(RunCase((written,), 200, 60, {"loss": losses}, guess={"loss": 1.0}))
    assert (told.name == "written_back") is (last == 1.0)


def test_a_finding_whose_message_names_its_place_tells_how_many_more_there_are():
    told = _symptom(
        replace(finding("no_gradient"), message="0.weight:grad is None", also=("1.weight:grad",)), RunCase((), 9, 9)
    )
    assert "(model.0.weight:grad and 1 more)" in told.text


@pytest.mark.parametrize(("power", "is_told"), [(2.0, True), (0.5, False)])
def test_a_loss_below_zero_is_without_bound_at_a_hundred_times_where_it_falls_ever_faster(power, is_told):
    losses = curve([-0.2 - 300 * (step / 240) ** power for step in range(240)])
    name = judge(RunCase((), 240, 60, {"loss": losses})).name
    assert (name == "falls_without_bound") is is_told


@pytest.mark.parametrize(
    ("steps", "first", "to", "state"),
    [
        (40, 2.31, 2.35, "not enough"),
        (40, 2.31, 1.9, "healthy"),
        (150, 2.31, 2.35, "suspicious"),
        (40, 3.5, 2.6, "not enough"),  # it has fallen, and knows less than who guesses
        (40, 3.5, 2.1, "healthy"),
    ],
)
def test_a_short_run_whose_loss_stays_where_guessing_is_is_not_called_healthy(steps, first, to, state):
    losses = curve([first + (to - first) * step / steps for step in range(steps)])
    verdict = judge(RunCase((), steps, steps, {"loss": losses}, guess={"loss": 2.303}))
    assert verdict.state == state
    assert ("too few to tell whether anything is learned" in verdict.cause) is (state == "not enough")
    assert judge(RunCase((), 40, 40, {"loss": losses}, guess={"loss": math.nan})).state == "healthy"


@pytest.mark.parametrize(
    ("case", "state", "words"),
    [
        (RunCase((), 0, 0), "not enough", "no step of a torch.optim.Optimizer was seen"),
        (RunCase((), 7, 7), "not enough", "7 steps are too few"),
        (RunCase((), 500, 2), "not enough", "only 2 of 500 steps were looked at"),
        (RunCase((), 500, 50), "healthy", "no loss was seen"),
        (RunCase((), 200, 50, {"loss": curve(falling())}), "healthy", "the loss 'loss' went from"),
        (
            RunCase((), 500, 14, single=SingleSteps(last_look=16)),
            "healthy",
            "none after step 16 (more with every=, --every)",
        ),
        (
            RunCase(
                (), 200, 50, {"loss": curve([1.0 + step % 2 + (step > 100) * 9 * (step % 3) for step in range(200)])}
            ),
            "healthy",
            "which is no fall: single steps differ by",
        ),
        (
            RunCase((finding("exploding"),), 200, 50, {"loss": curve([40.0 - 1.2**step for step in range(200)])}),
            "wrong",
            "the loss 'loss' falls below zero without bound",
        ),
        (RunCase((finding("not_cleared", severity="error"),), 200, 50), "wrong", "not_cleared is"),
        (RunCase((finding("dead_units"),), 200, 50), "suspicious", "often caused by a cause"),
    ],
)
def test_states(case, state, words):
    verdict = judge(case)
    assert verdict.state == state
    assert verdict.state in STATES
    assert words in verdict.cause


def test_a_failure_comes_first_whatever_the_numbers_say():
    verdict = judge(RunCase((finding("not_cleared", severity="error"),), 200, 50), "the command ended with exit code 3")
    assert str(verdict) == "failed: the command ended with exit code 3"
    assert verdict.evidence == ("what was seen before: not_cleared is (model.0.weight:grad)",)
    assert [one.name for one in verdict.alternatives] == ["not_cleared"]


def test_large_steps_before_a_rise_are_the_cause_of_what_follows():
    loss = curve([3.0 - 0.02 * step for step in range(30)] + [2.4 + 0.5 * step for step in range(200)])
    found = (finding("nonfinite", 220, "error"), finding("dead_units", 60), finding("update_large", 5))
    told = claims(RunCase(found, 230, 40, {"loss": loss}, curve([0.1] * 230)))
    assert told[0].name == "learning_rate_too_high"
    assert told[0].certainty == "likely"
    assert told[0].since == 5
    assert "0.01" in told[0].remedy
    assert "warm it up" in told[0].remedy
    assert [one.name for one in told[1:]] == []
    alone = claims(RunCase((finding("update_large", 5),), 230, 40, {"loss": curve(falling())}))
    assert [one.name for one in alone] == ["update_large"]  # large steps alone are no harm


def test_a_rising_loss_of_several_optimizers_is_no_sign():
    loss = curve([1.0 + 0.1 * step for step in range(200)])
    assert claims(RunCase((), 200, 50, {"loss": loss}, optimizers=2)) == []
    assert claims(RunCase((), 200, 50, {"a": loss, "b": curve(falling())})) == []


def test_a_classifier_at_the_level_of_guessing():
    loss = curve([2.3 + 0.01 * (step % 5) for step in range(150)])
    verdict = judge(RunCase((), 150, 40, {"loss": loss}, guess={"loss": 2.3026}))
    assert (verdict.state, verdict.name) == ("suspicious", "labels_do_not_belong")
    assert "guessing gives 2.303" in verdict.evidence[0]
    assert judge(RunCase((), 60, 40, {"loss": loss}, guess={"loss": 2.3026})).state == "not enough"


def test_a_watched_run_has_a_verdict(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "a", every=1):
        for _ in range(40):
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
    verdict = gaff.load(tmp_path / "a").verdict
    assert (verdict.state, verdict.name) == ("wrong", "not_cleared")
    assert json.loads(json.dumps(verdict.to_dict()))["state"] == "wrong"


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(25):
    optimizer.zero_grad(); model(torch.randn(4, 2)).pow(2).mean().backward(); optimizer.step()
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "state"), [("raise SystemExit(3)", "failed"), ("", "healthy")])
def test_gaff_watch_and_gaff_report_agree(tmp_path, end, state):
    (tmp_path / "train.py").write_text(SCRIPT.format(end=end))
    words = [sys.executable, "-m", "gaff", "watch", "--every", "1", "--out", "a", "--", sys.executable, "train.py"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == (3 if end else 0)
    assert f"a: {state}: " in told.stderr
    words = [sys.executable, "-m", "gaff", "report", "a", "--json"]
    report = json.loads(subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert set(report) >= {"state", "cause", "evidence", "since", "alternatives"}
    assert report["state"] == state


@pytest.mark.parametrize(("end", "state"), [(1.3, "wrong"), (0.3, "healthy")])
def test_a_loss_that_was_a_thousand_times_what_it_was_at_first_has_hardly_learned(end, state):
    loss = [1.8, *(3000 * 0.9**step + end for step in range(150)), *[end] * 50]
    told = judge(RunCase((), 200, 50, {"loss": curve(loss)}))
    assert told.state == state, told
    if state == "wrong":
        assert "the loss was 1.8 at first, and rose to" in told.evidence[0]
    else:
        assert "went from 1.8, and up to" in told.cause


def test_a_single_step_at_the_end_is_no_stretch_of_its_own():
    assert curve([1.0] * 120 + [9.0]).last == 1.0
    assert curve([1.0] * 120 + [9.0] * 4).last == 9.0


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(10, 0.5), (20, 0.2), (30, 0.4), (40, 0.5)], "since then it overfits"),
        ([(10, 0.5), (20, 0.2), (30, 0.21), (40, 0.4)], ""),
        ([(at, 0.2 + (0.2 + 0.002 * at) * (at % 20 > 9)) for at in range(10, 200, 9)], ""),  # they scatter
    ],
)
def test_overfitting_is_two_evaluations_that_are_worse_while_the_loss_falls(pairs, told):
    case = RunCase((), 200, 50, {"loss": curve(falling())}, evaluated=Evaluations({"cross_entropy": tuple(pairs)}))
    cause = judge(case).cause
    assert ("overfits" in cause) == bool(told), cause


@pytest.mark.parametrize(("at", "is_told"), [(1, False), (190, True)])
def test_a_single_evaluation_is_told_if_it_came_late(at, is_told):
    case = RunCase((), 200, 50, {"loss": curve(falling())}, evaluated=Evaluations({"cross_entropy": ((at, 0.5),)}))
    told = f"that of the one evaluation that was heard, cross_entropy at step {at}, was 0.5"
    assert (told in judge(case).cause) == is_told
    assert ("evaluation" in judge(case).cause) == is_told


def looks_at(labels, classes=10):
    """What looks at consecutive steps tell of their labels: ``labels`` of each step."""
    return [
        (step, {"guess_of": "loss", "labels": [float(one.count(label)) for label in range(classes)]})
        for step, one in enumerate(labels)
    ]


def test_data_in_the_order_of_its_labels_is_told_from_batches_that_hold_few_by_design():
    whole = sorted(list(range(10)) * 60)
    ordered = [whole[at : at + 40] for at in range(0, 600, 40)] * 3
    drawn = random.Random(0)
    shuffled = [drawn.sample(whole, 40) for _ in range(45)]
    few = [
        [label for label in drawn.sample(range(10), 2) for _ in range(20)] for _ in range(45)
    ]  # as metrics are learned
    assert label_order(looks_at(ordered)) is not None
    assert label_order(looks_at(shuffled)) is None
    assert label_order(looks_at(few)) is None
    case = RunCase((), 200, 50, {"loss": curve(falling())}, order=label_order(looks_at(ordered)))
    assert judge(case).cause == "the data comes in the order of its labels"


def test_a_model_that_was_pruned_does_not_overfit():
    """Both losses jump after the best evaluation, and come down again together."""
    loss = [*(1.0 * 0.96**step for step in range(80)), *(1.65 * 0.995**step for step in range(100))]
    heard = Evaluations({"cross_entropy": [(20, 0.45), (75, 0.17), (100, 1.6), (140, 1.4), (175, 1.1)]})
    assert "overfits" not in judge(RunCase((), 180, 50, {"loss": curve(loss)}, evaluated=heard)).cause


def test_hard_batches_that_come_now_and_then_are_no_step_that_was_too_large():
    """With squared errors of outliers a batch can cost a hundred times what the first one did."""
    random.seed(0)
    loss = [random.uniform(2.0, 6.0) + (400.0 if step % 19 == 15 else 0.0) for step in range(250)]
    assert judge(RunCase((), 250, 50, {"loss": curve(loss)})).state == "healthy"


@pytest.mark.filterwarnings("ignore")
def test_a_last_bias_at_the_mean_of_the_targets_is_no_imbalance(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    years = 1990 + 5 * (x @ torch.randn(6))
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    nn.init.constant_(model[2].bias, years.mean().item())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with gaff.watch(model, optimizer, out=tmp_path / "run") as watch:
        for _ in range(30):
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), years).backward()
            optimizer.step()
    assert "init_imbalance" not in [one.rule for one in watch.findings]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_updates_of_narrow_weights_are_not_rounded_to_their_type(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Linear(20, 30, bias=False).to(dtype)
    nn.init.constant_(model.weight, 0.0101)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        (model(torch.rand(64, 20).to(dtype)).float() - 20).square().mean().backward()
        before = model.weight.detach().double()
        optimizer.step()
        update = model.weight.detach().double() - before
    run = gaff.load(tmp_path / "run")
    for name, true in (("max", update.max()), ("mean", update.mean()), ("rms", update.square().mean().sqrt())):
        assert run.series("weight:update", name).values[0] == pytest.approx(true.item(), rel=1e-6)


def test_targets_that_are_all_alike_tell_nothing_of_guessing(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(30):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), torch.ones(64, 1)).backward()
            optimizer.step()
    told = str(gaff.load(tmp_path / "run").verdict)
    assert "healthy" in told
    assert "guessing" not in told


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_with_a_few_targets_far_from_all_others_is_neither_too_fast_nor_stuck(seed):
    drawn = random.Random(seed)
    loss = [0.3 + sum(abs(drawn.gauss(0, 200)) / 64 for _ in range(64) if drawn.random() < 0.02) for _ in range(400)]
    told = judge(RunCase((), 400, 60, {"loss": curve([1.2, *loss])}, guess={"loss": 4.3}))
    assert told.state == "healthy", told


def test_a_learning_rate_that_still_rises_at_the_end_is_told():
    still = [2.0 + 0.01 * (step % 3) for step in range(200)]
    rising, steady = (curve(rates) for rates in ([1e-8 * (step + 1) for step in range(200)], [1e-8] * 200))
    for rates, is_told in ((rising, True), (steady, False)):
        verdict = judge(RunCase((), 200, 50, {"loss": curve(still)}, rates, {"loss": 2.0}))
        assert (verdict.name == "learning_rate_too_low") == is_told, str(verdict)
    assert "still being warmed up when the run ended" in judge(RunCase((), 200, 50, {"l": curve(still)}, rising)).cause
    assert judge(RunCase((), 200, 50, {"loss": curve(falling())}, rising, {"loss": 2.0})).state == "healthy"


def test_a_hole_in_the_losses_is_no_part_of_a_median():
    """Of a killed run the first step is known, and what the ring still held."""
    known = [(0, 1.2), *((step, 0.6 - step / 1000) for step in range(56, 120))]
    assert Curve.of(known).first == 1.2
    assert Curve.of(known).last == pytest.approx(0.482, abs=0.003)
    whole = [(step, 1.2 - step / 200) for step in range(120)]
    assert len(Curve.of(whole).values) == 24
    assert Curve.of([]).values == ()
    assert Curve.of([(7, 2.0)]).values == (2.0,)


@pytest.mark.slow
def test_a_rate_of_zero_in_another_process_is_told(tmp_path):
    """A sweep under one watch: the rates of the first process say nothing about the second."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nfrom torch import nn\n"
        "torch.manual_seed(0)\nmodel = nn.Linear(6, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))\n"
        "for _ in range(60):\n    x = torch.randn(32, 6)\n    optimizer.zero_grad()\n"
        "    loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())\n    loss.backward()\n    optimizer.step()\n"
    )
    sweep = tmp_path / "sweep.sh"
    sweep.write_text(f"{sys.executable} {script} 0.1\n{sys.executable} {script} 0.0\n")
    command = [
        sys.executable,
        "-m",
        "gaff",
        "watch",
        "--every",
        "1",
        "--out",
        str(tmp_path / "run"),
        "--",
        "bash",
        str(sweep),
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    verdict = gaff.load(tmp_path / "run").verdict
    assert (verdict.state, verdict.name) == ("wrong", "lr_zero")


def test_a_rate_that_is_zero_for_long_is_told_with_where_that_ends(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 100)  # meant: / 100
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(150):
            x = torch.randn(32, 6)
            loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    verdict = gaff.load(tmp_path / "run").verdict
    assert verdict.name == "lr_zero"
    assert re.fullmatch(r"the learning rate is zero: nothing is learned, up to about step (9\d|10\d)", verdict.cause)


@pytest.mark.parametrize("warm_up", [0, 60])
def test_a_rate_that_is_gone_once_all_is_learned_is_no_fault_after_a_warm_up_either(warm_up):
    loss = [(step, max(0.2, 2.0 - 0.018 * step) + 0.001 * (step % 3)) for step in range(960)]
    rate = [(step, (0.1 * min(1.0, (step + 1) / max(1, warm_up))) if step < 300 else 1e-6) for step in range(960)]
    case = RunCase((), 960, 50, {"loss": Curve.of(loss)}, Curve.of(rate))
    assert case.has_settled
    assert claims(case) == []


@pytest.mark.parametrize(
    ("values", "since"),
    [((0.3, math.nan), 20), ((0.3, math.nan, 0.2), None), ((math.inf,), 10), ((math.nan, 0.2, math.nan), 30)],
)
def test_an_evaluation_that_came_to_nothing_is_told(values, since):
    pairs = tuple((10 * (at + 1), value) for at, value in enumerate(values))
    case = RunCase((), 200, 50, {"loss": curve(falling())}, evaluated=Evaluations({"mse_loss": pairs}))
    told = judge(case)
    assert (told.name == "evaluation_not_finite") is (since is not None)
    if since is not None:
        assert told.state == "wrong"
        assert told.since == since
        assert "mse_loss" in told.cause


def test_a_loss_that_has_fallen_before_its_first_stretch_ends_has_fallen():
    values = [2.7, 1.6, 0.9] + [0.77 - 1e-5 * step for step in range(400)]
    verdict = judge(RunCase((), 403, 60, {"loss": curve(values)}, guess={"loss": 1.5}))
    assert verdict.state == "healthy", verdict


def test_a_loss_that_fell_and_rose_again_is_told_as_that():
    values = [2.3 - 0.02 * step for step in range(100)] + [0.3 + 0.01 * step for step in range(210)]
    spread = [value + (0.4 if at % 2 else -0.4) for at, value in enumerate(values)]
    verdict = judge(RunCase((), 310, 60, {"loss": curve(spread)}, guess={"loss": 2.3}))
    assert "the loss fell to" in verdict.cause, verdict
    assert "and rose again" in verdict.cause


def test_what_grows_a_hundredfold_is_no_noise():
    values = [0.2 + 0.01 * (at % 3) for at in range(200)] + [0.2 * 1.2**at for at in range(200)]
    told = Curve.of(enumerate(values)).rise()
    assert told is not None
    assert told[1] > 1e6
