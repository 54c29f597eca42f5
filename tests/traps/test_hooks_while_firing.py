"""Sessions opened and closed inside a forward hook of somebody else do no harm."""

import pytest
import torch
from torch import nn

import gaff


def test_open_and_close_inside_a_hook():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    inner = []

    def hook(module, args, output):
        with gaff.capture(model, "0") as got:
            model[0](x)
        inner.append(got["0"])

    handle = model[0].register_forward_hook(hook)
    with pytest.raises(RecursionError):
        model(x)
    handle.remove()
    with gaff.capture(model, "1") as outer:
        session = gaff.capture(model, "0")
        handle = model[0].register_forward_pre_hook(lambda module, args: print(session.__enter__().keys()))
        model(x)
        handle.remove()
        model(x)
        session.__exit__(None, None, None)
    assert len(outer.all("1")) == 2
    assert not model[0]._forward_hooks
