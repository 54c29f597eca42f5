"""``gaff watch`` around a command: signals, standard streams that are closed, folders that go, names."""

import json
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


def in_shell(folder, words, tail, options=("--quiet",)):
    """The same in a shell, bare and watched: its exit codes and standard outputs."""
    bare, done = (
        run(["bash", "-c", f"{shlex.join(each)} {tail}"]) for each in (words, watched(folder, *words, options=options))
    )
    return (bare.returncode, bare.stdout), (done.returncode, done.stdout), done.stderr


def test_a_command_has_the_files_that_its_shell_has_opened(tmp_path):
    words = [sys.executable, "-c", "import sys; print(open(sys.argv[1]).read())"]
    bare, done, _ = in_shell(tmp_path / "run", words, "<(echo hello)")
    assert bare == done == (0, "hello\n\n")


def test_a_text_without_a_program_in_its_first_line_is_run_by_a_shell(tmp_path):
    script = tmp_path / "plain.sh"
    script.write_text("echo hello $1\n")
    script.chmod(0o755)
    bare, done, _ = in_shell(tmp_path / "run", [str(script), "there"], "")
    assert bare == done == (0, "hello there\n")


def test_an_exit_code_is_kept_where_ended_children_are_ignored(tmp_path):
    words = watched(tmp_path / "run", sys.executable, "-c", "raise SystemExit(3)")
    starting = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    assert run([sys.executable, "-c", starting, *words]).returncode == 3


def test_what_a_program_reads_of_its_own_standard_error_is_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import contextlib, io\nwith contextlib.redirect_stderr(io.StringIO()) as told:\n    exec({LOOP!r}.replace('0.1', '1e30'))\n"
        "print(len(told.getvalue()))\n"
    )
    _, done, told = in_shell(tmp_path / "run", [sys.executable, str(script)], "", options=())
    assert done == (0, "0\n")
    assert "not finite" in told


def test_an_error_in_a_console_before_a_training_is_not_its_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import code\ncode.InteractiveConsole().push('1/0')\n{LOOP}")
    assert run(watched(tmp_path / "run", sys.executable, str(script))).returncode == 0
    assert gaff.load(tmp_path / "run").verdict.state != "failed"


def test_a_tool_that_opens_the_files_of_all_frames_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    done = run(watched(tmp_path / "run", sys.executable, "-m", "trace", "--count", "-C", str(tmp_path / "counts"),
                       "--ignore-dir", sys.prefix, str(script)))  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("around", [[], ["bash", "-c", 'python=$1; shift; "$python" "$@"; echo after', "sh"]])
def test_a_question_to_the_launcher_reaches_who_trains(around, tmp_path):
    script = tmp_path / "script.py"
    slow = LOOP.replace("range(20)", "range(200)") + "    print(1, flush=True)\n    __import__('time').sleep(0.02)\n"
    script.write_text(slow)
    command = watched(tmp_path / "run", *around, sys.executable, str(script))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True)
    for _ in range(20):
        assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGUSR1)
    told = process.communicate(timeout=120)[0]
    assert (process.returncode, told.endswith("after\n")) == (0, bool(around))
    assert sum("SIGUSR1" in event["why"] for _, event in gaff.load(tmp_path / "run").events("flight")) == 1


def test_a_signal_before_the_command_is_known_is_kept_for_it(tmp_path):
    at_start = (
        "import os, signal, sys\nfrom gaff.cli import launch, main\nstart = launch.start\n"
        "def signalled(*args, **more):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return start(*args, **more)\n"
        "launch.start = signalled\nsys.exit(main(sys.argv[1:]))"
    )
    words = watched(tmp_path / "run", sys.executable, "-c", "import time; time.sleep(60)")[3:]
    done = run([sys.executable, "-c", at_start, *words])
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["code"] == -signal.SIGTERM


def test_what_is_ignored_is_ignored_by_the_command(tmp_path):
    words = watched(
        tmp_path / "run", sys.executable, "-c", "import signal; print(repr(signal.getsignal(signal.SIGHUP)))"
    )
    starting = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    assert "SIG_IGN" in run([sys.executable, "-c", starting, *words]).stdout


def test_a_question_that_nobody_takes_ends_nothing(tmp_path):
    command = watched(tmp_path / "run", "sh", "-c", "echo 1; sleep 2; exit 4", options=())
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGUSR1)
    _, told = process.communicate(timeout=120)
    assert (process.returncode, "SIGUSR1 is not handed on" in told) == (4, True)


def test_a_report_is_not_written_where_the_script_has_put_its_output(tmp_path):
    script, log = tmp_path / "script.py", tmp_path / "log.txt"
    script.write_text(f"import sys\nsys.stdout = open({str(log)!r}, 'w')\nprint('mine')\n{LOOP.replace('0.1', '1e30')}")
    done = run([sys.executable, "-m", "gaff", "nan", str(script)])
    assert (done.returncode, "not finite" in done.stdout, log.read_text()) == (3, True, "mine\n")


def test_names_that_cannot_be_are_refused_in_words(tmp_path):
    done = run(watched("a" * 300, sys.executable, "-c", "0"))
    assert (done.returncode, "cannot be written: File name too long" in done.stderr) == (1, True), done.stderr
