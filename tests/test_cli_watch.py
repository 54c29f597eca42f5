"""``gaff watch`` and ``gaff report``: what they refuse, what they print."""

import json
import os
import subprocess
import sys
import time
from dataclasses import fields

import pytest
import torch
from torch import nn

import gaff
from gaff.cli import main, parser_of
from gaff.cli.launch import make_folder
from gaff.errors import RecordError
from gaff.training.watch.settings import VARIABLE, Settings
from gaff.views.run_text import box, sparkline, to_ascii


def refused(capsys, *arguments):
    code = main(list(arguments))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "gaff: no command: expected gaff watch [options] -- python train.py"),
        (["--", "no-such-program"], "gaff: 'no-such-program' is not found: expected a program, such as python"),
        (["--budget", "3", "--", sys.executable], "gaff: --budget 3.0: expected a share of the time"),
        (["--every", "0", "--", sys.executable], "gaff: --every 0: expected a number of steps, 1 or more"),
        (
            ["--rules-off", "dead", "--", sys.executable],
            "gaff: no rule 'dead': expected a name that docs/rules.md lists",
        ),
        (["--rules-off", "dead_unit", "--", sys.executable], "; did you mean 'dead_units'?\n"),
        (["--only", "a..b", "--", sys.executable], "gaff: address 'a..b' has an empty name"),
    ],
)
def test_slips_are_told_before_anything_runs(arguments, message, capsys, tmp_path):
    code, text = refused(capsys, "watch", "--out", str(tmp_path / "run"), *arguments)
    assert code == 1
    assert message in text
    assert not (tmp_path / "run").exists()


def test_keeping_batches_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not there
    code, text = refused(capsys, "watch", "--out", str(tmp_path / "run"), "--keep-batch", "--", sys.executable)
    assert code == 1
    assert (
        text
        == "gaff: --keep-batch needs the package 'safetensors', which is not installed: pip install 'gaff[files]'\n"
    )
    assert not (tmp_path / "run").exists()


def test_every_setting_reaches_the_command(capfd, tmp_path):
    options = "--only a --only b.* --skip c --every 3 --budget 0.5 --rules-off dead_units --interval 7 --keep-batch"
    code = f"import os; print(os.environ[{VARIABLE!r}])"
    words = ["watch", "--out", str(tmp_path / "run"), *options.split(), "--quiet", "--", sys.executable, "-c", code]
    assert main(words) == 0
    told = json.loads(capfd.readouterr().out)
    assert Settings.from_json(told) == Settings(
        out=tmp_path / "run",
        only=("a", "b.*"),
        skip=("c",),
        every=3,
        budget=0.5,
        rules_off=("dead_units",),
        interval_s=7.0,
        keep_batch=True,
    )
    assert (told["quiet"], told["plain"]) == (True, False)


def test_every_setting_is_an_option_with_the_default_and_the_help_of_its_declaration():
    actions = {one.dest: one for one in parser_of("watch")._actions}
    for one in fields(Settings):
        if "help" in one.metadata:
            assert actions[one.name].help.startswith(one.metadata["help"])
    plain = vars(parser_of("watch").read([]))
    assert Settings.from_json({**plain, "out": None}) == Settings()


def test_commands_that_begin_at_once_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    made = [make_folder(None, ["python", "train.py"]) for _ in range(3)]
    assert [one.name for one in made] == [f"20260101-000000-train{end}" for end in ("", "-2", "-3")]
    with pytest.raises(RecordError, match=r"nothing is recorded yet.*such as --out .*train-4"):
        make_folder(str(made[0]), ["python", "train.py"])
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    (tmp_path / "inside" / "gaff-runs").touch()
    with pytest.raises(RecordError, match="cannot be written: Not a directory"):
        make_folder(None, ["python", "train.py"])


def test_a_folder_that_holds_a_run_is_not_written_to(capsys, tmp_path):
    (tmp_path / "rank0.gaff").write_bytes(b"GAFFLOG1")
    code, text = refused(capsys, "watch", "--out", str(tmp_path), "--", sys.executable, "-c", "print()")
    assert code == 1
    assert f"holds a run already (0 steps): expected a new folder, such as --out {tmp_path}-2, or --force" in text
    assert (tmp_path / "rank0.gaff").exists()


