"""A session may be closed while another thread is in the middle of a forward: that goes on, and nothing stays."""

import threading

import pytest
import torch
from torch import nn

import gaff
from gaff import edits
from gaff.engine import clock
from gaff.engine.gradients import ports
from gaff.engine.modules import Hook
from gaff.engine.ops.scope import Scope


class Meeting:
    """Holds a thread that comes to ``wait`` until the main one has gone on."""

    def __init__(self):
        self.is_there, self.may_go, self.out = threading.Event(), threading.Event(), []

    def wait(self):
        if threading.current_thread() is not threading.main_thread():
            self.is_there.set()
            self.may_go.wait(10)

    def run(self, model, close):
        def work():
            try:
                self.out.append(model(torch.ones(1, 2, requires_grad=True)))
            except BaseException as error:
                self.out.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert self.is_there.wait(10)
        close()
        self.may_go.set()
        thread.join()
        assert isinstance(self.out[0], torch.Tensor), self.out


def two():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_between_the_end_of_a_run_and_its_removal(monkeypatch):
    meeting, plain, model = Meeting(), clock.end_call, two()

    def slow(frames, owner):
        found = plain(frames, owner)
        if not frames:
            meeting.wait()
        return found

    monkeypatch.setattr(clock, "end_call", slow)
    handle = gaff.edit(model, {"0": edits.scale(2.0)}).attach()
    meeting.run(model, handle.remove)
    assert not any(isinstance(hook, Hook) for one in model.modules() for hook in one._forward_hooks.values())


def test_at_the_entry_of_a_module_whose_gradient_is_asked(monkeypatch):
    meeting, plain, model = Meeting(), ports.passed_in, two()

    def slow(*args):
        meeting.wait()
        return plain(*args)

    monkeypatch.setattr(ports, "passed_in", slow)
    got = gaff.capture(model, gaff.maybe("0:input_grad"), threads="all")
    got.__enter__()
    meeting.run(model, lambda: got.__exit__(None, None, None))


def test_inside_a_module_that_is_edited():
    class Slow(nn.Module):
        def forward(self, x):
            meeting.wait()
            return x + 1

    meeting = Meeting()
    model = nn.Sequential(nn.Linear(2, 2), Slow())
    handle = gaff.edit(
        model, {gaff.maybe("1"): edits.scale(2.0), gaff.maybe("1:grad_input"): edits.scale(2.0)}
    ).attach()
    meeting.run(model, handle.remove)


def test_while_ops_come_whose_names_are_new():
    class Busy(nn.Module):
        def forward(self, x):
            return torch.tanh(torch.relu(x))

    model = Busy()
    got = gaff.capture(model, gaff.maybe("/nothing"), threads="all")
    got.__enter__()
    model(torch.ones(2))
    scope = got._session._wiring.scopes[0]

    class Growing(dict):
        def values(self):
            found = super().values()
            self.setdefault("new", next(iter(found)))
            return found

    scope.rows = Growing({"relu": scope.row("relu")})
    got.__exit__(None, None, None)
    assert not got._session.is_open


def test_gradients_are_let_go_whatever_fails_at_closing(monkeypatch):
    def broken(self):
        raise RuntimeError("a defect of gaff")

    monkeypatch.setattr(Scope, "settle", broken)
    model, x = two(), torch.ones(1, 2, requires_grad=True)
    got = gaff.capture(model, gaff.maybe("/relu", "0:grad_output"))
    with pytest.raises(RuntimeError, match="a defect of gaff"), got:
        out = model(x)
    assert not got._session._wiring.gradients.is_open
    out.sum().backward()  # nothing listens any more
