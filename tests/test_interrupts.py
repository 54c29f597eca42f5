"""A Ctrl-C while a session opens or closes leaves no hook."""

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import gaff
from gaff.sessions.exact import Keeper

OPENED = {
    "capture": lambda model: gaff.capture(model, "**"),
    "edit": lambda model: gaff.edit(model, {"**": gaff.edits.scale(2.0)}),
}


def hooks_of(model):
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("times", [1, 3])
def test_in_the_middle_of_closing(opened, times, monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    removed = []
    original = RemovableHandle.remove

    def remove(handle):
        removed.append(handle)
        if 3 <= len(removed) < 3 + times:
            raise KeyboardInterrupt
        original(handle)

    session = OPENED[opened](model)
    session.__enter__()
    model(torch.randn(2, 4))
    monkeypatch.setattr(RemovableHandle, "remove", remove)
    with pytest.raises(KeyboardInterrupt):
        session.__exit__(None, None, None)
    monkeypatch.undo()
    assert not hooks_of(model)


def test_between_the_hooks_and_the_block(monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(Keeper, "meet", interrupted)
    with pytest.raises(KeyboardInterrupt), gaff.capture(model, "**"):
        pass
    assert not hooks_of(model)