def test_force_removes_the_run_that_is_there_and_nothing_else(tmp_path):
    folder = tmp_path / "a"
    (folder / "batches").mkdir(parents=True)
    for name in ("rank0.gaff", "rank0.ring", "run.json", "notes.txt", "batches/00000003-nonfinite.safetensors"):
        (folder / name).write_text("{}")
    make_folder(str(folder), ["python", "train.py"], force=True)
    assert sorted(one.name for one in folder.rglob("*") if one.is_file()) == ["notes.txt", "run.json"]
    assert "train.py" in (folder / "run.json").read_text()


def test_the_next_free_name_is_told(tmp_path):
    for name in ("a", "a-2"):
        make_folder(str(tmp_path / name), ["python", "train.py"])
    with pytest.raises(RecordError, match=r"a' holds a run already \(.*\): expected .*a-3"):
        make_folder(str(tmp_path / "a"), ["python", "train.py"])


def test_a_command_without_torch_runs_and_that_is_told(capfd, tmp_path):
    code = main(
        ["watch", "--out", str(tmp_path / "run"), "--", sys.executable, "-c", "print('out'); raise SystemExit(4)"]
    )
    told = capfd.readouterr()
    assert code == 4
    assert told.out == "out\n"
    assert "nothing was watched" in told.err


