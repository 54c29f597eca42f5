"""Scripts that know nothing of gaff: watched and bare they print the same, end the same and compute the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gaff

SCRIPTS = Path(__file__).parent.parent / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "common")
pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


ABORTED = "terminate called without an active exception"  # gloo, now and then, as a process ends; without gaff, too


def run(command, out=None, **options):
    for _ in range(3):
        done = subprocess.run(
            command, cwd=SCRIPTS, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False, **options
        )
        if ABORTED not in done.stderr:
            break
        if out is not None:
            shutil.rmtree(out, ignore_errors=True)
    return done


def watch(out, *command, options=()):
    return run([sys.executable, "-m", "gaff", "watch", "--out", str(out), *options, "--", *command], out)


@pytest.mark.parametrize("name", NAMES)
def test_a_watched_script_prints_and_computes_the_same(name, tmp_path):
    command = [sys.executable, f"{name}.py", "--lr", "0.1"]
    bare = run(command)
    watched = watch(tmp_path / "run", *command, options=["--every", "3"])
    told = watched.stdout.replace(" 2 {} ", " 1 {} ") if name == "compiled" else watched.stdout  # the looked-at variant
    assert told == bare.stdout
    assert watched.returncode == bare.returncode, bare.stderr + watched.stderr
    assert "Traceback" not in watched.stderr or "Traceback" in bare.stderr
    assert "training goes on" not in watched.stderr, watched.stderr
    if name == "no_torch":
        assert "nothing was watched" in watched.stderr
        return
    record = gaff.load(tmp_path / "run")
    assert record.steps >= 5, watched.stderr
    assert record.is_complete
    losses = [one for one in record.scalars if one.startswith("loss:")]
    assert losses


def test_models_losses_and_ranks_are_named_as_the_user_names_them(tmp_path):
    watch(tmp_path / "gan", sys.executable, "gan.py")
    record = gaff.load(tmp_path / "gan")
    assert {name.partition(".")[0].partition(":")[0] for name in record.sites} == {"netG", "netD"}
    assert {"loss:errD_real", "loss:errD_fake", "loss:errG"} <= set(record.scalars)
    watch(tmp_path / "lstm", sys.executable, "lstm.py")
    assert gaff.load(tmp_path / "lstm").describe("model")["name"] == "self.actor"
    watch(tmp_path / "trainer", sys.executable, "trainer.py")
    record = gaff.load(tmp_path / "trainer")
    assert record.describe("model")["name"] == "model"
    assert len(record.series("transformer.h.0.attn.c_attn", "rms")) > 2
    assert record.steps == 12
    watch(tmp_path / "ddp", sys.executable, "ddp.py")
    record = gaff.load(tmp_path / "ddp")
    assert record.ranks == [0, 1]
    one, other = (dict(record.series("0.weight:param", "mean", rank=rank)) for rank in (0, 1))
    both = one.keys() & other.keys()  # on a busy machine one may look more often
    assert len(both) > 2
    assert {step: one[step] for step in both} == {step: other[step] for step in both}
    own = [record.series("0", "mean", rank=rank).values for rank in (0, 1)]
    assert own[0] != own[1]


@pytest.mark.parametrize("launcher", ["torchrun", "module", "pytest", "shell"])
def test_commands_that_start_python_by_other_means(launcher, tmp_path):
    script = str(SCRIPTS / "gan.py")
    test = tmp_path / "test_it.py"
    test.write_text("def test_it():\n    import gan\n")
    command = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        "module": [sys.executable, "-m", "gan"],
        "pytest": [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path),
                   "-o", f"pythonpath={SCRIPTS}", str(test)],
        "shell": ["sh", "-c", f"{sys.executable} gan.py | cat"],
    }[launcher]  # fmt: skip
    done = watch(tmp_path / "run", *command)
    assert done.returncode == 0, done.stderr
    record = gaff.load(tmp_path / "run")
    assert record.steps == 30
    assert record.ranks == ([0, 1] if launcher == "torchrun" else [0])


def test_a_signal_reaches_the_command_and_ends_both(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(3, 3)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "print('begun', flush=True)\nwhile True:\n    model(torch.randn(4, 3)).sum().backward()\n    optimizer.step()\n"
    )
    command = [sys.executable, "-m", "gaff", "watch", "--out", str(tmp_path / "run"), "--quiet", "--", sys.executable]
    with subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        file = tmp_path / "run" / "rank0.gaff"
        while not file.exists() or gaff.load(tmp_path / "run").steps < 10:  # it can be read while it is written
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert process.returncode == -signal.SIGTERM
    record = gaff.load(tmp_path / "run")
    assert record.steps >= 10
    assert not record.is_complete
    assert any(one.rule == "not_cleared" for one in record.findings)


def test_an_existing_sitecustomize_is_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.MARK = __name__\n")
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(MARK, any('inject' in one for one in sys.path))\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "gaff", "watch", "--out", str(tmp_path / "run"), "--", sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "sitecustomize False\n", done.stderr


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path):
    bare = run([sys.executable, "plain.py"])
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
    )
    command = [
        sys.executable,
        "-m",
        "gaff",
        "watch",
        "--out",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        "-B",
        "plain.py",
    ]
    done = subprocess.run(command, cwd=SCRIPTS, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == bare.stdout
    assert done.returncode == bare.returncode
    assert done.stderr.count("the record is not written any further, training goes on") == 1, done.stderr
    assert len(gaff.load(tmp_path / "run").sites) > 5  # what was written before can be read


def test_the_report_is_data(tmp_path):
    watch(tmp_path / "run", sys.executable, "plain.py")
    done = run([sys.executable, "-m", "gaff", "report", str(tmp_path / "run"), "--json"])
    told = json.loads(done.stdout)
    assert set(told) >= {"findings", "sites", "overhead", "verdict", "steps", "scalars"}
    assert told["steps"] == 40
    assert "torch" not in done.stderr
