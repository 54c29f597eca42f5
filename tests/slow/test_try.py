"""gaff try, as a user calls it: scripts that know nothing of gaff, healthy and broken, with and without a DataLoader."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gaff

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def tried(tmp_path, *words, options=(), code=0):
    run = [sys.executable, "-m", "gaff", "try", "--out", "a", *options, "--", sys.executable, *map(str, words)]
    told = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert told.returncode == code, told.stderr[-3000:]
    return told


def test_a_healthy_script_without_a_loader(tmp_path):
    told = tried(tmp_path, ROOT / "examples" / "train_digits.py", options=["--steps", "100"])
    assert "a: healthy: " in told.stdout
    assert "each label is learned for its input, by rule or by heart" in told.stdout
    assert "the model can learn" in told.stdout
    assert "6 runs follow, about " in told.stderr
    record = gaff.load(tmp_path / "a")
    assert record.experiments.is_repeatable
    assert {one.name for one in record.experiments.changed} == {"seed=1", "lr=0.1x", "lr=10x", "scramble", "one-batch"}
    assert record.steps == 100
    assert gaff.load(tmp_path / "a" / "try" / "scramble").steps == 100
    report = subprocess.run([sys.executable, "-m", "gaff", "report", "a"], cwd=tmp_path, capture_output=True, text=True,
                            check=True)  # fmt: skip
    assert "scramble" in report.stdout


@pytest.mark.parametrize(
    ("fault", "name"), [("labels-shuffled", "labels_do_not_belong"), ("decay", "weight_decay_too_high")]
)
def test_what_is_wrong_is_found(tmp_path, fault, name):
    tried(tmp_path, ROOT / "tests" / "diagnose" / "train.py", "--fault", fault, code=3 if fault == "decay" else 0)
    assert gaff.load(tmp_path / "a").verdict.name == name


def test_only_what_was_asked_for_as_data(tmp_path):
    told = tried(tmp_path, ROOT / "examples" / "train_digits.py", "--bug", "lr-too-high", code=3,
                 options=["--only", "lr=0.001x,scramble", "--jobs", "2", "--steps", "60", "--json"])  # fmt: skip
    data = json.loads(told.stdout)
    assert (data["state"], data["name"]) == ("wrong", "learning_rate_too_high")
    made = data["experiments_made"]
    assert [one["name"] for one in made["changed"]] == ["seed=1", "lr=0.001x", "scramble"]
    assert made["is_repeatable"] is True


def test_with_nothing_changed_a_run_has_the_bits_of_the_bare_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))\n"
        "optimizer = torch.optim.Adam(model.parameters(), 0.01)\n"
        "for step in range(30):\n"
        "    loss = model(torch.randn(8, 4)).square().mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    print(step, loss.item().hex(), float(sum(one.detach().double().sum() for one in model.parameters())).hex(), flush=True)\n"
    )
    bare = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout.splitlines()  # fmt: skip
    tried(tmp_path, script, options=["--only", "fp32", "--steps", "20"])
    for folder in ("a", "a/try/again", "a/try/fp32"):
        lines = (tmp_path / folder / "output.txt").read_text().splitlines()
        assert lines == bare[: len(lines)]
        assert len(lines) == 19  # ended inside the twentieth step
    told = subprocess.run([sys.executable, "-m", "gaff", "report", "a"], cwd=tmp_path, capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    assert "autocast was never on" in told


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("print('no torch here')", [], "has trained no model of torch"),
        ("import torch; raise SystemExit(3)", [], "has trained no model of torch"),
        ("", ["--only", "lrr"], "'lrr' is no experiment: expected one of lr, warmup"),
        ("", ["--steps", "3"], "--steps 3: expected 10 or more"),
        ("", ["--only", "lr", "--all"], "--only and --all: expected one of them"),
        ("", ["--jobs", "0"], "--jobs 0: expected 1 or more"),
        ("import torch\nm = torch.nn.Linear(2, 1)\nm(torch.ones(1, 2)).sum().backward()\n1 / 0", [],
         "nothing can be compared: in the run as it is"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_told_in_one_line(tmp_path, text, options, words):
    (tmp_path / "train.py").write_text(text)
    told = tried(tmp_path, "train.py", options=options, code=1)
    last = told.stderr.strip().splitlines()[-1]
    assert last.startswith("gaff: ")
    assert words in last
    if options:
        assert not (tmp_path / "a").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_cancelled_try_ends_what_it_runs(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(
        "import os, time, torch\nfrom torch import nn\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "model = nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n    optimizer.zero_grad()\n    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n    time.sleep(0.05)\n"
    )
    command = [
        sys.executable,
        "-m",
        "gaff",
        "try",
        "--steps",
        "100000",
        "--out",
        str(tmp_path / "out"),
        "--",
        sys.executable,
        str(script),
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    child.terminate()
    child.wait(30)
    training = int((tmp_path / "pid").read_text())
    while time.monotonic() < deadline:
        try:
            os.kill(training, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(training, signal.SIGKILL)
    raise AssertionError("the training went on")
