"""Which process ended first, where a command is ended from outside."""

import subprocess
import sys
import time

import pytest

from gaff.cli import processes

LAUNCHER = """
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
first, last = (subprocess.Popen(sleep, env={**os.environ, "RANK": str(rank)}) for rank in range(2))
sys.stdin.readline()
last.kill()
last.wait()  # at once, as torchrun may
sys.stdin.readline()  # the others take their time to end
first.terminate()
first.wait()
"""


def two_ranks(monkeypatch):
    """A command with two ranks that were seen, and how each has ended, by process; to be filled."""
    ended = {}
    monkeypatch.setattr(processes, "_children", lambda pid: [11, 12] if pid == 1 else [])
    monkeypatch.setattr(processes, "_rank_of", {11: 0, 12: 1}.get)
    monkeypatch.setattr(processes, "_ended", ended.get)
    known = processes.Processes(1)
    known.look()
    return known, ended


@pytest.mark.parametrize(
    ("how", "told", "gone"),
    [
        ("SIGKILL", False, {"rank": 1, "how": "SIGKILL"}),
        ("SIGTERM", False, {"rank": 1, "how": "SIGTERM"}),
        ("SIGTERM", True, None),  # by the signal that was handed on to all of them
        ("SIGINT", True, None),
        ("exit code 3", True, {"rank": 1, "how": "exit code 3"}),
        ("?", False, {"rank": 1, "how": ""}),  # its launcher had asked before that was read
        ("?", True, None),
    ],
)
def test_a_signal_to_the_whole_command_is_no_process_that_ended_first(monkeypatch, how, told, gone):
    known, ended = two_ranks(monkeypatch)
    assert known.gone is None
    known.are_told = told
    ended[12] = how
    known.look()
    assert known.gone == gone


def test_of_several_that_nobody_saw_end_none_is_named(monkeypatch):
    known, ended = two_ranks(monkeypatch)
    ended.update({11: "?", 12: "?"})
    known.look()
    assert known.gone is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")  # on Linux it runs
def test_the_end_of_a_rank_wakes_who_waits_and_it_is_named_though_its_launcher_asked_first():
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, text=True) as launcher:
        known = processes.Processes(launcher.pid)
        while len(known._ranks) < 2:
            time.sleep(0.01)
            known.look()
        launcher.stdin.write("\n")
        launcher.stdin.flush()
        while known.gone is None and launcher.poll() is None:
            known.wait()
            known.look()
        launcher.stdin.write("\n")
        launcher.stdin.flush()
        launcher.wait()
        assert known.gone["rank"] == 1
        assert known.gone["how"] in ("SIGKILL", "")  # whoever was quicker
        known.close()
        assert not known._ends