def test_a_training_command_is_watched_and_reported(capfd, tmp_path):
    script = (
        "import torch\ntorch.set_num_threads(1)\nmodel = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(30):\n    model(torch.randn(8, 4)).square().mean().backward()\n    optimizer.step()\n"
    )
    run = str(tmp_path / "run")
    assert main(["watch", "--out", run, "--plain", "--", sys.executable, "-c", script]) == 0
    told = capfd.readouterr()
    assert told.out == ""
    assert "gaff: error: not_cleared at model.weight:grad" in told.err
    assert "remedy: call optimizer.zero_grad() once" in told.err
    assert "watching took" in told.err
    assert told.err.isascii()
    assert main(["report", run, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    [finding] = [one for one in found["findings"] if one["rule"] == "not_cleared"]
    assert set(finding) >= {"rule", "site", "since", "severity", "cause", "remedy", "evidence"}
    assert found["steps"] == 30
    assert {one["site"] for one in found["sites"]} >= {":input", ":output", "weight:param", "weight:grad"}
    assert main(["report", run]) == 0
    assert "┌─ gaff · error: not_cleared" not in (text := capfd.readouterr().out) or "│" in text


def test_a_missing_run_is_told(capsys, tmp_path):
    code, text = refused(capsys, "report", str(tmp_path / "nothing"))
    assert code == 1
    assert "is not there: expected the folder of a run" in text
    with pytest.raises(RecordError):
        main(["report", str(tmp_path / "nothing"), "--debug"])


def test_sparklines_tell_what_is_not_finite_and_scale():
    assert sparkline([0.0, 1.0, 2.0, 3.0]) == "▁▃▆█"
    assert sparkline([1.0, float("nan"), 3.0]) == "▁!█"
    assert sparkline([1.0, 10.0, 100.0, 1000.0]) == "▁▃▆█"  # logarithmic
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert sparkline([], plain=True) == ""
    assert sparkline([0.0, 1.0], plain=True).isascii()
    assert len(sparkline(list(range(1000)))) == 16


def test_boxes_become_plain_lines():
    text = box("title", ["one", "two"])
    assert all(len(line) == 100 for line in text.splitlines())
    assert to_ascii(text) == "gaff: title\ngaff:   one\ngaff:   two"


def test_options_of_a_report_that_would_be_passed_over_are_refused(capsys, tmp_path):
    import torch

    import gaff

    for name in ("a", "b"):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with gaff.watch(model, optimizer, out=tmp_path / name):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for words, told in (
        (["--html", "x.html", "--json"], "--html and --json are different ways to tell of a run"),
        (["--live", "--html", "x.html"], "--html and --live are different ways"),
        (["--rank", "1"], "--rank is of no use without --html or --live"),
        (["--port", "80"], "--port is of no use without --live"),
        (["--idle", "3", "--json"], "--idle is of no use without --live"),
    ):
        code, error = refused(capsys, "report", *runs, *words)
        assert (code, told in error) == (1, True), error
    assert main(["report", *runs, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["report", runs[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1


def test_a_script_that_is_no_program_and_an_empty_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("echo 1")
    told = "'./train.sh' is no program: expected one before it, as in python ./train.sh"
    assert told in refused(capsys, "watch", "--", "./train.sh")[1]
    assert "--out is empty" in refused(capsys, "watch", "--out", "", "--", sys.executable, "train.py")[1]
    assert not (tmp_path / "gaff-runs").exists()


def test_a_script_of_python_is_run_by_the_python_that_runs_gaff(tmp_path, capfd):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.executable, *sys.argv[1:])")
    assert main(["watch", "--out", str(tmp_path / "run"), str(tmp_path / "train.py"), "--epochs", "3"]) == 0
    assert f"{sys.executable} --epochs 3" in capfd.readouterr().out


def test_a_kernel_of_no_known_name_is_told_before_the_command_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GAFF_KERNEL", "foo")
    assert main(["watch", "--out", str(tmp_path / "run"), sys.executable, "-c", "print(1)"]) == 1
    assert "GAFF_KERNEL='foo': expected one of native, plain, avx512" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("encoding", "is_plain"), [("cp1252", True), ("ascii", True), ("utf-8", False)])
def test_where_an_encoding_has_no_boxes_the_report_is_plain(encoding, is_plain, tmp_path):
    from gaff.cli.printing import has_boxes

    with open(tmp_path / "out", "w", encoding=encoding) as stream:
        assert has_boxes(stream) is not is_plain
    record = tmp_path / "run"
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=record, every=1):
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "gaff", "report", str(record)]
    told = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120).stdout
    assert b"\\u25" not in told
    assert ("\u2588".encode() in told) is not is_plain


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "between"])
def test_a_script_that_starts_another_training_is_told_by_its_own(order, tmp_path, capfd):
    file = tmp_path / "main.py"
    file.write_text(
        "import subprocess, sys, torch\n"
        "def train(rate, steps):\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=rate)\n"
        "    for step in range(steps):\n"
        f"        if len(sys.argv) == 1 and step == 5 and {order == 'between'}:\n"
        "            subprocess.run([sys.executable, __file__, 'helper'], check=True)\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.randn(8, 4)).square().mean().backward()\n"
        "        optimizer.step()\n"
        f"if len(sys.argv) == 1 and {order == 'before'}:\n"
        "    subprocess.run([sys.executable, __file__, 'helper'], check=True)\n"
        "train(0.1, 20) if len(sys.argv) == 1 else train(0.01, 10)\n"
    )
    run = tmp_path / "run"
    assert main(["watch", "--out", str(run), "--plain", "--", sys.executable, str(file)]) == 0
    capfd.readouterr()
    record = gaff.load(run)
    assert record.groups == [[1], [0]]
    assert record.steps == 20
    assert set(record.scalar("lr").values) == {0.1}
    assert set(record.scalar("lr", rank=1).values) == {0.01}


def test_force_removes_the_experiments_of_the_run_that_it_removes(tmp_path):
    from gaff.cli.launch import make_folder

    (tmp_path / "run" / "try" / "again").mkdir(parents=True)
    (tmp_path / "run" / "try.json").write_text("{}")
    (tmp_path / "run" / "run.json").write_text("{}")
    make_folder(str(tmp_path / "run"), ["python", "x.py"], force=True)
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == ["run.json"]


def test_a_record_of_another_rank_alone_is_told_as_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
    assert main(["report", str(tmp_path / "run"), "--json"]) in (0, 3)
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == [3]
    assert len(told["scalars"]["loss:loss"]) == 3
    assert any(one.get("rms") is not None for one in told["sites"])


@pytest.mark.parametrize("option", ["--data", "--tokenizer"])
def test_options_that_live_would_pass_over_are_refused(tmp_path, capsys, option):
    assert main(["report", str(tmp_path), "--live", option, "x"]) == 1
    assert f"{option} is of no use with --live" in capsys.readouterr().err
