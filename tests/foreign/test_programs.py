"""Each program of ``programs`` prints the same, bare and watched, and watching it does not fail."""

import contextlib
import io
import threading

import programs
import pytest
import torch
from torch import nn

import gaff
from gaff.address.grammar import Site
from gaff.cli import main
from gaff.training.watch.sampled_step import SampledStep
from gaff.training.watch.settings import to_stderr

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def printed(function):
    """What a program prints, from the same random numbers each time."""
    torch.manual_seed(0)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function()
    return out.getvalue()


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_program_prints_the_same_when_it_is_watched(name, tmp_path):
    bare = printed(programs.PROGRAMS[name])
    assert bare
    with gaff.watch(out=tmp_path, every=1) as watching:
        watched = printed(programs.PROGRAMS[name])
    assert watched == bare
    assert watching.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 1000])
def test_a_watched_program_gets_as_deep_as_a_bare_one(every):
    bare, limit = programs.depths()
    with gaff.watch(every=every) as watching:
        watched, seen = programs.depths()
    assert watching.failure is None
    assert seen == limit
    assert all(abs(one - other) <= 2 for one, other in zip(watched, bare, strict=True)), (watched, bare)


def test_who_closes_waits_for_what_another_thread_is_doing(monkeypatch):
    entered, may_go_on = threading.Event(), threading.Event()

    def slow(self):
        if threading.current_thread() is trains:  # not what an earlier test's watcher closes on this thread
            entered.set()
            may_go_on.wait(60)
        close(self)

    close = SampledStep.close
    monkeypatch.setattr(SampledStep, "close", slow)
    model = programs.Net()
    watching = gaff.watch(model, every=1)
    trains = threading.Thread(target=programs.train, args=(model, torch.optim.SGD(model.parameters(), 0.1), 3))
    closes = threading.Thread(target=watching.remove)
    trains.start()
    assert entered.wait(60)  # by the second step, which completes the first
    closes.start()
    closes.join(0.1)
    assert closes.is_alive()
    may_go_on.set()
    trains.join()
    closes.join()
    assert watching.failure is None
    assert 1 <= watching.step <= 3  # the thread that trains may have gone on before the other was let in


def test_names_of_modules_do_not_command_a_terminal(tmp_path, capsys):
    odd = "ev\nil\x1b[31m\u202e`\\"
    model = nn.Sequential()
    model.add_module(odd, nn.Linear(4, 4))
    with gaff.watch(model, out=tmp_path / "run", every=1, tell=to_stderr):
        model(torch.full((2, 4), float("inf"))).sum().backward()
    main(["report", str(tmp_path / "run"), "--all"])
    told = capsys.readouterr()
    assert not any(one in told.out + told.err for one in ("\x1b", "\u202e", "ev\nil"))
    assert "`ev\\nil\\x1b[31m\\u202e``\\\\`" in told.out
    with gaff.capture(model, str(Site(odd))) as got:
        model(torch.ones(2, 4))
    assert got[str(Site(odd))].shape == (2, 4)
