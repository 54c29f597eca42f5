"""Which process ended first, where a command is ended from outside."""

import pytest

from gaff.cli import processes


@pytest.mark.parametrize(
    ("how", "told", "gone"),
    [
        ("SIGKILL", False, {"rank": 1, "how": "SIGKILL"}),
        ("SIGTERM", False, {"rank": 1, "how": "SIGTERM"}),
        ("SIGTERM", True, None),  # by the signal that was handed on to all of them
        ("SIGINT", True, None),
        ("exit code 3", True, {"rank": 1, "how": "exit code 3"}),
    ],
)
def test_a_signal_to_the_whole_command_is_no_process_that_ended_first(monkeypatch, how, told, gone):
    ended = {}
    monkeypatch.setattr(processes, "_children", lambda pid: [11, 12] if pid == 1 else [])
    monkeypatch.setattr(processes, "_rank_of", {11: 0, 12: 1}.get)
    monkeypatch.setattr(processes, "_ended", ended.get)
    known = processes.Processes(1)
    known.look()
    assert known.has_ranks
    assert known.gone is None
    known.are_told = told
    ended[12] = how
    known.look()
    assert known.gone == gone
