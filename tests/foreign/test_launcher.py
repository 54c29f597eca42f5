"""``gaff watch`` around a command: signals, standard streams that are closed, folders that go, names."""

import os
import shlex
import signal
import subprocess
import sys

import endings
import pytest

import gaff

pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LOOP = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def watched(folder, *command, options=("--quiet",)):
    return [sys.executable, "-m", "gaff", "watch", *options, "--out", str(folder), "--", *command]


def run(command, **options):
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False, **options)


@pytest.mark.parametrize("name", ["exit_with_a_number", "by_SIGTERM", "an_exception"])
def test_a_command_ends_as_it_would_without(name, tmp_path):
    command = [sys.executable, endings.__file__, name]
    bare, done = run(command), run(watched(tmp_path / "run", *command))
    assert (done.returncode, done.stdout, done.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert gaff.load(tmp_path / "run").steps == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_alone_reaches_the_command(number, tmp_path):
    script = f"import signal, sys, time\nsignal.signal({int(number)}, lambda *_: sys.exit(9))\nprint(1, flush=True)\ntime.sleep(120)"
    command = watched(tmp_path / "run", sys.executable, "-c", script)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, start_new_session=True
    )
    assert process.stdout.readline() == b"1\n"
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 9


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_standard_stream_that_is_closed_or_full_changes_no_exit_code(closed, tmp_path):
    command = [sys.executable, "-c", "import os; print(1); os._exit(5)"]
    bare, done = (
        run(["sh", "-c", f"{shlex.join(words)} {closed}"]) for words in (command, watched(tmp_path / "run", *command))
    )
    assert done.returncode == bare.returncode


def test_nothing_of_ours_takes_the_place_of_a_closed_stream(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"{LOOP}\nimport os\nprint(os.open(os.devnull, os.O_RDONLY), file=open({str(tmp_path / 'told')!r}, 'w'))"
    )
    told = []
    for words in ([sys.executable, str(script)], watched(tmp_path / "run", sys.executable, str(script))):
        assert run(["sh", "-c", f"{shlex.join(words)} >&-"]).returncode == 0
        told.append((tmp_path / "told").read_text())
    assert told[0] == told[1]
    assert gaff.load(tmp_path / "run").steps == 20


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("import shutil; shutil.rmtree({run!r})", "", "or what was in it, while the command ran"),
        ("", "import shutil; shutil.rmtree({run!r})", "or what was in it, while the command ran"),
        ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))", "", "and could not be written"),
    ],
)
def test_a_record_that_could_not_be_written_is_told_truly(before, after, message, tmp_path):
    run_of = str(tmp_path / "run")
    script = before.format(run=run_of) + LOOP + after.format(run=run_of)
    done = run(watched(run_of, sys.executable, "-c", script))
    assert done.returncode == 0
    assert "gaff: nothing is recorded: " in done.stderr
    assert message in done.stderr
    assert "saw no torch model" not in done.stderr


def test_a_disk_that_fills_up_is_in_the_record(tmp_path):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
    script = LOOP + limit + LOOP * 20
    done = run(watched(tmp_path / "run", sys.executable, "-c", script, options=("--every", "1")))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the record is not written any further, training goes on") == 1
    assert "note: the record ends before the run: [Errno 27] File too large" in done.stderr
    record = gaff.load(tmp_path / "run")
    assert not record.is_complete
    assert record.flight()[-1].step == 20 * 21 - 1


def test_a_module_that_is_run_has_the_names_of_its_variables(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(LOOP)
    assert run(watched("run", sys.executable, "-m", "package.train"), cwd=tmp_path).returncode == 0
    assert gaff.load(tmp_path / "run").describe("model")["name"] == "model"
